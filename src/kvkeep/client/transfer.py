"""Blocks between engine memory and the server, on either data plane. These calls block, each up to a deadline, so
they run in a worker's own thread or for a caller who asked for it; none raises for a server's fault.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.connection import Connection
from kvkeep.client.replies import Plan, read_found, read_plan
from kvkeep.errors import PoolError, RequestError
from kvkeep.kv import native
from kvkeep.kv.checksum import checksum_at
from kvkeep.kv.copy import gather, scatter
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

_BYTES_A_PART = 128 << 20  # a store goes in parts, so that a load never waits long behind one
_BLOCKS_A_PART = 1024
_BYTES_A_MESSAGE = 8 << 20  # on the network plane: what a server sends in one reply

# With verification off, blocks are stored with checksum 0. A client that verifies does not take them: what cannot be
# proven right is not used.


def _ids(block_ids: Any) -> NDArray[np.int64]:
    """Block ids as engines have them (a list, an array, a CPU tensor) as an array. RequestError, in the thread of
    whoever made the request, for anything that is no list of integers."""
    array = np.asarray(block_ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise RequestError(
            "bad_request", f"block_ids must be integers, not {array.dtype} of shape {array.shape}", field="block_ids"
        )
    return array.astype(np.int64, copy=False)


@dataclass(frozen=True)
class StoreRequest:
    """Blocks to store: block_ids[i] of the engine holds the block of the i-th key.

    parent     the key before the first one; b"" if the first one begins the prompt
    priority   0 to 100, 50 is normal; higher ones stay longer
    ttl_ms     after that long the blocks are the first to be evicted, and served until they are; 0: like all others
    """

    tenant: str
    parent: bytes
    keys: bytes
    block_ids: NDArray[np.int64]
    priority: int = 50
    ttl_ms: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_ids", _ids(self.block_ids))
        if len(self.keys) != len(self.block_ids) * KEY_BYTES:
            raise RequestError(
                "bad_request", f"{len(self.block_ids)} blocks, but {len(self.keys)} bytes of keys", field="keys"
            )
        if len(self.parent) not in (0, KEY_BYTES):
            raise RequestError("bad_keys", f"a parent key has {KEY_BYTES} bytes, or none at a root", field="parent")
        if not 0 <= self.priority <= 100:
            raise RequestError("bad_priority", f"priority {self.priority} is not in 0..100", field="priority")
        if self.ttl_ms < 0:
            raise RequestError("bad_ttl", f"ttl_ms is {self.ttl_ms}; 0 means no limit", field="ttl_ms")


@dataclass(frozen=True)
class Stored:
    """What came of a store: how many blocks were written, and whether the server has all of them now."""

    written: int
    complete: bool


@dataclass(frozen=True)
class LoadRequest:
    """Blocks to load: those of keys[skip:], into block_ids of the engine, from the slots that a lookup gave.

    `keys` begins at the root: on the network plane the worker looks up for itself, with a lease of its own. There are
    as many block_ids as the lookup described blocks: `answer.blocks - answer.skip`.
    """

    tenant: str
    keys: bytes
    skip: int
    block_ids: NDArray[np.int64]
    epoch: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]  # [blocks, shards]

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_ids", _ids(self.block_ids))
        if len(self.slots) not in (0, len(self.block_ids)):
            raise RequestError(
                "bad_request",
                f"{len(self.block_ids)} blocks to load from {len(self.slots)} slots",
                field="block_ids",
                hint="one for each block that the lookup described: answer.blocks - answer.skip",
            )


@functools.cache
def _note_slow_copies() -> None:
    """Says once in a process that the C kernel is missing."""
    if not native.available:
        log.warning(
            "kvkeep: the C kernel was not built, blocks are copied with numpy, several times slower. "
            "Install a C compiler and reinstall kvkeep."
        )


class Transfer:
    """Moves one shard of blocks for one registered set of KV tensors."""

    def __init__(self, connection: Connection, runs: BlockRuns, shard: int) -> None:
        self._connection = connection
        self._runs = runs
        self._shard = shard
        self._store_deadline_ms = connection.options.store_deadline_ms
        _note_slow_copies()

    # -- store

    def store(self, request: StoreRequest) -> int:
        """Stores what the server lacks. Returns how many blocks were written; failures are counted, not raised."""
        return self.offer(request).written

    def offer(self, request: StoreRequest, between_parts: Callable[[], None] = lambda: None) -> Stored:
        """Stores what the server lacks; failures are counted, not raised.

        `between_parts` is called where something else may be done, also while the server lets us wait. Slots that are
        not filled are given back, also when this raises for a request that is wrong in itself.
        """
        parts = self._parts(request)
        first = self._prepare(request, next(parts))
        ahead: tuple[tuple[int, int], Call] | None = first
        begun = [first[1]]  # not yet completed
        completions: list[tuple[Call, Call]] = []
        complete = True
        try:
            while ahead is not None:
                part, call = ahead
                plan = read_plan(self._connection.wait(call, between_parts), part[1] - part[0])
                complete &= plan is not None and not plan.refused
                if plan is None:
                    break
                if plan.refused:
                    self._connection.counters.fail("orphan" if plan.orphan else "no_room")
                # Ask for the next part's slots now: the server works while this part is copied.
                following = next(parts, None) if not plan.refused else None
                ahead = self._prepare(request, following) if following else None
                if ahead is not None:
                    begun.append(ahead[1])
                if len(plan.positions):
                    completion = self._write_part(request, part, call, plan)
                    if completion is None:
                        complete = False
                        break
                    completions.append((call, completion))
                begun.remove(call)
                if ahead is not None:
                    between_parts()
        finally:
            for call in begun:
                self._connection.give_up(call)
        written, all_done = self._count_stored(completions, between_parts)
        return Stored(written, complete and all_done)

    def _count_stored(self, completions: list[tuple[Call, Call]], meanwhile: Callable[[], None]) -> tuple[int, bool]:
        stored, all_done = 0, True
        for written, completion in completions:
            done = self._connection.wait(completion, meanwhile)
            if isinstance(done, m.Done):
                stored += done.count
            else:
                self._connection.give_up(written)
                all_done = False
        return stored, all_done

    def _parts(self, request: StoreRequest) -> Iterator[tuple[int, int]]:
        count = len(request.block_ids)
        welcome = self._connection.welcome
        allowed = welcome.limits.blocks_per_request if welcome else _BLOCKS_A_PART
        size = max(1, min(_BLOCKS_A_PART, allowed, _BYTES_A_PART // self._runs.nbytes))
        return ((start, min(start + size, count)) for start in range(0, max(count, 1), size))

    def _prepare(self, request: StoreRequest, part: tuple[int, int]) -> tuple[tuple[int, int], Call]:
        start, stop = part
        layout = self._connection.layout
        parent = request.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else request.parent
        message = m.PrepareStore(
            tenant=request.tenant,
            layout=layout.layout if layout else 0,
            shard=self._shard,
            parent=parent,
            keys=request.keys[start * KEY_BYTES : stop * KEY_BYTES],
            priority=request.priority,
            ttl_ms=request.ttl_ms,
        )
        return part, self._connection.call(message, self._store_deadline_ms)

    def _write_part(self, request: StoreRequest, part: tuple[int, int], call: Call, plan: Plan) -> Call | None:
        """Copies the blocks that the plan names and says that it is done. None: they could not be written."""
        block_ids = request.block_ids[part[0] : part[1]][plan.positions]
        checksums = self._into_slots(call, block_ids, plan) if len(plan.slots) else self._into_puts(call, block_ids)
        if checksums is None:
            return None
        return self._connection.call(m.CompleteStore(call.number, checksums.tobytes()), self._store_deadline_ms)

    def _into_slots(self, call: Call, block_ids: NDArray[np.int64], plan: Plan) -> NDArray[np.uint64] | None:
        with self._addresses(plan.slots, call.epoch, call.session) as addresses:
            if addresses is None:
                return None
            checksums = gather(self._runs, block_ids, addresses, verify=self._connection.verify)
        return np.zeros(len(block_ids), dtype=np.uint64) if checksums is None else checksums

    def _into_puts(self, call: Call, block_ids: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Network plane: gathers into a buffer of our own and sends it, as many blocks at a time as a frame takes."""
        nbytes = self._runs.nbytes
        at_a_time = self._blocks_a_message()
        checksums = np.empty(len(block_ids), dtype=np.uint64)
        for start in range(0, len(block_ids), at_a_time):
            some = block_ids[start : start + at_a_time]
            buffer = np.empty((len(some), nbytes), dtype=np.uint8)
            sums = gather(self._runs, some, _rows(buffer), verify=True)
            assert sums is not None
            checksums[start : start + len(some)] = sums
            put = self._connection.call(m.Put(call.number, start), self._store_deadline_ms, list(buffer))
            if not isinstance(self._connection.wait(put), m.Done):
                return None
        return checksums

    # -- load

    def load(self, request: LoadRequest) -> NDArray[np.bool_]:
        """Loads blocks. True where the block is in place and verified; the others must be computed."""
        nothing = np.zeros(len(request.block_ids), dtype=np.bool_)
        if request.epoch != self._connection.epoch:
            self._connection.counters.fail("stale_epoch")
            return nothing
        if self._connection.segments is None:
            return self._load_by_fetch(request)
        if len(request.slots) != len(request.block_ids):
            self._connection.counters.fail("no_slots")
            return nothing
        with self._addresses(request.slots, request.epoch) as addresses:
            if addresses is None:
                return nothing
            expected = request.checksums[:, self._shard] if self._connection.verify else None
            loaded = scatter(self._runs, request.block_ids, addresses, expected)
        self._report_bad(request, np.flatnonzero(~loaded))
        return loaded

    def _load_by_fetch(self, request: LoadRequest) -> NDArray[np.bool_]:
        connection, layout = self._connection, self._connection.layout
        loaded = np.zeros(len(request.block_ids), dtype=np.bool_)
        message = m.Lookup(request.tenant, layout.layout if layout else 0, request.keys, request.skip)
        lookup = connection.call(message, connection.options.lookup_deadline_ms)
        hit = read_found(connection.wait(lookup), request.keys, request.skip, len(connection.shape.shard_bytes))
        if hit is not None:
            count = min(len(hit.checksums), len(loaded))
            fetched = self._fetch(lookup.number, request.block_ids[:count], hit.checksums[:count, self._shard])
            loaded[: len(fetched)] = fetched
            self._report_bad(request, np.flatnonzero(~fetched))
        connection.give_up(lookup)
        return loaded

    def _fetch(self, lease: int, block_ids: NDArray[np.int64], checksums: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether each block that came is good and in place. Shorter than `block_ids` if not all came."""
        nbytes, at_a_time = self._runs.nbytes, self._blocks_a_message()
        fetched = np.zeros(0, dtype=np.bool_)
        for start in range(0, len(block_ids), at_a_time):
            some = block_ids[start : start + at_a_time]
            call = self._connection.call(m.Fetch(lease, self._shard, start, len(some)), self._store_deadline_ms)
            if not isinstance(self._connection.wait(call), m.Done):
                break
            if [len(frame) for frame in call.payload] != [nbytes] * len(some):
                self._connection.counters.fail("bad_payload")
                break
            buffer = np.frombuffer(b"".join(call.payload), dtype=np.uint8).reshape(len(some), nbytes)
            # Bytes that crossed a network are checked always, and before they touch engine memory.
            good = checksum_at(_rows(buffer), nbytes) == checksums[start : start + len(some)]
            scatter(self._runs, some[good], _rows(buffer)[good], None)
            fetched = np.concatenate((fetched, good))
        return fetched

    def _report_bad(self, request: LoadRequest, positions: NDArray[np.int64]) -> None:
        """Tells the server which blocks did not match; it looks for itself. Nobody waits for the answer."""
        for position in positions.tolist():
            at = (request.skip + position) * KEY_BYTES
            self._connection.counters.fail("bad_block")
            self._connection.call(
                m.ReportBad(request.tenant, request.keys[at : at + KEY_BYTES]), self._store_deadline_ms
            )

    # -- places

    @contextlib.contextmanager
    def _addresses(self, slots: NDArray[np.int64], epoch: int, session: int = 0) -> Iterator[NDArray[np.uint64] | None]:
        """Where this shard's part of each slot is in this process, for as long as the block lasts. None if the pool is
        gone or never had it."""
        with self._connection.pool(epoch, session) as pool:
            if pool is None:
                self._connection.counters.fail("stale_epoch")
                yield None
                return
            segments, layout = pool
            try:
                addresses = segments.addresses(slots + layout.shard_offsets[self._shard], self._runs.nbytes)
            except PoolError as error:
                self._connection.counters.fail("pool")
                self._connection.refusal = str(error)
                addresses = None
            yield addresses

    def _blocks_a_message(self) -> int:
        welcome = self._connection.welcome
        frame_bytes = min(welcome.limits.frame_bytes, _BYTES_A_MESSAGE) if welcome else 0
        return max(1, min(64, frame_bytes // self._runs.nbytes))


def _rows(buffer: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The address of each row of a C-contiguous array."""
    return np.uint64(buffer.ctypes.data) + np.arange(len(buffer), dtype=np.uint64) * np.uint64(buffer.strides[0])
