"""Frames over ZMQ: what cannot go out fails at once, and a wrong address says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvkeep.client.transport import ZmqTransport
from kvkeep.errors import SettingsError
from kvkeep.wire.auth import new_pair


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


# -- with keys


def until(happens: Callable[[], bool], transport: ZmqTransport) -> None:
    """Polls the transport as a connection does. The limit only ends a test that has failed."""
    for _ in range(4_000):
        if happens():
            return
        transport.lost()
        transport.wait(5)
    raise AssertionError("it did not happen")


@pytest.fixture
def curve_server() -> Iterator[tuple[zmq.Socket[bytes], str, str, ThreadAuthenticator]]:
    """A ROUTER of another make that lets in any key, or those that its authenticator is told of."""
    public, secret = new_pair()
    with zmq.Context() as context:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        with context.socket(zmq.ROUTER) as router:
            router.curve_server, router.curve_secretkey, router.linger = True, secret.encode(), 0
            port = router.bind_to_random_port("tcp://127.0.0.1")
            yield router, f"tcp://127.0.0.1:{port}", public, authenticator
        authenticator.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.key"
    path.write_text(new_pair()[1])
    path.chmod(0o600)
    return path


def test_with_the_right_keys_frames_go_both_ways(
    curve_server: tuple[zmq.Socket[bytes], str, str, ThreadAuthenticator], key_file: Path
) -> None:
    router, address, public, _ = curve_server
    transport = ZmqTransport(address, str(key_file), public)
    until(lambda: transport.send([b"question"]), transport)
    assert router.poll(20_000)
    sender, question = router.recv_multipart()
    router.send_multipart([sender, b"answer"])
    transport.wait(60_000)
    assert (question, transport.receive()) == (b"question", [b"answer"])
    transport.close()


@pytest.mark.parametrize("wrong", ["server key", "no keys"])
def test_with_keys_that_do_not_fit_nothing_goes_out_and_it_can_be_told(
    curve_server: tuple[zmq.Socket[bytes], str, str, ThreadAuthenticator], key_file: Path, wrong: str
) -> None:
    router, address, _, _ = curve_server
    keys = (str(key_file), new_pair()[0]) if wrong == "server key" else ()
    transport = ZmqTransport(address, *keys)
    until(lambda: transport.send([b"secret"]) or bool(transport.refusal()), transport)
    for _ in range(40):
        transport.lost()
        transport.wait(5)
    assert transport.refusal() == "its keys and ours do not fit (see curve_key and server_key)"
    assert not router.poll(0)
    transport.close()


def test_who_was_turned_away_knocks_again_until_the_keys_are_set_right(
    curve_server: tuple[zmq.Socket[bytes], str, str, ThreadAuthenticator],
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvkeep.client.transport._KNOCK_AGAIN_S", 0.02)
    router, address, public, authenticator = curve_server
    authenticator.configure_curve(domain="*", location=str(key_file.parent))  # an empty list of certificates
    transport = ZmqTransport(address, str(key_file), public)
    until(lambda: bool(transport.refusal()), transport)
    authenticator.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
    until(lambda: transport.send([b"now"]), transport)
    assert router.recv_multipart()[1:] == [b"now"]
    until(lambda: not transport.refusal(), transport)
    transport.close()


def test_a_key_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nothing cannot be read"):
        ZmqTransport("tcp://127.0.0.1:1", str(tmp_path / "nothing"), new_pair()[0])
