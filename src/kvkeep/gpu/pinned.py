"""Which host memory the bus can reach, and how few copies it takes to move what lies in it."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int, int, int]  # address, distance, place of the first among all areas, count


class Pinned:
    """Ranges of addresses that are registered with the GPU's driver. No copy may cross from one into the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}
        self._sorted = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

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
        self._sorted = (
            np.array([start for start, _ in ordered], np.uint64),
            np.array([stop for _, stop in ordered], np.uint64),
        )

    def runs(self, addresses: NDArray[np.uint64], nbytes: int) -> list[Run] | None:
        """Areas of `nbytes` as runs that one copy takes each: equally far apart, and registered together. None if not
        all of them are registered."""
        starts, stops = self._sorted
        if not len(addresses) or not len(starts):
            return None
        part = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
        if (part < 0).any() or (addresses + np.uint64(nbytes) > stops[part]).any():
            return None
        steps = np.diff(addresses.astype(np.int64))
        steps[(np.diff(part) != 0) | (steps < nbytes)] = 0  # no copy goes across
        runs: list[Run] = []
        at, listed, places = 0, steps.tolist(), addresses.tolist()
        while at < len(places):
            stop = at + 1
            step = listed[at] if at < len(listed) else 0
            while step and stop - 1 < len(listed) and listed[stop - 1] == step:
                stop += 1
            runs.append((places[at], step or nbytes, at, stop - at))
            at = stop
        return runs
