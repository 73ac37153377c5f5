from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.store.store import Store
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep.wire.messages import Done, Lookup, Ping, Refused, Release
from kvkeep.wire.stream import Stream
from kvkeep_lab.chaos.network import ChaosNetwork
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.chaos.server import ChaosServer, cut_off_after
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.simulation import Process, Simulation

SLAB_BYTES = 4 * 4096


class World:
    def __init__(self, directory: Path) -> None:
        self.simulation = Simulation(1)
        record = Record(self.simulation)
        self.network = ChaosNetwork(self.simulation, 1, {}, record)
        self.server = ChaosServer(
            self.simulation, self.network, record, directory, 8 * SLAB_BYTES, SLAB_BYTES, 1
        )
        self.server.start()

    def peer(self) -> Peer:
        return Peer(
            lambda frames: self.server.service.handle(frames, self.server.process.now_ms())
        ).attach()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.simulation.close()
    if world.server.is_up:
        world.server.stop(keep=False)


def store_some(world: World, count: int = 3) -> bytes:
    keys, peer = chain("a", count), world.peer()
    assert peer.store(peer.open_layout(), keys, [bytes([at]) * 64 for at in range(count)]) == count
    return keys


def test_the_next_server_adopts_what_one_that_crashed_has_left(world: World) -> None:
    keys = store_some(world)
    epoch, memory = world.server.epoch, world.server.memory
    world.server.crash()
    assert not world.server.is_up
    world.server.start()
    assert world.server.epoch != epoch
    assert world.server.memory == memory
    assert world.server.adopted_blocks == 3
    peer = world.peer()
    assert len(peer.load(peer.open_layout(), keys)) == 3


def test_a_fresh_server_begins_empty_in_other_memory(world: World) -> None:
    store_some(world)
    memory = world.server.memory
    world.server.crash()
    world.server.start(fresh=True)
    assert world.server.adopted_blocks == 0
    assert world.server.memory != memory


@pytest.mark.parametrize("keep", [True, False])
def test_one_that_stops_in_order_keeps_the_pool_if_told(world: World, keep: bool) -> None:
    store_some(world)
    world.server.stop(keep=keep)
    world.server.start()
    assert world.server.adopted_blocks == (3 if keep else 0)


class Caller:
    """A raw connection to the server, which says what it is told."""

    def __init__(self, world: World) -> None:
        self._world = world
        end: Any = world.network.connect(Process(world.simulation, "caller"), socket.AF_UNIX)
        self.stream = Stream(end, 1 << 20)

    def say(self, *messages: list[Any], duration_us: int = 20_000) -> list[list[bytes]]:
        """Returns what has come by then."""
        for frames in messages:
            self.stream.send(frames)
        came = []
        for _ in range(20):
            self.stream.flush()
            self._world.simulation.run(duration_us // 20)
            self.stream.read()
            while (answer := self.stream.next()) is not None:
                came.append(answer)
        return came


def test_one_that_is_paused_answers_when_it_goes_on(world: World) -> None:
    caller = Caller(world)
    world.server.pause()
    assert caller.say(encode(Header(0, 1), Ping())) == []
    world.server.resume()
    assert len(caller.say()) == 1


def test_two_replies_to_one_request_are_noticed(world: World) -> None:
    """Neither side sends a message twice: one that comes twice was doubled on the way."""
    peer, caller = world.peer(), Caller(world)
    message = encode(Header(peer.session, 99), Ping())
    assert len(caller.say(message)) == 1
    with pytest.raises(Violation, match="answered twice"):
        caller.say(message)


def test_what_still_comes_over_an_earlier_connection_is_not_carried_out(world: World) -> None:
    """A client has sent a Lookup over the first, given it up, and given its lease back over the
    second."""
    keys, peer = store_some(world), world.peer()
    layout = peer.open_layout()
    first, second = Caller(world), Caller(world)
    late = encode(Header(peer.session, 77), Lookup("default", layout, keys))
    (released,) = second.say(encode(Header(peer.session, 78), Release([77])))
    (refused,) = first.say(late)
    (alive,) = second.say(encode(Header(peer.session, 79), Ping()))
    answers = [decode_reply(decode_header(answer), answer) for answer in (released, refused, alive)]
    assert answers[0] == Done(0) and answers[2] == Done()
    assert isinstance(answers[1], Refused) and answers[1].code == "unknown_session"
    assert not any(session.leases for session in world.server.store.sessions.values())


def test_a_fault_inside_the_server_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, caller = world.peer(), Caller(world)
    monkeypatch.setattr(world.server.service.sessions, "get", lambda *_: 1 // 0)
    with pytest.raises(Violation, match="ZeroDivisionError"):
        caller.say(encode(Header(peer.session, 9), Ping()))


def test_a_crash_ends_its_connections_and_the_next_server_takes_new_ones(world: World) -> None:
    caller = Caller(world)
    world.server.crash()
    caller.say()
    assert caller.stream.is_over
    world.server.start()
    assert len(Caller(world).say(encode(Header(0, 1), Ping()))) == 1


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 100])
def test_bytes_that_are_no_message_end_a_connection_wherever_a_turn_ends(
    world: World, count: int
) -> None:
    """After the last message of a turn the server looks whether there is another one: what it sees
    then ends the connection, too. Nobody writes again, so nothing else would."""
    caller = Caller(world)
    end: Any = caller.stream.socket
    end.outgoing.arrived += b"".join(encode(Header(0, 1), Ping())) * count + b"nonsense"
    end.other.notify()
    assert len(caller.say(duration_us=2_000_000)) <= count
    assert caller.stream.is_over and len(world.server.connections) == 0


def test_nothing_is_read_from_a_peer_that_does_not_take_its_replies(world: World) -> None:
    caller = Caller(world)
    end: Any = caller.stream.socket
    end.incoming.capacity = 600
    for number in range(1, 400):
        caller.stream.send(encode(Header(0, number), Ping()))
        caller.stream.flush()
    world.simulation.run(100_000)
    (peer,) = world.server.connections._peers.values()
    assert 0 < peer.stream.unsent_bytes < 1_000 and peer.waits_to_send
    assert peer.stream.held_bytes < 32 << 10
    answers = [answer for _ in range(60) for answer in caller.say()]
    assert [decode_header(answer).number for answer in answers] == list(range(1, 400))


def test_code_of_the_store_is_cut_off_at_a_line() -> None:
    store = Store(SLAB_BYTES, SLAB_BYTES)
    done: list[int] = []

    def open_some() -> None:
        for number in range(5):
            store.open_session(number)
            done.append(number)

    cut_off_after(7, open_some)
    assert 0 < len(done) < 5
    cut_off_after(1_000, lambda: store.open_session(77))
    assert 77 in store.sessions
