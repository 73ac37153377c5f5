"""Blocks between engine memory and the server, on either data plane. These calls block, each up to
a deadline, so they run in a worker's own thread or for a caller who asked for it; none raises for a
server's fault."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.connection import Connection
from kvkeep.client.copier import Copier, Fetched, HostCopier, row_addresses
from kvkeep.client.loading import Loading, report_bad
from kvkeep.client.piece_store import PieceStore
from kvkeep.client.rank_memory import RankMemory
from kvkeep.client.replies import read_found
from kvkeep.client.requests import LoadRequest, Stored, StoreRequest
from kvkeep.client.sources import NO_BLOCK, Piece, Sources
from kvkeep.kv import native
from kvkeep.kv.checksum import ABSENT, checksum_at
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

# With verification off, blocks are stored with checksum 0. A client that verifies does not take
# them: what cannot be proven right is not used.


@functools.cache
def _note_slow_copies() -> None:
    """Says once in a process that the C kernel is missing."""
    if not native.available:
        log.warning(
            "kvkeep: the C kernel was not built, blocks are copied with numpy, several times slower. "
            "Install a C compiler and reinstall kvkeep."
        )


class Transfer:
    """Moves one KV rank's part of blocks, in as many pieces as its engine has, each in a shard of
    its own."""

    def __init__(
        self,
        connection: Connection,
        pieces: Sequence[Piece],
        first_shard: int,
        copier: Copier | None = None,
    ) -> None:
        self.connection = connection
        self.memory = RankMemory(connection, pieces, first_shard, copier)
        # What an engine may need back soonest is copied first.
        self._order = sorted(range(len(pieces)), key=lambda piece: not pieces[piece].may_lack)
        self._store_deadline_ms = connection.options.store_deadline_ms
        if isinstance(self.copier, HostCopier):
            _note_slow_copies()

    @property
    def copier(self) -> Copier:
        return self.memory.copier

    def sources(self, requests: Collection[StoreRequest]) -> list[Sources]:
        """The engine blocks that storing these reads, for the engine's thread. RequestError if
        block ids are not given for every piece that the engine has."""
        tables = [self.memory.table(request.block_ids) for request in requests]
        ready = self.copier.mark() if tables else None
        threads = self.connection.threads
        return [Sources(self.memory.pieces, table, self.copier, threads, ready) for table in tables]

    # -- store

    def store(self, request: StoreRequest) -> int:
        """Stores what the server lacks. Returns how many blocks were written; failures are counted,
        not raised."""
        return self.offer(request).written

    def offer(self, request: StoreRequest, sources: Sources | None = None) -> Stored:
        """Stores what the server lacks; failures are counted, not raised.

        Slots that are not filled are given back, also when this raises for a request that is wrong
        in itself."""
        storing = self.storing(request, sources or self.sources([request])[0])
        storing.begin()
        try:
            storing.copy()
        finally:
            storing.depart()
        return storing.finish()

    def storing(self, request: StoreRequest, sources: Sources) -> Storing:
        """The same, step by step."""
        return Storing([PieceStore(self.memory, request, piece, sources) for piece in self._order])

    # -- load

    def load(self, request: LoadRequest) -> NDArray[np.bool_]:
        """Loads blocks. True where the block is in place and verified; the others must be
        computed."""
        return self.load_together([request])[0]

    def load_together(
        self,
        requests: Sequence[LoadRequest],
        ready: Sequence[Any] = (),
        ahead: Fetched | None = None,
    ) -> list[NDArray[np.bool_]]:
        """Loads the blocks of several requests at once, after those marks of the engine's."""
        return self.loading(requests, ready, ahead).finish()

    def loading(
        self,
        requests: Sequence[LoadRequest],
        ready: Sequence[Any] = (),
        ahead: Fetched | None = None,
    ) -> Loading:
        """The same in two steps: this one begins it."""
        for request in requests:
            self.memory.table(request.block_ids)
        loading = Loading(self.memory, requests)
        if self.connection.segments is None:
            for request, loaded in zip(requests, loading.loaded, strict=True):
                if request.epoch == self.connection.epoch:
                    loaded[:] = self._load_by_fetch(
                        request, self.memory.table(request.block_ids), ready
                    )
                else:
                    self.connection.counters.fail("stale_epoch")
        else:
            loading.begin(self.connection.epoch, ready, ahead)
        return loading

    def _load_by_fetch(
        self, request: LoadRequest, table: NDArray[np.int64], ready: Sequence[Any]
    ) -> NDArray[np.bool_]:
        connection = self.connection
        loaded = np.zeros(request.blocks, dtype=np.bool_)
        message = m.Lookup(request.tenant, connection.layout_number, request.keys, request.skip)
        lookup = connection.call(
            message, self._store_deadline_ms
        )  # other loads' bytes may come before the answer
        try:
            hit = read_found(
                connection.wait(lookup),
                request.keys,
                request.skip,
                len(connection.shape.shard_bytes),
            )
            count = min(len(hit.checksums), len(loaded)) if hit is not None else 0
            loaded[:count] = True
            for piece, block_ids in enumerate(table):
                if hit is None or (block_ids[:count] == NO_BLOCK).all():
                    continue
                sums = hit.checksums[:count, self.memory.shard(piece)]
                fetched = self._fetch(lookup.number, piece, block_ids[:count], sums, ready)
                loaded[len(fetched) : count] = False
                loaded[: len(fetched)] &= fetched
                report_bad(
                    connection, request, np.flatnonzero(~fetched & (sums[: len(fetched)] != ABSENT))
                )
        finally:
            connection.give_up(lookup)  # also if a copy fails
            connection.poll()  # the server hears of it now
        return loaded

    def _fetch(
        self,
        lease: int,
        piece: int,
        block_ids: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        ready: Sequence[Any],
    ) -> NDArray[np.bool_]:
        """Whether each block that came is good and in place, or not wanted. Shorter than
        `block_ids` if not all came."""
        nbytes, at_a_time = self.memory.nbytes(piece), self.memory.blocks_a_message(piece)
        fetched = np.zeros(0, dtype=np.bool_)
        for start in range(0, len(block_ids), at_a_time):
            some = block_ids[start : start + at_a_time]
            message = m.Fetch(lease, self.memory.shard(piece), start, len(some))
            call = self.connection.call(message, self._store_deadline_ms)
            if not isinstance(self.connection.wait(call), m.Done):
                break
            if [len(frame) for frame in call.payload] != [nbytes] * len(some):
                self.connection.counters.fail("bad_payload")
                break
            buffer = np.frombuffer(b"".join(call.payload), dtype=np.uint8).reshape(
                len(some), nbytes
            )
            # Bytes that crossed a network are checked always, and before they touch engine memory.
            good = (
                checksum_at(row_addresses(buffer), nbytes) == checksums[start : start + len(some)]
            )
            usable = good & (some != NO_BLOCK)
            self.copier.begin_load(
                piece, some[usable], row_addresses(buffer)[usable], None, ready
            ).good()
            fetched = np.concatenate((fetched, good | (some == NO_BLOCK)))
        return fetched


