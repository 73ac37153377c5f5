from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.store.store import Store
from kvkeep.testing.chaos_network import ChaosNetwork
from kvkeep.testing.chaos_record import Record, Violation
from kvkeep.testing.chaos_server import ChaosServer, cut_off_after
from kvkeep.testing.peer import Peer, chain
from kvkeep.testing.simulation import Process, Simulation
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.messages import Ping

SLAB_BYTES = 4 * 4096


class World:
    def __init__(self, directory: Path) -> None:
        self.simulation = Simulation(1)
        record = Record(self.simulation)
        self.network = ChaosNetwork(self.simulation, 1, {}, record)
        self.server = ChaosServer(self.simulation, self.network, record, directory, 8 * SLAB_BYTES, SLAB_BYTES, 1)
        self.server.start()

    def peer(self) -> Peer:
        return Peer(lambda frames: self.server.service.handle(frames, self.server.process.now_ms())).attach()


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


def test_one_that_is_paused_answers_when_it_goes_on(world: World) -> None:
    client = Process(world.simulation, "c")
    transport = world.network.transport(client)
    world.server.pause()
    world.server.receive(transport, encode(Header(0, 1), Ping()))
    world.simulation.run(10_000)
    assert transport.receive() is None
    world.server.resume()
    world.simulation.run(10_000)
    assert transport.receive() is not None


def test_two_replies_to_one_request_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = world.peer()
    transport = world.network.transport(Process(world.simulation, "c"))
    message = [bytes(frame) for frame in encode(Header(peer.session, 99), Ping())]
    world.server.receive(transport, message)
    world.server.receive(transport, message)  # which it has seen
    session = world.server.service.sessions.all()[0]
    monkeypatch.setattr(type(session), "is_repeated", lambda *_: False)
    with pytest.raises(Violation, match="answered twice"):
        world.server.receive(transport, message)


def test_a_fault_inside_the_server_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = world.peer()
    monkeypatch.setattr(world.server.service.sessions, "get", lambda *_: 1 // 0)
    transport = world.network.transport(Process(world.simulation, "c"))
    with pytest.raises(Violation, match="ZeroDivisionError"):
        world.server.receive(transport, [bytes(frame) for frame in encode(Header(peer.session, 9), Ping())])


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
