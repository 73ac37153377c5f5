"""The HTTP port over real sockets, plain and over TLS: clients that are silent, slow or greedy, and
who may do what with which certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.cli.certificates import Issued, issue, new_authority
from kvkeep.cli.keygen import make
from kvkeep.server import http_server
from kvkeep.server.guard import MAX_WAITING, MAX_WORKED_ON
from kvkeep.server.http_server import HttpConnection, TlsLayer
from kvkeep.store.operators import set_quota
from kvkeep.testing.clock import eventually
from kvkeep.wire.tls import handshake_problem

BEYOND = ("--http-address", "0.0.0.0:0", "--session-check-interval", "50ms")
CHANGE = ("/v1/settings", "PATCH", {"log_level": "info"})
LARGE = "GET /v1/tenants?limit=100000"
NO_TOKEN = {"authorization": ""}
TENANT = "t-" + "a" * 32
Start = Callable[..., Any]


@dataclass
class Keys:
    """What `kvkeep keygen` has made: a server, a client `engine`, and a client `ops` that
    administers."""

    directory: Path

    def flags(self, *more: str) -> tuple[str, ...]:
        names = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}
        files = {f"--tls-{name}": str(self.directory / file) for name, file in names.items()}
        tls = [word for pair in files.items() for word in pair]
        return (*BEYOND, *tls, "--authorized-clients", str(self.directory / "authorized"), *more)

    def context(self, client: str = "") -> ssl.SSLContext:
        """Of a client that trusts our CA and shows the certificate of this name, or none."""
        context = ssl.create_default_context(cafile=self.directory / "ca.pem")
        if client:
            pair = (self.directory / f"{client}.pem", self.directory / f"{client}.key")
            context.load_cert_chain(*pair)
        return context

    def context_of(self, issued: Issued) -> ssl.SSLContext:
        """Of a client that trusts our CA and shows this certificate."""
        self.put("issued.pem", issued.cert + issued.key)
        context = self.context()
        context.load_cert_chain(self.directory / "issued.pem")
        return context

    def authority(self) -> Issued:
        cert, key = ((self.directory / name).read_text() for name in ("ca.pem", "ca.key"))
        return Issued(cert, key)

    def put(self, name: str, text: str) -> None:
        """Replaces a file, as a rotation does."""
        new = self.directory / "new"
        new.write_text(text)
        new.chmod(0o600)
        new.rename(self.directory / name)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    make(tmp_path / "keys", ["engine"])
    make(tmp_path / "keys", ["ops"], admin=True)
    return Keys(tmp_path / "keys")


@dataclass
class Port:
    """An HTTP port, plain or over TLS."""

    begin: Start
    keys: Keys | None

    def start(self, **options: float) -> Any:
        return self.begin(*(self.keys.flags() if self.keys else ()), **options)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return self.keys and self.keys.context("ops")

    def connect(self, running: Any, receive_bytes: int = 0) -> socket.socket:
        return connect(running, self.tls, receive_bytes)

    def stall(self, running: Any, line: str = LARGE) -> socket.socket:
        """A client that asks and never reads. What it is sent can be read without TLS."""
        connection = self.connect(running, receive_bytes=4096)
        connection.sendall(request(line, running.token))
        return socket.socket(fileno=connection.detach())


@pytest.fixture(params=["plain", "tls"])
def port(request: pytest.FixtureRequest, start: Start) -> Port:
    is_tls = request.param == "tls"
    return Port(start, request.getfixturevalue("keys") if is_tls else None)


@pytest.fixture
def running(start: Start) -> Any:
    return start()


@pytest.fixture
def secure(start: Start, keys: Keys) -> Any:
    """A server with TLS."""
    return start(*keys.flags())


@pytest.fixture
def crowd() -> Iterator[contextlib.ExitStack]:
    """Closes what is put into it when the test ends."""
    with contextlib.ExitStack() as clients:
        yield clients


def connect(
    running: Any, tls: ssl.SSLContext | None = None, receive_bytes: int = 0
) -> socket.socket:
    """A connection whose handshake, if there is one, is done."""
    connection = socket.socket()
    connection.settimeout(60)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(running.place)
    if tls is None:
        return connection
    return tls.wrap_socket(connection, server_hostname="127.0.0.1", suppress_ragged_eofs=False)


def request(line: str, token: str, *headers: str) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def has_been_closed(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except (ConnectionResetError, ssl.SSLError):
        return True


def received(connection: socket.socket) -> bytes:
    """All that still comes, until the server's end."""
    connection.settimeout(60)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            data += piece
    return data


