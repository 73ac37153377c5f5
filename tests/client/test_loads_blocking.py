"""Loads of the engine's own thread, and what is fetched before it knows its blocks: for one load,
and for no other."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.client.conftest import Transfer
from tests.client.test_worker_threads import Engine, Gate

from kvkeep.client import loads as loads_module
from kvkeep.client import worker as worker_module
from kvkeep.client.copier import row_addresses
from kvkeep.client.loads import BlockingLoader, Load
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadOutcome, LoadRequest, StoreRequest
from kvkeep.kv.runs import BlockRuns
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

Make = Callable[..., Any]
NBYTES, BLOCKS = 1000, 20
IDS = [10, 11, 12, 13]


def keys(count: int) -> bytes:
    return b"".join(f"k{at}".encode().ljust(16, b".") for at in range(count))


class Fetched:
    """The bytes of slots as they are now. Nobody looks whether a load is of the same ones."""

    def __init__(self, copier: Any, rows: NDArray[np.uint8]) -> None:
        self._copier = copier
        self.rows = rows
        self.open = True

    def __bool__(self) -> bool:
        return len(self.rows) > 0

    def close(self) -> None:
        self.open = False
        self._copier.note("close")


def fetching(late_copier: Any) -> Any:
    """As a GPU's, but careless."""

    class Fetching(late_copier):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.fetched: list[Fetched] = []

        def fetch_ahead(self, piece: int, addresses: Any) -> Fetched:
            self.note("fetch")
            nbytes = self._pieces[piece].nbytes
            rows = np.empty((len(addresses), nbytes), dtype=np.uint8)
            for row, address in zip(rows, addresses.tolist(), strict=True):
                row[:] = np.ctypeslib.as_array(
                    (np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(address)
                )
            self.fetched.append(Fetched(self, rows))
            return self.fetched[-1]

        def begin_load(
            self, piece: int, ids: Any, addresses: Any, expected: Any, ready: Any, ahead: Any = None
        ) -> Any:
            if ahead is not None:
                assert ahead.open
                self.note("take")
                addresses = row_addresses(ahead.rows)
            return super().begin_load(piece, ids, addresses, expected, ready)

    return Fetching


class World:
    """Four blocks in a server, and an engine to load them into."""

    def __init__(self, sim: Any, make_copier: Any, breaks: str = "", **options: Any) -> None:
        self.connection = sim.connected(NBYTES, **options)
        self.engine = np.random.default_rng(1).integers(1, 256, (BLOCKS, NBYTES), dtype=np.uint8)
        store = StoreRequest("default", b"", keys(4), np.arange(4))
        assert (
            Transfer(self.connection, [GroupMemory(BlockRuns.of([self.engine]))], 0).store(store)
            == 4
        )
        self.target = np.zeros_like(self.engine)
        piece = GroupMemory(BlockRuns.of([self.target]))
        self.copier = make_copier([piece.runs], breaks)
        self.transfer = Transfer(self.connection, [piece], 0, self.copier)
        self.failures: list[str] = []
        self.at_once = BlockingLoader(self.transfer, self.failures.append)
        self.fence = self.connection.shared_pool
        call = self.connection.call(
            m.Lookup("default", self.connection.layout.layout, keys(4)), 200
        )
        found = self.connection.wait(call)
        assert isinstance(found, m.Found)
        slots, checksums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
        )
        self.request = LoadRequest(
            "default", keys(4), 0, np.array(IDS), call.epoch, slots, checksums
        )

    def fetch(self, owner: str = "a") -> bool:
        return self.at_once.fetch(owner, self.request.epoch, self.request.slots)

    def load(self, owner: str | None = "a") -> list[int]:
        """The places of those that failed."""
        outcome = self.at_once.load(self.request, owner)
        assert outcome.seconds is not None and outcome.seconds > 0
        assert not any(each.open for each in self.copier.fetched), "nothing is left of it"
        return sorted(IDS.index(block) for block in outcome.failed)

    def slot(self, place: int) -> NDArray[np.uint8]:
        with self.transfer.addresses(
            0, self.request.slots[place : place + 1], self.request.epoch
        ) as addresses:
            assert addresses is not None
            area = (np.ctypeslib.ctypes.c_uint8 * NBYTES).from_address(int(addresses[0]))
            return np.ctypeslib.as_array(area)

    def has_loaded(self) -> bool:
        return bool((self.target[IDS] == self.engine[:4]).all())


