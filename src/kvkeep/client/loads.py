"""Loads: blocks from the server into engine memory, verified.

`Load` begins the loads of several requests together and finishes when all of them are in place.
`BlockingLoader` makes one load in the engine's own thread, for a request that is alone.

With verification off, blocks are stored with checksum 0. A client that verifies does not load them:
what cannot be proven right is not used."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import read_found
from kvkeep.client.connection import Connection
from kvkeep.client.copier import Fetched, LoadCopy, row_addresses
from kvkeep.client.rank_memory import RankMemory
from kvkeep.client.requests import NO_BLOCK, LoadOutcome, LoadRequest
from kvkeep.errors import PoolError
from kvkeep.kv.checksum import ABSENT, checksum_at
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m


class QueuedLoad(NamedTuple):
    """A load that waits for its thread, and the engine's mark of when it was handed over."""

    job: Hashable
    request: LoadRequest
    mark: Any


def take_together(
    waiting: deque[QueuedLoad], block_bytes: int, most_bytes: int
) -> list[QueuedLoad]:
    """Takes the next load, and those behind it while all together have at most `most_bytes`."""
    loads, nbytes = list[QueuedLoad](), 0
    while waiting:
        nbytes += waiting[0].request.blocks * block_bytes
        if loads and nbytes > most_bytes:
            break
        loads.append(waiting.popleft())
    return loads


class Load:
    """Loads of some requests under way. After `finish`, `loaded[i]` is True where a block of
    request i is in place and verified. Slots are read under the caller's lease, and the pool's
    memory stays ours until then."""

    def __init__(
        self,
        memory: RankMemory,
        requests: Sequence[LoadRequest],
        ready: Sequence[Any] = (),
        ahead: Fetched | None = None,
    ) -> None:
        """Begins after those marks of the engine's. What was fetched `ahead` is not fetched again.
        RequestError if block ids are not given for every group that the engine has."""
        tables = [memory.table(request.block_ids) for request in requests]
        self._memory = memory
        self._connection = memory.connection
        self._requests = requests
        self.loaded = [np.zeros(request.blocks, dtype=np.bool_) for request in requests]
        self._sound: list[int] = []  # requests that this server can serve
        self._under_way: list[tuple[NDArray[np.int64], NDArray[np.bool_], LoadCopy]] = []
        self._pool = contextlib.ExitStack()
        self._take_sound(self._connection.epoch)
        if self._connection.segments is not None:
            self._begin(tables, ready, ahead)
            return
        for number in self._sound:
            self.loaded[number] = self._fetch(requests[number], tables[number], ready)
        self._sound = []

    def _take_sound(self, epoch: int) -> None:
        is_near = self._connection.segments is not None
        for number, request in enumerate(self._requests):
            if request.epoch != epoch:
                self._connection.counters.fail("stale_epoch")
            elif is_near and len(request.slots) != request.blocks:
                self._connection.counters.fail("no_slots")
            else:
                self._sound.append(number)

    # -- from slots

    def _begin(
        self, tables: Sequence[NDArray[np.int64]], ready: Sequence[Any], ahead: Fetched | None
    ) -> None:
        """Gives all of it to the copier."""
        if not self._sound:
            return
        loads = [self._requests[number] for number in self._sound]
        slots = _joined([request.slots for request in loads])
        table = _joined([tables[number] for number in self._sound], axis=1)
        checksums = _joined([request.checksums for request in loads])
        try:
            for group, block_ids in enumerate(table):
                wanted = (block_ids != NO_BLOCK).nonzero()[0]
                place = self._memory.addresses(group, slots[wanted], loads[0].epoch)
                addresses = self._pool.enter_context(place)
                if addresses is None:  # the pool is gone
                    self._sound = []
                    break
                sums = checksums[wanted, self._memory.shard(group)]
                expected = sums if self._connection.verify else None
                copy = self._memory.copier.begin_load(
                    group, block_ids[wanted], addresses, expected, ready, ahead
                )
                self._under_way.append((wanted, sums != ABSENT, copy))
        except PoolError as error:
            self._memory.was_cut_off(error)
            self._sound = []
            self._close()
        except BaseException:
            # guard: raised again; no copy may go on into memory that is given away
            self._close()
            raise

    @property
    def ready_s(self) -> float:
        """When the engine had done what had to come first, if that was waited for when the load
        began; else 0."""
        return max((copy.ready_s for _, _, copy in self._under_way), default=0.0)

    def finish(self) -> list[NDArray[np.bool_]]:
        """Waits for all of it."""
        try:
            results = [(wanted, written, copy.good()) for wanted, written, copy in self._under_way]
        finally:
            self._close()
        if self._sound:
            self._judge(results)
        return self.loaded

    def _close(self) -> None:
        with self._pool, contextlib.ExitStack() as all_of_them:  # also those after one that fails
            for _, _, copy in self._under_way:
                all_of_them.callback(copy.close)
        self._under_way = []

    def _judge(
        self, results: list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]
    ) -> None:
        ends = list(accumulate(self._requests[number].blocks for number in self._sound))
        loaded = np.ones(ends[-1], dtype=np.bool_)
        for wanted, written, good in results:
            # Verified or not, a block that was never written cannot be loaded. That is no fault of
            # the server either.
            loaded[wanted] &= good & written
            bad = wanted[~good & written]
            if len(bad):
                owners = np.searchsorted(ends, bad, side="right")
                for owner in np.unique(owners).tolist():
                    request = self._requests[self._sound[owner]]
                    first = ends[owner] - request.blocks
                    report_bad(self._connection, request, bad[owners == owner] - first)
        for number, end in zip(self._sound, ends, strict=True):
            self.loaded[number] = loaded[end - self._requests[number].blocks : end]

    # -- over the network

    def _fetch(
        self, request: LoadRequest, table: NDArray[np.int64], ready: Sequence[Any]
    ) -> NDArray[np.bool_]:
        """Loads one request by messages, under a lease of its own."""
        connection = self._connection
        loaded = np.zeros(request.blocks, dtype=np.bool_)
        message = m.Lookup(
            request.tenant,
            connection.layout_number,
            request.keys,
            request.skip,
            trace=connection.carried(request.trace),
        )
        # Bytes of other loads may come before the answer: a lookup's deadline would be too short.
        lookup = connection.call(message, connection.options.store_deadline_ms)
        shards = len(connection.shape.shard_bytes)
        try:
            hit = read_found(connection.wait(lookup), request.keys, request.skip, shards)
            count = min(len(hit.checksums), len(loaded)) if hit is not None else 0
            loaded[:count] = True
            for group, block_ids in enumerate(table):
                if hit is None or (block_ids[:count] == NO_BLOCK).all():
                    continue
                sums = hit.checksums[:count, self._memory.shard(group)]
                fetched = self._fetch_group(lookup.number, group, block_ids[:count], sums, ready)
                loaded[len(fetched) : count] = False
                loaded[: len(fetched)] &= fetched
                bad = np.flatnonzero(~fetched & (sums[: len(fetched)] != ABSENT))
                report_bad(connection, request, bad)
        finally:
            connection.give_up(lookup)  # also if a copy fails
            connection.poll()  # the server is told now
        return loaded

    def _fetch_group(
        self,
        lease: int,
        group: int,
        block_ids: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        ready: Sequence[Any],
    ) -> NDArray[np.bool_]:
        """Whether each block that came is good and in place, or not wanted. Shorter than
        `block_ids` if not all came."""
        connection, memory = self._connection, self._memory
        nbytes, at_a_time = memory.nbytes(group), memory.blocks_per_message(group)
        fetched = np.zeros(0, dtype=np.bool_)
        for start in range(0, len(block_ids), at_a_time):
            some = block_ids[start : start + at_a_time]
            message = m.Fetch(lease, memory.shard(group), start, len(some))
            call = connection.call(message, connection.options.store_deadline_ms)
            if not isinstance(connection.wait(call), m.Done):
                break
            if [len(frame) for frame in call.payload] != [nbytes] * len(some):
                connection.counters.fail("bad_payload")
                break
            received = np.frombuffer(b"".join(call.payload), dtype=np.uint8)
            rows = row_addresses(received.reshape(len(some), nbytes))
            # Bytes that crossed a network are always checked, before they touch engine memory.
            good = checksum_at(rows, nbytes) == checksums[start : start + len(some)]
            usable = good & (some != NO_BLOCK)
            memory.copier.begin_load(group, some[usable], rows[usable], None, ready).good()
            fetched = np.concatenate((fetched, good | (some == NO_BLOCK)))
        return fetched


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


