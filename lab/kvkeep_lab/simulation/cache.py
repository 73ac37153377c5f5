"""An external cache in simulated time for the reference engine: a whole server, and workers that do
as they are told.

    cache = SimulatedCache(seed=7, faults=CacheFaults(load_failure=0.2))
    engine = Engine(OracleModel(), config, cache)

Jobs run inside `poll`, some polls after they were handed over, in an order that the seed decides;
nothing runs in between. So a block that the engine reuses too early is read, or written, too late:
the oracle sees it."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import GroupMemory, physical_fingerprint
from kvkeep.client.requests import Finished, LoadRequest, StoreRequest
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.transfer import Transfer
from kvkeep.connector.cost_model import LoadWhen
from kvkeep.kv.keys import addresses
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns, cut_heads
from kvkeep.kv.shape import BlockShape
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.tiers import SimulatedTiers
from kvkeep_lab.simulation.wire import Faults, SimulatedNetwork

_SLAB_BYTES = 1 << 14


@dataclass(frozen=True)
class CacheFaults:
    """Probabilities: of a job, or of a moment for what concerns the server. `delay` is in polls."""

    network: Faults = field(default_factory=Faults)
    load_failure: float = 0.0  # some of its blocks are filled with garbage and reported
    load_loss: float = 0.0  # none of its blocks is loaded
    store_loss: float = 0.0
    bit_flip: float = 0.0  # of a byte in the pool, whosever it is
    delay: tuple[int, int] = (0, 0)


class SimulatedCache:
    """The CacheBackend of one or several engines. All of it follows from the seed, so nothing from
    measured time: engines load whatever they can, unless `load_when` is changed before they are
    made."""

    def __init__(
        self, seed: int, faults: CacheFaults | None = None, *, pool_bytes: int = 1 << 20
    ) -> None:
        self.load_when: LoadWhen = "always"
        self.tp_shards: int | None = None
        self.tracing = False
        self.is_seen = False  # what the server lacks, as by an engine that shares memory with it
        self.faults = faults or CacheFaults()
        self.random = random.Random(seed)
        of_jobs = ("loads", "stores", "failed_blocks", "lost_loads", "lost_stores")
        of_the_server = ("bit_flips", "restarts", "outages", "taken_down")
        self.counts = dict.fromkeys((*of_jobs, *of_the_server), 0)
        self.network = SimulatedNetwork(seed, self.faults.network)
        self.tiers: SimulatedTiers | None = None
        self._pool_bytes = pool_bytes
        self._epoch = 0
        self._connections: list[Connection] = []
        self.restart_server()

    # -- what an engine's backend does

    def lookup_side(self, shape: BlockShape) -> SchedulerAdapter:
        return SeeingAdapter(self, shape, self._connection(shape))

    def transfer_side(self, shape: BlockShape, strategy: ParallelStrategy) -> SimulatedWorker:
        return SimulatedWorker(self, self._connection(shape), strategy)

    def connect(self) -> None:
        for connection in self._connections:
            connection.wait_until_up(1_000)

    def close(self) -> None:
        """The server stays: another engine may come."""

    # -- what a test does

    def restart_server(self) -> None:
        """A new server takes the place of the old one, with nothing in memory. What a tier keeps
        stays."""
        self._epoch += 1
        self.counts["restarts"] += self._epoch > 1
        self.server = SimulatedServer(self._pool_bytes, _SLAB_BYTES, epoch=self._epoch)
        if self.tiers is not None:
            self.tiers.attach(self.server)
        self.resume_server()

    def add_tier(self, block_ms: int) -> SimulatedTiers:
        """The server has a tier from now on. Clients see it when they connect."""
        self.tiers = SimulatedTiers(self.server, block_ms)
        self.resume_server()
        return self.tiers

    def stop_server(self) -> None:
        """Nobody answers until `resume_server` or `restart_server`."""
        self.counts["outages"] += 1
        self.network.serve(None)

    def resume_server(self) -> None:
        self.network.serve(self.tiers or self.server.service)

    def pass_time(self, duration_ms: int) -> None:
        """Lets the network deliver what is due, and every client take it in."""
        self.network.run_until(self.network.clock.now_ms + duration_ms)
        for connection in self._connections:
            connection.poll()

    def lacks(self, epoch: int, address: bytes) -> bool:
        """Whether the server of that epoch, if it is the one that is there, has no such block."""
        return epoch == self._epoch and self.server.store.blocks.presence.lacks(address)

    def maybe_flip_a_bit(self) -> None:
        if self.random.random() < self.faults.bit_flip:
            self.counts["bit_flips"] += 1
            pool = self.server.memory.bytes
            pool[self.random.randrange(len(pool))] ^= 1 << self.random.randrange(8)

    def check_nothing_held(self) -> None:
        """AssertionError unless the server, given some time, holds nothing for anybody."""
        self.network.faults = Faults()
        self.resume_server()
        for _ in range(200):
            if not self._held():
                break
            self.pass_time(50)
        self.server.check_integrity()
        assert not self._held(), f"the server still holds {self._held()}"

    def _held(self) -> list[object]:
        sessions = self.server.store.sessions.values()
        return [held for session in sessions for held in (*session.leases, *session.writes)]

    def _connection(self, shape: BlockShape) -> Connection:
        options = ClientOptions(
            address="tcp://simulated:5555",
            lookup_deadline_ms=60,
            store_deadline_ms=120,
            handshake_deadline_ms=80,
            ping_interval_ms=200,
            reconnect_interval_ms=40,
        )
        connection = Connection(shape, options, self.network.transport(), self.network.clock)
        self._connections.append(connection)
        return connection


class SeeingAdapter(SchedulerAdapter):
    """Sees what the server lacks without any shared memory, if it may."""

    def __init__(self, cache: SimulatedCache, shape: BlockShape, connection: Connection) -> None:
        super().__init__(shape, connection=connection)
        self._cache = cache

    def lacks(self, key: bytes) -> bool:
        address = addresses(key, self.connection.shape.fingerprint)
        return self._cache.is_seen and self._cache.lacks(self.connection.epoch, address)


class SimulatedWorker:
    """A WorkerAdapter without a thread: jobs run in `poll`, when they are due."""

    def __init__(
        self, cache: SimulatedCache, connection: Connection, strategy: ParallelStrategy
    ) -> None:
        self._cache = cache
        self._connection = connection
        self._strategy = strategy
        self._transfer: Transfer | None = None
        self._layers: Sequence[Any] = ()
        # How many polls are left, the job, and what is to be done.
        self._waiting: list[tuple[int, Hashable, LoadRequest | StoreRequest]] = []
        self._finished = Finished(strategy.rank)

    def register_kv_caches(
        self, layers: Mapping[str, Any] | Sequence[Any], block_dim: int = 0
    ) -> None:
        assert isinstance(layers, Mapping) and block_dim == 0
        shards = self._strategy.shards
        each = cut_heads(layers, -2, len(shards)) if len(shards) > 1 else [layers]
        groups = [GroupMemory(BlockRuns.of(views)) for views in each]
        self._layers = list(layers.values())
        self._transfer = Transfer(
            self._connection, groups, shards.start, shards_per_rank=len(shards)
        )
        self._connection.physical = (shards.start, physical_fingerprint(groups[:1]))
        self._connection.further_shards = list(shards[1:])

    def load(self, job: Hashable, request: LoadRequest) -> None:
        self._waiting.append((self._cache.random.randint(*self._cache.faults.delay), job, request))

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        for job, request in requests.items():
            self.store(job, request)

    def store(self, job: Hashable, request: StoreRequest) -> None:
        if self._strategy.stores:
            self._waiting.append(
                (self._cache.random.randint(*self._cache.faults.delay), job, request)
            )
        else:
            self._finished.stored[job] = 0

    def withdraw(self, block_ids: Sequence[int] | None) -> None:
        """Stores that read these blocks do so now, or never."""
        taken, waiting = set(block_ids or ()), self._waiting
        self._waiting = []
        for entry in waiting:
            _, job, request = entry
            if not isinstance(request, StoreRequest) or (
                block_ids is not None and taken.isdisjoint(request.block_ids.tolist())
            ):
                self._waiting.append(entry)
            elif block_ids is not None and self._cache.random.random() < 0.5:
                self._store(job, request)
            else:
                self._lose_store(job)

    def poll(self) -> Finished:
        due = [entry for entry in self._waiting if entry[0] <= 0]
        self._waiting = [
            (polls - 1, job, request) for polls, job, request in self._waiting if polls > 0
        ]
        self._cache.random.shuffle(due)
        for _, job, request in due:
            if isinstance(request, LoadRequest):
                self._load(job, request)
            else:
                self._store(job, request)
        finished, self._finished = self._finished, Finished(self._strategy.rank)
        return finished

    def close(self) -> None:
        self._connection.close()

    def _load(self, job: Hashable, request: LoadRequest) -> None:
        assert self._transfer is not None
        chance, faults, counts = self._cache.random, self._cache.faults, self._cache.counts
        counts["loads"] += 1
        loaded = np.zeros(request.blocks, dtype=np.bool_)
        if chance.random() < faults.load_loss:
            counts["lost_loads"] += 1
        else:
            loaded = self._transfer.load(request)
        if chance.random() < faults.load_failure:
            loaded[chance.randrange(len(loaded)) :] &= chance.random() < 0.5
            loaded[chance.randrange(len(loaded))] = False
        outcome = request.outcome(loaded)
        self._fill_with_garbage(sorted(outcome.failed))
        counts["failed_blocks"] += len(outcome.failed)
        self._finished.loads[job] = outcome

    def _store(self, job: Hashable, request: StoreRequest) -> None:
        assert self._transfer is not None
        self._cache.counts["stores"] += 1
        if self._cache.random.random() < self._cache.faults.store_loss:
            self._lose_store(job)
        else:
            store = self._transfer.store(request)
            self._finished.stored[job] = store.written
            self._finished.incomplete += [] if store.is_complete else [job]

    def _lose_store(self, job: Hashable) -> None:
        self._cache.counts["lost_stores"] += 1
        self._finished.stored[job] = 0
        self._finished.incomplete.append(job)

    def _fill_with_garbage(self, block_ids: list[int]) -> None:
        for layer in self._layers:
            for block in block_ids:
                layer[block].fill_(self._cache.random.randrange(1, 100))
