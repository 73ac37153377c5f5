"""Tests for the socket that engines connect to, above all for opening it again: where it was, and as safe."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
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

    def close(self) -> None:
        for listener in self._listeners:
            listener.close(0)
        self.context.destroy(linger=0)

    def call(self, address: str) -> zmq.Socket[bytes]:
        self._callers.append(self.context.socket(zmq.DEALER))
        self._callers[-1].setsockopt(zmq.IPV6, "[" in address)
        self._callers[-1].connect(address)
        return self._callers[-1]


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    made.close()


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
    listener = net.listen(address.format(tmp_path if "@" not in address else f"{tmp_path.name}-{os.getpid()}"))
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


def keyed_gate(
    net: Net,
    directory: Path,
    secret: str = new_pair()[1],
    client: str = new_pair()[0],
    counters: Counters | None = None,
) -> Gate:
    """One that lets in a client by the name c."""
    (directory / "server.key").write_text(secret)
    (directory / "server.key").chmod(0o600)
    (directory / "authorized").write_text(f"{client} c\n")
    counted = counters or Counters()
    return Gate(net.context, directory / "server.key", directory / "authorized", lambda: counted)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """None is left while this lasts, but the ones that become free in it."""
    taken = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://{}/s", "ipc://@{}"])
def test_it_needs_no_more_descriptors_than_it_has(net: Net, tmp_path: Path, address: str, with_keys: bool) -> None:
    gate = keyed_gate(net, tmp_path) if with_keys else None
    listener = net.listen(address.format(tmp_path if "@" not in address else f"{tmp_path.name}-{os.getpid()}"), gate)
    with no_descriptors():
        for _ in range(3):
            first = listener.socket
            listener.reopen(lambda: None)
            assert first.closed and not listener.socket.closed
    if gate is None:
        assert hears(listener, net.call(listener.address), b"word")


@pytest.fixture
def allow() -> Iterator[Callable[[bool], None]]:
    """Whether new descriptors are to be had, whatever becomes free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def set_limit(any_left: bool) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft if any_left else 3, hard))

    yield set_limit
    set_limit(True)


def test_it_waits_a_moment_for_descriptors(net: Net, allow: Callable[[bool], None]) -> None:
    """ZMQ closes what it has one after the other, in threads of its own."""
    listener = net.listen("tcp://127.0.0.1:0")
    soon = threading.Timer(0.1, allow, [True])

    def meanwhile() -> None:
        allow(False)
        soon.start()

    listener.reopen(meanwhile)
    soon.join()
    assert hears(listener, net.call(listener.address), b"word")


def test_it_is_opened_later_where_there_are_none_now(net: Net, allow: Callable[[bool], None]) -> None:
    listener = net.listen("tcp://127.0.0.1:0")
    client = net.call(listener.address)
    assert hears(listener, client, b"one")
    for _ in range(2):
        with pytest.raises((OSError, zmq.ZMQError), match="Too many open files"):
            listener.reopen(lambda: allow(False))
        assert listener.socket.closed
    allow(True)
    listener.reopen(lambda: None)
    assert hears(listener, client, b"two")


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_another_that_listens_at_the_same_port_of_another_host_address_is_left_alone(net: Net, host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.bind((host, 0))
        other.listen()
        listener = net.listen(f"tcp://127.0.0.1:{other.getsockname()[1]}")
        listener.reopen(lambda: None)
        assert hears(listener, net.call(listener.address), b"word")
        with socket.create_connection(other.getsockname()[:2]):
            other.settimeout(PATIENCE_MS / 1000)
            other.accept()[0].close()


def test_all_addresses_of_the_host(net: Net) -> None:
    listener = net.listen("tcp://*:0")
    port = listener.address.rpartition(":")[2]
    assert listener.address == f"tcp://0.0.0.0:{port}"
    assert hears(listener, net.call(f"tcp://127.0.0.3:{port}"), b"four")
    both = net.listen("tcp://[::]:0")
    assert hears(both, net.call(f"tcp://127.0.0.1:{both.address.rpartition(':')[2]}"), b"and six")


def test_a_dead_servers_socket_is_taken_over(net: Net, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
    listener = net.listen(f"ipc://{tmp_path}/s")
    assert hears(listener, net.call(listener.address), b"word")


def test_the_port_is_free_when_it_is_closed(net: Net) -> None:
    listener = net.listen("tcp://127.0.0.1:0")
    listener.reopen(lambda: None)
    listener.close(0)
    for _ in range(PATIENCE_MS // 10):  # ZMQ closes its own in a thread of its own
        try:
            net.listen(listener.address)
            return
        except SettingsError:
            time.sleep(0.01)
    raise AssertionError("somebody still listens there")


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
    counters = Counters()
    gate = keyed_gate(net, tmp_path, server_secret, public, counters)
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
