"""Peers of an earlier release, which spoke ZMQ: one line on each side, and the engine serves
without the cache."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess
from kvkeep.wire.address import tcp_host, unix_name

sys.path.insert(0, str(Path(__file__).parent))
from engines import (
    BRISK,
    POOL,
    engine,
    eventually,
    oracle,
    prompt,
    serve,
    status,
    tokens_of,
    without_cache,
)

# The first 64 bytes of a ZMTP 3.1 connection: signature, version, mechanism, as-server, filler; and
# what follows them.
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.mark.parametrize("sent", [SIGNATURE, GREETING, GREETING + READY])
def test_a_client_of_an_earlier_release_is_closed_and_named_once(sent: bytes) -> None:
    with ServerProcess(*POOL) as server:
        where, name = tcp_host(server.address), unix_name(server.address)
        assert where is not None and name is not None
        for _ in range(5):  # it tries again and again
            with socket.create_connection(where, timeout=30) as old:
                old.sendall(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert old.recv(100) == b""
        lines = [line for line in server.log().splitlines() if "seems to be" in line]
        assert len(lines) == 1 and "a kvkeep of an earlier release" in lines[0]
        assert "install the same kvkeep release on both sides" in lines[0]
        assert status(server)["counters"]["sessions_opened"] == 0


class OldServer:
    """Listens as a server of an earlier release does, and greets by ZMTP whoever connects. What it
    hears then is not ZMTP: it closes the connection, or waits for more."""

    def __init__(self, first: bytes, *, closes: bool) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.greeted = 0
        self._first, self._closes = first, closes
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listening.accept()
                self._kept.append(connected)
                self.greeted += 1
                with contextlib.suppress(OSError):
                    connected.sendall(self._first)
                    if self._closes:
                        connected.recv(1)
                        connected.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        for each in self._kept:
            each.close()


@pytest.fixture(params=[False, True], ids=["stays", "closes"])
def old_server(request: pytest.FixtureRequest) -> Iterator[OldServer]:
    server = OldServer(SIGNATURE, closes=request.param)
    yield server
    server.close()


def test_with_a_server_of_an_earlier_release_an_engine_serves_without_the_cache_and_says_so_once(
    old_server: OldServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = oracle(), [prompt(23) for _ in range(3)]
    expected = without_cache(model, prompts)
    with engine(old_server.address, model, extra=BRISK) as llm:
        assert tokens_of(serve(llm, prompts)) == expected

        def goes_on() -> bool:
            assert tokens_of(serve(llm, prompts)) == expected
            return old_server.greeted >= 6 and "earlier release" in caplog.text

        assert eventually(goes_on), "it tries again and again"
    lines = [line for line in caplog.text.splitlines() if "earlier release" in line]
    assert (
        len(lines) == 1
        and "Serving without the cache" in lines[0]
        and "install the same release" in lines[0]
    )
