"""A session's own way to a server on its host: taken where there is one, left when it breaks, and never missed."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvkeep
from kvkeep.cli.remote import ask
from kvkeep.client.connection import Connection
from kvkeep.client.direct import DirectTransport, Ways
from kvkeep.client.options import ClientOptions
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.frames import HEADER_BYTES
from kvkeep.wire.stream import SOCKET_FILE, Stream, socket_path

SHAPE = BlockShape(ModelIdentity(model="direct", revision="1", kv_dtype="|u1", block_tokens=4, content="bytes"), (64,))
CACHE: dict[str, Any] = {
    "model": "direct",
    "revision": "1",
    "block_tokens": 4,
    "block_shape": (2, 8),
    "dtype": "float32",
}
FRAMES = [b"h" * HEADER_BYTES, b"body"]


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[..., Connection]]:
    made: list[Connection] = []

    def begin(to: ServerProcess = server, **options: object) -> Connection:
        made.append(Connection(SHAPE, ClientOptions(address=to.address, **options)))  # type: ignore[arg-type]
        assert made[-1].wait_until_up(60_000)
        return made[-1]

    yield begin
    for connection in made:
        connection.close()


def answers(connection: Connection) -> bool:
    return connection.wait(connection.call(m.Ping(), 10_000)) is not None


def counted(server: ServerProcess) -> list[float]:
    """Sessions that ended, and that died."""
    lines = metrics(server).splitlines()
    names = ("kvkeep_sessions_ended_total", "kvkeep_sessions_died_total")
    return [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]


def metrics(server: ServerProcess) -> str:
    with urllib.request.urlopen(f"http://{server.http.removeprefix('http://')}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


def until(happens: Callable[[], bool], connection: Connection) -> None:
    give_up_s = time.monotonic() + 60
    while not happens():
        connection.poll()
        time.sleep(0.001)
        assert time.monotonic() < give_up_s


# -- the way


def test_it_is_taken_on_the_servers_host_and_not_over_a_network(connect: Callable[..., Connection]) -> None:
    near, far = connect(), connect(shared_memory=False)
    assert near._transport.is_direct and not far._transport.is_direct
    assert answers(near) and answers(far)


def test_blocks_go_in_and_come_out(server: ServerProcess) -> None:
    with kvkeep.connect(server.address, required=True, **CACHE) as cache:
        rows = np.random.default_rng(1).random((512, 2, 8), dtype=np.float32)
        assert cache.put(range(2048), rows) == 512
        assert np.array_equal(cache.get(range(2048)), rows)
        assert cache.connection._transport.is_direct


def test_a_message_longer_than_any_buffer_of_the_kernels(connect: Callable[..., Connection]) -> None:
    connection = connect()
    assert connection.layout is not None
    keys = os.urandom(16 * 100_000)
    call = connection.call(m.Lookup("default", connection.layout.layout, keys), 60_000)
    connection.wait(call)
    assert isinstance(call.reply, m.Found) or call.failure == "too_many_blocks", call.failure
    assert answers(connection) and connection._transport.is_direct


def test_without_such_a_socket_all_goes_by_zmq(server: ServerProcess, connect: Callable[..., Connection]) -> None:
    """One of an earlier release."""
    (server.pool / SOCKET_FILE).rename(server.pool / "away")
    try:
        connection = connect()
        assert not connection._transport.is_direct and answers(connection)
    finally:
        (server.pool / "away").rename(server.pool / SOCKET_FILE)


def break_it(connection: Connection) -> None:
    way = connection._transport._now
    assert isinstance(way, DirectTransport)
    way._stream._socket.shutdown(socket.SHUT_RDWR)


def test_one_that_breaks_costs_the_calls_on_their_way_and_no_session(connect: Callable[..., Connection]) -> None:
    connection = connect(ping_interval_ms=500)
    before = connection.welcome
    for _ in range(3):
        break_it(connection)
        call = connection.call(m.Ping(), 10_000)
        connection.wait(call)
        assert call.failure == "unreachable"
        connection.poll()
        assert answers(connection), "by ZMQ, or by the socket again"
        until(lambda: connection._transport.is_direct, connection)
        assert answers(connection)
    assert connection.welcome is before and connection.counters.sessions == 1


def test_what_is_leased_stays_so_when_it_breaks() -> None:
    """Others of the engine's processes read it, by connections of their own; with verification off nobody would notice
    that the slots are somebody else's."""
    with (
        ServerProcess("--pool-size", "1MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms") as server,
        kvkeep.connect(server.address, required=True, **CACHE) as cache,
    ):
        rows = np.full((256, 2, 8), 7, dtype=np.float32)
        assert cache.put(range(1024), rows) == 256
        scheduler = SchedulerAdapter(
            cache.connection.shape, ClientOptions(address=server.address, ping_interval_ms=200)
        )
        assert scheduler.connection.wait_until_up(60_000) and scheduler.connection._transport.is_direct
        keys = cache._chain(range(1024), None).keys(0)
        scheduler.lookup("r", None, keys)
        scheduler.connection.wait(scheduler._asked["r"].call)
        answer = scheduler.lookup("r", None, keys)
        assert answer is not None and answer.blocks == 256
        break_it(scheduler.connection)
        give_up_s = time.monotonic() + 1.5
        while time.monotonic() < give_up_s:
            scheduler.connection.poll()
            time.sleep(0.01)
        assert ask(server.http, "/v1/status")["leases"] == 1 and scheduler.connection.counters.sessions == 1
        scheduler.close()


