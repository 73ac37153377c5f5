"""Memory on the GPU that blocks pass through: buffers of the two lanes, and a place for what the
engine takes back."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.gpu.driver import Cuda
from kvkeep.gpu.kernels import Units
from kvkeep.gpu.streams import COPY_SIZES, CopySizes, CopyStreams

MOST_BLOCKS = 4096  # of one call; more go in several
BUFFERS = 3  # of a lane
_RECORDS = 4  # at first; more calls than that are seldom under way


class StagingBuffer:
    """Staging memory of one batch. `busy` is when it will be free, `bounced` when its bounce buffer
    will."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.address: int = memory.data_ptr()
        self.busy: Any = None
        self.bounced: Any = None
        self.bounce: torch.Tensor | None = None


class TransferRecord:
    """Block ids of one call on their way to the GPU, and checksums on their way back."""

    def __init__(self, device: Cuda) -> None:
        self._ids_here, self._ids = device.host_memory(MOST_BLOCKS), device.memory(MOST_BLOCKS)
        self._ids_view = self._ids_here.numpy()
        self._ids_at, self._ids_here_at = self._ids.data_ptr(), self._ids_here.data_ptr()
        self._sums_here, self.sums = device.host_memory(MOST_BLOCKS), device.memory(MOST_BLOCKS)
        self._sums_at, self._sums_here_at = self.sums.data_ptr(), self._sums_here.data_ptr()

    def begin(self, batch: Any, stream: Any, count: int) -> None:
        """So many sums will be taken."""
        batch.zero(stream, self.sums[:count])

    def ids(
        self, batch: Any, stream: Any, block_ids: NDArray[np.int64], at: int = 0
    ) -> torch.Tensor:
        count = len(block_ids)
        self._ids_view[at : at + count] = block_ids
        batch.move(stream, self._ids_at + 8 * at, self._ids_here_at + 8 * at, count)
        return self._ids[at : at + count]

    def send_sums(self, batch: Any, stream: Any, count: int) -> None:
        batch.move(stream, self._sums_here_at, self._sums_at, count)

    def sums_here(self, count: int) -> NDArray[np.uint64]:
        """When they have arrived."""
        return self._sums_here[:count].numpy().view(np.uint64).copy()


class CopyLane:
    """One direction: its streams, buffers and records. For one thread, but for `give_back`."""

    def __init__(
        self,
        device: Cuda,
        staging_bytes: int,
        largest_pitch: int,
        sizes: CopySizes = COPY_SIZES,
    ) -> None:
        self._device = device
        self.buffer_bytes = max(staging_bytes // BUFFERS // 8 * 8, largest_pitch)
        self._buffers = [
            StagingBuffer(device.memory(self.buffer_bytes // 8)) for _ in range(BUFFERS)
        ]
        self._records = deque(TransferRecord(device) for _ in range(_RECORDS))
        self.turn = 0  # of the buffer that was taken last
        self._queued: deque[Any] = deque()  # when each of the last buffers is over
        self._most_queued = max(BUFFERS, sizes.queued_bytes // self.buffer_bytes)
        self.kernels, self.copies = device.stream(), CopyStreams(device, sizes)

    def blocks_per_buffer(self, pitch: int) -> int:
        return min(self.buffer_bytes // pitch, MOST_BLOCKS)

    def next_buffer(self) -> StagingBuffer:
        self.turn += 1
        return self._buffers[self.turn % BUFFERS]

    def first_of_too_many(self) -> Any:
        """What is to be over before another buffer is queued for the bus, if anything. To queue all at
        once is no faster, and what is queued cannot be called back."""
        return self._queued.popleft() if len(self._queued) >= self._most_queued else None

    def queue(self, over: Any) -> None:
        self._queued.append(over)

    def take_record(self) -> TransferRecord:
        """One that nobody has. Memory of a new one is the kernels' stream's, not the engine's."""
        if self._records:
            return self._records.popleft()
        with self._device.on(self.kernels):
            return TransferRecord(self._device)

    def give_back(self, record: TransferRecord) -> None:
        """From any thread."""
        self._records.append(record)

    def bounce(self, buffer: StagingBuffer) -> int:
        """The address of host memory as large as the buffer. Only who needs it has it."""
        if buffer.bounce is None:
            buffer.bounce = self._device.host_memory(self.buffer_bytes // 8)
        return int(buffer.bounce.data_ptr())

    def drain(self) -> None:
        """Waits for all that is under way here. Whoever calls this gives memory away afterwards,
        often because something has failed: what fails here, too, must not end the waiting."""
        failed: Exception | None = None
        for stream in (self.kernels, *self.copies.streams):
            try:
                self._drain(stream)
            except Exception as error:  # guard: raised when the others have been waited for
                failed = failed or error
        if failed is not None:
            raise failed

    def _drain(self, stream: Any) -> None:
        try:
            self._device.wait(self._device.mark(stream))
        except Exception:  # guard: no event to be had; this takes none
            self._device.drain(stream)


class EvacuatedBlock:
    """A copy of a block in memory of our own, and its sum; there after `ready`."""

    def __init__(
        self, aside: EvacuationBuffer, memory: torch.Tensor, sums: torch.Tensor, nbytes: int
    ) -> None:
        self._aside = aside
        self.memory = memory
        self.sums = sums
        self.nbytes = nbytes
        self.ready: Any = None

    def free(self) -> None:
        self._aside.free()


class EvacuationBuffer:
    """Memory for blocks that the engine takes back before they are read. It is used from its
    beginning on, and from its beginning again when all of it is free."""

    def __init__(self, device: Cuda, nbytes: int) -> None:
        self._device = device
        self._memory = device.memory(nbytes // 8)
        self._sums = device.memory(MOST_BLOCKS)
        self._ids_here, self._ids = device.host_memory(MOST_BLOCKS), device.memory(MOST_BLOCKS)
        self._lock = threading.Lock()
        # Words, blocks, and blocks that are not free again.
        self._used = self._taken = self._left = 0

    def take(self, units: Units, block_ids: NDArray[np.int64]) -> list[EvacuatedBlock]:
        """On the engine's stream, in its thread, which does not wait. MemoryError if there is no
        room."""
        count, words = len(block_ids), units.pitch // 8
        if not count:
            return []
        with self._lock:
            start = -(-self._used // 2) * 2  # kernels count on 16 bytes
            if start + count * words > len(self._memory) or self._taken + count > MOST_BLOCKS:
                raise MemoryError
            place = slice(self._taken, self._taken + count)
            self._used = start + count * words
            self._taken = place.stop
            self._left += count
        memory = self._memory[start : start + count * words]
        sums = self._sums[place]
        ids = self._ids[place]
        try:
            self._ids_here[place].numpy()[:] = block_ids
            ids.copy_(self._ids_here[place], non_blocking=True)
            sums.zero_()
            units.gather(ids, memory, sums)
            rows = memory.view(count, words)
            saved = [
                EvacuatedBlock(self, row, sums[at : at + 1], units.nbytes)
                for at, row in enumerate(rows)
            ]
            ready = self._device.mark()
        except BaseException:  # guard: raised again; the room would be lost for good
            self.free(count)
            raise
        for each in saved:
            each.ready = ready
        return saved

    def free(self, count: int = 1) -> None:
        with self._lock:
            self._left -= count
            if not self._left:
                self._used = self._taken = 0
