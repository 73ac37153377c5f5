"""Which host memory the bus can reach, and how few copies it takes to move what lies in it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int, int, int]  # address, distance, place of the first among all areas, count


class Pinned:
    """Ranges of addresses that are registered with the GPU's driver. No copy may cross from one
    into the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}
        self._sorted: tuple[list[int], list[int]] = ([], [])  # where they begin and end

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._ranges[address] = address + nbytes
            self._sort()

    def remove(self, address: int) -> bool:
        """Whether it was there."""
        with self._lock:
            found = self._ranges.pop(address, None)
            self._sort()
            return found is not None

    def _sort(self) -> None:
        ordered = sorted(self._ranges.items())
        self._sorted = [start for start, _ in ordered], [stop for _, stop in ordered]

    def runs(
        self, addresses: NDArray[np.uint64], nbytes: int, at_a_time: int
    ) -> Iterator[list[Run] | None]:
        """Areas of `nbytes`, so many at a time, as runs that one copy takes each: equally far
        apart, and registered together. None for those of which not all are registered."""
        # Lists, and only as far as they are asked for: somebody waits for the first, and they are
        # few at a time.
        for start in range(0, len(addresses), at_a_time):
            yield self._runs(addresses[start : start + at_a_time].tolist(), nbytes)

    def _runs(self, places: Sequence[int], nbytes: int) -> list[Run] | None:
        starts, stops = self._sorted
        runs: list[Run] = []
        low = high = 0  # the range that the last one is in
        first = step = count = 0  # of the run that grows
        for at, place in enumerate(places):
            distance = place - places[at - 1]
            if place < low or place + nbytes > high:
                number = bisect_right(starts, place) - 1
                if number < 0 or place + nbytes > stops[number]:
                    return None
                low, high, distance = starts[number], stops[number], 0  # no copy goes across
            if count and distance >= nbytes and (count == 1 or distance == step):
                step, count = distance, count + 1
                continue
            if count:
                runs.append((places[first], step or nbytes, first, count))
            first, step, count = at, 0, 1
        if count:
            runs.append((places[first], step or nbytes, first, count))
        return runs
