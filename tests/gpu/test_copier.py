"""Blocks go from a GPU into slots and back, bit for bit, whatever the pool is like; and in order
with the engine."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pretend import Pretend

from kvkeep.errors import DeviceError, PoolError, RequestError
from kvkeep.gpu import copier as module
from kvkeep.gpu.copier import GpuCopier
from kvkeep.gpu.kernels import Units
from kvkeep.gpu.streams import COPY_SIZES, CopySizes
from kvkeep.kv import native
from kvkeep.kv.checksum import checksum
from kvkeep.kv.runs import BlockRuns

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BLOCKS = 24
LAYERS = 3
LAYER_BYTES = 3 * 1024
BLOCK_BYTES = LAYERS * LAYER_BYTES
BUFFERS_OF_TWO = 16 * BLOCK_BYTES  # staging memory: a quarter aside, the rest in six buffers
ANY_STAGING = CopySizes(least_staging_bytes=0)
# Of the device's streams, those of stores and of loads: for kernels, then two for copies.
OUT, IN = slice(0, 3), slice(3, 6)


class Engine:
    """Layers of random bytes, a pool of slots, and a copier between them."""

    def __init__(
        self,
        staging: int = 4 << 20,
        *,
        pinned: str = "all",
        slot_bytes: int = 0,
        registrable: bool = True,
        sizes: CopySizes = COPY_SIZES,
    ):
        random = torch.Generator().manual_seed(1)
        self.layers = [
            torch.randint(0, 256, (BLOCKS, LAYER_BYTES), dtype=torch.uint8, generator=random).to(
                DEVICE
            )
            for _ in range(LAYERS)
        ]
        self.runs = BlockRuns.of(self.layers)
        self.device = None if CUDA else Pretend(registrable)
        self.copier: Any = GpuCopier([self.runs], staging, self.device, sizes)  # type: ignore[arg-type]
        self.copier.enter()
        self.slot_bytes = slot_bytes or self.runs.nbytes
        slots = -(-BLOCKS * self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pool = np.frombuffer(mmap.mmap(-1, slots), dtype=np.uint8)
        self.base, half = self.pool.ctypes.data, slots // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self.pinned = {
            "all": [(0, slots)],
            "none": [],
            "half": [(0, half)],
            "halves": [(0, half), (half, slots)],
        }[pinned]
        self.took = [self.copier.pin(self.base + low, high - low) for low, high in self.pinned]

    def close(self) -> None:
        for low, _ in self.pinned:
            self.copier.unpin(self.base + low)

    def bytes_of(self, block: int) -> Any:
        return np.concatenate([layer[block].cpu().numpy() for layer in self.layers])

    def addresses(self, slots: list[int]) -> Any:
        return np.array([self.base + slot * self.slot_bytes for slot in slots], dtype=np.uint64)

    def slot(self, slot: int) -> Any:
        start = slot * self.slot_bytes
        return self.pool[start : start + self.runs.nbytes]

    def store(self, blocks: list[int], slots: list[int], *, verify: bool = True) -> Any:
        ids, addresses = np.array(blocks), self.addresses(slots)
        reading = self.copier.begin_store(0, verify=verify, ready=self.copier.mark())
        try:
            for start in range(0, len(ids), reading.at_a_time):
                some = slice(start, start + reading.at_a_time)
                reading.make_room()
                reading.gather(ids[some], addresses[some])
                reading.deliver()
            reading.end()
            return reading.sums()
        finally:
            reading.close()


@pytest.fixture(params=["all", "none", "half", "halves"])
def engine(request: pytest.FixtureRequest) -> Any:
    made = Engine(pinned=request.param)
    yield made
    made.close()


ORDERS = {
    "in a row": list(range(12)),
    "backwards": list(range(11, -1, -1)),
    "here and there": [17, 3, 4, 5, 20, 0, 22, 23, 8, 10, 12, 14],
}


@pytest.mark.parametrize("order", ORDERS)
def test_there_and_back(engine: Engine, order: str) -> None:
    slots, blocks = ORDERS[order], [5, 6, 7, 23, 0, 11, 2, 3, 19, 13, 9, 21]
    expected = [engine.bytes_of(block) for block in blocks]
    sums = engine.store(blocks, slots)
    assert sums.tolist() == [checksum(data) for data in expected]
    for slot, data in zip(slots, expected, strict=True):
        assert np.array_equal(engine.slot(slot), data)
    back = blocks[::-1]
    good = engine.copier.begin_load(
        0, np.array(back), engine.addresses(slots), sums, [engine.copier.mark()]
    ).good()
    assert good.all()
    for block, data in zip(back, expected, strict=True):
        assert np.array_equal(engine.bytes_of(block), data)


@pytest.mark.skipif(not native.available, reason="only the C kernel survives it")
def test_slots_that_somebody_cuts_off_fail_the_copy_and_nothing_else() -> None:
    """Those that the bus does not reach: a processor copies them. What is registered stays there
    for the bus."""
    engine = Engine(pinned="none")
    file, nbytes = os.memfd_create("pool"), engine.pool.nbytes
    os.ftruncate(file, nbytes)
    engine.pool = np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8)
    engine.base = engine.pool.ctypes.data
    blocks, slots = [5, 6, 7], [0, 1, BLOCKS - 1]
    expected = [engine.bytes_of(block) for block in blocks]
    for _ in range(3):
        os.ftruncate(file, 0)
        with pytest.raises(PoolError, match="was cut off"):
            engine.store(blocks, slots)
        os.ftruncate(file, nbytes)
        sums = engine.store(blocks, slots)
        os.ftruncate(file, nbytes // 2)
        with pytest.raises(PoolError, match="was cut off"):
            engine.copier.begin_load(0, np.array([9, 10, 11]), engine.addresses(slots), sums)
        loaded = engine.copier.begin_load(
            0, np.array([9, 10]), engine.addresses(slots[:2]), sums[:2]
        ).good()
        assert loaded.all() and all(
            np.array_equal(engine.bytes_of(9 + at), expected[at]) for at in range(2)
        )
    engine.close()
    os.close(file)


def test_an_engine_whose_memory_is_elsewhere_is_copied_from_and_to_there(engine: Engine) -> None:
    data = engine.bytes_of(5)
    sums = engine.store([5], [1])
    old_runs, engine.runs = weakref.ref(engine.runs), None  # type: ignore[assignment]
    engine.copier.relocate([])
    gc.collect()
    assert old_runs() is None, "nothing refers to the old memory"
    old = [layer.clone() for layer in engine.layers]
    before, engine.layers = engine.layers, [torch.zeros_like(layer) for layer in engine.layers]
    engine.runs = BlockRuns.of(engine.layers)
    engine.copier.relocate([engine.runs])
    assert not any(layer.any() for layer in engine.layers), "trying the kernels changes nothing"
    scattering = engine.copier.begin_load(
        0, np.array([7]), engine.addresses([1]), sums, [engine.copier.mark()]
    )
    assert scattering.good().all() and np.array_equal(engine.bytes_of(7), data)
    engine.store([7], [2])
    assert np.array_equal(engine.slot(2), data), "and read from there"
    assert all(torch.equal(layer, was) for layer, was in zip(before, old, strict=True))


@pytest.mark.skipif(CUDA, reason="a pretended device")
@pytest.mark.parametrize("way", ["store", "store buffer by buffer", "load"])
@pytest.mark.parametrize("engine_busy", [None, True, False])
def test_copies_take_turns_on_two_streams_each_after_the_one_before(
    way: str, engine_busy: bool | None
) -> None:
    """So that the engine's own come between them, unless it says that it computes nothing."""
    sizes = CopySizes(least_staging_bytes=0, small_slice_bytes=1)
    engine = Engine(BUFFERS_OF_TWO, sizes=sizes)
    blocks, device, waits = np.arange(8), engine.device, list[tuple[Any, Any, int]]()
    after = device.after  # type: ignore[union-attr]
    device.after = lambda stream, mark: (
        waits.append((stream, mark, len(device.copies))),
        after(stream, mark),
    )  # type: ignore[union-attr, method-assign]
    if engine_busy is not None:
        engine.copier.set_engine_busy(engine_busy)
    if way == "load":
        engine.copier.begin_load(0, blocks, engine.addresses([*range(0, 16, 2)]), None).good()
    elif way == "store":
        reading = engine.copier.begin_store(0, verify=False, ready=None)
        assert reading.read(blocks, engine.addresses([*range(0, 16, 2)])) == 8
        reading.end()
        reading.close()
    else:
        engine.store(blocks.tolist(), [*range(0, 16, 2)], verify=False)
    _, first, second = device.streams[IN if way == "load" else OUT]  # type: ignore[union-attr]
    turns = [
        (who, mark[0], copies) for who, mark, copies in waits if {who, mark[0]} == {first, second}
    ]
    to_and_fro = [(second, first), (first, second)] * 4
    assert turns == (
        [(*pair, copies) for copies, pair in enumerate(to_and_fro[:7], 1)]
        if engine_busy is not False
        else []
    )
    assert len(device.copies) == (4 if engine_busy is False else 8)  # type: ignore[union-attr]
    engine.close()


