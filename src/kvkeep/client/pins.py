"""Maps the server's pool ahead of its use, and lets a GPU reach it, segment by segment: it takes a
while, and what is not done yet can be used."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvkeep.client.connection import Connection
from kvkeep.wire.segments import Segments

log = logging.getLogger(__name__)

_UNPINNED_S = 0.2  # until a new server's memory is looked at
_RESTS = 4  # times as long as the driver took, which lets an engine start no kernel meanwhile
POOL_REGISTERED = "kvkeep: the server's pool is mapped and registered with the GPU's driver"


def populate(connection: Connection) -> bool:
    """Maps a little more of the pool. Whether there was any left."""
    with connection.pool(connection.epoch) as pool:
        return pool is not None and pool[0].populate_next()


class Pins:
    """For a GPU's copier, and a thread of its own.

    Taking a large pool back from the driver takes seconds. Whoever is the last to let go of it may
    be the engine's own thread, so it is done in this one, too."""

    def __init__(self, connection: Connection, copier: Any) -> None:
        self._connection = connection
        self._copier = copier
        self._lock = threading.Lock()
        self._ended: list[Segments] = []  # pools that nobody uses any more
        self._is_over = False
        self._is_closing: Callable[[], bool] = lambda: False
        self._rests_until_s = 0.0
        self._told = 0  # in which epoch it was said that all is done

    def run(self, wake: Any, is_closing: Callable[[], bool]) -> None:
        """Until that is so; whoever makes it so notifies `wake`."""
        self._is_closing = is_closing
        try:
            while not is_closing():
                if not self.go_on():
                    with wake:
                        wake.wait_for(is_closing, _UNPINNED_S)
        except Exception:  # guard: what is not registered goes through a bounce buffer
            self._connection.counters.fail("internal_error")
            log.exception("kvkeep: a %s failed inside the client", "thread")
        finally:
            with self._lock:
                self._is_over = True
            self._unmap()

    def go_on(self) -> bool:
        """A little more. Whether there was any left."""
        self._unmap()
        with self._connection.pool(epoch := self._connection.epoch) as pool:
            if pool is None:
                return False
            segments, _ = pool
            segments.unmapped_by = self._take
            if segments.populate_next(self._pin, self._unpin):
                return True
            if segments.is_populated and epoch != self._told:
                self._told = epoch
                log.info(POOL_REGISTERED)
            return False

    def _take(self, segments: Segments) -> None:
        """From any thread; in that one if this has ended."""
        with self._lock:
            if not self._is_over:
                self._ended.append(segments)
                return
        segments.unmap()

    def _unmap(self) -> None:
        while self._ended:
            self._ended.pop(0).unmap()

    def _pin(self, address: int, nbytes: int) -> bool:
        return bool(self._at_leisure(self._copier.pin, address, nbytes))

    def _unpin(self, address: int) -> None:
        self._at_leisure(self._copier.unpin, address)

    def _at_leisure(self, work: Callable[..., Any], *given: int) -> Any:
        """After a rest, unless all ends, or another thread does it in place of this one."""
        if not (self._is_over or self._is_closing()):
            time.sleep(max(0.0, self._rests_until_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            return work(*given)
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + _RESTS * (ended_s - began_s)
