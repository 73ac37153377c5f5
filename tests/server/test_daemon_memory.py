"""Messages of endlessly many parts: they cost everybody the connection, and the server no memory."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvkeep.cli.remote import ask
from kvkeep.server import daemon as daemon_module
from kvkeep.server import own_memory
from kvkeep.server.own_memory import Statm
from kvkeep.store.integrity import check_integrity
from kvkeep.testing.peer import Peer, chain
from kvkeep.testing.process import ServerProcess
from kvkeep.units import MIB
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, encode

LIMIT = 96 * MIB
BLOCKS = [bytes([at + 1]) * 512 for at in range(4)]
own_bytes = Statm().own_bytes
PATIENCE_S = 60  # ends a test that has failed
ASK_AGAIN_S = 5


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (daemon_module, own_memory):
        monkeypatch.setattr(module, "INCOMING_BYTES", LIMIT)
    monkeypatch.setattr(own_memory, "_SETTLED_BYTES", LIMIT // 4)


def greet(address: str) -> socket.socket:
    """A raw connection that has said all of its handshake, and waits for no answer."""
    host, port = address.removeprefix("tcp://").split(":")
    wire = socket.create_connection((host, int(port)), PATIENCE_S)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    wire.sendall(greeting + bytes([4, len(ready)]) + ready)
    return wire


class Flood:
    """A raw connection that sends parts and, if it has an end, a last one; again and again until it is cut."""

    def __init__(self, address: str, part_bytes: int, parts: int | None = None) -> None:
        self._wire = greet(address)
        greeting_and_ready = 64 + 2
        while greeting_and_ready > 0:  # what comes before that is no part of a message
            greeting_and_ready -= len(self._wire.recv(greeting_and_ready))
        more, last = (self._part(part_bytes, flag) for flag in (1, 0))
        count = parts or max(1, MIB // len(more))
        self._message = more * count + (last if parts else b"")
        self.is_cut = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    @staticmethod
    def _part(nbytes: int, more: int) -> bytes:
        head = bytes([more, nbytes]) if nbytes < 256 else bytes([more | 2]) + struct.pack(">Q", nbytes)
        return head + bytes(nbytes)

    def _send(self) -> None:
        try:
            while True:
                self._wire.sendall(self._message)
        except OSError:
            self.is_cut.set()

    def close(self) -> None:
        self._wire.close()
        self._thread.join()


@pytest.fixture
def flood() -> Iterator[Callable[..., Flood]]:
    made: list[Flood] = []

    def begin(*args: Any, **more: Any) -> Flood:
        made.append(Flood(*args, **more))
        return made[-1]

    yield begin
    for one in made:
        one.is_cut.wait(PATIENCE_S)
        one.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], Peer]]:
    """Makes clients that ask again when no answer comes, as ours do by their deadline."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kept = []

    def connected(address: str) -> Peer:
        wire = context.socket(zmq.DEALER)
        kept.append(wire)
        wire.connect(address)

        def exchange(frames: list[bytes]) -> list[bytes] | None:
            for _ in range(PATIENCE_S // ASK_AGAIN_S):
                wire.send_multipart(frames)
                while wire.poll(ASK_AGAIN_S * 1000):
                    reply = wire.recv_multipart()
                    if decode_header(reply).number == decode_header(frames).number:  # else it was late
                        return reply
            return None

        return Peer(exchange)

    yield connected
    context.destroy(linger=0)


def stored(peer: Peer) -> int:
    layout = peer.open_layout(512)
    peer.store(layout, chain("a", 4), BLOCKS)
    return layout


def resets(running: Any) -> int:
    return int(running.daemon.service.counters.connection_resets)


def wait_for(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def check_served(running: Any, peer: Peer, layout: int) -> None:
    """The session is the one from before, and so are the blocks."""
    assert peer.load(layout, chain("a", 4)) == BLOCKS
    running.in_loop(lambda: check_integrity(running.daemon.store))
    assert running.daemon.service.counters.internal_errors == 0


@pytest.mark.parametrize("part_bytes", [1, 200_000])
def test_a_message_without_end_is_cut_and_its_memory_comes_back(
    start: Callable[..., Any], connect: Callable[[str], Peer], flood: Callable[..., Flood], part_bytes: int
) -> None:
    running = start()
    peer = connect(running.daemon.address).attach()
    layout, before = stored(peer), own_bytes()
    bad = flood(running.daemon.address, part_bytes)
    assert bad.is_cut.wait(PATIENCE_S), "nobody cut it"
    wait_for(lambda: resets(running) == 1)
    wait_for(lambda: own_bytes() - before < LIMIT // 2)
    check_served(running, peer, layout)


def test_it_happens_again_and_again_and_the_limit_stays_the_same(
    start: Callable[..., Any], connect: Callable[[str], Peer], flood: Callable[..., Flood]
) -> None:
    running = start()
    peer = connect(running.daemon.address).attach()
    layout, highest = stored(peer), 0
    own = running.daemon._memory._quiet_bytes
    for number in range(1, 4):
        bad = flood(running.daemon.address, 50_000)
        while not bad.is_cut.wait(0.005):
            highest = max(highest, own_bytes())
        wait_for(lambda number=number: resets(running) == number)  # type: ignore[misc]
        running.in_loop(lambda: None)  # it is open again
    wider = running.daemon._memory._quiet_bytes - own  # a little may stay of other tests in this process
    assert wider < LIMIT // 2, "a client cannot make its limit wider, by what it sent, again and again"
    assert highest - own > LIMIT // 2
    check_served(running, peer, layout)


def test_whole_messages_of_very_many_parts_are_broken_off_while_they_are_read(
    start: Callable[..., Any], connect: Callable[[str], Peer], flood: Callable[..., Flood]
) -> None:
    """Reading one takes seconds, and others come in meanwhile: the loop must not be deaf to that."""
    running = start(loop=False)
    running.daemon._memory_due = float("inf")  # so that it can only be seen while reading
    bad = flood(running.daemon.address, 1, parts=400_000)
    wait_for(lambda: own_bytes() - running.daemon._memory._quiet_bytes > 2 * LIMIT)
    running.thread.start()
    assert bad.is_cut.wait(PATIENCE_S), "nobody cut it"
    wait_for(lambda: resets(running) == 1)
    peer = connect(running.daemon.address).attach()
    check_served(running, peer, stored(peer))


def test_what_is_left_of_a_message_that_was_broken_off_is_no_message(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts could say anything, such as another's name: the socket is closed even if there is memory again."""
    running = start(loop=False)
    daemon = running.daemon
    monkeypatch.setattr("kvkeep.server.auth._PARTS_BETWEEN_LOOKS", 2)
    monkeypatch.setattr(daemon._memory, "incoming_bytes", lambda blocks, replies: LIMIT + 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(daemon.address)
        forged = [b"another", *encode(Header(0, 1), m.Hello("forged", 1))]
        dealer.send_multipart([b"x", *forged])
        first = daemon._listener.socket
        assert first.poll(PATIENCE_S * 1000)
        daemon._answer_all()
        monkeypatch.setattr(daemon._memory, "incoming_bytes", lambda blocks, replies: 0)
        daemon._turn(0)
        assert first.closed and daemon.service.counters.connection_resets == 1
        daemon._turn(0)
        assert daemon.service.counters.connection_resets == 1
        assert daemon.service.counters.sessions_opened == daemon.service.counters.bad_frames == 0


def test_memory_that_is_explained_closes_nothing(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(loop=False)
    daemon = running.daemon
    daemon._memory._quiet_bytes -= 2 * LIMIT
    monkeypatch.setattr(daemon.service.backlog, "waiting_bytes", lambda: 2 * LIMIT)
    daemon._look_after_memory()
    assert resets(running) == 0
    monkeypatch.setattr(daemon.service.backlog, "waiting_bytes", lambda: 0)
    daemon._look_after_memory()
    assert resets(running) == 1


def test_a_look_that_fails_ends_nothing_and_is_said_once(
    start: Callable[..., Any],
    connect: Callable[[str], Peer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = start()
    counters = running.daemon.service.counters

    def fail() -> int:
        raise OSError("no measure")

    running.in_loop(lambda: monkeypatch.setattr(running.daemon._memory, "_measure", fail))
    wait_for(lambda: counters.internal_errors >= 3)
    peer = connect(running.daemon.address).attach()
    layout = stored(peer)
    monkeypatch.setattr("kvkeep.server.auth._PARTS_BETWEEN_LOOKS", 2)
    assert peer.load(layout, chain("a", 4)) == BLOCKS
    assert [record.message for record in caplog.records if "no measure" in str(record.exc_info)] == [
        "the server could not look after its memory; it will try again and again"
    ]
    assert resets(running) == 0


def test_a_socket_that_could_not_be_opened_again_is_opened_later(
    start: Callable[..., Any], connect: Callable[[str], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    daemon = running.daemon
    peer = connect(daemon.address).attach()
    layout = stored(peer)
    reopened, open_socket = threading.Event(), daemon._listener._open

    def cannot() -> zmq.Socket[bytes]:
        if not reopened.is_set():
            raise PermissionError("not now")
        return open_socket()  # type: ignore[no-any-return]

    def begin() -> None:
        monkeypatch.setattr(daemon._listener, "_open", cannot)
        daemon._memory._quiet_bytes -= 2 * LIMIT

    running.in_loop(begin)
    wait_for(lambda: daemon.service.counters.internal_errors >= 3)
    assert daemon._listener.socket.closed and running.ask("/v1/status")[0] == 200, "all else goes on"
    reopened.set()
    assert peer.load(layout, chain("a", 4)) == BLOCKS
    assert resets(running) == 1


class PoorServer(ServerProcess):
    """One that may have so many descriptors, and no more."""

    DESCRIPTORS = 120

    def command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {self.DESCRIPTORS}; exec "$0" "$@"', *super().command()]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def test_who_takes_all_descriptors_does_not_end_the_server(connect: Callable[[str], Peer]) -> None:
    """Nobody need prove anything for a connection. Those who are connected are served, and others afterwards."""
    with PoorServer("--pool-size", "64MiB") as server:
        peer = connect(server.address).attach()
        layout = stored(peer)
        idle = [greet(server.address) for _ in range(PoorServer.DESCRIPTORS + 20)]
        wait_for(lambda: server.descriptors() == PoorServer.DESCRIPTORS)
        for _ in range(10):
            time.sleep(daemon_module._MEMORY_CHECK_S)  # a look or more
            assert peer.load(layout, chain("a", 4)) == BLOCKS
        assert server.descriptors() == PoorServer.DESCRIPTORS, "all that while none was left"
        for each in idle:
            each.close()
        another = connect(server.address).attach()
        assert another.load(another.open_layout(512), chain("a", 4)) == BLOCKS
        assert ask(server.http, "/v1/status")["counters"]["internal_errors"] == 0
