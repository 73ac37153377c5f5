"""What goes in at one end comes out at the other, is remembered, and can be held up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvkeep_lab.simulation.relay import Relay


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that says everything twice."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        near, _ = listener.accept()
        with near:
            while data := near.recv(1 << 16):
                near.sendall(data * 2)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    thread.join()
    listener.close()


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", int(relay.address.rpartition(":")[2])), timeout=30
    )


def read(near: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += near.recv(count)
    return data


def test_all_is_passed_on_and_what_was_said_is_remembered(echo: str) -> None:
    with Relay(echo) as relay, connect(relay) as near:
        near.sendall(b"abc")
        assert read(near, 6) == b"abcabc"
        assert bytes(relay.sent) == b"abc"


def test_blocks_are_held_up_and_little_things_are_not(echo: str) -> None:
    with Relay(echo) as relay, connect(relay) as near:
        relay.hold_blocks()
        near.sendall(b"abc")
        assert read(near, 6) == b"abcabc" and relay.held_up == 0
        near.sendall(bytes(8192))
        while not relay.held_up:
            time.sleep(0.001)
        relay.let_go()
        assert read(near, 16384) == bytes(16384)


def test_a_slow_one_takes_its_time(echo: str) -> None:
    with Relay(echo, bytes_a_second=100_000) as relay, connect(relay) as near:
        started = time.monotonic()
        near.sendall(bytes(10_000))
        read(near, 20_000)
        assert time.monotonic() - started >= 0.25, "0.1 s there, 0.2 s back"
