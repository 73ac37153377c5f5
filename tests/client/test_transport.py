"""Frames over ZMQ: what cannot go out fails at once, and a wrong address says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from kvkeep.client.transport import ZmqTransport
from kvkeep.errors import SettingsError


def test_without_a_server_a_send_fails_at_once_and_nothing_is_queued_for_later(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody"
    transport = ZmqTransport(address)
    assert not transport.send([b"a", b"b"])
    assert transport.receive() is None
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        while not transport.send([b"now"]):
            transport.wait(10)
        assert router.recv_multipart()[1:] == [b"now"], "what failed was not kept"
        transport.close()


def test_frames_go_both_ways_and_wait_returns_when_something_has_come(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        transport = ZmqTransport(address)
        while not transport.send([b"question", memoryview(b"payload")]):
            transport.wait(10)
        sender, *frames = router.recv_multipart()
        assert frames == [b"question", b"payload"]
        router.send_multipart([sender, b"answer", b""])
        transport.wait(60_000)
        assert transport.receive() == [b"answer", b""]
        assert transport.receive() is None
        transport.close()


def test_close_does_not_wait_for_what_was_not_delivered(tmp_path: Path) -> None:
    transport = ZmqTransport(f"ipc://{tmp_path}/nobody")
    transport.send([b"lost"])
    transport.close()
    assert transport._socket.closed


@pytest.mark.parametrize("address", ["localhost:5555", "tcp://", "tcp://host:port", "smoke://signals", ""])
def test_an_address_that_is_none_is_named_with_a_remedy(address: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ZmqTransport(address)
    assert repr(address) in caught.value.message
    assert "tcp://host:port" in caught.value.hint


def test_a_connection_that_ends_is_noticed_once() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        transport = ZmqTransport(f"tcp://127.0.0.1:{port}")
        while not transport.send([b"hello"]):
            transport.wait(1)
        assert router.recv_multipart()[1] == b"hello"
        assert not transport.lost()
        router.close(linger=0)
        while not transport.lost():
            transport.wait(1)
        assert not transport.lost()
        transport.close()