def add_tenants(running: Any, count: int) -> None:
    """So many that the answer to LARGE does not fit the kernel's buffers."""

    def work() -> None:
        for number in range(count):
            set_quota(running.daemon.store, f"t-{number:032x}", 0, 0)

    running.in_loop(work)


def connections(running: Any) -> set[Any]:
    return set(running.http.state.connections)


def answering(running: Any) -> list[Any]:
    """Connections that are not in a TLS handshake."""
    return [each for each in connections(running) if isinstance(each, HttpConnection)]


def handshakes(running: Any) -> int:
    return len(connections(running)) - len(answering(running))


def unread_bytes(running: Any) -> int:
    return sum(each.transport.get_write_buffer_size() for each in answering(running))


def working(running: Any) -> list[Any]:
    return [each for each in answering(running) if each.is_working()]


def failures(running: Any) -> dict[str, int]:
    counters = running.daemon.service.counters
    found: dict[str, int] = running.in_loop(lambda: dict(counters.auth_failures))
    return found


# -- silent clients


def test_silent_connections_keep_nobody_out(running: Any, crowd: contextlib.ExitStack) -> None:
    silent = [crowd.enter_context(connect(running)) for _ in range(600)]
    assert running.ask("/healthz")[0] == 200
    assert has_been_closed(silent[0]), "the oldest was closed"


@pytest.mark.parametrize("sent", [b"", b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_health_is_answered_when_hundreds_connect_in_one_turn(running: Any, sent: bytes) -> None:
    """The event loop is held while they connect, so that it finds all of them in the kernel's
    queue."""
    with connect(running):
        assert eventually(lambda: len(connections(running)) == 1)
        [one] = connections(running)
        loop = one.loop
    for _ in range(3):
        release = threading.Event()
        with contextlib.ExitStack() as crowd:
            crowd.callback(release.set)
            loop.call_soon_threadsafe(release.wait, 60)
            flood = [crowd.enter_context(connect(running)) for _ in range(300)]
            health = crowd.enter_context(connect(running))
            health.sendall(request("GET /healthz", ""))
            flood += [crowd.enter_context(connect(running)) for _ in range(300)]
            for each in flood:
                each.sendall(sent)
            release.set()
            assert received(health).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /healthz HT",
        b"GET /v1/status HTTP/1.1\r\nContent-Length: 9\r\n",
        request("PATCH /v1/settings", "", "Content-Length: 9") + b"{",
    ],
)
def test_a_connection_that_sends_no_whole_request_is_closed(port: Port, sent: bytes) -> None:
    running = port.start(request_within_s=0.1)
    with port.connect(running) as connection:
        connection.sendall(sent)
        assert eventually(lambda: not connections(running)) and has_been_closed(connection)


def test_a_request_that_takes_long_is_answered_all_the_same(start: Start) -> None:
    running = start(request_within_s=0.05)
    running.daemon.run_in_loop(lambda: time.sleep(0.5))
    assert running.ask("/v1/status")[0] == 200


# -- clients that do not read, and those that send too much


