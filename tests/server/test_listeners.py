"""Tests for the socket that engines connect to, above all for opening it again: where it was, and as safe."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvkeep.errors import SettingsError
from kvkeep.server.auth import Gate
from kvkeep.server.counters import Counters
from kvkeep.server.listeners import Listener
from kvkeep.units import MIB
from kvkeep.wire.auth import new_pair

PATIENCE_MS = 30_000  # ends a test that has failed


class Net:
    """Listeners and those who call them, until the test is over."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listeners: list[Listener] = []
        self._callers: list[zmq.Socket[bytes]] = []

    def listen(self, address: str, gate: Gate | None = None) -> Listener:
        gate = gate or Gate(self.context, None, None, Counters)
        self._listeners.append(Listener(self.context, gate, address, MIB))
        return self._listeners[-1]

    def call(self, address: str) -> zmq.Socket[bytes]:
        self._callers.append(self.context.socket(zmq.DEALER))
        self._callers[-1].setsockopt(zmq.IPV6, "[" in address)
        self._callers[-1].connect(address)
        return self._callers[-1]


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    made.context.destroy(linger=0)


def hears(listener: Listener, dealer: zmq.Socket[bytes], word: bytes) -> bool:
    """Whether a word gets through, there and back. It is said again, as one that went into a connection which was just
    closed is lost; no other word may come."""
    for _ in range(PATIENCE_MS // 200):
        dealer.send(word)
        if not listener.socket.poll(200):
            continue
        peer, said = listener.socket.recv_multipart()
        assert said == word
        listener.socket.send_multipart([peer, said])
        if dealer.poll(200):
            answer = dealer.recv()
            while listener.socket.poll(20):
                listener.socket.recv_multipart()
            return answer == word
    return False


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0", "ipc://{}/s", "ipc://@{}"]
)
def test_it_is_opened_again_where_it_was(net: Net, tmp_path: Path, address: str) -> None:
    listener = net.listen(address.format(tmp_path if "@" not in address else tmp_path.name))
    where, first = listener.address, listener.socket
    client = net.call(where)
    assert hears(listener, client, b"one")
    for word in (b"two", b"three"):
        listener.reopen(lambda: None)
        assert listener.address == where and listener.socket is not first
        assert hears(listener, client, word), "who was connected connects again by itself"
    another = net.call(where)
    assert hears(listener, another, b"four")
    if listener.path is not None:
        assert listener.path.is_socket() and listener.path.stat().st_mode & 0o777 == 0o600


def test_what_has_come_in_is_gone(net: Net) -> None:
    listener = net.listen("tcp://127.0.0.1:0")
    client = net.call(listener.address)
    assert hears(listener, client, b"one")
    client.send(b"lost")
    assert listener.socket.poll(PATIENCE_MS)
    listener.reopen(lambda: None)
    assert hears(listener, client, b"two"), "and not the lost one first"


def test_nobody_can_take_the_port_meanwhile_and_who_connects_then_is_served(net: Net) -> None:
    listener = net.listen("tcp://127.0.0.1:0")
    host, port = "127.0.0.1", int(listener.address.rpartition(":")[2])
    clients = []

    def meanwhile() -> None:
        assert listener.socket.closed
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind((host, port))
        clients.append(net.call(listener.address))

    listener.reopen(meanwhile)
    assert hears(listener, clients[0], b"hello")


def test_it_keeps_no_files_open(net: Net) -> None:
    listener = net.listen("tcp://127.0.0.1:0")
    client = net.call(listener.address)
    counts = []
    for _ in range(12):
        listener.reopen(lambda: None)
        assert hears(listener, client, b"x")
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[6:]) <= max(counts[:6]) + 1, counts


def test_keys_are_asked_for_as_before(net: Net, tmp_path: Path) -> None:
    """The second socket lets in who the first let in, and nobody else, though the key's file has gone meanwhile."""
    public, secret = new_pair()
    server_public, server_secret = new_pair()
    (tmp_path / "server.key").write_text(server_secret)
    (tmp_path / "server.key").chmod(0o600)
    (tmp_path / "authorized").write_text(f"{public} c\n")
    counters = Counters()
    gate = Gate(net.context, tmp_path / "server.key", tmp_path / "authorized", lambda: counters)
    listener = net.listen("tcp://127.0.0.1:0", gate)
    (tmp_path / "server.key").unlink()
    listener.reopen(lambda: None)
    assert len(gate.sockets) == 2

    def knock(pair: tuple[str, str] | None) -> bool:
        """Whether what was sent comes; False as soon as somebody was turned away."""
        before = sum(counters.auth_failures.values())
        with net.context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            if pair is not None:
                dealer.curve_publickey, dealer.curve_secretkey = (half.encode() for half in pair)
                dealer.curve_serverkey = server_public.encode()
            dealer.connect(listener.address)
            dealer.send(b"word")
            poller = zmq.Poller()
            for each in (listener.socket, *gate.sockets):
                poller.register(each, zmq.POLLIN)
            while ready := dict(poller.poll(PATIENCE_MS)):
                if listener.socket in ready:
                    _, frames, caller = gate.receive(listener.socket)
                    return frames == [b"word"] and caller is not None and caller.name == "c"
                for each in ready:
                    gate.serve(each)
                if sum(counters.auth_failures.values()) > before:
                    return False
        raise AssertionError("nothing happened at all")

    assert knock((public, secret))
    assert not knock(new_pair())
    assert not knock(None)
    assert knock((public, secret))
    gate.close()


def test_the_file_goes_when_it_is_told_to(net: Net, tmp_path: Path) -> None:
    listener = net.listen(f"ipc://{tmp_path}/socket")
    listener.remove_file()
    assert not (tmp_path / "socket").exists()
    (tmp_path / "socket").write_text("of the next server")
    listener.remove_file()
    assert (tmp_path / "socket").exists(), "it is no longer ours"


def test_a_port_in_use_is_named_with_the_remedy(net: Net) -> None:
    listener = net.listen("tcp://127.0.0.1:0")
    with pytest.raises(SettingsError, match="cannot listen on tcp") as refused:
        net.listen(listener.address)
    assert "--address" in refused.value.hint