class Storing:
    """A store of all pieces of some blocks. With several of them only the last one's end is left to
    `depart`."""

    def __init__(self, stores: Sequence[PieceStore]) -> None:
        self._stores = stores
        self._at = 0  # the one that is under way
        self._written = 0
        self._is_over = False  # what comes after the one under way is of no use

    def begin(self, *, hurry: bool = True, alone: bool = True) -> None:
        self._stores[0].begin(hurry=hurry, alone=alone)

    def copy(
        self,
        before_the_last: Callable[[], None] = lambda: None,
        departing: Callable[[], None] = lambda: None,
    ) -> None:
        """`departing` is called when `depart` may be, in whatever thread, at the latest before this
        ends."""
        try:
            while self._at < len(self._stores) - 1:
                self._stores[self._at].copy()
                outcome = self._stores[self._at].finish()
                self._written = max(self._written, outcome.written)
                if not outcome.complete:
                    self._is_over = True
                    return
                self._at += 1
                self._stores[self._at].begin()
        except BaseException:
            # guard: raised again; what was copied before it arrives, and is told or given back
            self._is_over = True
            self._stores[self._at].end_copy()
            with contextlib.suppress(Exception):  # guard: the first fault is the one to tell
                self._stores[self._at].finish()
            raise
        finally:
            departing()
        self._stores[self._at].copy(before_the_last)

    def end_copy(self) -> None:
        """Instead of `copy`: nothing is stored."""
        self._is_over = True
        self._stores[self._at].end_copy()

    def depart(self) -> None:
        if not self._is_over:
            self._stores[self._at].depart()

    def unanswered(self) -> Call | None:
        return None if self._is_over else self._stores[self._at].unanswered()

    def finish(self) -> Stored:
        if self._is_over:
            return Stored(self._written, complete=False)
        outcome = self._stores[self._at].finish()
        return Stored(max(self._written, outcome.written), outcome.complete)
