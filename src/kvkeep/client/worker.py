"""What an engine's workers need: stores and loads that run in the background while the engine computes.

The engine hands over a job and goes on; `poll` tells later which jobs are finished and which blocks failed. Until a job
is reported, its engine blocks must stay as they are. One thread a worker does the copying, loads before stores.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import LoadRequest, Stored, StoreRequest
from kvkeep.client.sources import Piece, Sources
from kvkeep.client.transfer import Transfer
from kvkeep.errors import RequestError
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape

log = logging.getLogger(__name__)

_IDLE_S = 0.02
_JOBS_QUEUED = 1024
_MOST_BYTES_ASIDE = 64 << 20  # for blocks that the engine takes back before they are copied
_MOST_BYTES_AT_ONCE = 16 << 20  # of those, in one step: some four milliseconds
_ALL = slice(None)


@dataclass
class Finished:
    """What has ended since the last poll, on one rank. `failed` names, for each load, the engine blocks that must be
    computed."""

    rank: int = 0
    stored: dict[Hashable, int] = field(default_factory=dict)  # job -> blocks written
    incomplete: list[Hashable] = field(default_factory=list)  # stores that left something out: offer those blocks again
    loaded: list[Hashable] = field(default_factory=list)  # every load, whether or not blocks of it failed
    failed: dict[Hashable, list[int]] = field(default_factory=dict)
    withdrawn: int = 0  # blocks that the engine took back before they were copied


class WorkerAdapter:
    """Stores and loads of one engine worker, over a connection of its own. (A `connection` can be given,
    to a server in this process or a simulated one; a scheduler that shared it would wait whenever this one does.)"""

    def __init__(
        self,
        shape: BlockShape,
        strategy: ParallelStrategy,
        options: ClientOptions | None = None,
        connection: Connection | None = None,
    ) -> None:
        if strategy.kv_world_size != shape.identity.kv_world_size:
            raise RequestError(
                "bad_shards",
                f"the strategy has {strategy.kv_world_size} shards, the block shape {shape.identity.kv_world_size}",
                field="strategy",
            )
        self.shape = shape
        self.strategy = strategy
        self.connection = connection or Connection(shape, options or ClientOptions())
        self._transfer: Transfer | None = None
        self._loads: deque[tuple[Hashable, LoadRequest]] = deque()
        self._stores: deque[tuple[Hashable, StoreRequest]] = deque()
        self._sources: dict[Hashable, Sources] = {}  # of stores that are queued or under way
        self._finished = Finished(strategy.rank)
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvkeep-worker", daemon=True)

    def register_kv_caches(self, layers: Mapping[str, Any] | Sequence[Any], block_dim: int = 0) -> None:
        """Says, once, where the engine's blocks are, one tensor a layer. Raises for tensors that do not fit."""
        self.register_pieces([Piece(BlockRuns.of(layers, block_dim))])

    def register_pieces(self, pieces: Sequence[Piece]) -> None:
        """The same for an engine whose blocks come in several pieces."""
        if self._transfer is not None:
            problem = "the tensors are registered already"
            raise RequestError("registered", problem, field="layers", hint="close this adapter and make another")
        first_shard = self.strategy.kv_rank * self.shape.pieces
        given = [piece.runs.nbytes for piece in pieces]
        expected = list(self.shape.shard_bytes[first_shard : first_shard + self.shape.pieces])
        if given != expected:
            raise RequestError(
                "bad_shards",
                f"the tensors have {_listed(given)} bytes a block, the block shape says {_listed(expected)}",
                field="layers",
                hint="shard_bytes of the BlockShape must be what each KV rank's tensors really hold",
            )
        self._transfer = Transfer(self.connection, pieces, first_shard)
        self.connection.physical = (first_shard, physical_fingerprint(pieces))
        if self.connection.state != "down":
            self.connection.start_over()  # the server has not been told yet how the tensors lie in memory
        self._thread.start()

    def store(self, job: Hashable, request: StoreRequest) -> None:
        """Stores blocks in the background. A rank whose shard another rank stores has nothing to do."""
        with self._wake:
            if not self.strategy.stores:
                self._end_store(job, Stored(0, complete=True))
                return
            if not self._has_room(self._stores):
                self._end_store(job, Stored(0, complete=False))
                return
            if self._transfer is not None:
                self._sources[job] = self._transfer.sources(request)
            self._stores.append((job, request))
            self._wake.notify()

    def load(self, job: Hashable, request: LoadRequest) -> None:
        """Loads blocks in the background."""
        with self._wake:
            if not self._has_room(self._loads):
                self._end_load(job, request.ids_of(_ALL))
                return
            self._loads.append((job, request))
            self._wake.notify()

    def withdraw(self, block_ids: Sequence[int] | None) -> None:
        """The engine will write into these blocks now (None: nobody knows which): stores that have not copied them yet
        set them aside, a few milliseconds' worth, or end with the part before. Waits for no server."""
        with self._wake:
            if block_ids is None:
                for sources in self._sources.values():
                    sources.give_up()
                return
            ids = np.asarray(block_ids, dtype=np.int64)
            aside = sum(sources.bytes_aside for sources in self._sources.values())
            allowance = min(_MOST_BYTES_AT_ONCE, _MOST_BYTES_ASIDE - aside)
            for sources in self._sources.values():
                count, nbytes = sources.take_back(ids, allowance)
                self._finished.withdrawn += count
                allowance -= nbytes

    def poll(self) -> Finished:
        """What has ended since the last call. Never blocks for longer than a lock is held."""
        with self._wake:
            finished, self._finished = self._finished, Finished(self.strategy.rank)
        return finished

    def close(self) -> None:
        """Ends the thread after the job in hand, then the session. Queued jobs end undone, and later ones at once."""
        with self._wake:
            self._closing = True
            for job, request in self._loads:
                self._end_load(job, request.ids_of(_ALL))
            for job, _ in self._stores:
                self._end_store(job, Stored(0, complete=False))
            self._loads.clear()
            self._stores.clear()
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self.connection.close()

    # -- the thread

    def _run(self) -> None:
        populating = False
        while not self._closing:
            self.connection.poll()
            with self._wake:
                if not (self._loads or self._stores or self._closing) and not populating:
                    self._wake.wait(_IDLE_S)
                load = self._loads.popleft() if self._loads else None
                store = self._stores.popleft() if self._stores and load is None else None
            if load is not None:
                self._load(*load)
            elif store is not None:
                self._store(*store)
            else:
                populating = self._populate()

    def _populate(self) -> bool:
        """Maps a little more of the pool ahead of its use. Whether there was any left."""
        with self.connection.pool(self.connection.epoch) as pool:
            return pool is not None and pool[0].populate_next()

    def _load_what_waits(self) -> None:
        """Loads that came while a store is under way: the engine waits for those, and for no store."""
        while True:
            with self._wake:
                if not self._loads:
                    return
                load = self._loads.popleft()
            self._load(*load)

    def _load(self, job: Hashable, request: LoadRequest) -> None:
        assert self._transfer is not None
        failed = request.ids_of(_ALL)
        try:
            failed = request.ids_of(~self._transfer.load(request))
        except Exception:  # guard: whatever goes wrong here is a failed load to the engine, never its end
            self._failed_inside("load")
        with self._wake:
            self._end_load(job, failed)

    def _store(self, job: Hashable, request: StoreRequest) -> None:
        assert self._transfer is not None
        stored = Stored(0, complete=False)
        try:
            stored = self._transfer.offer(request, self._load_what_waits, self._sources.get(job))
        except Exception:  # guard: whatever goes wrong here is a block that was not stored, never the engine's end
            self._failed_inside("store")
        with self._wake:
            self._end_store(job, stored)

    def _failed_inside(self, what: str) -> None:
        self.connection.counters.fail("internal_error")
        log.exception("kvkeep: a %s failed inside the client", what)

    # -- with the lock held

    def _has_room(self, queue: deque[Any]) -> bool:
        if self._closing or len(queue) >= _JOBS_QUEUED:
            self.connection.counters.fail("closed" if self._closing else "queue_full")
            return False
        return True

    def _end_store(self, job: Hashable, stored: Stored) -> None:
        self._sources.pop(job, None)
        self._finished.stored[job] = stored.written
        if not stored.complete:
            self._finished.incomplete.append(job)

    def _end_load(self, job: Hashable, failed: list[int]) -> None:
        self._finished.loaded.append(job)
        if failed:
            self._finished.failed[job] = failed


def physical_fingerprint(pieces: Sequence[Piece]) -> bytes:
    """Equal where blocks can be exchanged, whichever way each piece lies in memory."""
    fingerprints = [bytes.fromhex(piece.runs.fingerprint) for piece in pieces]
    return fingerprints[0] if len(pieces) == 1 else hashlib.blake2b(b"".join(fingerprints), digest_size=16).digest()


def _listed(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))