@pytest.mark.skipif(CUDA, reason="a pretended device")
def test_no_more_staging_memory_is_taken_than_the_bus_has_a_use_for() -> None:
    engine = Engine(staging=8 << 30)
    assert 90 << 20 < engine.device.largest_memory_bytes <= 96 << 20  # type: ignore[union-attr]
    engine.close()


def test_slots_further_apart_than_blocks() -> None:
    """As shards of several ranks lie."""
    engine = Engine(slot_bytes=LAYERS * LAYER_BYTES + 4096)
    expected = engine.bytes_of(4), engine.bytes_of(9)
    engine.pool[:] = 0xEE
    sums = engine.store([4, 9], [2, 3])
    assert np.array_equal(engine.slot(2), expected[0]) and np.array_equal(
        engine.slot(3), expected[1]
    )
    between = engine.pool[2 * engine.slot_bytes + engine.runs.nbytes : 3 * engine.slot_bytes]
    assert (between == 0xEE).all(), "nothing beside a block is written"
    assert (
        engine.copier.begin_load(0, np.array([0, 1]), engine.addresses([2, 3]), sums).good().all()
    )
    engine.close()


@pytest.mark.skipif(CUDA, reason="the kernels are made there")
def test_kernels_that_cannot_be_made_are_said_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(Units, "gather", no_compiler)
    with pytest.raises(
        DeviceError, match="the kernels that move blocks cannot be made: Failed to find C"
    ) as caught:
        Engine()
    assert "such as gcc" in caught.value.hint and isinstance(caught.value.__cause__, RuntimeError)


