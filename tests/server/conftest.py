"""A daemon with its HTTP in this process, driven from outside like any other."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import KVKeepError
from kvkeep.server.daemon import Daemon
from kvkeep.server.http_server import HttpServer
from kvkeep.server.settings import Settings

BLOCK_BYTES = 4096


@dataclass
class Running:
    """One daemon with its loop in a thread. `ask` speaks HTTP; `store` puts blocks in without a
    client."""

    daemon: Daemon
    http: HttpServer
    thread: threading.Thread
    writes: Iterator[int] = field(default_factory=lambda: iter(range(1, 1 << 30)))

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: Any = None,
        headers: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[int, Any]:
        """Status and body, decoded where it is JSON. `body` may be bytes that are no JSON. Sends
        the server's token."""
        connection = http.client.HTTPConnection(*self.place, timeout=60)
        if tls is not None:
            connection = http.client.HTTPSConnection(*self.place, timeout=60, context=tls)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            usual = {"content-type": "application/json", "authorization": f"Bearer {self.token}"}
            connection.request(method, path, data, {**usual, **(headers or {})})
            reply = connection.getresponse()
            text = reply.read().decode()
            is_json = reply.headers.get_content_type() == "application/json"
            return reply.status, json.loads(text) if is_json and text else text
        finally:
            connection.close()

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the HTTP server; of one that listens everywhere, those on loopback."""
        host, _, port = self.http.address.removeprefix("https://").rpartition(":")
        return host.strip("[]").replace("0.0.0.0", "127.0.0.1"), int(port)

    @property
    def token(self) -> str:
        settings = self.daemon.settings
        return (settings.admin_token or settings.made_token).read_text().strip()

    def store(self, tenant: str, blocks: int, first: int = 0, complete: bool = True) -> None:
        """A chain of `blocks` blocks of 4 KiB each; its keys are the numbers from `first` on."""
        keys = b"".join(number.to_bytes(16, "big") for number in range(first, first + blocks))
        write, store = next(self.writes), self.daemon.store

        def work() -> None:
            if 1 not in store.sessions:
                store.open_session(1)
            layout = store.open_layout(1, b"f" * 16, (BLOCK_BYTES,)).number
            store.prepare_store(1, write, tenant, layout, 0, b"", keys, 0)
            if complete:
                store.complete_store(1, write, np.zeros(blocks, dtype=np.uint64), 0)

        self.in_loop(work)

    def handle(self, frames: list[bytes]) -> list[Any] | None:
        """Carries out a request in the loop, at the server's time."""
        daemon = self.daemon
        reply: list[Any] | None = self.in_loop(
            lambda: daemon.service.handle(frames, daemon.now_ms())
        )
        return reply

    def in_loop(self, duty: Callable[[], Any]) -> Any:
        return self.daemon.run_in_loop(duty).result(60)


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*flags, **http_options)` gives a Running; all are stopped at the end. Each has its own
    pool and state."""
    running: list[Running] = []

    def begin(*flags: str, loop: bool = True, **http_options: float) -> Running:
        (tmp_path / "shm").mkdir(exist_ok=True)
        defaults = {
            "--pool-size": "32MiB",
            "--address": "tcp://127.0.0.1:0",
            "--http-address": "127.0.0.1:0",
            "--shm-dir": str(tmp_path / "shm"),
            "--state-dir": str(tmp_path / "state"),
            "--shutdown-grace": "0s",
        }
        argv = [word for pair in defaults.items() for word in pair]
        daemon = Daemon(Settings.load(None, {}, [*argv, *flags]))
        try:
            served = HttpServer(daemon, **http_options)
        except KVKeepError:
            daemon.close()
            raise
        served.start()
        thread = threading.Thread(target=daemon.run, daemon=True)
        one = Running(daemon, served, thread)
        running.append(one)
        if loop:
            thread.start()
            assert daemon.ready.wait(60)
        return one

    yield begin
    for one in running:
        end(one)


def end(one: Running) -> None:
    one.daemon.stop()
    if one.thread.ident is not None:
        one.thread.join(60)
    one.http.stop()
    one.daemon.close()


@pytest.fixture
def stop() -> Callable[[Running], None]:
    """Ends a Running before its test does. Ending it again is harmless."""
    return end
