"""Bytes that cross the bus before anybody knows their blocks: they are the load's own, whatever the
order in which a device works, and nobody else's, also where no checksum would tell."""

from __future__ import annotations

from itertools import count as numbers
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazy import Event
from numpy.typing import NDArray
from test_copier import BUFFERS_OF_TWO, IN, Engine
from test_copier_faults import Faulty
from test_copier_orders import (
    BLOCKS,
    MOST_BLOCKS,
    SIZES,
    SLOTS,
    Load,
    World,
    Wrong,
    check,
    filled_world,
    sums_of,
    taking_any_buffer,
)
from test_copier_orders import small as small  # a fixture
from test_loads import Watched, without_gpu
from tests.client.conftest import Simulation

from kvkeep.client.copier import row_addresses
from kvkeep.client.loads import BlockingLoader
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.transfer import Transfer
from kvkeep.errors import DeviceError, RequestError
from kvkeep.gpu import loads
from kvkeep.gpu.driver import Rows
from kvkeep.gpu.loads import Fetched, LoadPath
from kvkeep.gpu.streams import CopySizes
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m

BAY, BUFFERS = 3, 3  # blocks of the first piece, and how many times as many can be ahead
COUNTS = [
    0,
    1,
    2,
    3,
    4,
    8,
    9,
    10,
    14,
    15,
    20,
]  # around a buffer, all buffers, and what one call takes


class Rig:
    """Slots full of random bytes, a device that works in any order, and every copy that it
    makes."""

    def __init__(self, seed: int, piece: int = 0) -> None:
        self.world, _ = filled_world(seed)
        self.piece, self.pool, self.memory = piece, self.world.pool[piece], self.world.memory[piece]
        self.slots = row_addresses(self.pool)
        self.copier: Any = self.world.copier
        self.write()
        self.copied: list[int] = []  # addresses of slots
        to_device = self.world.device.to_device

        def note(stream: Any, rows: Rows) -> None:
            self.copied += [rows.host + at * rows.host_pitch for at in range(rows.number)]
            to_device(stream, rows)

        self.world.device.to_device = note  # type: ignore[method-assign]

    def write(self) -> None:
        """Other bytes into all slots, as when others have them now."""
        self.pool[:] = self.world.bytes.integers(0, 256, self.pool.shape, dtype=np.uint8)

    def fetch(self, slots: list[int]) -> Any:
        return self.copier.fetch_ahead(self.piece, self.slots[slots])

    def load(
        self, slots: list[int], ahead: Any = None, *, verify: bool = True
    ) -> NDArray[np.bool_]:
        """Into the engine's last blocks; what is there then is what is in the slots now."""
        ids, content = np.arange(BLOCKS - len(slots), BLOCKS), self.pool[slots].copy()
        expected = sums_of(content.reshape(-1, SIZES[self.piece])) if verify else None
        moving = self.copier.begin_load(
            self.piece, ids, self.slots[slots], expected, [self.copier.mark()], ahead
        )
        good: NDArray[np.bool_] = moving.good()
        check([self.memory[ids]], [content], "in blocks")
        return good

    def work(self) -> None:
        for _ in range(self.world.random.randrange(30)):
            self.world.device.step()

    def is_still(self) -> bool:
        return self.world.device.is_still("in ")

    def reads_slots(self) -> bool:
        return not self.world.device.is_still("in copies")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("piece", "most"), [(0, BUFFERS * BAY), (1, MOST_BLOCKS)])
def test_blocks_arrive_whole_and_cross_the_bus_once(
    piece: int, most: int, count: int, verify: bool
) -> None:
    for seed in range(25):
        rig = Rig(seed, piece)
        slots = rig.world.random.sample(range(SLOTS), count)
        for _ in range(3):  # all buffers come first in turn
            ahead = rig.fetch(slots)
            assert rig.copied == rig.slots[slots][:most].tolist()
            rig.work()
            assert rig.load(slots, ahead, verify=verify).all()
            assert rig.copied == rig.slots[slots].tolist()
            ahead.close()
            rig.copied.clear()
            rig.write()
            rig.load(rig.world.random.sample(range(SLOTS), rig.world.random.choice([0, 1, 4])))
            rig.copied.clear()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 8])
def test_of_what_was_fetched_the_first_may_be_enough(count: int) -> None:
    for seed in range(40):
        rig = Rig(seed)
        slots = rig.world.random.sample(range(SLOTS), 12)
        ahead = rig.fetch(slots)
        assert rig.load(slots[:count], ahead).all() and len(rig.copied) == BUFFERS * BAY
        ahead.close()
        rig.write()
        assert rig.load(slots[::-1]).all(), "and all buffers are free"


