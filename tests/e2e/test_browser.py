"""A web page that speaks to the engine port: by raw requests as a browser sends them, and by a real
Chromium."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator

import clients
import pytest
from clients import holds, stores
from engines import POOL, eventually, status

from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host
from kvkeep.wire.frames import Header, encode

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HELLO = b"".join(encode(Header(0, 1), m.Hello("a web page", 1)))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL, "--max-sessions", "4") as running:
        yield running


@contextlib.contextmanager
def unharmed(server: ServerProcess) -> Iterator[None]:
    """What happens inside opens no session and has nothing carried out; and then an engine is
    served."""
    before = status(server)["counters"]
    yield
    after = status(server)
    assert after["counters"] == before and after["sessions"] == []
    with clients.connect(server.address) as cache:
        assert stores(cache, range(8)) in (0, 2) and holds(cache, range(8)) == 2


def answer_to(server: ServerProcess, said: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    where, heard = tcp_host(server.address), b""
    assert where is not None
    with (
        socket.create_connection(where, timeout=30) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(said)
        while data := connection.recv(65536):
            heard += data
    return heard


def request(method: bytes, path: bytes, body: bytes) -> bytes:
    heads = b"\r\nHost: localhost:5555\r\nOrigin: http://page.example\r\nContent-Type: text/plain\r\nContent-Length: %d"
    return method + b" " + path + b" HTTP/1.1" + heads % len(body) + b"\r\n\r\n" + body


REQUESTS = {
    "a message as the body": request(b"POST", b"/", HELLO),
    "many messages": request(b"POST", b"/", HELLO * 300),
    "a path that begins like a message": request(b"POST", b"/KVKP%03%00%00%00", HELLO),
    "our name as the method": request(b"KVKP", b"/", HELLO),
    "our name as the method, and a path as long as a header": request(b"KVKP", b"/" * 64, HELLO),
    "a line break before the message": b"\r\n" + HELLO,
    "a body of frames as the old protocol had them": request(
        b"POST", b"/", b"\x01\x00\x00\x24" + HELLO[:36] + HELLO
    ),
    "a WebSocket": request(b"GET", b"/", b"")[:-2]
    + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    + HELLO,
    "TLS": b"\x16\x03\x01\x00\xf1\x01\x00\x00\xed\x03\x03" + bytes(230) + HELLO,
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_request_of_a_browser_gets_no_answer_and_opens_nothing(
    server: ServerProcess, what: str
) -> None:
    with unharmed(server):
        for _ in range(5):
            assert answer_to(server, REQUESTS[what]) == b""


SITE_TEXT = """<!doctype html><title>page</title>
<iframe name="sink"></iframe>
<form id="form" method="post" enctype="text/plain" target="sink" action="http://127.0.0.1:PORT/KVKP">
<textarea name="KVKP"></textarea></form>
<script>
const hello = new Uint8Array([HELLO]);
const many = new Uint8Array(Array(300).fill([...hello]).flat());
const hosts = ["127.0.0.1", "localhost"];
const outcome = tried => tried.then(() => "answered", () => "failed");
async function attack() {
  const tried = [];
  for (const host of hosts) {
    const engine = `http://${host}:PORT`;
    for (const path of ["/", "/KVKP", "/" + "A".repeat(36)]) {
      for (const body of [hello, many, new Blob([hello], {type: "text/plain"})]) {
        tried.push(outcome(fetch(engine + path, {method: "POST", mode: "no-cors", body})));
      }
    }
    tried.push(outcome(fetch(engine, {method: "KVKP"})));
    tried.push(new Promise(done => {
      const socket = new WebSocket(engine.replace("http", "ws"));
      socket.onopen = () => done("answered");
      socket.onerror = () => done("failed");
    }));
    navigator.sendBeacon(engine + "/beacon", hello);
    const image = new Image();
    image.src = engine + "/image";
  }
  document.querySelector("textarea").value = String.fromCharCode(...hello);
  document.getElementById("form").submit();
  const outcomes = await Promise.all(tried);
  await fetch("/done", {method: "POST", body: outcomes.join(" ")});
}
attack();
</script>"""


class Site:
    """A web site on another port of this host, with the page. `done` is what the page told when it
    had tried all."""

    def __init__(self, text: bytes) -> None:
        site = self
        self.done = ""

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_POST(self) -> None:
                site.done = self.rfile.read(int(self.headers["content-length"])).decode()
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def browsing(url: str) -> Iterator[None]:
    """A Chromium with that page."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(
        prefix="kvkeep-chromium-", ignore_cleanup_errors=True
    ) as profile:
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        # The debugging port keeps the browser open.
        flags += " --disable-background-networking --remote-debugging-port=0"
        browser = subprocess.Popen(
            [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            browser.terminate()
            try:
                browser.wait(30)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()


@pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM HERE: the attack by a real web page was not tried"
)
def test_a_site_in_a_real_browser_gets_no_answer_and_opens_nothing() -> None:
    with ServerProcess(*POOL, "--max-sessions", "4") as server, contextlib.ExitStack() as opened:
        where = tcp_host(server.address)
        assert where is not None
        text = SITE_TEXT.replace("PORT", str(where[1])).replace("HELLO", ",".join(map(str, HELLO)))
        site = Site(text.encode())
        opened.callback(site.close)
        with browsing(site.url), unharmed(server):
            assert eventually(lambda: bool(site.done), limit_s=120), (
                "the page has tried all that it can"
            )
            assert set(site.done.split()) == {"failed"}, "and nothing was answered"
        assert server.log().count("seems to be an HTTP client") == 1, "though it did reach the port"