@pytest.fixture
def world(simulation: Make, late_copier: Any) -> World:
    return World(simulation(shared_memory=True), fetching(late_copier))


def test_a_load_takes_what_was_fetched_for_it(world: World) -> None:
    assert world.fetch()
    assert world.copier.names == ["fetch"] and world.fence.holders == 2, (
        "the pool's memory stays ours"
    )
    assert world.load() == [] and world.has_loaded()
    assert world.copier.names == ["fetch", "mark", "take", "scatter 0", "good 0", "close"]
    assert world.fence.holders == 1 and world.failures == []
    assert world.load() == [] and world.copier.names.count("take") == 1, "once"


def test_copies_give_way_to_nobody_while_an_engine_waits_for_them(world: World) -> None:
    seen, copier = list[tuple[str, bool]](), world.copier
    fetch_ahead, begin_load = copier.fetch_ahead, copier.begin_load
    copier.fetch_ahead = lambda *given: (
        seen.append(("fetch", copier.gave_way[-1])),
        fetch_ahead(*given),
    )[1]
    copier.begin_load = lambda *given: (
        seen.append(("scatter", copier.gave_way[-1])),
        begin_load(*given),
    )[1]
    world.fetch()
    copier.set_engine_busy(True)
    world.load()
    copier.set_engine_busy(True)
    world.load(owner="another")
    assert seen == [("fetch", False), ("scatter", False), ("scatter", False)]
    copier.set_engine_busy(True)
    world.at_once.drop()
    assert copier.gave_way[-1], "what a step has said stands"


def test_what_a_load_took_began_when_its_first_bytes_were_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(loads_module.time, "perf_counter", lambda: now_s)
    world.fetch()
    now_s += 100
    assert world.at_once.load(world.request, "a").seconds == 100
    world.fetch("b")
    now_s += 100
    assert world.at_once.load(world.request, "a").seconds == 0, "not that one's"
    assert world.at_once.load(world.request, "a").seconds == 0


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("owner", ["b", None])
def test_nobody_else_does(
    simulation: Make, late_copier: Any, owner: str | None, verify: bool
) -> None:
    """Whose slots are the same, and hold other bytes by now."""
    world = World(simulation(shared_memory=True), fetching(late_copier), verify=verify)
    world.fetch()
    world.slot(1)[:] = 7
    assert world.load(owner) == ([1] if verify else [])
    assert "take" not in world.copier.names and (world.target[IDS[1]] == 7).all()
    assert world.copier.names[:2] == ["fetch", "close"] and world.fence.holders == 1


def again(world: World) -> None:
    world.fetch("b")


def drop(world: World) -> None:
    world.at_once.drop()


def fetch_nothing(world: World) -> None:
    world.at_once.fetch("a", world.request.epoch, world.request.slots[:0])


@pytest.mark.parametrize("between", [again, drop, fetch_nothing])
def test_what_is_dropped_is_gone(
    simulation: Make, late_copier: Any, between: Callable[[World], None]
) -> None:
    world = World(simulation(shared_memory=True), fetching(late_copier), verify=False)
    world.fetch()
    between(world)
    world.slot(1)[:] = 7
    assert world.load() == [] and (world.target[IDS[1]] == 7).all()
    assert "take" not in world.copier.names and world.fence.holders == 1


def test_what_is_wrong_in_a_slot_is_found_out(world: World) -> None:
    world.slot(2)[5] ^= 1
    world.fetch()
    assert world.load() == [2] and "take" in world.copier.names


def test_a_pool_that_goes_before_the_load_costs_the_load(
    simulation: Make, late_copier: Any
) -> None:
    sim = simulation(shared_memory=True)
    world = World(sim, fetching(late_copier))
    lock = sim.server.service.sessions.all()[0].watch
    world.fetch()
    world.connection.start_over()
    assert lock.is_held(), "the server may not take a slot that is being read"
    assert world.load() == [0, 1, 2, 3] and not world.target.any()
    assert not lock.is_held() and world.fence.holders == 0


