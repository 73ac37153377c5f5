"""Moves blocks between an engine's GPU memory and slots in host memory, at the speed of the bus.

    store    engine blocks ── gather + checksum ──► staging buffer ── copy over the bus ──► slots
    load     engine blocks ◄── scatter + checksum ── staging buffer ◄── copy over the bus ── slots

Each direction has a lane of its own with three staging buffers on the GPU: while a kernel fills one,
another is on the bus, each on a stream of its own. Stores and loads run at the same time. Nothing
here waits for the whole device, and nothing is copied to or from host memory that the bus cannot
reach directly: slots in a part of the pool that is not registered are reached through a bounce
buffer.

Events keep the order with the engine; its thread never waits:

    mark         in the engine's thread, when it hands over a job: kernels of that job begin after
                 what the engine did before
    fence_reads  in the engine's thread, before it writes into blocks that a store reads: that work
                 begins after those reads. It takes some microseconds, because a gather is given to
                 the GPU only when its staging buffer is free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.errors import DeviceError, RequestError
from kvkeep.gpu.driver import Cuda, Gate, Rows
from kvkeep.gpu.kernels import Units
from kvkeep.gpu.loads import Fetched, LoadCopy, LoadedPart, LoadPath, Ready
from kvkeep.gpu.registration import CopyRun, PoolRegistration, RegisteredMemory
from kvkeep.gpu.staging import (
    MOST_BLOCKS,
    CopyLane,
    EvacuatedBlock,
    EvacuationBuffer,
    StagingBuffer,
)
from kvkeep.gpu.streams import COPY_SIZES, CopySizes
from kvkeep.kv.copy import move_rows
from kvkeep.kv.runs import BlockRuns
from kvkeep.units import format_size

log = logging.getLogger(__name__)

Addresses = NDArray[np.uint64]
_OF_WHAT_IS_FREE = 8  # an eighth of it at most
_MOST_ASIDE = 64 << 20
_TOKENS_S = 0.002  # from the end of a forward pass until its tokens are on their way


class GpuCopier:
    """For one engine worker. Stores are for one thread, loads for another."""

    # Each part holds the engine up a dozen times. While the first is on the bus the second one's
    # slots are found.
    whole_bytes, first_bytes, part_bytes = 1 << 30, 128 << 20, 512 << 20

    def __init__(
        self,
        pieces: Sequence[BlockRuns],
        staging_bytes: int,
        device: Cuda | None = None,
        sizes: CopySizes = COPY_SIZES,
    ) -> None:
        """DeviceError if memory or a compiler is lacking; RequestError for blocks that cannot be
        moved."""
        self._device = device or Cuda(torch.device(pieces[0].device))
        self._units = [Units.of(runs, self._device.torch_device) for runs in pieces]
        self._runs, self._pinned = pieces, RegisteredMemory()
        self._last_read: Any = None
        self._warned = False
        staging_bytes = max(staging_bytes, sizes.least_staging_bytes)
        self._take_memory(min(staging_bytes, sizes.most_staging_bytes), sizes)
        self._try_out()

    def _take_memory(self, staging_bytes: int, sizes: CopySizes) -> None:
        """As much as that, or half, or a quarter of it, and so on: what is free is for others,
        too."""
        largest, least = max(units.pitch for units in self._units), sizes.least_staging_bytes
        left = staging_bytes
        while left // 2 >= least and left > self._device.free_bytes() // _OF_WHAT_IS_FREE:
            left //= 2
        while True:
            made: list[Any] = []
            try:
                aside = min(left // 4, _MOST_ASIDE)
                lane_bytes = (left - aside) // 2
                made += [CopyLane(self._device, lane_bytes, largest, sizes) for _ in range(2)]
                self._aside, (self._out, self._in) = EvacuationBuffer(self._device, aside), made
                break
            except RuntimeError as error:  # torch's words for memory that cannot be had
                made.clear()  # before the next try: it is short enough
                if left // 2 < least:
                    hint = "leave a little more of it free, such as with gpu_memory_utilization 0.9"
                    raise DeviceError(f"no memory for staging: {error}", hint) from error
            left //= 2
        log.info("kvkeep: blocks go through %s of %s", format_size(left), self._device.torch_device)

    def _try_out(self) -> None:
        """Compiles and loads the kernels now: later it would hold up a step. Block 0 is read and
        written back as it is; nobody uses it yet."""
        buffer = self._out.next_buffer()
        ids = torch.zeros(1, dtype=torch.int64, device=self._device.torch_device)
        try:
            for units in self._units:
                for sums in (None, torch.zeros_like(ids)):
                    units.gather(ids, buffer.memory, sums)
                    units.scatter(ids, buffer.memory, sums)
            self._device.wait(self._device.mark())
            batch = self._device.batch()
            batch.move(self._out.kernels, buffer.address, ids.data_ptr(), 1)
            batch.run()
            self._device.wait(self._device.mark(self._out.kernels))
        except Exception as error:
            # guard: raised again; Triton and the C compiler that it calls have many words
            hint = "Triton needs a C compiler on this host, such as gcc"
            raise DeviceError(
                f"the kernels that move blocks cannot be made: {error}", hint
            ) from error

    # -- the engine's thread

    def mark(self) -> Any:
        """What the engine has done so far."""
        return self._device.mark()

    def fence_reads(self) -> None:
        """What the engine does from now on waits for the reads that have begun."""
        if self._last_read is not None:
            self._device.after(None, self._last_read)

    def relocate(self, pieces: Sequence[BlockRuns]) -> None:
        """The engine's blocks are in this memory from now on; in none: nothing here refers to it,
        and nothing that was given to the GPU is still to read it. Staging memory stays. DeviceError
        or RequestError as in the beginning."""
        self._device.wait(self._device.mark())  # blocks are set aside on the engine's own stream
        units = [Units.of(runs, self._device.torch_device) for runs in pieces]
        self._runs = pieces
        self._units = units
        if pieces:
            self._try_out()

    def set_engine_busy(self, busy: bool) -> None:
        """Whether copies that are asked for from now on let the engine's own through as soon as can
        be. That costs some hundredths of the bus. They do, unless it says that it computes
        nothing."""
        for lane in (self._out, self._in):
            lane.copies.engine_busy = busy

    def evacuate(self, piece: int, block_ids: NDArray[np.int64]) -> list[EvacuatedBlock]:
        """Copies of these blocks, in memory of our own, ordered before whatever the engine does
        next. MemoryError if there is no room."""
        return self._aside.take(self._units[piece], _checked(self._runs[piece], block_ids))

    # -- the threads that copy

    def enter(self) -> None:
        """The first that such a thread does."""
        self._device.enter()

    def wait_for(self, mark: Any) -> bool:
        """Waits until the engine has got so far. Whether it had not."""
        if is_ahead := not self._device.is_over(mark):
            self._device.wait(mark)
        return is_ahead

    def begin_store(self, piece: int, *, verify: bool, ready: Any) -> StoreCopy:
        """Reads blocks for a store, after that mark. If a step is under way it ends first: its
        tokens go to the host by the same copy engine, behind whatever is there."""
        if ready is not None and self.wait_for(ready):
            time.sleep(_TOKENS_S)
        return StoreCopy(self, piece, verify, ready)

    def fetch_ahead(self, piece: int, addresses: Addresses) -> Fetched:
        """The first bytes of these slots begin to cross the bus, for the next `begin_load`."""
        way = LoadPath(
            self._device, self._in, self._pinned, self._units[piece], Ready((), self.wait_for)
        )
        try:
            return way.fetch_ahead(addresses, MOST_BLOCKS)
        except BaseException:  # guard: raised again; nobody may have memory that a copy still reads
            self._in.drain()
            raise

    def begin_load(
        self,
        piece: int,
        block_ids: NDArray[np.int64],
        addresses: Addresses,
        expected: NDArray[np.uint64] | None,
        ready: Sequence[Any] = (),
        ahead: Fetched | None = None,
    ) -> LoadCopy:
        """Slots into engine blocks, after those marks. What was fetched ahead of them is not
        fetched again; that is for an engine's own thread, which then does not sleep until all of it
        is in place."""
        block_ids = _checked(self._runs[piece], block_ids)
        for mark in ready:
            self._device.after(self._in.kernels, mark)
        units, engine, parts = self._units[piece], Ready(ready, self.wait_for), list[LoadedPart]()
        way = LoadPath(self._device, self._in, self._pinned, units, engine, awake=ahead is not None)
        fetched = ahead.take(units, addresses) if ahead is not None else []
        try:
            for start in range(0, len(block_ids), MOST_BLOCKS):
                some = slice(start, start + MOST_BLOCKS)
                verify = expected is not None
                parts.append(
                    way.scatter(block_ids[some], addresses[some], verify=verify, fetched=fetched)
                )
                fetched = []
        except BaseException:
            # guard: raised again; nobody may have memory that a copy still goes to
            self._in.drain()
            raise
        return LoadCopy(self._device, self._in, units, parts, expected, engine.came_s)

    # -- host memory

    def pool_registration(self, connection: Any) -> PoolRegistration:
        """What registers the server's pool, for a thread of its own."""
        return PoolRegistration(connection, self)

    def pin(self, address: int, nbytes: int) -> bool:
        """Lets the bus reach this part of the pool. False if it cannot; it is usable all the
        same."""
        try:
            self._device.register(address, nbytes)
        except DeviceError as error:
            if not self._warned:
                log.warning(
                    "kvkeep: host memory cannot be registered with CUDA, transfers are slower: %s",
                    error,
                )
            self._warned = True
            return False
        self._pinned.add(address, nbytes)
        return True

    def unpin(self, address: int) -> None:
        """Before that memory goes. Nothing may be under way to or from it."""
        if self._pinned.remove(address):
            try:
                self._device.unregister(address)
            except DeviceError as error:
                log.warning("kvkeep: host memory cannot be taken back from CUDA: %s", error)