def test_more_than_the_staging_memory_holds() -> None:
    engine = Engine(BUFFERS_OF_TWO, sizes=ANY_STAGING)
    blocks, slots = list(range(23)), list(range(1, 24))
    expected = [engine.bytes_of(block) for block in blocks]
    sums = engine.store(blocks, slots)
    assert sums.tolist() == [checksum(data) for data in expected]
    back = [(block + 5) % 24 for block in blocks]
    assert engine.copier.begin_load(0, np.array(back), engine.addresses(slots), sums).good().all()
    assert all(
        np.array_equal(engine.bytes_of(block), data)
        for block, data in zip(back, expected, strict=True)
    )
    engine.close()


def test_a_damaged_slot_is_seen_and_the_others_are_good(engine: Engine) -> None:
    sums = engine.store([1, 2, 3], [4, 5, 6])
    engine.slot(5)[1234] ^= 1
    good = engine.copier.begin_load(
        0, np.array([7, 8, 9]), engine.addresses([4, 5, 6]), sums
    ).good()
    assert good.tolist() == [True, False, True]
    assert np.array_equal(engine.bytes_of(9), engine.bytes_of(3))


def test_without_verification_nothing_is_checked(engine: Engine) -> None:
    assert engine.store([1, 2], [4, 5], verify=False).tolist() == [0, 0]
    engine.slot(5)[0] ^= 1
    assert (
        engine.copier.begin_load(0, np.array([7, 8]), engine.addresses([4, 5]), None).good().all()
    )
    assert np.array_equal(engine.bytes_of(7), engine.bytes_of(1))


@pytest.mark.parametrize("wrong", [-1, BLOCKS])
def test_blocks_that_do_not_exist_are_refused_before_anything_moves(
    engine: Engine, wrong: int
) -> None:
    before = engine.pool.copy()
    with pytest.raises(RequestError, match="does not exist"):
        engine.store([1, wrong], [4, 5])
    assert np.array_equal(engine.pool, before)
    with pytest.raises(RequestError, match="does not exist"):
        engine.copier.begin_load(0, np.array([wrong]), engine.addresses([4]), None)
    with pytest.raises(RequestError, match="does not exist"):
        engine.copier.evacuate(0, np.array([wrong]))


def test_nothing_to_move(engine: Engine) -> None:
    assert engine.store([], []).tolist() == []
    assert (
        engine.copier.begin_load(0, np.zeros(0, dtype=np.int64), engine.addresses([]), None)
        .good()
        .tolist()
        == []
    )
    assert engine.copier.evacuate(0, np.zeros(0, dtype=np.int64)) == []