def test_a_client_that_does_not_read_is_cut_off(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    running = port.start(read_within_s=0.1)
    add_tenants(running, 5_000)
    with port.stall(running) as stalled:
        assert eventually(lambda: "did not read its answer" in caplog.text)
        assert eventually(lambda: not connections(running))
        assert len(received(stalled)) < 5_000 * 200
    if port.tls is None:
        assert running.ask("/v1/tenants?limit=5000")[1]["total"] == 5_000, "one that reads gets all"


def test_unread_answers_are_bounded_and_the_oldest_goes_first(
    port: Port, crowd: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = port.start(read_within_s=3600)
    add_tenants(running, 5_000)
    with port.stall(running) as first:
        assert eventually(lambda: unread_bytes(running) > 500_000)
        one_answer = unread_bytes(running)
        monkeypatch.setattr("kvkeep.server.http_server._UNREAD_BYTES", int(2.5 * one_answer))
        for _ in range(4):
            crowd.enter_context(port.stall(running))
        assert eventually(lambda: running.http.state.total_requests == 5)
        assert len(connections(running)) == 2 and unread_bytes(running) <= 2.5 * one_answer
        assert len(received(first)) < one_answer


def test_health_is_answered_when_stalled_clients_have_all_connections(
    port: Port, crowd: contextlib.ExitStack
) -> None:
    running = port.start(read_within_s=3600, request_within_s=3600, handshake_within_s=3600)
    add_tenants(running, 3_000)
    stalled = [crowd.enter_context(port.stall(running)) for _ in range(30)]
    assert eventually(lambda: len(connections(running)) == 30 and not working(running))
    for _ in range(300):
        crowd.enter_context(port.connect(running))
    for _ in range(20):
        crowd.enter_context(connect(running))
    for path in ("/healthz", "/readyz"):
        assert running.ask(path, headers=NO_TOKEN, tls=port.tls)[0] == 200
    assert 250 <= len(answering(running)) <= 257
    assert len(received(stalled[0])) < 3_000 * 100, "the oldest was closed"


def test_health_does_not_wait_for_other_requests(
    start: Start, crowd: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop is held, so that requests wait: as many as may, and one more, which is refused."""
    running, port = start(loop_wait_s=600, stuck_after_s=600), Port(start, None)
    release = threading.Event()
    crowd.callback(release.set)
    running.daemon.run_in_loop(lambda: release.wait(600))  # longer than a client waits
    count = MAX_WORKED_ON + MAX_WAITING
    waiting = [crowd.enter_context(port.stall(running, "GET /v1/status")) for _ in range(count)]
    assert eventually(lambda: len(working(running)) == count)
    status, said = running.ask("/v1/settings")
    assert (status, said["error"]) == (503, "too_many_requests")
    assert "too_many_requests" in caplog.text
    assert [running.ask(path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    release.set()
    assert all(received(each).startswith(b"HTTP/1.1 200") for each in waiting), (
        "those that waited are answered"
    )


def test_a_second_request_on_a_connection_is_not_carried_out(port: Port) -> None:
    running = port.start()
    running.store(TENANT, 3)
    with port.connect(running) as connection:
        clear = request("DELETE /v1/blocks?confirm=everything", running.token)
        connection.sendall(request("GET /v1/status", running.token) + 10 * clear)
        said = received(connection)
    assert said.count(b"HTTP/1.1 ") == 1 and b"connection: close" in said.lower()
    assert running.ask(f"/v1/tenants/{TENANT}", tls=port.tls)[1]["blocks"] == 3


def test_pipelined_requests_are_not_kept_in_memory(start: Start) -> None:
    """While the first request is worked on, the server reads one piece of what follows and no
    more."""
    running = start(loop_wait_s=600)
    release = threading.Event()
    running.daemon.run_in_loop(lambda: release.wait(600))
    with connect(running) as connection, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(release.set)
        connection.sendall(request("GET /v1/status", running.token))
        assert eventually(lambda: len(working(running)) == 1)
        connection.setblocking(False)
        more = 10_000 * request("GET /v1/status", running.token)
        with contextlib.suppress(BlockingIOError):  # until the kernel's buffers are full
            for _ in range(1000):
                connection.send(more)
        [one] = connections(running)
        assert eventually(lambda: one.flow.read_paused)
        assert len(one.conn.trailing_data[0]) <= 1 << 20


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"\xff" + bytes(7) + b"\x01\x7f", "a ZMQ client"),
        (b"*1\r\n$4\r\nPING\r\n", "a Redis client"),
    ],
)
def test_a_foreign_client_gets_one_line_that_says_what_it_seems_to_be(
    running: Any, caplog: pytest.LogCaptureFixture, sent: bytes, kind: str
) -> None:
    for _ in range(2):
        with connect(running) as foreign:
            foreign.sendall(sent)
            foreign.shutdown(socket.SHUT_WR)
            received(foreign)
    said = [each.getMessage() for each in caplog.records if "seems to be" in each.getMessage()]
    [line] = said
    assert line.startswith(f"127.0.0.1 talks to the HTTP port and seems to be {kind}: ")


class Waiting(HttpConnection):
    """A connection that waits since then, with so many bytes of its answer unread."""

    def __init__(self, connections: set[Any], since: float, unread_bytes: int) -> None:
        self.connections = connections
        self.transport = SimpleNamespace(  # type: ignore[assignment]
            get_write_buffer_size=lambda: unread_bytes, abort=lambda: None
        )
        self.problems = SimpleNamespace(note=lambda kind, message: None)  # type: ignore[assignment]
        self.client = None
        self.waiting_since = since
        connections.add(self)

    def is_working(self) -> bool:
        return False


def test_a_client_that_does_not_read_goes_before_one_that_waits_longer_for_its_turn() -> None:
    """While the server worked on answers that are not read, a health check has connected."""
    connections: set[Any] = set()
    health = Waiting(connections, since=1.0, unread_bytes=0)
    later, sooner = (Waiting(connections, since, 1000) for since in (3.0, 2.0))
    health.end_longest_waiting("too much is unread")
    assert connections == {health, later} and sooner not in connections
    health.end_longest_waiting("too much is unread")
    assert connections == {health}
    health.end_longest_waiting("too many connections")
    assert not connections, "where all read, the one that waits longest goes"


# -- TLS: who may do what


def test_a_token_does_for_everything_and_needs_no_certificate(secure: Any, keys: Keys) -> None:
    tls = keys.context()
    assert secure.http.address.startswith("https://0.0.0.0:")
    assert secure.ask("/v1/status", tls=tls)[1]["http_address"] == secure.http.address
    assert secure.ask(*CHANGE, tls=tls)[0] == 200
    assert secure.ask("/v1/status", headers={"authorization": "Bearer wrong"}, tls=tls)[0] == 401


@pytest.mark.parametrize("who", ["", "engine"])
def test_without_token_only_health_is_open_also_with_an_engines_certificate(
    secure: Any, keys: Keys, who: str
) -> None:
    tls = keys.context(who)
    for path in ("/healthz", "/readyz"):
        assert secure.ask(path, headers=NO_TOKEN, tls=tls)[0] == 200
    for asked in (("/v1/status",), ("/metrics",), ("/openapi.json",), CHANGE):
        status, said = secure.ask(*asked, headers=NO_TOKEN, tls=tls)
        assert (status, said["error"]) == (401, "unauthorized")
    assert "certificate with the right admin" in said["hint"]
    assert str(secure.daemon.settings.state_dir) not in said["hint"], "no paths for other hosts"
    assert eventually(lambda: failures(secure) == {"admin_token": 4})


@pytest.mark.parametrize(
    "asked", [("/v1/status",), ("/metrics",), CHANGE, ("/v1/blocks?confirm=everything", "DELETE")]
)
def test_a_certificate_that_administers_needs_no_token(
    secure: Any, keys: Keys, asked: tuple[Any, ...]
) -> None:
    assert secure.ask(*asked, headers=NO_TOKEN, tls=keys.context("ops"))[0] == 200


@pytest.fixture
def token_flags(tmp_path: Path) -> tuple[str, str]:
    make(tmp_path / "token", [], admin_token=True)
    return "--admin-token", str(tmp_path / "token" / "admin-token")


def test_without_a_list_no_certificate_administers(
    start: Start, keys: Keys, token_flags: tuple[str, str]
) -> None:
    running = start(*keys.flags("--authorized-clients", "none", *token_flags))
    assert running.ask("/v1/status", headers=NO_TOKEN, tls=keys.context("ops"))[0] == 401
    assert running.ask("/v1/status", tls=keys.context("ops"))[0] == 200


def test_the_servers_own_origin_is_one_of_https(secure: Any, keys: Keys) -> None:
    tls, host = keys.context("ops"), "{}:{}".format(*secure.place)
    for origin, status in (
        (f"https://{host}", 200),
        (f"http://{host}", 403),
        ("https://evil.example", 403),
    ):
        assert secure.ask(*CHANGE, headers={**NO_TOKEN, "origin": origin}, tls=tls)[0] == status


def test_on_loopback_there_is_no_tls(start: Start, keys: Keys) -> None:
    running = start(*keys.flags("--http-address", "127.0.0.1:0"))
    assert running.http.address.startswith("127.0.0.1:")
    assert running.ask("/v1/status", headers=NO_TOKEN)[0] == 200


def test_a_token_in_the_clear_beyond_loopback_is_warned_of_once(
    start: Start, keys: Keys, token_flags: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert start(*BEYOND, *token_flags).ask("/v1/status")[0] == 200
    [said] = [each.getMessage() for each in caplog.records if "in the clear" in each.getMessage()]
    assert "set tls_cert" in said
    start(*keys.flags(*token_flags, "--name", "second"))
    assert caplog.text.count("in the clear") == 1


# -- TLS: who gets no connection


def alert(connection: socket.socket) -> str:
    """How a connection ends that the server has refused: in TLS 1.3 the client hears of it when it
    reads."""
    connection.sendall(request("GET /healthz", ""))
    with pytest.raises(ssl.SSLError) as caught:
        connection.recv(1)
    return handshake_problem(caught.value)


def test_a_certificate_of_another_ca_is_refused_for_health_too(
    secure: Any, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    posing = keys.context_of(issue(new_authority(1), "ops", days=1))
    with connect(secure, posing) as connection:
        assert "it rejected our certificate" in alert(connection)
    assert eventually(lambda: failures(secure) == {"handshake": 1})
    refused = "127.0.0.1 was turned away at the HTTP port: its certificate is not signed by a CA"
    assert refused in caplog.text


def test_tls_before_1_3_is_refused(secure: Any, keys: Keys) -> None:
    tls = keys.context()
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        connect(secure, tls)
    assert eventually(lambda: failures(secure) == {"handshake": 1})


@pytest.mark.parametrize(
    "asked",
    [("/healthz",), CHANGE, (f"/v1/tenants/{TENANT}/quota", "PUT", b"x" * 60_000)],
    ids=["GET", "PATCH", "PUT"],
)
def test_plain_http_is_told_to_use_https(
    secure: Any, asked: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        status, said = secure.ask(*asked)
        assert (status, said["error"]) == (400, "https_only") and "https://" in said["hint"]
    assert eventually(lambda: failures(secure) == {"handshake": 3})
    assert caplog.text.count("it speaks HTTP without TLS") == 1


def test_what_is_neither_is_closed(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), request_within_s=3600)
    with connect(running) as connection:
        connection.sendall(b"\x00" * 100)
        assert not received(connection).startswith(b"HTTP")
    with (
        connect(running, keys.context()) as connection,
        socket.socket(fileno=connection.detach()) as raw,
    ):
        raw.sendall(b"\x17\x03\x03\x00\x20" + b"\x00" * 32)  # a record that was not encrypted
        received(raw)
    assert running.ask("/healthz", tls=keys.context())[0] == 200
    assert eventually(lambda: not connections(running))


# -- TLS: bytes and where they are cut


class Client:
    """A TLS client over a plain socket, which decides when its bytes are sent."""

    def __init__(self, running: Any, tls: ssl.SSLContext) -> None:
        self.socket = connect(running)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = tls.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")

    def shake_hands(self, send: Callable[[bytes], None]) -> None:
        """Up to its last flight, which is still in `outgoing`."""
        while True:
            try:
                self.tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                send(self.outgoing.read())
                self.incoming.write(self.socket.recv(65536))

    def answer(self) -> bytes:
        self.incoming.write(received(self.socket))
        self.incoming.write_eof()
        data = b""
        with contextlib.suppress(ssl.SSLError):
            while piece := self.tls.read(65536):
                data += piece
        return data


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_bytes_may_come_one_at_a_time_or_with_the_end_of_the_handshake(
    secure: Any, keys: Keys, piece_bytes: int
) -> None:
    client = Client(secure, keys.context("ops"))
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(data: bytes) -> None:
        for at in range(0, len(data), piece_bytes):
            client.socket.sendall(data[at : at + piece_bytes])

    with client.socket:
        client.shake_hands(send)
        client.tls.write(request("GET /v1/status", ""))
        send(client.outgoing.read())
        assert client.answer().startswith(b"HTTP/1.1 200")


def test_a_large_answer_comes_whole_and_ends_with_close_notify(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), read_within_s=3600)
    add_tenants(running, 5_000)
    with connect(running, keys.context("ops")) as connection:
        connection.sendall(request(LARGE, ""))
        said = received(connection)  # a connection that is cut off raises SSLEOFError here
        assert eventually(lambda: not connections(running)), (
            "the server does not wait for the client's close_notify"
        )
    assert said.startswith(b"HTTP/1.1 200") and said.count(b'"tenant"') == 5_000


def test_a_client_that_sends_close_notify_is_closed(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), request_within_s=3600)
    connection = connect(running, keys.context())
    assert isinstance(connection, ssl.SSLSocket)
    with connection, connection.unwrap() as raw:
        assert has_been_closed(raw)
    assert eventually(lambda: not connections(running))


# -- TLS: handshakes


def test_stalled_handshakes_are_bounded_and_health_is_answered_meanwhile(
    start: Start, keys: Keys, crowd: contextlib.ExitStack
) -> None:
    running, most = start(*keys.flags(), handshake_within_s=3600), http_server.MOST_HANDSHAKES
    stalled = [crowd.enter_context(connect(running)) for _ in range(3 * most)]
    for connection in stalled:
        connection.sendall(b"\x16\x03\x01\x02")
    for path in ("/healthz", "/readyz"):
        assert running.ask(path, headers=NO_TOKEN, tls=keys.context())[0] == 200
    assert has_been_closed(stalled[0]), "the oldest was closed"
    assert eventually(lambda: 0 < handshakes(running) <= most)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_is_not_finished_is_ended(start: Start, keys: Keys, sent: bytes) -> None:
    running = start(*keys.flags(), handshake_within_s=0.1)
    with connect(running) as connection:
        connection.sendall(sent)
        assert has_been_closed(connection)
    assert eventually(lambda: failures(running) == {"handshake_timeout": 1})


def test_a_refused_client_that_stays_is_ended(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), handshake_within_s=0.1)
    with connect(running) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 400")
        assert eventually(lambda: not connections(running))
    assert failures(running) == {"handshake": 1}, "it is counted once"


def test_what_a_refused_client_still_sends_is_ignored(
    start: Start, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(*keys.flags(), handshake_within_s=3600)
    with connect(running) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert received(connection).count(b"HTTP/1.1 400") == 1
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert eventually(lambda: not connections(running)) and failures(running) == {"handshake": 1}
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_handshake_that_is_broken_off_is_counted_and_leaves_nothing(secure: Any) -> None:
    connect(secure).close()
    assert eventually(lambda: failures(secure) == {"handshake": 1} and not connections(secure))


def test_a_server_that_stops_ends_handshakes(
    start: Start, keys: Keys, stop: Callable[[Any], None]
) -> None:
    running = start(*keys.flags(), handshake_within_s=3600)
    with connect(running) as connection:
        assert eventually(lambda: handshakes(running) == 1)
        assert all(isinstance(each, TlsLayer) for each in connections(running))
        stop(running)
        assert has_been_closed(connection) and not connections(running)
        assert running.daemon.service.counters.auth_failures == {}


# -- TLS: what changes without a restart


def shown(running: Any, keys: Keys) -> bytes | None:
    with connect(running, keys.context()) as connection:
        assert isinstance(connection, ssl.SSLSocket)
        return connection.getpeercert(binary_form=True)


def test_a_renewed_certificate_is_shown_without_a_restart(secure: Any, keys: Keys) -> None:
    renewed = issue(keys.authority(), "kvkeep server", ("127.0.0.1",), days=1)
    keys.put("server.key", renewed.key)
    keys.put("server.pem", renewed.cert)
    assert eventually(lambda: shown(secure, keys) == ssl.PEM_cert_to_DER_cert(renewed.cert))


def test_a_revoked_line_counts_from_the_next_request_on(secure: Any, keys: Keys) -> None:
    tls, line = keys.context("ops"), keys.directory / "authorized" / "ops.client"
    with connect(secure, tls) as before:
        line.write_text("ops\n")  # an engine from now on
        assert eventually(lambda: secure.ask("/v1/status", headers=NO_TOKEN, tls=tls)[0] == 401)
        before.sendall(request("GET /v1/status", ""))
        assert received(before).startswith(b"HTTP/1.1 401")
    assert secure.ask("/healthz", headers=NO_TOKEN, tls=tls)[0] == 200
    line.write_text("ops tenants=default admin\n")
    assert eventually(lambda: secure.ask("/v1/status", headers=NO_TOKEN, tls=tls)[0] == 200)


def test_a_ca_that_was_removed_proves_nothing_from_the_next_request_on(
    start: Start, keys: Keys
) -> None:
    ours, other = keys.authority(), new_authority(1)
    keys.put("trusted.pem", ours.cert + other.cert)
    running = start(*keys.flags("--tls-ca", str(keys.directory / "trusted.pem")))
    tls = keys.context_of(issue(other, "ops", days=1))
    assert running.ask("/v1/status", headers=NO_TOKEN, tls=tls)[0] == 200
    with connect(running, tls) as before:
        assert eventually(lambda: len(connections(running)) == 1 and not handshakes(running))
        keys.put("trusted.pem", ours.cert)
        assert eventually(lambda: running.daemon.authority.trust == 1)
        before.sendall(request("GET /v1/status", ""))
        assert received(before).startswith(b"HTTP/1.1 401")
    with connect(running, tls) as after:
        assert "it rejected our certificate" in alert(after)
    assert running.ask("/v1/status", headers=NO_TOKEN, tls=keys.context("ops"))[0] == 200