class StoreCopy:
    """One piece of some blocks, `MOST_BLOCKS` at most, on their way into slots: `read`, and for
    those that it leaves `make_room`, `gather`, `deliver`, and so on; then `end`; and when it is
    needed `sums`, which waits for what is still under way, as `close` does. The next one may begin
    before that."""

    def __init__(self, copier: GpuCopier, piece: int, verify: bool, ready: Any) -> None:
        self._copier = copier
        self._device = copier._device
        self._lane = copier._out
        self._units = copier._units[piece]
        self._runs = copier._runs[piece]
        self._verify = verify
        self._record = self._lane.take_record()
        self._count = 0
        self._buffer: StagingBuffer | None = None
        self._gathered: tuple[StagingBuffer, Addresses] | None = None
        self._saved: list[EvacuatedBlock] = []
        # When all is over. None until `end`.
        self._marks: list[Any] | None = None
        self._closed, self._gate, self._reads = False, Gate(), list[Any]()
        self.at_a_time: int = self._lane.blocks_per_buffer(self._units.pitch)
        self._batch = self._device.batch()
        if ready is not None:
            self._batch.after(self._lane.kernels, ready)
        if verify:
            self._record.begin(self._batch, self._lane.kernels, MOST_BLOCKS)

    def read(self, block_ids: NDArray[np.int64], addresses: Addresses) -> int:
        """Instead of buffer by buffer: all of them, in one call that lets go of the interpreter, as far
        as the bus reaches their slots, or until `halt`. So many are read; `at_a_time` in each buffer
        but the last."""
        batch, lane, units, at_a_time = self._batch, self._lane, self._units, self.at_a_time
        per_buffer = self._record.ids(
            batch, lane.kernels, _checked(self._runs, block_ids), self._count
        ).split(at_a_time)
        sums_per_buffer = self._record.sums[self._count : self._count + len(block_ids)].split(
            at_a_time
        )
        buffers, goes_on = [], True
        for number, runs in enumerate(
            self._copier._pinned.runs(addresses, units.nbytes, at_a_time)
        ):
            if runs is None:
                break
            ids = per_buffer[number]
            sums = sums_per_buffer[number] if self._verify else None
            buffer = lane.next_buffer()
            buffers.append((buffer, before := buffer.busy, lane.copies.slice))
            if before is not None:
                batch.wait(before)
            batch.enter(self._gate, number + 1)
            batch.gather(lane.kernels, units, ids, buffer.memory, sums)
            self._reads.append(batch.mark(lane.kernels))
            batch.has_read(self._gate, number + 1)
            batch.after(lane.copies.stream, self._reads[-1])
            self._collect(buffer, runs)
            if number == 0 and (before is None or self._device.is_over(before)):
                goes_on = batch.run()  # not later: the bus has nothing to do
                if not goes_on:
                    break
        done = len(buffers) if goes_on and batch.run() else self._gate.halt()
        for buffer, before, turn in reversed(buffers[done:]):
            buffer.busy, lane.copies.slice = before, turn
        count = min(done * at_a_time, len(block_ids))
        self._count += count
        self._note_reads(done)
        return count

    def halt(self) -> int:
        """For the engine's thread: `read` reads no more blocks than so many, and `fence_reads` covers
        them."""
        done = self._gate.halt()
        self._note_reads(done)
        return done * self.at_a_time

    def _note_reads(self, buffers: int) -> None:
        if buffers:
            self._copier._last_read = self._reads[buffers - 1]

    def make_room(self) -> None:
        """Waits until a buffer is free: what `gather` gives to the GPU then waits for nothing but the
        engine."""
        self._buffer = self._lane.next_buffer()
        if self._buffer.busy is not None:
            self._batch.wait(self._buffer.busy)
        self._batch.run()

    def gather(self, block_ids: NDArray[np.int64], addresses: Addresses) -> None:
        """These blocks are read: the engine must not write into them before it has called
        `fence_reads`."""
        assert self._buffer is not None
        if not len(block_ids):
            return
        some = slice(self._count, self._count + len(block_ids))
        batch, lane = self._batch, self._lane
        ids = self._record.ids(batch, lane.kernels, _checked(self._runs, block_ids), self._count)
        sums = self._record.sums[some] if self._verify else None
        batch.gather(lane.kernels, self._units, ids, self._buffer.memory, sums)
        read = batch.mark(lane.kernels)
        batch.after(lane.copies.stream, read)
        batch.run()
        self._copier._last_read = read
        self._count = some.stop
        self._gathered = (self._buffer, addresses)

    def deliver(self) -> None:
        """What was gathered goes into its slots, at the latest when room is made for others, or at
        the end."""
        if self._gathered is None:
            return
        (buffer, addresses), self._gathered = self._gathered, None
        batch, copies, units = self._batch, self._lane.copies, self._units
        [runs] = self._copier._pinned.runs(addresses, units.nbytes, len(addresses))
        if runs is not None:
            self._collect(buffer, runs)
            return
        bounce = self._lane.bounce(buffer)
        pitch = units.pitch
        copies.to_host(batch, Rows(bounce, pitch, buffer.address, pitch, pitch, len(addresses)))
        buffer.busy = copies.mark(batch)
        batch.wait(buffer.busy)
        batch.run()
        move_rows(bounce, units.pitch, addresses, units.nbytes, to_slots=True)

    def _collect(self, buffer: StagingBuffer, runs: Sequence[CopyRun]) -> None:
        """From this buffer into slots."""
        batch, copies, units = self._batch, self._lane.copies, self._units
        for address, step, at, count in runs:
            place = buffer.address + at * units.pitch
            copies.to_host(batch, Rows(address, step, place, units.pitch, units.nbytes, count))
        buffer.busy = copies.mark(batch)

    def put(self, saved: EvacuatedBlock, address: int) -> None:
        """What was set aside goes into its slot."""
        self._saved.append(saved)
        self.make_room()
        assert self._buffer is not None
        self._device.after(self._lane.kernels, saved.ready)
        words = self._units.pitch // 8
        with self._device.on(self._lane.kernels):
            self._buffer.memory[:words].copy_(saved.memory, non_blocking=True)
            if self._verify:
                self._record.sums[self._count : self._count + 1].copy_(
                    saved.sums, non_blocking=True
                )
        self._device.after(self._lane.copies.stream, self._device.mark(self._lane.kernels))
        self._count += 1
        self._gathered = (self._buffer, np.array([address], dtype=np.uint64))
        self.deliver()

    def end(self) -> None:
        """There is no more."""
        batch, lane = self._batch, self._lane
        if self._verify:
            self._record.send_sums(batch, lane.kernels, self._count)
        marks = [batch.mark(lane.kernels), lane.copies.mark(batch)]
        batch.run()
        self._marks = marks  # not before: who waits for what was never recorded does not wait

    def sums(self) -> NDArray[np.uint64]:
        """The checksums of what was gathered and put, in that order; 0 if not asked for. All of it
        has arrived."""
        self._wait()
        sums = self._units.checksums(self._record.sums_here(self._count))
        self.close()
        return sums if self._verify else np.zeros(self._count, dtype=np.uint64)

    def close(self) -> None:
        """Waits for what is under way of it."""
        self._wait()
        if not self._closed:
            self._closed = True
            self._lane.give_back(self._record)
            for saved in self._saved:
                saved.free()

    def _wait(self) -> None:
        if self._marks is None:
            self._lane.drain()
            self._marks = []
        for mark in self._marks:
            self._device.wait(mark)
        self._marks = []  # it is over: who closes it does not wait again


def _checked(runs: BlockRuns, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    wrong = (block_ids < 0) | (block_ids >= runs.num_blocks)
    if wrong.any():
        message = f"block {int(block_ids[wrong][0])} does not exist: the engine has blocks 0 to {runs.num_blocks - 1}"
        raise RequestError("bad_request", message, field="block_ids")
    return np.ascontiguousarray(block_ids, dtype=np.int64)
