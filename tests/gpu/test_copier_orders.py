"""Whatever the order in which a GPU does what it was given, every block arrives whole, and its
checksum is right.

An engine computes, stores and loads at random on a device that is as late as it may be (`lazy`),
and everything that arrives is compared with what was computed. That the comparison sees what it
should is tested as well: for each dependency that the copier makes there is an order in which
leaving it out goes wrong."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lazy import Dependency, Event, Lazy, Units
from numpy.typing import NDArray

from kvkeep.client.copier import row_addresses
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.stores import CopiedBlocks, SourceBlocks
from kvkeep.errors import DeviceError, RequestError
from kvkeep.gpu import copier as module
from kvkeep.gpu import staging
from kvkeep.gpu.copier import GpuCopier, StoreCopy
from kvkeep.gpu.registration import RegisteredMemory
from kvkeep.gpu.staging import CopyLane, StagingBuffer, TransferRecord
from kvkeep.gpu.streams import CopySizes, CopyStreams
from kvkeep.kv.checksum import checksum_at
from kvkeep.kv.runs import BlockRuns

SEEDS = range(240)
STEPS = 40
BLOCKS, SLOTS = 24, 20
SIZES = (40, 21)  # bytes of each piece of a block
BAY_BYTES = 3 * 40
BLOCKS_ASIDE = 2 * BAY_BYTES // 48  # of the first piece
MOST_BLOCKS = 14  # of one call: more than there is staging memory for
MOST_WAITING, MOST_UNDER_WAY = 2, 3
PLENTY = 1 << 30

Bytes = list[NDArray[np.uint8]]  # of each piece


class Wrong(BaseException):
    """Other bytes than there should be, or another checksum. No guard takes it for a fault of the
    device."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little staging memory, so that all of it is used again and again; and no Triton, which would
    take minutes."""
    monkeypatch.setattr(module, "Units", Units)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    for each in (module, staging):
        monkeypatch.setattr(each, "MOST_BLOCKS", MOST_BLOCKS)


class Store:
    """Some blocks as they are when the store is made, and slots for them."""

    def __init__(self, sources: SourceBlocks, slots: list[int], content: Bytes) -> None:
        self.sources = sources
        self.slots = slots
        self.content = content
        self.copies: list[CopiedBlocks | None] = []


class Load:
    """Some slots, blocks for them, and what the engine did before."""

    def __init__(self, slots: list[int], blocks: list[int], ready: Any) -> None:
        self.slots = slots
        self.blocks = blocks
        self.ready = ready
        self.moving: list[Any] = []


class World:
    """An engine's memory, a pool of slots, and three threads' work, which one thread does in
    turns."""

    def __init__(
        self, seed: int, forgets: Dependency | None = None, small_slice_bytes: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.device = Lazy(seed, forgets)
        self.memory: Bytes = [np.zeros((BLOCKS, nbytes), dtype=np.uint8) for nbytes in SIZES]
        self.pool: Bytes = [np.zeros((SLOTS, nbytes), dtype=np.uint8) for nbytes in SIZES]
        self.computed: Bytes = [
            memory.copy() for memory in self.memory
        ]  # by what the engine was given so far
        self.pieces = [GroupMemory(BlockRuns.of([memory])) for memory in self.memory]
        runs, device = [piece.runs for piece in self.pieces], self.device
        sizes = CopySizes(
            least_staging_bytes=0,
            small_slice_bytes=small_slice_bytes or 1 + seed % 3 * BAY_BYTES // 2,
            large_slice_bytes=2 * BAY_BYTES,
        )
        self.copier = GpuCopier(runs, 8 * BAY_BYTES, device, sizes)  # type: ignore[arg-type]
        self.copier.set_engine_busy(seed % 4 > 0)
        for pool in self.pool:  # a part of it, which may be none or all
            self.copier.pin(
                pool.ctypes.data, pool[: self.random.choice([0, SLOTS // 2, SLOTS])].nbytes
            )
        self.free, self.full = list(range(SLOTS)), dict[int, Bytes]()
        self.targets: set[int] = set()  # of loads that were asked for
        self.stores, self.stored = list[Store](), list[Store]()  # asked for, and on their way
        self.loads, self.loaded = list[Load](), list[Load]()
        self.at_work: set[str] = set()
        self.device.elsewhere = lambda: self.turn(0.4)

    # -- turns

    def run(self) -> None:
        for _ in range(STEPS):
            self.turn(1)
        while self.stores or self.loads or self.stored or self.loaded:
            self.turn(1, busy=False)
        while self.device.step():
            pass
        check(self.memory, self.computed, "in the end")
        assert len(self.free) + len(self.full) == SLOTS
        self.copier.evacuate(0, np.arange(BLOCKS_ASIDE))  # MemoryError, if some are there still

    def turn(self, chance: float, *, busy: bool = True) -> None:
        """Something in one of the threads, if none of them is there already."""
        if self.random.random() > chance:
            return
        threads = {
            "engine": [self.compute, self.ask_store, self.ask_load] if busy else [],
            "stores": [self.begin_store, self.end_store],
            "loads": [self.begin_load, self.end_load],
        }
        name = self.random.choice(
            [name for name in threads if name not in self.at_work and threads[name]] or [""]
        )
        if not name:
            return
        self.at_work.add(name)
        try:
            with self.device.on(self.device.engine) if name == "engine" else self.device.thread():
                self.random.choice(threads[name])()
        finally:
            self.at_work.remove(name)

    # -- the engine's thread

    def compute(self) -> None:
        self.copier.set_engine_busy(self.random.random() < 0.7)
        blocks = self.some([block for block in range(BLOCKS) if block not in self.targets], 5)
        self.take_back(blocks)
        for piece, memory in enumerate(self.memory):
            for block in blocks:
                new = self.computed[piece][block] = self.bytes.integers(
                    0, 256, SIZES[piece], dtype=np.uint8
                )
                self.device.give(lambda row=memory[block], new=new: np.copyto(row, new))

    def take_back(self, blocks: list[int]) -> None:
        """As a worker does, before the engine or a load writes into them."""
        self.evacuate(blocks)
        self.copier.fence_reads()

    def evacuate(self, blocks: list[int]) -> None:
        for store in [*self.stores, *self.stored]:
            store.sources.evacuate(np.array(blocks, dtype=np.int64), PLENTY)

    def ask_store(self) -> None:
        blocks = self.some(
            [block for block in range(BLOCKS) if block not in self.targets], 2 * MOST_BLOCKS
        )
        slots = self.some(self.free, len(blocks))
        if not slots or len(self.stores) == MOST_WAITING:
            return
        ids = np.array([blocks[: len(slots)]] * len(SIZES), dtype=np.int64)
        self.free = [slot for slot in self.free if slot not in slots]
        content = [computed[ids[0]] for computed in self.computed]
        self.stores.append(Store(SourceBlocks(self.pieces, ids, self.copier), slots, content))

    def ask_load(self) -> None:
        blocks = self.some([block for block in range(BLOCKS) if block not in self.targets], BLOCKS)
        slots = self.some(
            [slot for slot in self.full if not any(slot in load.slots for load in self.asked())],
            SLOTS,
        )
        blocks, slots = blocks[: len(slots)], slots[: len(blocks)]
        if not slots or len(self.loads) == MOST_WAITING:
            return
        self.targets.update(blocks)
        self.take_back(blocks)
        self.loads.append(Load(slots, blocks, self.copier.mark()))

    def asked(self) -> list[Load]:
        return [*self.loads, *self.loaded]

    def some(self, among: list[int], most: int) -> list[int]:
        return self.random.sample(among, self.random.randint(0, min(most, len(among))))

    # -- the thread that stores

    def begin_store(self) -> None:
        if not self.stores or len(self.stored) == MOST_UNDER_WAY:
            return
        store = self.stores[0]
        for piece, pool in enumerate(self.pool):
            addresses, parts = (
                row_addresses(pool)[store.slots],
                range(0, len(store.slots), MOST_BLOCKS),
            )
            for start in parts:
                positions = np.arange(start, min(start + MOST_BLOCKS, len(store.slots)))
                store.copies.append(
                    store.sources.copy(piece, positions, addresses[positions], verify=True)
                )
        self.stores.remove(store)
        self.stored.append(store)

    def end_store(self) -> None:
        if not self.stored:
            return
        store = self.random.choice(self.stored)
        copies, parts = store.copies, -(-len(store.slots) // MOST_BLOCKS)
        sums = [None if copy is None else copy.checksums() for copy in copies]
        store.sources.close()
        self.stored.remove(store)
        if any(each is None for each in sums):  # there was no room to set something aside
            self.free += store.slots
            return
        for piece, (pool, content) in enumerate(zip(self.pool, store.content, strict=True)):
            check([pool[store.slots]], [content], "in slots")
            found = [each for each in sums[piece * parts : (piece + 1) * parts] if each is not None]
            check(
                found,
                np.split(sums_of(content), range(MOST_BLOCKS, len(content), MOST_BLOCKS))[:parts],
                "checksums",
            )
        for at, slot in enumerate(store.slots):
            self.full[slot] = [content[at].copy() for content in store.content]

    # -- the thread that loads

    def begin_load(self) -> None:
        if not self.loads or len(self.loaded) == MOST_UNDER_WAY:
            return
        load = self.loads[0]
        for piece, pool in enumerate(self.pool):
            expected = sums_of(
                np.array([self.full[slot][piece] for slot in load.slots]).reshape(-1, SIZES[piece])
            )
            addresses, ids = row_addresses(pool)[load.slots], np.array(load.blocks, dtype=np.int64)
            load.moving.append(
                self.copier.begin_load(piece, ids, addresses, expected, [load.ready])
            )
        self.loads.remove(load)
        self.loaded.append(load)

    def end_load(self) -> None:
        if not self.loaded:
            return
        load = self.random.choice(self.loaded)
        for piece, moving in enumerate(load.moving):
            if not moving.good().all():
                raise Wrong("a checksum of a load")
            for slot, block in zip(load.slots, load.blocks, strict=True):
                self.computed[piece][block] = self.full[slot][piece]
            check(
                [self.memory[piece][load.blocks]], [self.computed[piece][load.blocks]], "in blocks"
            )
        self.loaded.remove(load)
        self.targets.difference_update(load.blocks)
        for slot in self.some(load.slots, SLOTS):  # somebody else gets them
            del self.full[slot]
            self.free.append(slot)
            for pool in self.pool:
                pool[slot] = 0xEE


def filled_world(seed: int, small_slice_bytes: int = 0) -> tuple[World, NDArray[np.uint64]]:
    """With something in each block, and slots for the first piece that the bus can reach; nothing
    happens meanwhile."""
    world = World(seed, small_slice_bytes=small_slice_bytes)
    for pool in world.pool:
        world.copier.pin(pool.ctypes.data, pool.nbytes)
    world.memory[0][:] = world.bytes.integers(0, 256, world.memory[0].shape, dtype=np.uint8)
    world.device.elsewhere = lambda: None
    return world, row_addresses(world.pool[0])


def sums_of(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    rows = np.ascontiguousarray(rows)
    return checksum_at(row_addresses(rows), rows.shape[1])


def check(found: list[Any], expected: list[Any], where: str) -> None:
    if not all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True)):
        raise Wrong(where)


def is_seen(forgets: Dependency | None = None, kind: type[World] = World) -> bool:
    """Whether any order shows that something is missing."""
    for seed in SEEDS:
        try:
            kind(seed, forgets).run()
        except (Wrong, RequestError):  # the latter: block ids that no engine has
            return True
    return False


@pytest.mark.parametrize("first", SEEDS[::40])
def test_every_block_arrives_as_it_was_in_whatever_order_the_device_works(first: int) -> None:
    halted = 0
    for seed in range(first, first + 40):
        world = World(seed)
        world.run()
        halted += world.device.halted
    assert halted > 5, "engines take back what is being read"


@pytest.mark.parametrize("at", range(8))
def test_a_halted_reading_goes_on_buffer_by_buffer(at: int) -> None:
    """Wherever it was halted: what it has read is whole, and no buffer is filled while it is still
    copied from."""
    for seed in range(30):
        world, slots = filled_world(seed)
        blocks, looks = np.arange(9, 9 + 11), iter(range(at))
        before = world.copier.begin_store(0, verify=True, ready=None)
        assert before.read(np.arange(9), slots[:9]) == 9
        before.end()
        reading = world.copier.begin_store(0, verify=True, ready=None)

        def look(reading: StoreCopy = reading, looks: Any = looks) -> None:
            if next(looks, None) is None:
                reading.halt()

        world.device.elsewhere = look
        first = reading.read(blocks, slots[9:])
        world.device.elsewhere = lambda: None
        assert first == reading.halt() or first == len(blocks) == 11
        for start in range(first, len(blocks), reading.at_a_time):
            some = slice(start, start + reading.at_a_time)
            reading.make_room()
            reading.gather(blocks[some], slots[9:][some])
            reading.deliver()
        reading.end()
        sums = np.concatenate([before.sums(), reading.sums()])
        check([world.pool[0][:20]], [world.memory[0][:20]], "in slots")
        check([sums], [sums_of(world.memory[0][:20])], "checksums")


@pytest.mark.parametrize("busy", [False, True])
def test_the_first_buffer_goes_ahead_of_the_others_if_it_is_free(busy: bool) -> None:
    """The bus has nothing to do then. If it has, all of them are given to the device in one go."""
    for seed in range(10):
        world, slots = filled_world(seed)
        before = world.copier.begin_store(0, verify=True, ready=None)
        assert before.read(np.arange(9), slots[9:18]) == 9  # so that all buffers were used
        before.end()
        reading = world.copier.begin_store(0, verify=True, ready=None)
        world.device.entered_in_runs.clear()
        world.device.is_over = lambda event: not busy  # type: ignore[method-assign]
        assert reading.read(np.arange(9), slots[:9]) == 9
        assert world.device.entered_in_runs == ([3] if busy else [1, 3])
        reading.end()
        check([before.sums(), reading.sums()], [sums_of(world.memory[0][:9])] * 2, "checksums")
        check([world.pool[0][:9]], [world.memory[0][:9]], "in slots")


def test_a_reading_is_halted_while_its_other_buffers_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has gone ahead is read, and covered; the rest is as if nobody had begun with it."""
    runs, next_buffer, mark = RegisteredMemory.runs, CopyLane.next_buffer, CopyStreams.mark
    for seed in range(30):
        world, slots = filled_world(seed, small_slice_bytes=1)
        was, halted = world.memory[0].copy(), list[int]()
        reading = world.copier.begin_store(0, verify=True, ready=None)
        taken, slices = list[tuple[StagingBuffer, Any]](), list[tuple[CopyStreams, Any]]()

        def halt_after_one(
            *given: Any, reading: StoreCopy = reading, halted: list[int] = halted
        ) -> Any:
            for number, some in enumerate(runs(*given)):
                if number == 1:
                    halted.append(reading.halt())
                yield some

        def note_buffer(lane: CopyLane, taken: list[Any] = taken) -> StagingBuffer:
            buffer = next_buffer(lane)
            taken.append((buffer, buffer.busy))
            return buffer

        def note_slice(copies: CopyStreams, batch: Any, slices: list[Any] = slices) -> Any:
            slices.append((copies, copies.slice))
            return mark(copies, batch)

        with monkeypatch.context() as patched:
            patched.setattr(RegisteredMemory, "runs", halt_after_one)
            patched.setattr(CopyLane, "next_buffer", note_buffer)
            patched.setattr(CopyStreams, "mark", note_slice)
            world.copier.set_engine_busy(True)
            assert reading.read(np.arange(9), slots[:9]) == 3 and halted == [3]
        copies, first = slices[0]
        assert len(slices) > 1 and copies.slice == first, (
            "that of the first buffer: no other was given to the device"
        )
        assert [buffer.busy is not before for buffer, before in taken].count(True) == 1
        world.copier.fence_reads()
        world.device.give(lambda memory=world.memory[0]: memory.fill(7))
        reading.end()
        check([reading.sums()], [sums_of(was[:3])], "checksums")
        check([world.pool[0][:9]], [np.concatenate([was[:3], np.zeros_like(was[3:9])])], "in slots")