def test_a_block_set_aside_is_stored_as_it_was(engine: Engine) -> None:
    expected = engine.bytes_of(6)
    [saved] = engine.copier.evacuate(0, np.array([6]))
    for layer in engine.layers:
        layer[6] = 0  # the engine has it back
    reading = engine.copier.begin_store(0, verify=True, ready=engine.copier.mark())
    reading.make_room()
    reading.gather(np.array([2]), engine.addresses([1]))
    reading.deliver()
    reading.put(saved, int(engine.addresses([3])[0]))
    reading.end()
    sums = reading.sums()
    assert sums.tolist() == [checksum(engine.bytes_of(2)), checksum(expected)]
    assert np.array_equal(engine.slot(3), expected)


def test_there_is_room_aside_again_when_all_of_it_was_stored() -> None:
    room = 5
    engine = Engine(4 * room * BLOCK_BYTES, sizes=ANY_STAGING)
    many = np.arange(room, dtype=np.int64) % BLOCKS
    for _ in range(2):
        saved = engine.copier.evacuate(0, many)
        with pytest.raises(MemoryError):
            engine.copier.evacuate(0, np.array([0, 1]))
        for each in saved:
            each.free()
    engine.close()


def test_memory_taken_back_is_reached_through_a_bounce_buffer_again() -> None:
    engine = Engine(pinned="halves")
    engine.copier.unpin(engine.base)
    sums = engine.store([1, 2], [0, 23])
    assert (
        engine.copier.begin_load(0, np.array([3, 4]), engine.addresses([0, 23]), sums).good().all()
    )
    assert np.array_equal(engine.slot(0), engine.bytes_of(1))
    engine.copier.unpin(engine.base)  # once more is no error
    engine.pinned = engine.pinned[1:]
    engine.close()


@pytest.mark.skipif(CUDA, reason="a pretended device")
class TestOrder:
    """What must wait for what, as a pretended device notes it; test_copier_orders.py tries orders."""

    @pytest.mark.parametrize("unfinished", [True, False])
    def test_a_store_lets_the_step_that_is_under_way_send_its_tokens(
        self, monkeypatch: pytest.MonkeyPatch, unfinished: bool
    ) -> None:
        engine = Engine()
        device, ready, slept = engine.device, engine.copier.mark(), list[tuple[float, bool]]()
        assert device is not None
        device.unfinished = [ready] * unfinished
        sleep = lambda seconds: slept.append((seconds, device.is_over(ready)))  # noqa: E731
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
        engine.copier.begin_store(0, verify=True, ready=ready).close()
        assert slept == [(0.002, True)] * unfinished

    @pytest.mark.parametrize("marks_left", range(5))
    def test_what_was_set_aside_is_free_again_when_the_device_fails_while_it_is_stored(
        self, marks_left: int
    ) -> None:
        engine = Engine(4 * 2 * BLOCK_BYTES, sizes=ANY_STAGING)
        saved = engine.copier.evacuate(0, np.array([6, 7]))
        reading, device = (
            engine.copier.begin_store(0, verify=True, ready=engine.copier.mark()),
            engine.device,
        )
        assert device is not None
        device.marks_left = marks_left
        put: list[Any] = []

        def store() -> None:
            for at, each in enumerate(saved):
                put.append(each)
                reading.put(each, int(engine.addresses([at])[0]))
            reading.end()

        with pytest.raises(DeviceError, match="out of memory"):
            store()
        reading.close()
        assert device.drained == device.streams[OUT]
        device.marks_left = 9
        if len(put) < 2:
            with pytest.raises(MemoryError):
                engine.copier.evacuate(0, np.array([8]))
        for each in saved[len(put) :]:
            each.free()
        assert len(engine.copier.evacuate(0, np.array([8, 9]))) == 2, "all of it is free"

    def test_a_host_that_does_not_let_memory_be_registered(self) -> None:
        engine = Engine(registrable=False)
        assert engine.took == [False]
        sums = engine.store([1, 2], [4, 5])
        assert (
            engine.copier.begin_load(0, np.array([7, 8]), engine.addresses([4, 5]), sums)
            .good()
            .all()
        )
        assert np.array_equal(engine.bytes_of(8), engine.bytes_of(2))

    def test_neighbouring_slots_are_one_copy(self) -> None:
        engine = Engine()
        engine.store([9, 1, 5, 7], [3, 4, 5, 6])
        blocks = [copy for copy in engine.device.copies if copy[1] == engine.runs.nbytes]  # type: ignore[union-attr]
        assert blocks == [("to host", engine.runs.nbytes, 4)]