def other_slots(slots: list[int]) -> dict[str, list[int]]:
    one_less = slots[:4] + slots[5:]
    return {
        "more": [*slots, slots[0]],
        "in another order": slots[::-1],
        "not all": one_less,
        "later": slots[1:],
    }


@pytest.mark.parametrize("which", other_slots([*range(10)]))
def test_it_is_for_no_other_slots(which: str) -> None:
    for seed in range(20):
        rig = Rig(seed)
        slots = rig.world.random.sample(range(SLOTS), 7)
        ahead = rig.fetch(slots)
        rig.load(other_slots(slots)[which], ahead, verify=False)


def test_it_is_for_no_other_piece() -> None:
    rig = Rig(1)
    ahead = rig.fetch([0, 1, 2, 3])
    ids = np.arange(4)
    rig.copier.begin_load(1, ids, rig.slots[:4], None, [], ahead).good()
    check([rig.world.memory[1][ids]], [rig.pool[:4, : SIZES[1]]], "in blocks")


def close(rig: Rig, ahead: Any) -> None:
    ahead.close()


def load_it(rig: Rig, ahead: Any) -> None:
    rig.load([*range(10)], ahead, verify=False)


def load_others(rig: Rig, ahead: Any) -> None:
    rig.load([19], verify=False)


def fetch_others(rig: Rig, ahead: Any) -> None:
    rig.fetch([15])


@pytest.mark.parametrize("between", [close, load_it, load_others, fetch_others])
def test_nobody_gets_the_bytes_of_before_though_no_checksum_would_tell(between: Any) -> None:
    for seed in range(20):
        rig = Rig(seed)
        ahead = rig.fetch([*range(10)])
        between(rig, ahead)
        rig.write()
        rig.load([*range(10)], ahead, verify=False)


def test_and_that_would_be_seen() -> None:
    rig = Rig(1)
    ahead = rig.fetch([*range(10)])
    while rig.world.device.step():
        pass
    rig.write()
    with pytest.raises(Wrong):
        rig.load([*range(10)], ahead, verify=False)


def test_what_nobody_takes_is_in_nobodys_way() -> None:
    """Its buffers are used at once, for other slots and other bytes."""
    for seed in range(60):
        rig = Rig(seed)
        ahead = rig.fetch(rig.world.random.sample(range(SLOTS), 10))
        rig.load(rig.world.random.sample(range(SLOTS), 11), verify=False)
        ahead.close()
        assert not rig.reads_slots()


def test_closed_it_reads_no_slot_any_more() -> None:
    for seed in range(20):
        rig = Rig(seed)
        for count in (9, 0):
            ahead = rig.fetch([*range(count)])
            assert bool(ahead) == bool(count)
            ahead.close()
            ahead.close()
            assert not rig.reads_slots()


