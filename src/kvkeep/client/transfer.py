"""Blocks between engine memory and the server, on either data plane. These calls block, each up to a deadline, so
they run in a worker's own thread or for a caller who asked for it; none raises for a server's fault.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.connection import Connection
from kvkeep.client.replies import Plan, read_found, read_plan
from kvkeep.client.requests import LoadRequest, Stored, StoreRequest
from kvkeep.client.sources import NO_BLOCK, Piece, Sources, row_addresses
from kvkeep.errors import PoolError, RequestError
from kvkeep.kv import native
from kvkeep.kv.checksum import ABSENT, checksum_at
from kvkeep.kv.copy import scatter
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

_BYTES_A_PART = 128 << 20  # a store goes in parts, so that a load never waits long behind one
_BLOCKS_A_PART = 1024
_BYTES_A_MESSAGE = 8 << 20  # on the network plane: what a server sends in one reply

# With verification off, blocks are stored with checksum 0. A client that verifies does not take them: what cannot be
# proven right is not used.


@functools.cache
def _note_slow_copies() -> None:
    """Says once in a process that the C kernel is missing."""
    if not native.available:
        log.warning(
            "kvkeep: the C kernel was not built, blocks are copied with numpy, several times slower. "
            "Install a C compiler and reinstall kvkeep."
        )


class Transfer:
    """Moves one KV rank's part of blocks, in as many pieces as its engine has, each in a shard of its own."""

    def __init__(self, connection: Connection, pieces: Sequence[Piece], first_shard: int) -> None:
        self.connection = connection
        self._pieces = pieces
        self._first_shard = first_shard
        # What an engine may need back soonest is copied first.
        self._order = sorted(range(len(pieces)), key=lambda piece: not pieces[piece].may_lack)
        self._store_deadline_ms = connection.options.store_deadline_ms
        _note_slow_copies()

    def sources(self, request: StoreRequest) -> Sources:
        """The blocks that storing this reads. RequestError if there are not as many pieces as the engine has."""
        return Sources(self._pieces, self._table(request.block_ids))

    # -- store

    def store(self, request: StoreRequest) -> int:
        """Stores what the server lacks. Returns how many blocks were written; failures are counted, not raised."""
        return self.offer(request).written

    def offer(
        self,
        request: StoreRequest,
        between_parts: Callable[[], None] = lambda: None,
        sources: Sources | None = None,
    ) -> Stored:
        """Stores what the server lacks; failures are counted, not raised.

        `between_parts` is called where something else may be done, also while the server lets us wait. Slots that are
        not filled are given back, also when this raises for a request that is wrong in itself.
        """
        sources = self.sources(request) if sources is None else sources
        written, complete = 0, True
        for piece in self._order:
            outcome = _PieceStore(self, request, piece, sources, between_parts).run()
            written, complete = max(written, outcome.written), complete and outcome.complete
            if not outcome.complete:
                break
        return Stored(written, complete)

    def _table(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        table = np.atleast_2d(block_ids)
        if len(table) != len(self._pieces):
            problem = f"block ids for {len(table)} pieces, but the engine's blocks have {len(self._pieces)}"
            raise RequestError("bad_request", problem, field="block_ids")
        return table

    # -- load

    def load(self, request: LoadRequest) -> NDArray[np.bool_]:
        """Loads blocks. True where the block is in place and verified; the others must be computed."""
        nothing = np.zeros(request.blocks, dtype=np.bool_)
        table = self._table(request.block_ids)
        if request.epoch != self.connection.epoch:
            self.connection.counters.fail("stale_epoch")
            return nothing
        if self.connection.segments is None:
            return self._load_by_fetch(request, table)
        if len(request.slots) != request.blocks:
            self.connection.counters.fail("no_slots")
            return nothing
        loaded = np.ones(request.blocks, dtype=np.bool_)
        for piece, block_ids in enumerate(table):
            wanted = np.flatnonzero(block_ids != NO_BLOCK)
            with self.addresses(piece, request.slots[wanted], request.epoch) as addresses:
                if addresses is None:
                    return nothing
                sums = request.checksums[wanted, self._first_shard + piece]
                expected = sums if self.connection.verify else None
                good = scatter(self._pieces[piece].runs, block_ids[wanted], addresses, expected)
            # Verified or not, what was never written cannot be loaded. It is no fault of the server either.
            loaded[wanted] &= good & (sums != ABSENT)
            self._report_bad(request, wanted[~good & (sums != ABSENT)])
        return loaded

    def _load_by_fetch(self, request: LoadRequest, table: NDArray[np.int64]) -> NDArray[np.bool_]:
        connection, layout = self.connection, self.connection.layout
        loaded = np.zeros(request.blocks, dtype=np.bool_)
        message = m.Lookup(request.tenant, layout.layout if layout else 0, request.keys, request.skip)
        lookup = connection.call(message, connection.options.lookup_deadline_ms)
        hit = read_found(connection.wait(lookup), request.keys, request.skip, len(connection.shape.shard_bytes))
        if hit is not None:
            count = min(len(hit.checksums), len(loaded))
            loaded[:count] = True
            for piece, block_ids in enumerate(table):
                if (block_ids[:count] == NO_BLOCK).all():
                    continue
                sums = hit.checksums[:count, self._first_shard + piece]
                fetched = self._fetch(lookup.number, piece, block_ids[:count], sums)
                loaded[len(fetched) : count] = False
                loaded[: len(fetched)] &= fetched
                self._report_bad(request, np.flatnonzero(~fetched & (sums[: len(fetched)] != ABSENT)))
        connection.give_up(lookup)
        return loaded

    def _fetch(
        self, lease: int, piece: int, block_ids: NDArray[np.int64], checksums: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Whether each block that came is good and in place, or not wanted. Shorter than `block_ids` if not all
        came."""
        runs, shard = self._pieces[piece].runs, self._first_shard + piece
        at_a_time = self.blocks_a_message(piece)
        fetched = np.zeros(0, dtype=np.bool_)
        for start in range(0, len(block_ids), at_a_time):
            some = block_ids[start : start + at_a_time]
            call = self.connection.call(m.Fetch(lease, shard, start, len(some)), self._store_deadline_ms)
            if not isinstance(self.connection.wait(call), m.Done):
                break
            if [len(frame) for frame in call.payload] != [runs.nbytes] * len(some):
                self.connection.counters.fail("bad_payload")
                break
            buffer = np.frombuffer(b"".join(call.payload), dtype=np.uint8).reshape(len(some), runs.nbytes)
            # Bytes that crossed a network are checked always, and before they touch engine memory.
            good = checksum_at(row_addresses(buffer), runs.nbytes) == checksums[start : start + len(some)]
            usable = good & (some != NO_BLOCK)
            scatter(runs, some[usable], row_addresses(buffer)[usable], None)
            fetched = np.concatenate((fetched, good | (some == NO_BLOCK)))
        return fetched

    def _report_bad(self, request: LoadRequest, positions: NDArray[np.int64]) -> None:
        """Tells the server which blocks did not match; it looks for itself. Nobody waits for the answer."""
        for position in positions.tolist():
            at = (request.skip + position) * KEY_BYTES
            self.connection.counters.fail("bad_block")
            self.connection.call(
                m.ReportBad(request.tenant, request.keys[at : at + KEY_BYTES]), self._store_deadline_ms
            )

    # -- places

    @contextlib.contextmanager
    def addresses(
        self, piece: int, slots: NDArray[np.int64], epoch: int, session: int = 0
    ) -> Iterator[NDArray[np.uint64] | None]:
        """Where this piece's part of each slot is in this process, for as long as the block lasts. None if the pool is
        gone or never had it."""
        with self.connection.pool(epoch, session) as pool:
            if pool is None:
                self.connection.counters.fail("stale_epoch")
                yield None
                return
            segments, layout = pool
            try:
                addresses = segments.addresses(slots + layout.shard_offsets[self.shard(piece)], self.nbytes(piece))
            except PoolError as error:
                self.connection.counters.fail("pool")
                self.connection.refusal = str(error)
                addresses = None
            yield addresses

    def shard(self, piece: int) -> int:
        return self._first_shard + piece

    def nbytes(self, piece: int) -> int:
        return self._pieces[piece].runs.nbytes

    def blocks_a_message(self, piece: int) -> int:
        welcome = self.connection.welcome
        frame_bytes = min(welcome.limits.frame_bytes, _BYTES_A_MESSAGE) if welcome else 0
        return max(1, min(64, frame_bytes // self.nbytes(piece)))


class _PieceStore:
    """The store of one piece of blocks, part by part."""

    def __init__(
        self, transfer: Transfer, request: StoreRequest, piece: int, sources: Sources, meanwhile: Callable[[], None]
    ) -> None:
        self._transfer = transfer
        self._connection = transfer.connection
        self._deadline_ms = self._connection.options.store_deadline_ms
        self._request = request
        self._piece = piece
        self._sources = sources
        self._meanwhile = meanwhile

    def run(self) -> Stored:
        parts = self._parts()
        first = self._prepare(next(parts))
        ahead: tuple[tuple[int, int], Call] | None = first
        begun = [first[1]]  # not yet completed
        completions: list[tuple[Call, Call]] = []
        complete = True
        try:
            while ahead is not None:
                part, call = ahead
                plan = read_plan(self._connection.wait(call, self._meanwhile), part[1] - part[0])
                complete &= plan is not None and not plan.refused
                if plan is None:
                    break
                positions = part[0] + plan.positions.astype(np.int64)
                self._sources.skip(self._piece, *part, positions)
                if plan.refused:
                    self._connection.counters.fail("orphan" if plan.orphan else "no_room")
                # Ask for the next part's slots now: the server works while this part is copied.
                following = next(parts, None) if not plan.refused else None
                ahead = self._prepare(following) if following else None
                if ahead is not None:
                    begun.append(ahead[1])
                if len(plan.positions):
                    completion = self._write(call, positions, plan)
                    if completion is None:
                        complete = False
                        break
                    completions.append((call, completion))
                begun.remove(call)
                if ahead is not None:
                    self._meanwhile()
        finally:
            for call in begun:
                self._connection.give_up(call)
        written, all_done = self._count(completions)
        return Stored(written, complete and all_done)

    def _count(self, completions: list[tuple[Call, Call]]) -> tuple[int, bool]:
        stored, all_done = 0, True
        for written, completion in completions:
            done = self._connection.wait(completion, self._meanwhile)
            if isinstance(done, m.Done):
                stored += done.count
            else:
                self._connection.give_up(written)
                all_done = False
        return stored, all_done

    def _parts(self) -> Iterator[tuple[int, int]]:
        count = self._request.blocks
        welcome = self._connection.welcome
        allowed = welcome.limits.blocks_per_request if welcome else _BLOCKS_A_PART
        size = max(1, min(_BLOCKS_A_PART, allowed, _BYTES_A_PART // self._transfer.nbytes(self._piece)))
        return ((start, min(start + size, count)) for start in range(0, max(count, 1), size))

    def _prepare(self, part: tuple[int, int]) -> tuple[tuple[int, int], Call]:
        start, stop = part
        request, layout = self._request, self._connection.layout
        message = m.PrepareStore(
            tenant=request.tenant,
            layout=layout.layout if layout else 0,
            shard=self._transfer.shard(self._piece),
            parent=request.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else request.parent,
            keys=request.keys[start * KEY_BYTES : stop * KEY_BYTES],
            priority=request.priority,
            ttl_ms=request.ttl_ms,
        )
        return part, self._connection.call(message, self._deadline_ms)

    def _write(self, call: Call, positions: NDArray[np.int64], plan: Plan) -> Call | None:
        """Copies the blocks that the plan names and says that it is done. None: they could not be written."""
        checksums = self._into_slots(call, positions, plan) if len(plan.slots) else self._into_puts(call, positions)
        if checksums is None:
            return None
        return self._connection.call(m.CompleteStore(call.number, checksums.tobytes()), self._deadline_ms)

    def _into_slots(self, call: Call, positions: NDArray[np.int64], plan: Plan) -> NDArray[np.uint64] | None:
        with self._transfer.addresses(self._piece, plan.slots, call.epoch, call.session) as addresses:
            if addresses is None:
                return None
            return self._copy(positions, addresses, verify=self._connection.verify)

    def _into_puts(self, call: Call, positions: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Network plane: gathers into a buffer of our own and sends it, as many blocks at a time as a frame takes."""
        nbytes, at_a_time = self._transfer.nbytes(self._piece), self._transfer.blocks_a_message(self._piece)
        checksums = np.empty(len(positions), dtype=np.uint64)
        for start in range(0, len(positions), at_a_time):
            some = positions[start : start + at_a_time]
            buffer = np.zeros((len(some), nbytes), dtype=np.uint8)
            sums = self._copy(some, row_addresses(buffer), verify=True)
            if sums is None:
                return None
            checksums[start : start + len(some)] = sums
            put = self._connection.call(m.Put(call.number, start), self._deadline_ms, list(buffer))
            if not isinstance(self._connection.wait(put), m.Done):
                return None
        return checksums

    def _copy(
        self, positions: NDArray[np.int64], addresses: NDArray[np.uint64], *, verify: bool
    ) -> NDArray[np.uint64] | None:
        checksums = self._sources.copy(self._piece, positions, addresses, verify=verify)
        if checksums is None:
            self._connection.counters.fail("withdrawn")
        return checksums
