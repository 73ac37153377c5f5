"""Blocks on their way from slots into engine memory: how they are given to the GPU, and what is
waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.gpu.driver import Cuda, Rows
from kvkeep.gpu.kernels import Units
from kvkeep.gpu.registration import CopyRun, RegisteredMemory
from kvkeep.gpu.staging import BUFFERS, CopyLane, StagingBuffer, TransferRecord
from kvkeep.kv.copy import move_rows

# In one call, and fewer at first: after each call a thread waits for the interpreter's lock.
_BUFFERS_TOGETHER = 8


class LoadedPart(NamedTuple):
    """A part of them: its record, how many, when nearly all and when all are in place. Until
    `nearly` one can sleep."""

    record: TransferRecord
    blocks: int
    nearly: Any
    done: Any


class Fetched:
    """Staging buffers with the first bytes of some slots, copied or on their way, before it is known
    which blocks they go to. The slots must not change until a load has taken the buffers and has
    ended, and stay leased until this is closed."""

    def __init__(
        self,
        device: Cuda,
        lane: CopyLane,
        units: Units,
        addresses: NDArray[np.uint64],
        buffers: list[tuple[StagingBuffer, Any]],
    ) -> None:
        self._device = device
        self._lane = lane
        self._units = units
        self._addresses = addresses
        self._buffers = buffers
        self._turn = lane.turn
        self._arrived = buffers[-1][1] if buffers else None

    def __bool__(self) -> bool:
        return self._arrived is not None

    def take(self, units: Units, addresses: NDArray[np.uint64]) -> list[tuple[StagingBuffer, Any]]:
        """Each buffer and when it is filled: once, and only for a load of these very slots, or of the
        first of them, while nobody else has taken a buffer."""
        buffers, self._buffers = self._buffers, []
        is_same = units is self._units and np.array_equal(
            self._addresses[: len(addresses)], addresses
        )
        return buffers if is_same and self._lane.turn == self._turn else []

    def close(self) -> None:
        """Waits until all of it has arrived, taken or not."""
        self._buffers = []
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            try:
                self._device.wait(arrived)
            except BaseException:
                # guard: raised again; nobody may have memory that a copy still reads
                self._lane.drain()
                raise


class Ready:
    """What the engine has to have done before blocks are written. `came_s` is when it had, if
    somebody waited for it: a load takes no time before that."""

    def __init__(self, marks: Sequence[Any], wait_for: Callable[[Any], bool]) -> None:
        self._marks = marks
        self._wait_for = wait_for
        self.came_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._marks)

    def wait(self) -> None:
        marks, self._marks = self._marks, ()
        for mark in marks:
            if self._wait_for(mark):
                self.came_s = time.perf_counter()


class LoadPath:
    """From slots into one piece of an engine's blocks. For the thread that loads. If that is the
    engine's own, and some of it was fetched ahead, it stays `awake`: the step that comes next
    begins on a core that has not rested."""

    def __init__(
        self,
        device: Cuda,
        lane: CopyLane,
        pinned: RegisteredMemory,
        units: Units,
        engine: Ready,
        *,
        awake: bool = False,
    ) -> None:
        self._device = device
        self._lane = lane
        self._pinned = pinned
        self._units = units
        self._engine = engine
        self._awake = awake

    def fetch_ahead(self, addresses: NDArray[np.uint64], most_blocks: int) -> Fetched:
        """Fills as many buffers as there are, or fewer: no more than so many blocks, and not from
        slots that the bus cannot reach."""
        lane, units, batch = self._lane, self._units, self._device.batch()
        buffers, at_a_time = list[tuple[StagingBuffer, Any]](), lane.blocks_per_buffer(units.pitch)
        per_buffer = self._pinned.runs(addresses[:most_blocks], units.nbytes, at_a_time)
        for number, runs in zip(range(BUFFERS), per_buffer, strict=False):
            if runs is None:
                break
            buffer, arrived = self._fill(batch, runs, addresses[number * at_a_time :])
            buffer.busy = arrived  # for whoever comes next, if nobody takes it
            lane.queue(arrived)
            buffers.append((buffer, arrived))
            if number == 0:  # the bus has nothing to do
                batch.run()
        batch.run()
        return Fetched(self._device, lane, units, addresses, buffers)

    def scatter(
        self,
        block_ids: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        verify: bool,
        fetched: Sequence[tuple[StagingBuffer, Any]] = (),
    ) -> LoadedPart:
        """`MOST_BLOCKS` at most. The first of them are in the buffers that were fetched."""
        lane, units, batch = self._lane, self._units, self._device.batch()
        record = lane.take_record()
        count = len(block_ids)
        at_a_time = lane.blocks_per_buffer(units.pitch)
        rest = self._pinned.runs(addresses[len(fetched) * at_a_time :], units.nbytes, at_a_time)
        ids, buffer, before = None, None, None
        for number, start in enumerate(range(0, count, at_a_time)):
            some = slice(start, min(start + at_a_time, count))
            before, is_fetched = buffer.busy if buffer is not None else None, number < len(fetched)
            buffer, arrived = (
                fetched[number] if is_fetched else self._fill(batch, next(rest), addresses[some])
            )
            if ids is None:  # while the first are on the bus
                batch.run()
                if verify:
                    record.begin(batch, lane.kernels, count)
                ids = record.ids(batch, lane.kernels, block_ids)
            batch.after(lane.kernels, arrived)
            batch.scatter(
                lane.kernels, units, ids[some], buffer.memory, record.sums[some] if verify else None
            )
            buffer.busy = batch.mark(lane.kernels)
            if not is_fetched:
                lane.queue(buffer.busy)
            if (number + 1) % _BUFFERS_TOGETHER == 0 or not number & (number + 1):
                batch.run()
        if verify:
            record.send_sums(batch, lane.kernels, count)
        done = batch.mark(lane.kernels, urgent=True)
        batch.run()
        return LoadedPart(record, count, None if self._awake else before, done)

    def _fill(
        self, batch: Any, runs: Sequence[CopyRun] | None, addresses: NDArray[np.uint64]
    ) -> tuple[StagingBuffer, Any]:
        """The next buffer, and when it holds what is in these slots. With no runs, they go through a
        bounce buffer."""
        lane, units = self._lane, self._units
        self._wait_for_room(batch)
        buffer = lane.next_buffer()
        if buffer.busy is not None:
            batch.after(lane.copies.stream, buffer.busy)
        for address, step, at, rows in runs or [self._bounced(batch, buffer, addresses)]:
            place = buffer.address + at * units.pitch
            copied = Rows(address, step, place, units.pitch, units.nbytes, rows)
            lane.copies.to_device(batch, copied)
        buffer.bounced = arrived = lane.copies.mark(batch)
        return buffer, arrived

    def _wait_for_room(self, batch: Any) -> None:
        """Waits, without the interpreter, while too much is queued for the bus."""
        earlier = self._lane.first_of_too_many()
        if earlier is None:
            return
        if self._engine:  # that is what it waits for, too
            batch.run()
            self._engine.wait()
        batch.wait(earlier, awake=self._awake)

    def _bounced(self, batch: Any, buffer: StagingBuffer, addresses: NDArray[np.uint64]) -> CopyRun:
        """The same bytes where the bus can reach them."""
        batch.run()
        if buffer.bounced is not None:
            self._device.wait(buffer.bounced)
        bounce, pitch, nbytes = self._lane.bounce(buffer), self._units.pitch, self._units.nbytes
        move_rows(bounce, pitch, addresses, nbytes, to_slots=False)
        return bounce, pitch, 0, len(addresses)


class LoadCopy:
    """Blocks on their way into engine memory."""

    def __init__(
        self,
        device: Cuda,
        lane: CopyLane,
        units: Units,
        parts: list[LoadedPart],
        expected: NDArray[np.uint64] | None,
        ready_s: float = 0.0,
    ) -> None:
        self._device = device
        self._lane = lane
        self._units = units
        self._parts = parts
        self._count = sum(part.blocks for part in parts)
        self._expected = expected
        self.ready_s = ready_s

    def good(self) -> NDArray[np.bool_]:
        """Waits until all are in place; True where the bytes have the checksum expected. A block
        answered False holds bytes that must not be used."""
        self._wait()
        good = np.ones(self._count, dtype=np.bool_)
        if self._expected is not None and self._parts:
            sums = np.concatenate([part.record.sums_here(part.blocks) for part in self._parts])
            good = np.equal(self._units.checksums(sums), self._expected)
        self.close()
        return good

    def close(self) -> None:
        """Waits until all are in place."""
        self._wait()
        parts, self._parts = self._parts, []
        for part in parts:
            self._lane.give_back(part.record)

    def _wait(self) -> None:
        """Asleep for most of it, then awake, because the engine waits for us."""
        for part in self._parts:
            if part.nearly is not None:
                self._device.wait(part.nearly)
            self._device.wait(part.done)
