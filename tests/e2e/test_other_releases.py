"""Peers of another release: of one that spoke ZMQ, or another version of the protocol. Each side
says so once, with the remedy, and the engine serves without the cache."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from engines import (
    BRISK,
    engine,
    eventually,
    oracle,
    prompt,
    serve,
    tokens_of,
    without_cache,
)

from kvkeep.client.transport import StreamTransport
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep_lab.simulation.strange import server_of_version

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"  # the first bytes of a ZMTP 3.1 connection

# -- a client of another release


@pytest.mark.parametrize("version", [m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1])
def test_a_client_of_another_version_is_told_which_one_is_spoken(
    server: ServerProcess, version: int
) -> None:
    transport = StreamTransport(server.address)
    try:
        for message in (m.Hello("another release", 1), m.Ping()):
            frames = encode(Header(0, 7, version=version), message)
            assert eventually(lambda frames=frames: transport.send(frames))  # type: ignore[misc]
            transport.wait(60_000)
            reply = transport.receive()
            assert reply is not None
            header = decode_header(reply)
            refused = decode_reply(header, reply)
            assert isinstance(refused, m.Refused) and refused.code == "protocol_version"
            spoken = f"this server speaks protocol version {m.PROTOCOL_VERSION}, not {version}"
            assert spoken in refused.message
            assert "install the same kvkeep release on both sides" in refused.hint
            assert header == Header(0, 7)
    finally:
        transport.close()


# -- a server of another release


class OldServer:
    """Greets by ZMTP. What it hears then is not ZMTP: it closes the connection, or waits."""

    def __init__(self, *, closes: bool) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.greeted = 0
        self._closes = closes
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
                    connected.sendall(SIGNATURE)
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
    server = OldServer(closes=request.param)
    yield server
    server.close()


def test_with_a_server_that_speaks_zmq_an_engine_serves_and_says_so_once(
    old_server: OldServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = oracle(), [prompt(23) for _ in range(3)]
    expected = without_cache(model, prompts)
    with engine(old_server.address, model, extra=BRISK) as llm:

        def goes_on() -> bool:
            assert tokens_of(serve(llm, prompts)) == expected
            return old_server.greeted >= 6 and "earlier release" in caplog.text

        assert eventually(goes_on), "the engine connects again and again"
    [line] = [line for line in caplog.text.splitlines() if "earlier release" in line]
    assert "Serving without the cache" in line and "install the same release" in line


def test_with_a_server_of_another_version_an_engine_serves_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, prompts, other = oracle(), [prompt(22)], m.PROTOCOL_VERSION + 1
    with server_of_version(other) as address, engine(address, model, extra=BRISK) as llm:
        answers = serve(llm, prompts)
        assert eventually(lambda: f"protocol version {other}" in caplog.text)
    assert tokens_of(answers) == without_cache(model, prompts)
    assert answers[0].metrics.external_cached_tokens == 0
    [said] = [text for text in caplog.messages if "protocol version" in text]
    assert f"this client {m.PROTOCOL_VERSION}" in said
