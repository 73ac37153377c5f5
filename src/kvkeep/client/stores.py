"""Stores: the engine blocks that a store reads, and its way to the server.

    begin    asks the server for slots of the first parts
    copy     reads the blocks of each part into its slots, and asks for the next ones meanwhile
    finish   waits until each part has arrived, tells the server, and waits for its answers

One thread begins and copies stores, another finishes them (`kvkeep.client.worker`), so that neither
the server nor the bus waits for the other.

    store thread      copy A ── copy B ── copy C
    departure thread       └─ A arrives, CompleteStore, answered ── B arrives, …

An engine that keeps its blocks still until a store is reported never evacuates. One that may need a
block at any moment says so before it writes into it: blocks that were not copied yet are evacuated
into a buffer of our own, or the store ends before them. Either way no copy reads a block after
`evacuate` has returned, and that never waits for a server: at most for the few megabytes that are
being copied this moment. On a GPU "before" and "after" are places in its queues of work
(`kvkeep.gpu.copier`), and no thread waits at all."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call, Plan, read_plan
from kvkeep.client.copier import Copier, EvacuatedBlock, HostCopier, StoreCopy, row_addresses
from kvkeep.client.rank_memory import GroupMemory, RankMemory
from kvkeep.client.requests import NO_BLOCK, StoreRequest
from kvkeep.client.threads import Threads
from kvkeep.errors import PoolError
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

_MOST_EVACUATED_BYTES = 64 << 20  # of all stores together
_MOST_BYTES_AT_ONCE = 16 << 20  # evacuated before one step: some four milliseconds
_BLOCKS_PER_PART = 512  # the server takes no more in one store
_PARTS_ASKED_FOR = 2  # at a time: a server that is busy with others must not leave the bus idle


class Part(NamedTuple):
    """Blocks start..stop-1 of a store, and which of the rank's groups: all shards of one group, or
    one of them."""

    start: int
    stop: int
    groups: Sequence[int]


class CopiedBlocks:
    """Blocks that were read, and may still be on their way."""

    def __init__(
        self,
        checksums: NDArray[np.uint64],
        copy: StoreCopy | None = None,
        places: Sequence[NDArray[np.int64]] = (),
    ) -> None:
        """The blocks at `places` get their checksums from `copy`; without one all have arrived."""
        self._checksums = checksums
        self._copy = copy
        self._places = places

    def checksums(self) -> NDArray[np.uint64]:
        """Waits until all have arrived. 0 without verification, ABSENT for blocks that the engine
        does not have."""
        if self._copy is not None:
            sums = self._copy.sums()
            if self._places:
                self._checksums[np.concatenate(self._places)] = sums
        return self._checksums

    def close(self) -> None:
        """Waits until all have arrived."""
        if self._copy is not None:
            self._copy.close()


class SourceBlocks:
    """The engine blocks of one store: `block_ids[g, b]` holds group g of block b. Made in the
    engine's thread, when the blocks are computed or that is under way; `ready` is the copier's mark
    of that moment. Safe to use from two threads."""

    def __init__(
        self,
        groups: Sequence[GroupMemory],
        block_ids: NDArray[np.int64],
        copier: Copier | None = None,
        threads: Threads = threading,
        ready: Any = None,
    ) -> None:
        self._groups = groups
        self._copier = copier or HostCopier([group.runs for group in groups])
        self._ready: Any = self._copier.mark() if ready is None else ready
        self._ids = block_ids.copy()
        self._left = np.ones(block_ids.shape, dtype=np.bool_)  # not copied yet
        self._evacuated: dict[tuple[int, int], EvacuatedBlock] = {}
        self._evacuated_bytes = 0
        # The copy that reads without the lock, and of which group and blocks.
        self._reading: tuple[StoreCopy, int, NDArray[np.int64]] | None = None
        self._lock = threads.Lock()
        self.stop = block_ids.shape[1]  # blocks from here on are lost
        lacks_some = bool(block_ids.size) and block_ids.min() < 0
        for row, group in zip(block_ids, groups, strict=True):
            # The engine has no such block, so nothing after it either.
            if lacks_some and not group.may_lack and NO_BLOCK in row:
                self.stop = min(self.stop, int(np.flatnonzero(row == NO_BLOCK)[0]))

    @property
    def evacuated_bytes(self) -> int:
        with self._lock:
            return self._evacuated_bytes

    def evacuate(self, block_ids: NDArray[np.int64], allowance: int) -> tuple[int, int]:
        """The engine will write into these blocks. Returns how many of them were still to be
        copied, and how many bytes were evacuated for that, `allowance` at most."""
        with self._lock:
            if self._reading is not None:
                _, reading_group, positions = self._reading
                if np.isin(self._ids[reading_group, positions], block_ids).any():
                    self._halt()
            wanted = self._left & (self._ids != NO_BLOCK) & np.isin(self._ids, block_ids)
            wanted[:, self.stop :] = False
            spent = 0
            for number, group in enumerate(self._groups):
                positions = np.flatnonzero(wanted[number])
                room = min(len(positions), max(0, allowance - spent) // group.runs.nbytes)
                try:
                    self._evacuate(number, positions[:room])
                except MemoryError:
                    room = 0
                spent += room * group.runs.nbytes
                self._ids[number, positions] = NO_BLOCK
                if len(positions) > room and not group.may_lack:
                    self.stop = min(self.stop, int(positions[room]))
            return int(wanted.sum()), spent

    def skip(self, group: int, start: int, stop: int, but: NDArray[np.int64]) -> None:
        """Of blocks start..stop-1 only these will be copied: the server has the others."""
        with self._lock:
            self._left[group, start:stop] = False
            self._left[group, but] = True
            for number, position in [
                at for at in self._evacuated if at[0] == group and start <= at[1] < stop
            ]:
                if position not in but:
                    self._take(number, position).free()

    def give_up(self) -> None:
        """Nothing more is read."""
        with self._lock:
            self.stop = 0
            self._halt()

    def close(self) -> None:
        """Nothing more is read, and evacuated blocks go."""
        with self._lock:
            self.stop = 0
            self._halt()
            for number, position in list(self._evacuated):
                self._take(number, position).free()

    def copy(
        self,
        group: int,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        verify: bool,
    ) -> CopiedBlocks | None:
        """Copies one group of these blocks to these addresses; ends when all of them are read. None
        if a block is lost."""
        copy = self._copier.begin_store(group, verify=verify, ready=self._ready)
        copied: list[NDArray[np.int64]] = []
        to_put: list[EvacuatedBlock] = []  # evacuated blocks that are not on their way yet
        try:
            first = self._read(group, positions, addresses, copy)
            copied.append(np.arange(first))
            for start in range(first, len(positions), copy.at_a_time):
                some = slice(start, start + copy.at_a_time)
                copy.make_room()
                with self._lock:
                    lost = bool(positions[some][-1] >= self.stop)
                    if not lost:
                        ids = self._ids[group, positions[some]]
                        there = ids != NO_BLOCK
                        copy.gather(ids[there], addresses[some][there])
                        self._left[group, positions[some]] = False
                        saved = {
                            at: self._take(group, int(positions[some][at]))
                            for at in np.flatnonzero(~there).tolist()
                            if (group, int(positions[some][at])) in self._evacuated
                        }
                if lost:
                    # outside the lock: it waits for the GPU, and `evacuate` must not
                    copy.close()
                    return None
                to_put += saved.values()
                copy.deliver()
                for at, each in saved.items():
                    to_put.remove(each)  # the copy frees it
                    copy.put(each, int(addresses[some][at]))
                copied += [
                    start + np.flatnonzero(there),
                    start + np.array(list(saved), dtype=np.int64),
                ]
            copy.end()
        except BaseException:
            # guard: raised again; no copy may go on into memory that is given away
            try:
                copy.close()
            finally:
                for each in to_put:
                    each.free()
            raise
        checksums = np.full(len(positions), ABSENT, dtype=np.uint64)
        return CopiedBlocks(checksums, copy, copied)

    def _read(
        self,
        group: int,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        copy: StoreCopy,
    ) -> int:
        """Copies a prefix without taking the lock for each few; returns how many blocks. Returns 0
        if some are lost or evacuated."""
        with self._lock:
            ids = self._ids[group, positions]
            if not len(positions) or positions[-1] >= self.stop or (ids == NO_BLOCK).any():
                return 0
            self._left[group, positions] = False
            self._reading = copy, group, positions
        count = 0
        try:
            count = copy.read(ids, addresses)
        finally:
            with self._lock:
                self._reading = None
                self._left[group, positions[count:]] = True
        return count

    def _halt(self) -> None:
        """With the lock held: from now on blocks are read only with the lock held."""
        if self._reading is not None:
            copy, group, positions = self._reading
            self._left[group, positions[copy.halt() :]] = True

    def _take(self, group: int, position: int) -> EvacuatedBlock:
        """The evacuated copy of this block, which is not kept here any longer."""
        saved = self._evacuated.pop((group, position))
        self._evacuated_bytes -= saved.nbytes
        return saved

    def _evacuate(self, group: int, positions: NDArray[np.int64]) -> None:
        for position, saved in zip(
            positions.tolist(),
            self._copier.evacuate(group, self._ids[group, positions]),
            strict=True,
        ):
            self._evacuated[group, position] = saved
            self._evacuated_bytes += saved.nbytes


def source_blocks(memory: RankMemory, requests: Collection[StoreRequest]) -> list[SourceBlocks]:
    """The blocks that these stores read, for the engine's thread. RequestError if block ids are not
    given for every group that the engine has."""
    tables = [memory.table(request.block_ids) for request in requests]
    ready = memory.copier.mark() if tables else None
    threads = memory.connection.threads
    return [SourceBlocks(memory.groups, table, memory.copier, threads, ready) for table in tables]


def evacuate(stores: Collection[SourceBlocks], block_ids: Sequence[int]) -> int:
    """The engine will write into these blocks. Returns how many of them were still to be copied."""
    ids, taken = np.asarray(block_ids, dtype=np.int64), 0
    evacuated_bytes = sum(sources.evacuated_bytes for sources in stores)
    allowance = min(_MOST_BYTES_AT_ONCE, _MOST_EVACUATED_BYTES - evacuated_bytes)
    for sources in stores:
        count, nbytes = sources.evacuate(ids, allowance)
        taken += count
        allowance -= nbytes
    return taken


class _CopiedPart(NamedTuple):
    """A part that was read: the call that gave its slots, and each of its shards. To leave `pool` is
    to wait until all have arrived; until then the pool's memory stays ours."""

    call: Call
    shards: Sequence[CopiedBlocks]
    pool: contextlib.ExitStack