@pytest.mark.parametrize("marks", range(8))
def test_a_load_that_fails_writes_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch, marks: int
) -> None:
    """Though then no event can be had to wait for. The engine has its blocks back."""
    world = World(marks)
    event, left = world.device.event, iter(range(marks))

    def fail_later(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise DeviceError("CUDA error: out of memory")
        return event(*arguments, **options)

    monkeypatch.setattr(world.device, "event", fail_later)
    world.device.elsewhere = lambda: None
    with pytest.raises(DeviceError, match="out of memory"):
        world.copier.begin_load(0, np.arange(12), row_addresses(world.pool[0])[:12], None)
    assert world.device.is_still("in ")


DEPENDENCIES = {
    "a store begins after what the engine did": Dependency("out kernels", "engine"),
    "the engine writes after a store has read": Dependency("engine", "out kernels"),
    "a copy to the host begins after its kernel": Dependency("out copies", "out kernels"),
    "copies to the host begin after those of the turn before": Dependency(
        "out copies", "out copies"
    ),
    "copies of a load begin after those of the turn before": Dependency("in copies", "in copies"),
    "a store has ended when its checksums are here": Dependency("host", "out kernels"),
    "a store has ended, and a buffer is free, after the copies to the host": Dependency(
        "host", "out copies"
    ),
    "a load begins after what the engine did": Dependency("in kernels", "engine"),
    "a kernel of a load begins after its copy": Dependency("in kernels", "in copies"),
    "a buffer of loads is filled again after its kernel": Dependency("in copies", "in kernels"),
    "a bounce buffer is filled again after its copy": Dependency("host", "in copies"),
    "a load has ended when its kernels have": Dependency("host", "in kernels"),
}


@pytest.mark.parametrize("what", DEPENDENCIES)
def test_no_dependency_can_be_left_out(what: str) -> None:
    assert is_seen(DEPENDENCIES[what]), "no order shows that"


@contextlib.contextmanager
def taking_any_buffer() -> Iterator[None]:
    """Buffers are taken as if they were free."""

    def next_free(lane: CopyLane) -> StagingBuffer:
        buffer = next_buffer(lane)
        buffer.busy = None
        return buffer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CopyLane, "next_buffer", next_free)
        yield


