"""The store of one piece, part by part: what comes when, what is under way meanwhile, and nothing
left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.client.conftest import Transfer, ended

from kvkeep.client.connection import Connection
from kvkeep.client.copier import HostCopier
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.kv.runs import BlockRuns
from kvkeep.store.plans import Limits
from kvkeep.wire import messages as m

Make = Callable[..., Any]
NBYTES = 1000


def keys(count: int) -> bytes:
    return b"".join(f"k{at}".encode().ljust(16, b".") for at in range(count))


def memory(blocks: int = 40) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (blocks, NBYTES), dtype=np.uint8)


def transfer(connection: Connection, engine: NDArray[np.uint8], copier: Any = None) -> Transfer:
    return Transfer(connection, [GroupMemory(BlockRuns.of([engine]))], 0, copier)


def storing(ids: list[int], **hints: int) -> StoreRequest:
    return StoreRequest("default", b"", keys(len(ids)), np.array(ids, dtype=np.int64), **hints)


def look_up(connection: Connection, count: int, ids: list[int]) -> LoadRequest:
    assert connection.layout is not None
    call = connection.call(m.Lookup("default", connection.layout.layout, keys(count)), 200)
    found = connection.wait(call)
    assert isinstance(found, m.Found)
    slots, checksums = (
        np.frombuffer(found.slots, "<i8"),
        np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
    )
    return LoadRequest(
        "default", keys(count), 0, np.array(ids, dtype=np.int64), call.epoch, slots, checksums
    )


def in_parts_of(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, first: int = 0, whole: int = 0
) -> None:
    monkeypatch.setattr(HostCopier, "part_bytes", nbytes)
    monkeypatch.setattr(HostCopier, "first_bytes", first or nbytes)
    monkeypatch.setattr(HostCopier, "whole_bytes", whole or first or nbytes)


def prepared_by(sim: Any) -> list[m.PrepareStore]:
    return [request for request in sim.recorder.came if isinstance(request, m.PrepareStore)]


@pytest.fixture(params=["network", "shared_memory"])
def sim(request: pytest.FixtureRequest, simulation: Make) -> Any:
    return simulation(shared_memory=request.param == "shared_memory")


# -- parts


@pytest.mark.parametrize("blocks_a_part", [1, 3, 4, 11, 12, 100])
def test_a_store_in_parts_is_the_same_as_one_at_once(
    sim: Any, monkeypatch: pytest.MonkeyPatch, blocks_a_part: int
) -> None:
    in_parts_of(monkeypatch, blocks_a_part * NBYTES)
    connection, engine = sim.connected(), memory()
    assert transfer(connection, engine).offer(storing([*range(20, 32)])) == (12, True)
    prepared = prepared_by(sim)
    assert [request.parent for request in prepared] == [
        keys(12)[start * 16 - 16 : start * 16] for start in range(0, 12, blocks_a_part)
    ]
    assert b"".join(request.keys for request in prepared) == keys(12)
    assert sim.recorder.count(m.CompleteStore) == len(prepared)
    target = np.zeros_like(engine)
    assert transfer(connection, target).load(look_up(connection, 12, [*range(12)])).all()
    assert (target[:12] == engine[20:32]).all()


def test_a_part_already_there_or_refused_does_not_confuse_the_others(
    simulation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_of(monkeypatch, 2 * NBYTES)
    sim = simulation(shared_memory=True, slots=8)
    connection, engine = sim.connected(), memory()
    assert transfer(connection, engine).store(storing([0, 1, 2])) == 3
    assert transfer(connection, engine).store(storing([*range(12)])) == 5, (
        "the pool has eight slots"
    )
    target = np.zeros_like(engine)
    assert transfer(connection, target).load(look_up(connection, 12, [*range(8)])).all()
    assert (target[:8] == engine[:8]).all()
    assert sim.held()[0][1] == 0


def test_parts_keep_to_the_servers_limit_of_blocks_a_request(simulation: Make) -> None:
    sim = simulation(limits=Limits(blocks_per_request=5))
    assert transfer(sim.connected(), memory()).store(storing([*range(12)])) == 12
    assert [len(request.keys) // 16 for request in prepared_by(sim)] == [5, 4, 3], "about as large"


def test_parts_of_small_blocks_are_no_longer_than_their_own_limit(simulation: Make) -> None:
    sim = simulation(shared_memory=True, slots=1200)
    assert transfer(sim.connected(), memory(1200)).store(storing([*range(1200)])) == 1200
    assert [len(request.keys) // 16 for request in prepared_by(sim)] == [512, 344, 344]


def test_the_first_part_may_be_smaller_than_the_others(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_of(monkeypatch, 4 * NBYTES, 2 * NBYTES)
    connection, engine = sim.connected(), memory()
    assert transfer(connection, engine).offer(storing([*range(12)])) == (12, True)
    assert [len(request.keys) // 16 for request in prepared_by(sim)] == [2, 5, 5]
    target = np.zeros_like(engine)
    assert transfer(connection, target).load(look_up(connection, 12, [*range(12)])).all()
    assert (target[:12] == engine[:12]).all()


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        # What is not too large goes in one part.
        *((8, parts) for parts in ([0], [1], [8], [2, 4, 3], [2, 5, 5])),
        *((2, parts) for parts in ([0], [2], [2, 1], [2, 3, 3])),
    ],
)
def test_the_first_of_several_parts_is_smaller_than_the_others(
    sim: Any, monkeypatch: pytest.MonkeyPatch, whole: int, parts: list[int]
) -> None:
    in_parts_of(monkeypatch, 4 * NBYTES, 2 * NBYTES, whole=whole * NBYTES)
    offered = transfer(sim.connected(), memory()).offer(storing([*range(sum(parts))]))
    assert offered == (sum(parts), True)
    assert [len(request.keys) // 16 for request in prepared_by(sim)] == parts


def test_hints_travel_with_every_part(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts_of(monkeypatch, NBYTES)
    transfer(sim.connected(), memory()).store(storing([0, 1, 2], priority=80, ttl_ms=1234))
    prepared = prepared_by(sim)
    assert [(request.priority, request.ttl_ms) for request in prepared] == [(80, 1234)] * 3


@pytest.mark.parametrize(("blocks_a_part", "slots"), [(12, 20), (4, 20), (12, 6), (4, 6), (4, 10)])
def test_another_store_may_begin_when_the_last_slots_are_asked_for_but_not_given_yet(
    simulation: Make, monkeypatch: pytest.MonkeyPatch, blocks_a_part: int, slots: int
) -> None:
    in_parts_of(monkeypatch, blocks_a_part * NBYTES)
    sim = simulation(shared_memory=True, slots=slots)
    connection = sim.connected()
    moving, call, asked = transfer(connection, memory()), connection.call, list[Any]()

    def noted(message: m.Message, *rest: Any) -> Any:
        asked.append(call(message, *rest))
        return asked[-1]

    monkeypatch.setattr(connection, "call", noted)
    store, told = (
        moving.storing(storing([*range(12)]), moving.sources([storing([*range(12)])])[0]),
        list[bool](),
    )
    store.begin()
    store.copy(lambda: told.append(not asked[-1].done))
    assert len(told) == 1, "also if there is no room for all"
    assert told == [True] or (slots == 6 and blocks_a_part == 4), (
        "there the answer before says that it is the last"
    )
    assert len(asked) == 12 // blocks_a_part
    store.finish()
    assert ended(store)[0] == min(12, slots)


# -- faults


def test_slots_go_back_when_asking_for_the_next_part_fails(
    simulation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_of(monkeypatch, 2 * NBYTES)
    sim = simulation(shared_memory=True)
    connection = sim.connected()
    moving, call, left = transfer(connection, memory()), connection.call, iter([True])

    def fails_later(message: m.Message, *rest: Any) -> Any:
        if isinstance(message, m.PrepareStore) and not next(left, False):
            raise MemoryError
        return call(message, *rest)

    monkeypatch.setattr(connection, "call", fails_later)
    store = moving.storing(storing([*range(12)]), moving.sources([storing([*range(12)])])[0])
    with pytest.raises(MemoryError):
        store.begin()
    sim.run(100)
    assert prepared_by(sim) and sim.held()[0][1] == 0


def test_the_end_is_told_though_slots_cannot_be_given_back(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = transfer(sim.connected(), memory())
    store = moving.storing(storing([0, 1]), moving.sources([storing([0, 1])])[0])
    store.begin()
    monkeypatch.setattr(moving.connection, "give_up", lambda call: [][0])
    monkeypatch.setattr(moving.copier, "begin_store", lambda *given, **options: {}[0])
    with pytest.raises(IndexError):
        store.copy()
    store.finish()  # it does not wait for ever


@pytest.mark.parametrize("lost", [m.PrepareStore, m.Put, m.CompleteStore])
def test_a_store_that_gets_no_answer_gives_its_slots_back(
    simulation: Make, passing: object, lost: type
) -> None:
    sim = simulation()
    connection = sim.connected()
    sim.recorder.instead = lambda header, request: None if isinstance(request, lost) else passing
    assert transfer(connection, memory()).store(storing([0, 1])) == 0
    sim.run(3_000)
    assert sim.held() == [(0, 0)]
    sim.recorder.instead = None
    assert transfer(connection, memory()).store(storing([0, 1])) == 2


def test_a_part_that_cannot_be_written_ends_the_store_and_gives_back_the_next_ones_slots(
    simulation: Make, monkeypatch: pytest.MonkeyPatch, passing: object
) -> None:
    in_parts_of(monkeypatch, 2 * NBYTES)
    sim = simulation()
    refused = m.Refused("cross", "no")
    sim.recorder.instead = lambda header, request: (
        refused if isinstance(request, m.Put) else passing
    )
    assert transfer(sim.connected(), memory()).store(storing([*range(6)])) == 0
    assert sim.recorder.count(m.Put) == 1
    sim.run(100)
    assert sim.held() == [(0, 0)]


# -- what is under way


class Late:
    """A store of twelve blocks in parts of four, each of which arrives when somebody waits for
    it."""

    def __init__(self, simulation: Make, copier: Any, passing: object, breaks: str = "") -> None:
        self.sim = simulation(shared_memory=True)
        self.connection = self.sim.connected()
        self.engine = memory()
        self.copier = copier([BlockRuns.of([self.engine])], breaks)
        self.transfer = transfer(self.connection, self.engine, self.copier)
        self.fence = self.connection.shared_pool
        self.sim.recorder.instead = self.watch
        self._passing = passing

    def watch(self, header: Any, request: m.Request) -> object:
        if isinstance(request, m.CompleteStore):
            done = self.sim.recorder.count(m.CompleteStore)
            assert all(not reading.on_the_way for reading in self.copier.readings[:done]), (
                "said before it has arrived"
            )
        if isinstance(request, m.AbandonStore):
            assert not any(reading.on_the_way for reading in self.copier.readings), (
                "copies still go to slots of others"
            )
        return self._passing

    def store(self) -> tuple[int, bool]:
        return self.transfer.offer(storing([*range(12)]))


@pytest.fixture
def late(
    simulation: Make,
    late_copier: Any,
    passing: object,
    monkeypatch: pytest.MonkeyPatch,
    request: Any,
) -> Callable[..., Late]:
    in_parts_of(monkeypatch, 4 * NBYTES)
    return lambda breaks="": Late(simulation, late_copier, passing, breaks)


def test_a_part_is_completed_while_later_ones_are_read(late: Callable[..., Late]) -> None:
    world = late()
    request = storing([*range(12)])
    store = world.transfer.storing(request, world.transfer.sources([request])[0])
    departing = threading.Thread(target=store.finish)
    store.begin()

    def wait_for_the_first() -> None:
        departing.start()
        deadline = time.monotonic() + 10
        while "sums 0" not in world.copier.names and time.monotonic() < deadline:
            time.sleep(0.001)

    store.copy(wait_for_the_first)
    departing.join(10)
    assert ended(store) == (12, True)
    steps = [name for name in world.copier.names if name.startswith(("gather", "sums"))]
    assert steps.index("sums 0") < steps.index("gather 2") and steps[-1] == "sums 2"
    kinds = [
        type(request)
        for request in world.sim.recorder.came
        if isinstance(request, m.PrepareStore | m.CompleteStore)
    ]
    assert kinds.index(m.CompleteStore) >= 2, (
        "the next part's slots are asked for while this one is copied"
    )
    target = np.zeros_like(world.engine)
    assert (
        transfer(world.connection, target).load(look_up(world.connection, 12, [*range(12)])).all()
    )
    assert (target[:12] == world.engine[:12]).all()
    assert world.connection.segments is not None and world.fence.holders == 1


@pytest.mark.parametrize(
    ("breaks", "completed"),
    [
        ("gather 0", 0),
        ("gather 1", 4),
        ("gather 2", 8),
        ("sums 0", 0),
        ("sums 1", 4),
        ("sums 2", 8),
    ],
)
def test_when_a_device_fails_slots_are_given_back_after_the_last_copy_and_memory_is_let_go(
    late: Callable[..., Late], breaks: str, completed: int
) -> None:
    world = late(breaks)
    with pytest.raises(RuntimeError, match=f"{breaks} broke"):
        world.store()
    assert not any(reading.on_the_way for reading in world.copier.readings)
    assert world.fence.holders == 1, "the session's own"
    world.sim.run(100)
    assert world.sim.held() == [(0, 0)]
    assert len(look_up(world.connection, 12, [*range(completed)]).slots) == completed


def test_memory_stays_ours_until_all_has_arrived_though_the_session_is_over(
    late: Callable[..., Late],
) -> None:
    world = late()
    wait, answers = world.connection.wait, []

    def wait_and_lose_the_session(call: Any) -> Any:
        answers.append(wait(call))
        if len(answers) == 2:  # the first part is under way, the second has its slots
            assert world.fence.holders == 2
            world.sim.replace_server(epoch=2)
            world.sim.run(1_000)
            assert world.connection.epoch == 2 and world.fence.holders == 1
        return answers[-1]

    world.connection.wait = wait_and_lose_the_session  # type: ignore[method-assign]
    assert world.store() == (0, False)
    assert world.copier.names.count("gather 0") == 1 and "gather 1" not in world.copier.names
    assert world.fence.holders == 0
    assert not world.sim.pools[0].segments.view(0, 64 * 4096).any(), (
        "not a byte in the new server's pool"
    )
    assert world.sim.held() == [(0, 0)]
    assert world.connection.counters.failures["stale_epoch"] == 1


def test_a_part_under_way_is_completed_when_the_next_one_is_lost(late: Callable[..., Late]) -> None:
    world = late()
    request = storing([*range(12)])
    sources = world.transfer.sources([request])[0]

    def evacuate(header: Any, message: m.Request) -> object:
        if isinstance(message, m.PrepareStore) and world.sim.recorder.count(m.PrepareStore) == 2:
            sources.evacuate(np.array([5]), 0)
        return world.watch(header, message)

    world.sim.recorder.instead = evacuate
    assert world.transfer.offer(request, sources) == (4, False)
    assert world.connection.counters.failures["withdrawn"] == 1
    world.sim.run(100)
    assert world.sim.held() == [(0, 0)]
    assert len(look_up(world.connection, 12, [0, 1, 2, 3]).slots) == 4


def test_step_by_step_a_store_leaves_its_last_part_under_way_and_another_begins_before_that(
    late: Callable[..., Late],
) -> None:
    world = late()
    sources = world.transfer.sources([storing([*range(12)])])[0]
    first = world.transfer.storing(storing([*range(12)]), sources)
    first.begin()
    assert world.copier.names == ["mark"], "nothing is read before the server has answered"
    begun: list[list[str]] = []
    first.copy(
        lambda: begun.append([name for name in world.copier.names if name.startswith("gather")])
    )
    assert begun == [["gather 0", "gather 1"]], "when there is nothing left to ask the server for"
    assert world.copier.readings[2].on_the_way and world.fence.holders == 4, (
        "the session and three parts"
    )
    assert ended(first) == (12, True)
    assert world.fence.holders == 1


def test_a_store_that_was_begun_and_no_more_gives_its_slots_back(late: Callable[..., Late]) -> None:
    world = late()
    storing_some = world.transfer.storing(
        storing([0, 1]), world.transfer.sources([storing([0, 1])])[0]
    )
    storing_some.begin()
    world.sim.run(50)
    assert world.sim.held() == [(0, 1)]
    storing_some.abandon()
    storing_some.finish()
    assert ended(storing_some) == (0, False)
    world.sim.run(50)
    assert world.sim.held() == [(0, 0)] and world.copier.readings == []