class Store:
    """One store under way, group by group and each group in parts. Only the last group's parts are
    left to `finish`; those before it end inside `copy`. `copy` and `finish` may run in two threads
    at once, and another store may begin before this one has ended."""

    def __init__(
        self,
        memory: RankMemory,
        request: StoreRequest,
        sources: SourceBlocks,
        job: Hashable = None,
    ) -> None:
        self.job = job
        self.request = request
        self.sources = sources
        self.began_ns = time.time_ns()
        self.written = 0  # blocks, known when it is finished
        self.is_complete = False  # whether the server has all of them now
        self._memory = memory
        self._connection = memory.connection
        self._deadline_ms = self._connection.options.store_deadline_ms
        self._groups = deque(memory.store_order)  # the first one is under way
        self._is_over = False  # nothing more is stored of the group that is under way
        self._more = self._connection.threads.Condition()
        # Of the group that is under way.
        self._unused: list[Call] = []  # slots that no copy goes to yet
        self._copied: deque[_CopiedPart | None] = deque()  # None: there is no more
        self._completions: list[tuple[Call, Call]] = []  # PrepareStore, CompleteStore
        self._parts: Iterator[Part] = iter(())  # that the server was not asked about
        self._asked: deque[tuple[Part, Call]] = deque()
        self._takes_all = False

    def begin(self) -> None:
        """Asks the server for the first slots."""
        self._parts = self._cut_into_parts()
        self._completions = []
        self._takes_all = self._is_over = False
        try:
            self._ask_ahead()
        except BaseException:  # guard: raised again; slots that were asked for go back
            self._end_copy()
            raise

    def copy(
        self,
        before_last: Callable[[], None] = lambda: None,
        departing: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies all that the server takes; the last parts may still be on their way afterwards.
        Slots that nothing is copied to go back. Calls `before_last` when the server was asked for
        the last slots, so that another store can begin; `departing` once, when `finish` may be
        called."""
        try:
            while len(self._groups) > 1:
                self._copy_group()
                self.finish()
                if not self.is_complete:
                    return
                self.is_complete = False
                self._groups.popleft()
                self.begin()
        except BaseException:
            # guard: raised again; what was copied before arrives, and is completed or given back
            self._end_copy()
            with contextlib.suppress(Exception):  # guard: the first fault is the one to report
                self.finish()
            self._is_over = True
            self.is_complete = False
            raise
        finally:
            departing()
        self._copy_group(before_last)

    def abandon(self) -> None:
        """Called instead of `copy`: nothing is stored."""
        self._is_over = True
        self._end_copy()

    def finish(self) -> None:
        """Waits until each part that was copied has arrived, tells the server of it, and waits for
        the answers; `written` and `is_complete` are right then. Slots of a part that did not arrive
        go back."""
        if self._is_over:
            return
        try:
            while (part := self._take_copied()) is not None:
                self._complete(part)
        except BaseException:
            # guard: raised again; slots go back when no copy goes there any more
            while (part := self._take_copied()) is not None:
                part.pool.close()
                self._connection.give_up(part.call)
            raise
        written, all_done = 0, True
        for prepared, completion in self._completions:
            done = self._connection.wait(completion)
            if isinstance(done, m.Done):
                written += done.count
            else:
                self._connection.give_up(prepared)
                all_done = False
        # a block whose shards were stored apart counts once
        self.written = min(max(self.written, written), self.request.blocks)
        self.is_complete = self._takes_all and all_done
        self._is_over = True

    def run(self) -> None:
        """All of it, in this thread. Slots that are not filled go back, also when this raises for a
        request that is wrong in itself."""
        self.begin()
        try:
            self.copy()
        finally:
            self.finish()

    def _copy_group(self, before_last: Callable[[], None] = lambda: None) -> None:
        try:
            self._takes_all = self._copy_parts(before_last)
        finally:
            self._end_copy()

    def _copy_parts(self, before_last: Callable[[], None]) -> bool:
        """Whether the server takes all of it."""
        complete = True
        while self._asked:
            part, call = self._asked.popleft()
            if not self._asked:
                before_last()  # while the server is at work on this part
            self._connection.poll()
            if not call.done:
                self._let_depart()
            plan = read_plan(self._connection.wait(call), part.stop - part.start)
            complete &= plan is not None and not plan.refused
            if plan is None:
                break
            positions = part.start + plan.positions.astype(np.int64)
            if plan.apart and len(part.groups) > 1:
                alone = [part._replace(groups=[group]) for group in part.groups]
                self._parts = itertools.chain(alone, self._parts)
            else:
                for group in part.groups:
                    self.sources.skip(group, part.start, part.stop, positions)
            if plan.refused:
                self._connection.counters.fail("orphan" if plan.orphan else "no_room")
                if self._asked:
                    self._asked.clear()
                    before_last()
            else:
                self._ask_ahead()  # the server works while this part is copied
            if not len(plan.positions):
                self._unused.remove(call)
                continue
            self._let_depart()
            copied = self._write(call, part, positions, plan)
            if copied is None:
                return False
            self._unused.remove(call)
            self._put_copied(copied)
        return complete

    def _end_copy(self) -> None:
        """Nothing more is copied; unused slots go back."""
        unused, self._unused = self._unused, []
        try:
            for call in unused:
                self._connection.give_up(call)
        finally:  # or `finish` would wait for ever
            self._put_copied(None)
            self._let_depart()

    def _complete(self, part: _CopiedPart) -> None:
        """Waits until a part has arrived, and tells the server."""
        try:
            with part.pool:
                sums = [shard.checksums() for shard in part.shards]
        except BaseException:  # guard: raised again, as above
            self._connection.give_up(part.call)
            raise
        checksums = sums[0] if len(sums) == 1 else np.stack(sums, axis=1)  # a block's together
        trace = self._connection.carried(self.request.trace)
        message = m.CompleteStore(part.call.number, checksums.tobytes(), trace)
        completion = self._connection.call(message, self._deadline_ms)
        self._completions.append((part.call, completion))

    def _put_copied(self, part: _CopiedPart | None) -> None:
        """The thread that waits for it is woken by `_let_depart`."""
        with self._more:
            self._copied.append(part)

    def _let_depart(self) -> None:
        """While the next part is copied: before that, the other thread would only take the
        interpreter and the connection from this one."""
        with self._more:
            self._more.notify_all()

    def _take_copied(self) -> _CopiedPart | None:
        with self._more:
            while not self._copied:
                self._more.wait()
            return self._copied.popleft()

    def _cut_into_parts(self) -> Iterator[Part]:
        """At least one. The first of several is small, because the server answers sooner then; the
        others are about as large as each other."""
        groups, count = self._groups[0], self.request.blocks
        nbytes = sum(map(self._memory.nbytes, groups))
        copier, welcome = self._memory.copier, self._connection.welcome
        limit = welcome.limits.blocks_per_request if welcome else _BLOCKS_PER_PART
        most = min(_BLOCKS_PER_PART, limit)
        if count <= max(1, min(most, copier.whole_bytes // nbytes)):
            yield Part(0, count, groups)
            return
        first = max(1, min(most, copier.first_bytes // nbytes))
        yield Part(0, first, groups)
        left = count - first
        parts = max(round(left * nbytes / copier.part_bytes), math.ceil(left / most), 1)
        size = math.ceil(left / parts)
        for start in range(first, count, size):
            yield Part(start, min(start + size, count), groups)

    def _ask_ahead(self) -> None:
        while len(self._asked) < _PARTS_ASKED_FOR and (part := next(self._parts, None)):
            self._asked.append((part, self._prepare(part)))

    def _prepare(self, part: Part) -> Call:
        request, (start, stop, groups) = self.request, part
        shard, *further_shards = map(self._memory.shard, groups)
        before = request.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES]
        message = m.PrepareStore(
            tenant=request.tenant,
            layout=self._connection.layout_number,
            shard=shard,
            parent=before if start else request.parent,
            keys=request.keys[start * KEY_BYTES : stop * KEY_BYTES],
            priority=request.priority,
            ttl_ms=request.ttl_ms,
            further_shards=further_shards,
            trace=self._connection.carried(request.trace),
        )
        call = self._connection.call(message, self._deadline_ms)
        self._unused.append(call)
        return call

    def _write(
        self, call: Call, part: Part, positions: NDArray[np.int64], plan: Plan
    ) -> _CopiedPart | None:
        """Copies the blocks that the plan names. None: they could not be written."""
        shards: list[CopiedBlocks] = []
        with contextlib.ExitStack() as pool:
            for group in part.groups:
                if len(plan.slots):
                    place = self._memory.addresses(group, plan.slots, call.epoch, call.session)
                    copied = self._copy_to(group, positions, pool.enter_context(place))
                else:
                    copied = self._put(call, part, group, positions)
                if copied is None:
                    return None
                pool.callback(copied.close)  # before the pool's memory goes
                shards.append(copied)
            return _CopiedPart(call, shards, pool.pop_all())

    def _copy_to(
        self, group: int, positions: NDArray[np.int64], addresses: NDArray[np.uint64] | None
    ) -> CopiedBlocks | None:
        if addresses is None:
            return None
        try:
            return self._read(group, positions, addresses, self._connection.verify)
        except PoolError as error:
            self._memory.was_cut_off(error)
            return None

    def _put(
        self, call: Call, part: Part, group: int, positions: NDArray[np.int64]
    ) -> CopiedBlocks | None:
        """Network plane: gathers into a buffer of our own and sends it, as many blocks at a time as
        a frame takes."""
        nbytes = self._memory.nbytes(group)
        at_a_time = self._memory.blocks_per_message(group)
        shard = self._memory.shard(group) if len(part.groups) > 1 else -1
        checksums = np.empty(len(positions), dtype=np.uint64)
        for start in range(0, len(positions), at_a_time):
            some = positions[start : start + at_a_time]
            buffer = np.zeros((len(some), nbytes), dtype=np.uint8)
            copied = self._read(group, some, row_addresses(buffer), True)
            if copied is None:
                return None
            checksums[start : start + len(some)] = copied.checksums()
            message = m.Put(call.number, start, shard)
            put = self._connection.call(message, self._deadline_ms, list(buffer))
            if not isinstance(self._connection.wait(put), m.Done):
                return None
        return CopiedBlocks(checksums)

    def _read(
        self,
        group: int,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        verify: bool,
    ) -> CopiedBlocks | None:
        copied = self.sources.copy(group, positions, addresses, verify=verify)
        if copied is None:
            self._connection.counters.fail("withdrawn")
        return copied