class BlockingLoader:
    """Loads that an engine with nothing else to do makes in its own thread, while no other thread
    loads.

    An engine learns which slots it can load before it has blocks for them. Until it has, the bus
    would stand idle, but only the last part of the way needs to know the blocks:

        fetch    slots ── bus ──► staging memory                 while the engine looks for blocks
        load                      staging memory ──► blocks      and the rest as in every load

    With verification off nothing would show that the bytes come from other slots. So they serve
    only a load of the same owner and the same slots, and the caller of `fetch` calls `load` or
    `drop` before it releases the slots. The engine computes nothing meanwhile, so copies
    need not interleave with its own."""

    def __init__(self, memory: RankMemory, fail: Callable[[str], None]) -> None:
        """`fail` is called when something went wrong inside."""
        self._memory = memory
        self._fail = fail
        self._owner: Hashable = None
        self._fetched: Fetched | None = None
        self._began_s = 0.0
        self._pool = contextlib.ExitStack()  # memory that something is fetched from

    def fetch(self, owner: Hashable, epoch: int, slots: NDArray[np.int64]) -> bool:
        """Begins with the first of these slots, where that can be done: an engine with one group,
        on a GPU, on the server's host. Returns whether any are on their way."""
        self.drop()
        connection = self._memory.connection
        is_near = connection.segments is not None and epoch == connection.epoch
        if not is_near or len(self._memory.groups) != 1 or not len(slots):
            return False
        self._began_s = time.perf_counter()
        try:
            addresses = self._pool.enter_context(self._memory.addresses(0, slots, epoch))
            if addresses is not None:
                self._memory.copier.set_engine_busy(False)
                self._owner = owner
                self._fetched = self._memory.copier.fetch_ahead(0, addresses)
        except Exception:  # guard: the load fetches all of it
            self._fail("load")
        if not self._fetched:
            self.drop()
        return self._fetched is not None

    def load(self, request: LoadRequest, owner: Hashable) -> LoadOutcome:
        """Loads and waits. Drops what was fetched for another owner."""
        if owner != self._owner:
            self.drop()
        began_s = time.perf_counter() if self._fetched is None else self._began_s
        loaded = None
        try:
            self._memory.copier.set_engine_busy(False)
            ready = [self._memory.copier.mark()]
            [loaded] = Load(self._memory, [request], ready, self._fetched).finish()
        except Exception:
            # guard: whatever goes wrong here is a failed load to the engine, never its end
            self._fail("load")
        self.drop()
        return request.outcome(loaded, time.perf_counter() - began_s)

    def drop(self) -> None:
        """Waits for what was fetched, and forgets it."""
        fetched, self._owner, self._fetched = self._fetched, None, None
        try:
            with self._pool:
                if fetched is not None:
                    fetched.close()
        except Exception:  # guard: an engine that drops it needs nothing of it
            self._fail("load")
