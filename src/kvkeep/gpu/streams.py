"""Copies of one direction over the bus, in slices on two streams, so that an engine's own copies
interleave with them.

A copy engine of a GPU stays with a stream for as long as that has work that can begin. All on one
stream, our copies would make those of an engine, such as a step's inputs and its tokens, wait for
the end of a whole load or store. So after some megabytes they go on in the other stream, when those
before them are over:

    stream 0    ▄▄ 0 ▄▄           ▄▄ 2 ▄▄
    stream 1            ▄▄ 1 ▄▄           ▄▄ 3 ▄▄

Between two slices a copy of the engine's goes first. Large slices cost nothing. Small ones cost up to
three hundredths of the bus, and are for an engine that computes meanwhile: it waits for about a
third of a millisecond, or for one block where those are larger than a slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvkeep.gpu.driver import Cuda, Rows


@dataclass(frozen=True)
class CopySizes:
    """How much memory of the GPU copies take, and how much they give to the bus at a time."""

    least_staging_bytes: int = 24 << 20
    # Buffers of 96 MiB: larger ones are no faster, and all of them may be queued at once.
    most_staging_bytes: int = 640 << 20
    queued_bytes: int = 224 << 20  # four milliseconds of the bus, or all buffers once
    small_slice_bytes: int = 16 << 20
    # 1.8 ms: an engine may begin to compute while they are under way.
    large_slice_bytes: int = 96 << 20


COPY_SIZES = CopySizes()


class Slice(NamedTuple):
    """Its number, and what was copied in it so far."""

    number: int
    nbytes: int


class CopyStreams:
    """For one thread, but for `engine_busy`. Nothing is given to the driver before the batch is
    run."""

    def __init__(self, device: Cuda, sizes: CopySizes = COPY_SIZES) -> None:
        self.streams = device.stream(), device.stream()
        self.slice = Slice(0, 0)
        self.engine_busy = True  # to an engine that computes; its thread may change that
        self._bytes_per_slice = {
            True: sizes.small_slice_bytes,
            False: sizes.large_slice_bytes,
        }

    @property
    def stream(self) -> Any:
        """Of the present slice. What it waits for, later slices wait for, too."""
        return self.streams[self.slice.number % 2]

    def to_host(self, batch: Any, rows: Rows) -> None:
        for part in self._parts(batch, rows):
            batch.to_host(self.stream, part)

    def to_device(self, batch: Any, rows: Rows) -> None:
        for part in self._parts(batch, rows):
            batch.to_device(self.stream, part)

    def mark(self, batch: Any) -> Any:
        """When all are over that were asked for so far."""
        return batch.mark(self.stream)

    def _parts(self, batch: Any, rows: Rows) -> Iterator[Rows]:
        """The rows for the stream of that moment."""
        start = 0
        while start < rows.number:
            most = self._bytes_per_slice[self.engine_busy]
            if self.slice.nbytes >= most:
                over = batch.mark(self.stream)
                self.slice = Slice(self.slice.number + 1, 0)
                batch.after(self.stream, over)
            fitting = max(1, (most - self.slice.nbytes) // rows.nbytes)
            number = min(rows.number - start, fitting)
            yield rows if number == rows.number else rows.part(start, number)
            self.slice = Slice(self.slice.number, self.slice.nbytes + number * rows.nbytes)
            start += number
