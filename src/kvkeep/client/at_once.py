"""Loads that an engine with nothing else to do makes in its own thread, and waits for.

An engine learns what it can load before it has blocks for it. Until it has, the bus would stand
idle, but only the last part of the way needs to know the blocks:

    fetch    slots ── bus ──► staging memory                 while the engine looks for blocks
    load                      staging memory ──► blocks      and the rest as every load

With verification off nothing would tell that such bytes are not those of a load. So they are for
the load of one owner, of the same slots, and for no other; and whoever says `fetch` says `load` or
`drop` before it lets go of the slots.

No step can begin meanwhile, so the copies need not give way to an engine's own. Whoever begins one
says whether they must."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.copier import Fetched
from kvkeep.client.requests import Finished, LoadRequest
from kvkeep.client.transfer import Transfer


class AtOnce:
    """For the engine's thread, while no other loads. `failed_inside` is told of what went wrong."""

    def __init__(self, transfer: Transfer, rank: int, failed_inside: Callable[[str], None]) -> None:
        self._transfer = transfer
        self._rank = rank
        self._failed_inside = failed_inside
        self._owner: Hashable = None
        self._fetched: Fetched | None = None
        self._began_s = 0.0  # with what is fetched
        self._pool = (
            contextlib.ExitStack()
        )  # its memory stays ours as long as anything is fetched from it

    def fetch(self, owner: Hashable, epoch: int, slots: NDArray[np.int64]) -> bool:
        """Begins with the first of these slots, where that can be done: an engine with one piece,
        on a GPU, on the server's host. Whether any are on their way."""
        self.drop()
        is_here = (
            self._transfer.connection.segments is not None
            and epoch == self._transfer.connection.epoch
        )
        if not is_here or len(self._transfer.memory.pieces) != 1 or not len(slots):
            return False
        self._began_s = time.perf_counter()
        try:
            addresses = self._pool.enter_context(self._transfer.memory.addresses(0, slots, epoch))
            if addresses is not None:
                self._transfer.copier.set_engine_busy(False)
                self._owner, self._fetched = owner, self._transfer.copier.fetch_ahead(0, addresses)
        except Exception:  # guard: the load fetches all of it
            self._failed_inside("load")
        if not self._fetched:
            self.drop()
        return self._fetched is not None

    def load(self, job: Hashable, request: LoadRequest, owner: Hashable) -> Finished:
        """Whatever was fetched for another is dropped."""
        if owner != self._owner:
            self.drop()
        began_s = time.perf_counter() if self._fetched is None else self._began_s
        failed = request.ids_of(slice(None))
        try:
            self._transfer.copier.set_engine_busy(False)
            ready = [self._transfer.copier.mark()]
            [loaded] = self._transfer.load_together([request], ready, self._fetched)
            failed = request.ids_of(~loaded)
        except Exception:
            # guard: whatever goes wrong here is a failed load to the engine, never its end
            self._failed_inside("load")
        self.drop()
        took = {job: time.perf_counter() - began_s}
        return Finished(
            self._rank, loaded=[job], failed={job: failed} if failed else {}, seconds=took
        )

    def drop(self) -> None:
        """Waits for what was fetched; nobody has it after that."""
        fetched, self._owner, self._fetched = self._fetched, None, None
        try:
            with self._pool:
                if fetched is not None:
                    fetched.close()
        except Exception:  # guard: an engine that drops it wants nothing of it
            self._failed_inside("load")
