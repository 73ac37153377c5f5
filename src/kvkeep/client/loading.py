"""Loads of some requests' blocks from slots: begun together, and finished when all of them are in
place."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.connection import Connection
from kvkeep.client.copier import Fetched, LoadCopy
from kvkeep.client.rank_memory import RankMemory
from kvkeep.client.requests import LoadRequest
from kvkeep.client.sources import NO_BLOCK
from kvkeep.errors import PoolError
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

Load = tuple[Hashable, LoadRequest, Any]  # job, blocks, and a mark of the engine's


def take_together(waiting: deque[Load], block_bytes: int, most_bytes: int) -> list[Load]:
    """The next one, and those behind it that are small enough to come along."""
    loads, nbytes = list[Load](), 0
    while waiting:
        nbytes += waiting[0][1].blocks * block_bytes
        if loads and nbytes > most_bytes:
            break
        loads.append(waiting.popleft())
    return loads


class Loading:
    """`loaded[i]` is, after `finish`, True where a block of request i is in place and verified. The
    pool's memory stays ours until then."""

    def __init__(self, memory: RankMemory, requests: Sequence[LoadRequest]) -> None:
        self._memory = memory
        self._connection = memory.connection
        self._requests = requests
        self.loaded = [np.zeros(request.blocks, dtype=np.bool_) for request in requests]
        self._sound: list[int] = []
        self._under_way: list[tuple[NDArray[np.int64], NDArray[np.bool_], LoadCopy]] = []
        self._pool = contextlib.ExitStack()

    def begin(self, epoch: int, ready: Sequence[Any], ahead: Fetched | None = None) -> None:
        """Gives all of it to the copier, but for what was fetched ahead."""
        for number, request in enumerate(self._requests):
            if request.epoch != epoch:
                self._connection.counters.fail("stale_epoch")
            elif len(request.slots) != request.blocks:
                self._connection.counters.fail("no_slots")
            else:
                self._sound.append(number)
        if not self._sound:
            return
        loads = [self._requests[number] for number in self._sound]
        slots = _joined([request.slots for request in loads])
        table = _joined([self._memory.table(request.block_ids) for request in loads], axis=1)
        checksums = _joined([request.checksums for request in loads])
        try:
            for piece, block_ids in enumerate(table):
                wanted = (block_ids != NO_BLOCK).nonzero()[0]
                place = self._memory.addresses(piece, slots[wanted], epoch)
                addresses = self._pool.enter_context(place)
                if addresses is None:  # the pool is gone
                    self._sound = []
                    break
                sums = checksums[wanted, self._memory.shard(piece)]
                expected = sums if self._connection.verify else None
                moving = self._memory.copier.begin_load(
                    piece, block_ids[wanted], addresses, expected, ready, ahead
                )
                self._under_way.append((wanted, sums != ABSENT, moving))
        except PoolError as error:
            self._memory.was_cut_off(error)
            self._sound = []
            self._close()
        except BaseException:
            # guard: raised again; nobody may have memory that a copy still goes to
            self._close()
            raise

    @property
    def ready_s(self) -> float:
        """When the engine had done what had to come first, if that was waited for when it began;
        else 0."""
        return max((moving.ready_s for _, _, moving in self._under_way), default=0.0)

    def finish(self) -> list[NDArray[np.bool_]]:
        """Waits for all of it."""
        try:
            results = [
                (wanted, written, moving.good()) for wanted, written, moving in self._under_way
            ]
        finally:
            self._close()
        if self._sound:
            self._judge(results)
        return self.loaded

    def _close(self) -> None:
        with self._pool, contextlib.ExitStack() as all_of_them:  # also those after one that fails
            for _, _, moving in self._under_way:
                all_of_them.callback(moving.close)
        self._under_way = []

    def _judge(
        self, results: list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]
    ) -> None:
        ends = list(accumulate(self._requests[number].blocks for number in self._sound))
        loaded = np.ones(ends[-1], dtype=np.bool_)
        for wanted, written, good in results:
            # Verified or not, what was never written cannot be loaded. It is no fault of the server
            # either.
            loaded[wanted] &= good & written
            bad = wanted[~good & written]
            if len(bad):
                owners = np.searchsorted(ends, bad, side="right")
                for owner in np.unique(owners).tolist():
                    request = self._requests[self._sound[owner]]
                    report_bad(
                        self._connection,
                        request,
                        bad[owners == owner] - (ends[owner] - request.blocks),
                    )
        for number, end in zip(self._sound, ends, strict=True):
            self.loaded[number] = loaded[end - self._requests[number].blocks : end]


def report_bad(connection: Connection, request: LoadRequest, positions: NDArray[np.int64]) -> None:
    """Tells the server which blocks did not match, so that it checks them. Does not wait for a
    reply."""
    for position in positions.tolist():
        at = (request.skip + position) * KEY_BYTES
        key = request.keys[at : at + KEY_BYTES]
        connection.counters.fail("bad_block")
        connection.call(
            m.ReportBad(request.tenant, connection.layout_number, key),
            connection.options.store_deadline_ms,
        )


def _joined(arrays: Sequence[NDArray[Any]], axis: int = 0) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)