def test_a_fetch_that_fails_costs_the_load_nothing(simulation: Make, late_copier: Any) -> None:
    world = World(simulation(shared_memory=True), fetching(late_copier), "fetch")
    assert not world.fetch()
    assert world.failures == ["load"] and world.fence.holders == 1
    assert world.load() == [] and world.has_loaded() and world.failures == ["load"]


def test_a_device_that_fails_afterwards_does_not_keep_the_pool(
    simulation: Make, late_copier: Any
) -> None:
    world = World(simulation(shared_memory=True), fetching(late_copier), "close")
    world.fetch()
    assert world.load() == [] and world.has_loaded()
    assert world.failures == ["load"] and world.fence.holders == 1


def test_where_nothing_can_be_fetched_nothing_is_held(simulation: Make, late_copier: Any) -> None:
    """No bus, no memory in common, another server's slots, several pieces."""
    world = World(simulation(shared_memory=True), fetching(late_copier))
    piece, slots = GroupMemory(BlockRuns.of([world.target])), world.request.slots
    for pieces, copier in (([piece], None), ([piece] * 2, world.copier)):
        at_once = BlockingLoader(
            Transfer(world.connection, pieces, 0, copier), world.failures.append
        )
        assert not at_once.fetch("a", world.request.epoch, slots)
        assert world.fence.holders == 1
    world.at_once.fetch("a", world.request.epoch + 1, slots)
    far = World(simulation(), fetching(late_copier))
    far.at_once.fetch("a", far.request.epoch, np.arange(4))
    assert world.copier.names == far.copier.names == [] and world.fence.holders == 1
    assert not any(each.connection.counters.failures.get("stale_epoch") for each in (world, far))


# --- a worker's


@pytest.fixture
def engine(server: ServerProcess, late_copier: Any) -> Iterator[Engine]:
    made = Engine(server)
    made.store("s", [0, 1])
    made.finished()
    memory = made.transfer
    memory.copier = fetching(late_copier)([group.runs for group in memory.groups])
    yield made
    server.send(signal.SIGCONT)
    made.worker.close()


def names(engine: Engine) -> list[str]:
    """What its copier was asked for ahead."""
    return [name for name in engine.transfer.copier.names if name in ("fetch", "take", "close")]


def test_a_worker_fetches_for_the_load_that_comes_next(engine: Engine) -> None:
    request = engine.looked_up([10, 11])
    engine.worker.load_ahead("a", request.epoch, request.slots)
    assert engine.worker.load_now(request, "a") == LoadOutcome()
    assert engine.has([10, 11], [0, 1]) and names(engine) == ["fetch", "take", "close"]
    engine.worker.load_ahead("a", request.epoch, request.slots)
    engine.worker.drop_ahead()
    engine.worker.drop_ahead()
    assert names(engine)[3:] == ["fetch", "close"]


def test_any_other_load_is_the_end_of_it(engine: Engine) -> None:
    request = engine.looked_up([10, 11])
    engine.worker.load_ahead("a", request.epoch, request.slots)
    engine.worker.load("l", request)
    assert names(engine) == ["fetch", "close"], "before that one begins"
    engine.finished()
    engine.worker.load_ahead("a", request.epoch, request.slots)
    engine.worker.close()
    assert names(engine)[2:] == ["fetch", "close"]
    engine.worker.load_ahead("a", request.epoch, request.slots)
    assert len(names(engine)) == 4, "nothing begins any more"


def test_nothing_is_fetched_and_nobody_loads_while_another_load_begins(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging memory is for one of them at a time. One that cannot be begun is over, too."""
    request, gate = engine.looked_up([10, 11]), Gate()
    monkeypatch.setattr(worker_module, "Load", gate.before(Load))
    engine.worker.load(
        "l", LoadRequest(**(vars(request) | {"block_ids": np.array([[12, 13], [14, 15]])}))
    )
    assert gate.reached.wait(30)
    engine.worker.load_ahead("a", request.epoch, request.slots)
    assert names(engine) == []
    with caplog.at_level(logging.CRITICAL, "kvkeep"):
        threading.Timer(0.05, gate.open).start()
        assert engine.worker.load_now(request) == LoadOutcome()
    assert eventually(lambda: engine.worker.poll().failed_blocks == {12, 13, 14, 15})
    assert engine.has([10, 11], [0, 1])