def test_a_server_that_is_killed_and_started_again_is_found_again(connect: Callable[..., Connection]) -> None:
    with ServerProcess("--pool-size", "16MiB", "--slab-size", "256KiB") as server:
        connection = connect(server)
        epoch = connection.epoch
        server.stop(signal.SIGKILL)
        call = connection.call(m.Ping(), 10_000)
        connection.wait(call)
        assert call.failure == "unreachable", "at once, and not at its deadline"
        server.start()
        until(lambda: connection.up and connection.epoch not in (0, epoch), connection)
        assert answers(connection) and connection._transport.is_direct
        connection.close()


def test_a_paused_server_is_waited_for_no_longer_than_a_deadline(connect: Callable[..., Connection]) -> None:
    with ServerProcess("--pool-size", "16MiB", "--slab-size", "256KiB") as server:
        connection = connect(server)
        server.send(signal.SIGSTOP)
        call = connection.call(m.Ping(), 50)
        connection.wait(call)
        assert call.failure == "deadline"
        server.send(signal.SIGCONT)
        until(lambda: connection.answering, connection)
        assert connection.counters.sessions == 1 and connection._transport.is_direct
        connection.close()


def test_goodbye_is_heard(server: ServerProcess, connect: Callable[..., Connection]) -> None:
    """Also of one who does not wait for the answer."""
    for _ in range(20):  # the server may look for the dead in that very moment
        connection, before = connect(), counted(server)
        connection.start_over()
        connection._closing = True
        give_up_s = time.monotonic() + 60
        while (now := counted(server)) == before:
            assert time.monotonic() < give_up_s
        if now[0] > before[0]:
            return
    raise AssertionError("they died, and have not ended")


# -- its parts


