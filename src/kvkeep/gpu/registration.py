"""Host memory that is registered with the GPU's driver, so that the bus reaches it directly.

`PoolRegistration` maps and registers the server's pool part by part, in a thread of its own. It
takes a while; parts that are not registered yet are usable through a bounce buffer.
`RegisteredMemory` knows which parts are, and how few copies move what lies in them."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.wire.segments import Segments

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2  # for a new server's pool
_REST = 4  # times as long as the driver took; meanwhile an engine can start kernels
POOL_REGISTERED = "kvkeep: the server's pool is mapped and registered with the GPU's driver"

CopyRun = tuple[int, int, int, int]  # address, distance, place of the first among all areas, count


class RegisteredMemory:
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
    ) -> Iterator[list[CopyRun] | None]:
        """Areas of `nbytes`, so many at a time, as runs that one copy takes each: equally far
        apart, and registered together. None for those of which not all are registered."""
        # Lists, and only as far as they are asked for: somebody waits for the first, and they are
        # few at a time.
        for start in range(0, len(addresses), at_a_time):
            yield self._runs(addresses[start : start + at_a_time].tolist(), nbytes)

    def _runs(self, places: Sequence[int], nbytes: int) -> list[CopyRun] | None:
        starts, stops = self._sorted
        runs: list[CopyRun] = []
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


class PoolRegistration:
    """Registers the pool of each server that a connection meets. `run` is for a thread of its own.

    That thread also unregisters pools. For a large one that takes seconds, and the last to let go
    of a pool may be the engine's own thread."""

    def __init__(self, connection: Any, copier: Any) -> None:
        """`connection` is a `kvkeep.client.connection.Connection`, `copier` a `GpuCopier`."""
        self._connection = connection
        self._copier = copier
        self._lock = threading.Lock()
        self._unused: list[Segments] = []  # pools to unmap
        self._has_ended = False
        self._is_closing: Callable[[], bool] = lambda: False
        self._rests_until_s = 0.0
        self._logged_epoch = 0  # whose pool was logged as registered

    def run(self, wake: Any, is_closing: Callable[[], bool]) -> None:
        """Runs until `is_closing`; the condition `wake` is notified then."""
        self._is_closing = is_closing
        try:
            while not is_closing():
                if not self.register_next():
                    with wake:
                        wake.wait_for(is_closing, _LOOK_AGAIN_S)
        except Exception:  # guard: what is not registered goes through a bounce buffer
            self._connection.counters.fail("internal_error")
            log.exception("kvkeep: a %s failed inside the client", "thread")
        finally:
            with self._lock:
                self._has_ended = True
            self._unmap_unused()

    def register_next(self) -> bool:
        """Maps and registers the next part of the pool. False if there is none."""
        self._unmap_unused()
        with self._connection.pool(epoch := self._connection.epoch) as pool:
            if pool is None:
                return False
            segments, _ = pool
            segments.unmapped_by = self._unmap_later
            if segments.populate_next(self._pin, self._unpin):
                return True
            if segments.is_populated and epoch != self._logged_epoch:
                self._logged_epoch = epoch
                log.info(POOL_REGISTERED)
            return False

    def _unmap_later(self, segments: Segments) -> None:
        """Called from any thread. Unmaps in that thread if `run` has ended."""
        with self._lock:
            if not self._has_ended:
                self._unused.append(segments)
                return
        segments.unmap()

    def _unmap_unused(self) -> None:
        while self._unused:
            self._unused.pop(0).unmap()

    def _pin(self, address: int, nbytes: int) -> bool:
        return bool(self._after_rest(self._copier.pin, address, nbytes))

    def _unpin(self, address: int) -> None:
        self._after_rest(self._copier.unpin, address)

    def _after_rest(self, work: Callable[..., Any], *given: int) -> Any:
        """The driver starts no kernel while it registers memory, so it gets a rest between two
        parts; not at the end, and not in another thread."""
        if not (self._has_ended or self._is_closing()):
            time.sleep(max(0.0, self._rests_until_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            return work(*given)
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + _REST * (ended_s - began_s)