@pytest.mark.parametrize("fails", ["one event", "all events", "waiting for kernels, too"])
def test_closed_it_reads_none_also_if_the_device_fails(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    for seed in range(20):
        rig = Rig(seed)
        ahead, waits, device = rig.fetch([*range(9)]), [0], rig.world.device
        wait, drain = device.wait, device.drain

        def fail(event: Any, waits: list[int] = waits, wait: Any = wait) -> None:
            waits[0] += 1
            if waits[0] == 1 or fails != "one event":
                raise DeviceError("no")
            wait(event)

        def drain_copies(stream: Any, drain: Any = drain) -> None:
            if stream.name == "in kernels" and fails == "waiting for kernels, too":
                raise DeviceError("no")
            drain(stream)

        with monkeypatch.context() as patched:
            patched.setattr(device, "wait", fail)
            patched.setattr(device, "drain", drain_copies)
            with pytest.raises(DeviceError):
                ahead.close()
        assert not rig.reads_slots()
        ahead.close()


@pytest.mark.parametrize("reached", [0, 2, 3, 8, 20])
def test_only_slots_that_the_bus_reaches_are_fetched_ahead(reached: int) -> None:
    """A bounce buffer is filled by hand."""
    for seed in range(20):
        rig = Rig(seed)
        rig.copier.unpin(int(rig.slots[0]))
        rig.copier.pin(int(rig.slots[0]), reached * SIZES[0])
        ahead = rig.fetch([*range(SLOTS)])
        assert len(rig.copied) == min(reached // BAY, BUFFERS) * BAY
        assert rig.load([*range(SLOTS)], ahead).all()


def test_what_is_wrong_in_a_slot_is_found_out() -> None:
    for seed in range(20):
        rig = Rig(seed)
        slots, content = [*range(12)], rig.pool[:12].copy()
        rig.pool[[1, 10]] ^= 1
        ahead = rig.fetch(slots)
        moving = rig.copier.begin_load(
            0, np.arange(12), rig.slots[slots], sums_of(content), [], ahead
        )
        assert np.flatnonzero(~moving.good()).tolist() == [1, 10]


@pytest.mark.parametrize("what", ["fetch", "load"])
def test_whichever_command_is_refused_nothing_is_under_way_after_it(what: str) -> None:
    for at in numbers():
        rig, asked = Rig(at), numbers()
        rig.load([*range(12)])
        ahead = rig.fetch([*range(10)]) if what == "load" else None
        rig.world.device.fails = lambda asked=asked, at=at: next(asked) == at
        try:
            if ahead is None:
                rig.fetch([*range(10)]).close()
            else:
                rig.load([*range(10)], ahead)
        except DeviceError:
            assert rig.is_still()
        else:
            break
        rig.world.device.fails = lambda: False
        rig.write()
        assert rig.load([*range(10)], ahead, verify=True).all()
    assert at >= 6


# --- among other loads, stores and steps


class Fetching(World):
    """Loads that wait may be fetched ahead, one or both of them, and are begun with what was
    fetched, good or not."""

    def __init__(self, seed: int, *given: Any) -> None:
        self.aheads: dict[Load, Any] = {}
        self.taken = 0
        super().__init__(seed, *given)
        begin_load: Any = self.copier.begin_load
        self.copier.begin_load = lambda *given: begin_load(*given, self.aheads.get(self.loads[0]))  # type: ignore[assignment, misc]

    def begin_load(self) -> None:
        if self.loads and self.random.random() < 0.4:
            load = self.random.choice(self.loads)
            self._close(load)
            self.fetch(load)
            return
        super().begin_load()

    def fetch(self, load: Load) -> None:
        piece = self.random.randrange(len(SIZES))
        ahead: Any = self.copier.fetch_ahead(piece, self._addresses(piece, load))
        take, self.aheads[load] = ahead.take, ahead

        def note(*given: Any) -> Any:
            buffers = take(*given)
            self.taken += bool(buffers)
            return buffers

        ahead.take = note

    def _addresses(self, piece: int, load: Load) -> NDArray[np.uint64]:
        return row_addresses(self.pool[piece])[load.slots]

    def end_load(self) -> None:
        """Slots that are let go of are read by nobody."""
        for load in [load for load in self.aheads if load not in self.loads]:
            self._close(load)
        super().end_load()

    def _close(self, load: Load) -> None:
        if load in self.aheads:
            self.aheads.pop(load).close()


class FaultyFetching(Fetching, Faulty):
    def fetch(self, load: Load) -> None:
        try:
            super().fetch(load)
        except DeviceError:
            self.failed += 1


def test_lives_with_loads_that_are_fetched_ahead() -> None:
    taken = 0
    for seed in range(150):
        world = Fetching(seed)
        world.run()
        taken += world.taken
    assert taken > 40


def test_lives_with_faults_and_loads_that_are_fetched_ahead() -> None:
    failed = taken = 0
    for seed in range(100):
        world = FaultyFetching(seed, 0.005)
        world.run()
        failed, taken = failed + world.failed, taken + world.taken
    assert failed > 25 and taken > 25


def is_seen() -> bool:
    for seed in range(150):
        try:
            Fetching(seed).run()
        except (Wrong, RequestError):
            return True
    return False


def without_arrival(fetched: Fetched, *given: Any) -> Any:
    return [(buffer, Event(arrived.stream, [])) for buffer, arrived in take(fetched, *given)]


class GoodForAll(Fetched):
    """Also if another load has taken one of its buffers."""

    def __init__(self, device: Any, lane: Any, units: Any, addresses: Any, buffers: Any) -> None:
        super().__init__(device, lane, units, addresses, buffers)
        self.units, self.blocks, self.buffers = units, len(addresses), buffers

    def take(self, units: Any, addresses: Any) -> Any:
        return self.buffers if units is self.units and len(addresses) == self.blocks else []

    def close(self) -> None:
        self.buffers = []
        super().close()


def without_room(way: Any, *given: Any) -> Fetched:
    with taking_any_buffer():
        return fetch_ahead(way, *given)


fetch_ahead, take = LoadPath.fetch_ahead, Fetched.take
CARELESS: dict[str, tuple[Any, str, Any]] = {
    "kernels begin after what was fetched has arrived": (Fetched, "take", without_arrival),
    "buffers are good until another load takes one": (loads, "Fetched", GoodForAll),
    "buffers are filled when they are free": (LoadPath, "fetch_ahead", without_room),
}


@pytest.mark.parametrize("what", CARELESS)
def test_no_care_can_be_left_out(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(*CARELESS[what])
    assert is_seen(), "no order shows that"


# --- from a server's pool


@pytest.mark.parametrize("verify", [True, False])
def test_a_load_at_once_takes_what_was_fetched_for_it(tmp_path: Path, verify: bool) -> None:
    """Both find the slots at the same addresses, so nothing crosses the bus twice."""
    for seed in range(10):
        rig = Rig(seed)
        sim = Simulation(tmp_path, shared_memory=True, slots=64, limits=None)
        connection, keys = (
            sim.connected(SIZES[0], verify=verify),
            b"".join(bytes([at]) * 16 for at in range(12)),
        )
        piece, failures = GroupMemory(BlockRuns.of([rig.memory])), list[str]()
        rig.memory[:12] = rig.pool[:12]
        store = StoreRequest("default", b"", keys, np.arange(12))
        assert Transfer(connection, [piece], 0).store(store).is_complete
        call = connection.call(m.Lookup("default", connection.layout.layout, keys), 200)  # type: ignore[union-attr]
        found = connection.wait(call)
        assert isinstance(found, m.Found)
        slots, sums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
        )
        transfer = Transfer(connection, [piece], 0, rig.copier)
        with transfer.addresses(0, slots, call.epoch) as addresses:
            assert addresses is not None and all(
                rig.copier.pin(int(each), SIZES[0]) for each in addresses
            )
        at_once = BlockingLoader(transfer, failures.append)
        at_once.fetch("a", call.epoch, slots)
        assert rig.copied == addresses[: BUFFERS * BAY].tolist()
        load = LoadRequest("default", keys, 0, np.arange(12, 24), call.epoch, slots, sums)
        assert not at_once.load(load, "a").failed and failures == []
        assert rig.copied == addresses.tolist()
        check([rig.memory[12:24]], [rig.pool[:12]], "in blocks")
        sim.close()


# --- with real kernels, and what is given to the bus


@pytest.fixture
def as_large_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what is small in lives."""
    monkeypatch.undo()


@pytest.mark.parametrize("pinned", ["all", "half", "none"])
def test_with_the_kernels_that_move_blocks(pinned: str, as_large_as_ever: None) -> None:
    engine = Engine(pinned=pinned)
    blocks, slots = [5, 6, 7, 23, 0, 11, 2, 3, 19, 13, 9, 21], [*range(12)]
    content = [engine.bytes_of(block) for block in blocks]
    sums, back = engine.store(blocks, slots), np.array(blocks[::-1])
    ahead = engine.copier.fetch_ahead(0, engine.addresses(slots))
    assert (
        engine.copier.begin_load(
            0, back, engine.addresses(slots), sums, [engine.copier.mark()], ahead
        )
        .good()
        .all()
    )
    ahead.close()
    assert all(
        np.array_equal(engine.bytes_of(block), data)
        for block, data in zip(back.tolist(), content, strict=True)
    )
    engine.close()


@without_gpu
def test_no_more_is_queued_for_the_bus_than_else(as_large_as_ever: None) -> None:
    engine, device = Engine(), Watched()
    sizes = CopySizes(least_staging_bytes=0, queued_bytes=0)  # all buffers once
    engine.copier = type(engine.copier)([engine.runs], BUFFERS_OF_TWO, device, sizes)
    assert engine.copier.pin(engine.base, engine.pool.nbytes)
    addresses = engine.addresses([*range(20)])  # ten buffers
    device.said.clear()
    device.marks.clear()
    ahead = engine.copier.fetch_ahead(0, addresses)
    assert device.said == ["copy"] * 3
    made = engine.copier.begin_load(0, np.arange(20), addresses, None, [], ahead)
    assert [said == "copy" for said in device.said[3:]] == [False, True] * 7, (
        "for each one that is over another one"
    )
    of_kernels = [mark for mark in device.marks if mark[0] is device.streams[IN][0]]
    assert device.said[9::2] == of_kernels[3:7], "the one before the last three"
    assert made.good().all()