def without_room(reading: Any) -> None:
    with taking_any_buffer():
        make_room(reading)


def without_ready(copier: Any, piece: int, *, verify: bool, ready: Any) -> Any:
    return StoreCopy(copier, piece, verify, None)


def put_at_once(reading: Any, saved: Any, address: int) -> None:
    saved.ready = Event(saved.ready.stream, [])  # of nothing
    put(reading, saved, address)


def freed_at_once(reading: Any, saved: Any, address: int) -> None:
    put(reading, saved, address)
    saved.free()
    saved.free = lambda: None


def one_for_all(lane: CopyLane, records: dict[CopyLane, TransferRecord] = {}) -> TransferRecord:  # noqa: B006
    return records.setdefault(lane, take_record(lane))


class OutOfOrder(World):
    """Blocks are set aside by another stream than the engine's."""

    def evacuate(self, blocks: list[int]) -> None:
        with self.device.thread():
            super().evacuate(blocks)


next_buffer, make_room, put = CopyLane.next_buffer, StoreCopy.make_room, StoreCopy.put
take_record, halt = CopyLane.take_record, StoreCopy.halt
CARELESS: dict[str, tuple[type, str, Any]] = {
    "a buffer is filled before it is free": (StoreCopy, "make_room", without_room),
    "blocks are gathered before they are computed": (GpuCopier, "begin_store", without_ready),
    "what was set aside is put before it is there": (StoreCopy, "put", put_at_once),
    "room aside is free before what was there is read": (StoreCopy, "put", freed_at_once),
    "a record is everybody's": (CopyLane, "take_record", one_for_all),
    "a reading goes on though the engine takes blocks back": (
        StoreCopy,
        "halt",
        lambda reading: MOST_BLOCKS,
    ),
    "what a halted reading left is nobody's": (
        StoreCopy,
        "halt",
        lambda reading: max(halt(reading), MOST_BLOCKS),
    ),
}


@pytest.mark.parametrize("what", CARELESS)
def test_no_care_can_be_left_out(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(*CARELESS[what])
    assert is_seen(), "no order shows that"


def test_blocks_are_set_aside_in_the_engines_order() -> None:
    assert is_seen(kind=OutOfOrder), "no order shows that"