def test_what_has_payload_does_not_go_this_way(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        way = DirectTransport(ours, 1 << 20)
        assert not way.send([*FRAMES, b"a block"]) and way.send(FRAMES)
        other = Stream(theirs, 1 << 20)
        other.read()
        assert other.next() == FRAMES and other.next() is None
        way.close()


def test_to_one_that_does_not_read_only_so_much_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        way, sent = DirectTransport(ours, 1 << 20), 0
        while way.send([FRAMES[0], bytes(1 << 20)]):
            sent += 1
            assert sent < 100
        assert way._stream.unsent_bytes < 18 << 20 and not way.lost()
        way.close()


def test_a_long_message_goes_while_the_other_side_reads_and_a_standing_one_is_tired_of() -> None:
    ours, theirs = socket.socketpair()
    way, other = DirectTransport(ours, 64 << 20), Stream(theirs, 64 << 20)
    assert way.send([FRAMES[0], bytes(32 << 20)]) and way._stream.unsent_bytes
    began_s = time.monotonic()
    for _ in range(1_000):
        assert way.receive() is None
    assert time.monotonic() - began_s < 1, "nobody reads, and nobody waits for that again and again"

    def read_all() -> None:
        while not other.has_next and not other.is_over:
            other.read()

    reader = threading.Thread(target=read_all)
    reader.start()
    give_up_s = time.monotonic() + 60
    while way._stream.unsent_bytes:
        way.wait(1_000)
        assert time.monotonic() < give_up_s
    reader.join(60)
    assert other.next() == [FRAMES[0], bytes(32 << 20)]
    way.close()
    other.close()


def test_a_loss_is_told_once() -> None:
    ours, theirs = socket.socketpair()
    way = DirectTransport(ours, 1 << 20)
    assert not way.lost()
    theirs.close()
    assert way.receive() is None
    assert way.lost() and not way.lost()
    began_s = time.monotonic()
    way.wait(60_000)
    assert time.monotonic() - began_s < 30 and not way.send(FRAMES)
    way.close()


def test_wait_returns_when_something_has_come() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        way = DirectTransport(ours, 1 << 20)
        Stream(theirs, 1 << 20).send(FRAMES)
        way.wait(60_000)
        assert way.receive() == FRAMES
        way.close()


def test_a_socket_of_the_dead_and_a_directory_of_nobody(tmp_path: Path) -> None:
    assert DirectTransport.open(tmp_path / "none", 1) is None
    assert DirectTransport.open(tmp_path, 1) is None
    with socket.socket(socket.AF_UNIX) as dead, socket_path(tmp_path) as path:
        dead.bind(path)
    assert DirectTransport.open(tmp_path, 1) is None


def test_back_is_the_way_that_was_there_before(server: ServerProcess) -> None:
    connection = Connection(SHAPE, ClientOptions(address=server.address))
    assert connection.wait_until_up(60_000)
    ways = connection._transport
    assert isinstance(ways, Ways) and ways.is_direct
    ways.go_back()
    ways.go_back()
    assert not ways.is_direct and not ways.lost()
    ways.go_direct(connection.welcome)
    assert ways.is_direct, "it was answered there before"
    connection.close()


class Monitored:
    """A Transport that counts how often it is asked whether it was lost."""

    def __init__(self) -> None:
        self.asked = 0

    def send(self, frames: object) -> bool:
        return False

    def receive(self) -> None:
        return None

    def wait(self, timeout_ms: int) -> None: ...

    def lost(self) -> bool:
        self.asked += 1
        return True

    def refusal(self) -> str:
        return ""

    def close(self) -> None: ...


def test_the_other_way_is_looked_after_meanwhile(server: ServerProcess, connect: Callable[..., Connection]) -> None:
    """Its events are read, or ZMQ's thread would wait for us when there are many; what they say does not matter."""
    other = Monitored()
    ways, welcome = Ways(other), connect().welcome
    ways.go_direct(welcome)
    assert ways.is_direct and not ways.lost() and other.asked == 1
    ways.close()


def test_who_is_turned_away_goes_by_zmq_and_does_not_knock_again_at_once() -> None:
    with ServerProcess("--pool-size", "16MiB", "--slab-size", "256KiB", "--max-sessions", "1") as server:
        knocks = []
        for _ in range(3):
            knocks.append(socket.socket(socket.AF_UNIX))
            with socket_path(server.pool) as path:
                knocks[-1].connect(path)
        connection = Connection(SHAPE, ClientOptions(address=server.address))
        assert connection.wait_until_up(60_000) and answers(connection) and not connection._transport.is_direct
        assert connection.counters.sessions == 1
        connection.close()
        for knock in knocks:
            knock.close()
