"""What an engine's workers need: stores and loads that run in the background while the engine
computes.

The engine hands over a job and goes on; `poll` returns later which jobs have finished and which
blocks failed. Until a job is reported, its engine blocks must stay as they are. One thread stores
and another begins loads, because the engine waits for loads and not for stores; two more wait until
blocks have arrived, so that the next job can begin before that.

An engine on a GPU hands over a job while its kernels are still to run: calls here are ordered with
the work that it has given to its current stream before and after them (`kvkeep.gpu.copier`)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.connection import Connection
from kvkeep.client.copier import Copier, copier_for
from kvkeep.client.loads import BlockingLoader, Load, QueuedLoad, take_together
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import (
    GroupMemory,
    RankMemory,
    check_sizes,
    physical_fingerprint_of_each,
)
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.stores import Store, evacuate, source_blocks
from kvkeep.errors import RequestError
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns, by_name, cut_heads
from kvkeep.kv.shape import BlockShape

log = logging.getLogger(__name__)

_JOBS_QUEUED = 1024
_BYTES_TOGETHER = 64 << 20  # of loads that wait at the same time: few launches for many small ones
_LOADS_UNDER_WAY = 4
_STORES_UNDER_WAY = 4


class JobCounts(NamedTuple):
    """What a worker has in hand."""

    stores: int  # queued or under way
    queued_stores: int
    loads: int  # queued or under way
    queued_loads: int


class WorkerAdapter:
    """Stores and loads of one engine worker, over a connection of its own. (A `connection` can be
    given, to a server in this process or a simulated one; a scheduler that shared it would wait
    whenever this one does.) Until memory is registered every job ends at once, undone."""

    def __init__(
        self,
        shape: BlockShape,
        strategy: ParallelStrategy,
        options: ClientOptions | None = None,
        connection: Connection | None = None,
    ) -> None:
        if (given := strategy.kv_shards) != (expected := shape.kv_shards):
            raise RequestError(
                "bad_shards",
                f"the strategy has {given} shards, the shape {expected}",
                field="strategy",
            )
        self.shape = shape
        self.strategy = strategy
        self.connection = connection or Connection(shape, options or ClientOptions())
        self.connection.role = f"worker {strategy.rank} of {strategy.world_size}"
        self.memory: RankMemory | None = None  # since the first registration
        self._blocking: BlockingLoader | None = None  # likewise
        self.is_registered = False  # the engine has memory now
        self._registers_pool = False  # a thread of its own maps the pool
        self._closing = False
        self._finished = Finished(strategy.rank)
        self._stores: dict[Hashable, Store] = {}  # queued or under way
        self._queued_stores: deque[Store] = deque()
        self._begun: Store | None = None  # the next one to be copied, if the server was asked
        self._departing: deque[Store] = deque()  # copied, or being copied
        self._all_copied = False  # no more stores will depart
        self._queued_loads: deque[QueuedLoad] = deque()
        self._arriving: deque[tuple[list[QueuedLoad], Load]] = deque()
        self._all_begun = False  # no more loads will arrive
        self._began_s: dict[Hashable, float] = {}  # loads that are queued or under way
        self._engine_ready_s = 0.0  # when a load last had to wait for the engine
        threads, lock = self.connection.threads, self.connection.threads.RLock()
        # One lock, and a condition for each that waits: no thread is woken, and takes the
        # interpreter, for another's news.
        self._wake, self._for_stores, self._for_departures, self._for_loads, self._for_arrivals = (
            threads.Condition(lock) for _ in range(5)
        )
        runs = {"stores": self._run_stores, "loads": self._run_loads}
        runs |= {"arrivals": self._run_arrivals, "departures": self._run_departures}
        self._threads = [self._thread(name, run) for name, run in runs.items()]

    def _thread(self, name: str, run: Callable[[], None]) -> Any:
        return self.connection.threads.Thread(target=run, name=f"kvkeep-{name}", daemon=True)

    # -- memory

    def register_kv_caches(
        self, layers: Mapping[str, Any] | Sequence[Any], block_dim: int = 0
    ) -> None:
        """Says, once, where the engine's blocks are, one tensor a layer. Raises for tensors that do
        not fit. For a rank with several shards the last dim but one counts KV heads."""
        count = self.strategy.shards_per_rank
        each = [layers] if count == 1 else cut_heads(by_name(layers), -2, count)
        self.register_groups([GroupMemory(BlockRuns.of(views, block_dim)) for views in each])

    def register_groups(self, groups: Sequence[GroupMemory]) -> None:
        """The same for an engine whose layers form several groups. All shards of a group are
        neighbours."""
        if self.is_registered:
            problem = "the tensors are registered already"
            raise RequestError(
                "registered", problem, field="layers", hint="unregister_kv_caches comes first"
            )
        pieces, count = self.shape.pieces, self.strategy.shards_per_rank
        first_shard = self.strategy.shards.start * pieces
        sizes = self.shape.shard_bytes[first_shard : first_shard + count * pieces]
        check_sizes(groups, [size for piece in range(pieces) for size in sizes[piece::pieces]])
        if self.memory is not None:
            self._register_again(self.memory, groups)
            return
        copier = self.make_copier([group.runs for group in groups])
        physical = physical_fingerprint_of_each(groups, count)
        self.memory = RankMemory(self.connection, groups, first_shard, copier, count)
        self._blocking = BlockingLoader(self.memory, self._failed_inside)
        self.connection.physical = (first_shard, physical)
        self.connection.further_shards = [shard * pieces for shard in self.strategy.shards[1:]]
        if self.connection.state != "down":
            # the server has not been told yet how the tensors lie in memory
            self.connection.start_over()
        registration = copier.pool_registration(self.connection)
        if registration is not None:
            self._registers_pool = True
            run = partial(self._run_registration, registration)
            self._threads.append(self._thread("registration", run))
        self.is_registered = True
        for thread in self._threads:
            thread.start()

    def _register_again(self, memory: RankMemory, groups: Sequence[GroupMemory]) -> None:
        if self._closing:
            raise RequestError("closed", "this adapter is closed", hint="make another")
        physical = physical_fingerprint_of_each(groups, self.strategy.shards_per_rank)
        if physical != self.connection.physical[1]:
            problem = "the tensors do not lie in memory as they did when they were first registered"
            raise RequestError(
                "bad_layer", problem, field="layers", hint="close this adapter and make another"
            )
        memory.relocate(groups)
        self.is_registered = True

    def unregister_kv_caches(self) -> None:
        """The engine takes its tensors' memory away; for the thread that hands over jobs. Stores
        end with what they have read by now, and loads under way are waited for; each has a
        deadline. When this returns no copy reads or writes that memory, and every job ends at once,
        undone, until `register_kv_caches` or `register_groups` says where the tensors are now."""
        if self.memory is None or not self.is_registered:
            return
        self.drop_ahead()
        with self._wake:
            self.is_registered = False
            self._end_queued()
        self.withdraw(None)
        with self._for_loads:
            self._for_loads.wait_for(lambda: not self._is_loading)
            self._wake.wait_for(lambda: not self._stores)
        self.memory.relocate(())

    def make_copier(self, runs: Sequence[BlockRuns]) -> Copier:
        return copier_for(runs, self.connection.options.gpu_staging_bytes)

    @property
    def jobs(self) -> JobCounts:
        with self._wake:
            stores, loads = len(self._stores), len(self._began_s)
            return JobCounts(stores, len(self._queued_stores), loads, len(self._queued_loads))

    @property
    def is_near(self) -> bool:
        """Whether it shares memory with the server."""
        return self.connection.segments is not None

    # -- jobs

    def store(self, job: Hashable, request: StoreRequest) -> None:
        """Stores blocks in the background. A rank whose shard another rank stores has nothing to
        do."""
        self.store_all({job: request})

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        """The same for several that are computed by now, which holds an engine's thread up once:
        all begin, or none."""
        taken, ended = dict[Hashable, StoreRequest](), list[Hashable]()
        with self._wake:
            for job, request in requests.items():
                if job in self._stores:  # the first store of that name will be reported
                    self.connection.counters.fail("repeated_job")
                elif self.strategy.stores and self._has_room(len(self._queued_stores) + len(taken)):
                    taken[job] = request
                else:
                    ended.append(job)
        try:
            # Not with the lock held: the store thread may go on meanwhile.
            stores = self._make_stores(taken)
        except BaseException as error:
            # guard: raised again; after an interrupt the caller cannot know that none has begun
            for job in () if isinstance(error, Exception) else (*taken, *ended):
                self._end_store(job)
            raise
        with self._wake:
            if self._closing:
                for job in taken:
                    self._end_store(job)
            elif stores:
                self._stores.update(stores)
                self._queued_stores.extend(stores.values())
                self._for_stores.notify_all()
            for job in ended:
                self._end_store(job, is_complete=not self.strategy.stores)

    def _make_stores(self, requests: Mapping[Hashable, StoreRequest]) -> dict[Hashable, Store]:
        if not requests:
            return {}
        assert self.memory is not None
        sources = source_blocks(self.memory, requests.values())
        return {
            job: Store(self.memory, request, blocks, job)
            for (job, request), blocks in zip(requests.items(), sources, strict=True)
        }

    def load(self, job: Hashable, request: LoadRequest) -> None:
        """Loads blocks in the background."""
        self.drop_ahead()
        with self._wake:
            if not self._has_room(len(self._queued_loads)):
                self._end_load(job, request.outcome())
                return
            assert self.memory is not None
            self._queued_loads.append(QueuedLoad(job, request, self.memory.copier.mark()))
            self._began_s[job] = time.perf_counter()
            self._for_loads.notify_all()

    def load_ahead(self, owner: Hashable, epoch: int, slots: NDArray[np.int64]) -> bool:
        """Begins to fetch these slots for a `load_now` of that owner; until then a lease must keep
        them. Returns whether anything has begun."""
        self.drop_ahead()
        with self._for_loads:
            may_load = self.is_registered and not (self._closing or self._is_loading)
        return may_load and self._blocking is not None and self._blocking.fetch(owner, epoch, slots)

    def drop_ahead(self) -> None:
        """There is no such load."""
        if self._blocking is not None:
            self._blocking.drop()

    def load_now(self, request: LoadRequest, owner: Hashable = None) -> LoadOutcome:
        """Loads in the calling thread and waits, for an engine that has nothing else to do, when
        all other loads have ended. Copies leave no gaps for the engine's own until
        `set_engine_busy`."""
        with self._for_loads:
            self._for_loads.wait_for(lambda: not self._is_loading)
            if not self._has_room(0):
                return request.outcome()
        assert self._blocking is not None
        return self._blocking.load(request, owner)

    def withdraw(self, block_ids: Sequence[int] | None) -> None:
        """The engine will write into these blocks now (None: it is not known which). Stores that
        have not copied them yet evacuate them, a few milliseconds' worth, or end with the part
        before. Waits for no server."""
        with self._wake:
            sources = [store.sources for store in self._stores.values()]
            if block_ids is None:
                for each in sources:
                    each.give_up()
            else:
                self._finished.withdrawn += evacuate(sources, block_ids)
            if self.memory is not None:
                self.memory.copier.fence_reads()

    def set_engine_busy(self, busy: bool) -> None:
        """While the engine computes, copies go in small slices so that its own can interleave."""
        if self.memory is not None:
            self.memory.copier.set_engine_busy(busy)

    def wait_for_load(self, seconds: float) -> None:
        """Waits until a load has ended, for an engine that has nothing else to do."""
        with self._wake:
            self._wake.wait_for(lambda: self._finished.loads or self._closing, seconds)

    def poll(self) -> Finished:
        """What has ended since the last call. Never blocks for longer than a lock is held."""
        with self._wake:
            finished, self._finished = self._finished, Finished(self.strategy.rank)
        return finished

    def close(self) -> None:
        """Ends the threads after the jobs in hand, then the session. Queued jobs end undone, and
        later ones at once."""
        with self._wake:
            self._closing = True
            self._end_queued()
            for condition in (self._wake, self._for_stores, self._for_loads, self._for_arrivals):
                condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.drop_ahead()
        self.connection.close()

    # -- the threads

    def _enter(self) -> None:
        """What every thread does first."""
        assert self.memory is not None
        try:
            self.memory.copier.enter()
        except Exception:  # guard: then copies fail, one by one, and the engine hears of each
            self._failed_inside("thread")

    def _run_stores(self) -> None:
        """This thread keeps the session, too."""
        self._enter()
        populating = False
        while not self._closing:
            self.connection.poll()
            with self._for_stores:
                if not (self._may_store() or populating or self._closing):
                    self._for_stores.wait(self.connection.rest_s)
            if self._may_store():
                self._begin_store()
                self._copy_store()
            else:
                is_idle = not (self._departing or self._registers_pool)
                populating = is_idle and self.connection.map_pool_ahead()
        if self._begun is not None:
            self._begun.abandon()
            self._end_store(self._begun.job)
        with self._wake:
            self._all_copied = True
            self._for_departures.notify_all()

    def _may_store(self) -> bool:
        """Whether there is a store to begin or to copy."""
        if len(self._departing) >= _STORES_UNDER_WAY:
            return False
        # Not while the first session is being made: an engine's first blocks are stored, too.
        may_begin = self._queued_stores and not self.connection.coming_up
        return self._begun is not None or bool(may_begin)

    def _begin_store(self) -> None:
        """Begins the next one that waits, unless one has begun: the server is asked for slots."""
        while True:
            with self._wake:
                if self._begun is not None or not self._queued_stores or self._closing:
                    return
                store = self._queued_stores.popleft()
            try:
                store.begin()
                self._begun = store
            except Exception:
                # guard: whatever goes wrong here is a block that was not stored, never the engine's
                # end
                self._failed_inside("store")
                self._end_store(store.job)

    def _copy_store(self) -> None:
        store, self._begun = self._begun, None
        if store is None:
            return
        try:
            store.copy(self._begin_store, partial(self._let_depart, store))
        except Exception:  # guard: likewise; it departs with what was copied before
            self._failed_inside("store")

    def _let_depart(self, store: Store) -> None:
        with self._wake:
            self._departing.append(store)
            self._for_departures.notify_all()

    def _run_departures(self) -> None:
        self._enter()
        while True:
            with self._for_departures:
                self._for_departures.wait_for(lambda: self._departing or self._all_copied)
                if not self._departing:
                    return
                store = self._departing[0]
            try:
                store.finish()
            except Exception:
                # guard: whatever goes wrong here is a block that was not stored, never the engine's
                # end
                self._failed_inside("store")
                store.written = 0
                store.is_complete = False
            self._end_store(store.job, store.written, is_complete=store.is_complete)
            with self._for_stores:
                self._departing.popleft()
                self._for_stores.notify_all()

    def _run_loads(self) -> None:
        self._enter()
        while not self._closing:
            with self._for_loads:
                self._for_loads.wait_for(
                    lambda: (
                        self._closing
                        or (self._queued_loads and len(self._arriving) < _LOADS_UNDER_WAY)
                    )
                )
                block_bytes = sum(self.shape.shard_bytes)
                loads = take_together(self._queued_loads, block_bytes, _BYTES_TOGETHER)
            if loads:
                self._begin_loads(loads)
        with self._for_arrivals:
            self._all_begun = True
            self._for_arrivals.notify_all()

    def _begin_loads(self, loads: list[QueuedLoad]) -> None:
        assert self.memory is not None
        try:
            marks = [load.mark for load in loads if load.mark is not None]
            under_way = Load(self.memory, [load.request for load in loads], marks)
        except Exception:
            # guard: whatever goes wrong here is a failed load to the engine, never its end
            if len(loads) > 1:  # a request that is wrong in itself costs the others nothing
                for load in loads:
                    self._begin_loads([load])
                return
            self._failed_inside("load")
            self._end_loads(loads, None)
            with self._for_loads:
                self._for_loads.notify_all()  # for those that wait until no load is left
            return
        with self._for_arrivals:
            self._arriving.append((loads, under_way))
            self._for_arrivals.notify_all()

    def _run_arrivals(self) -> None:
        self._enter()
        while True:
            with self._for_arrivals:
                self._for_arrivals.wait_for(lambda: self._arriving or self._all_begun)
                if not self._arriving:
                    return
                loads, under_way = self._arriving[0]
            loaded = None
            try:
                self._wait_for_engine(loads, under_way.ready_s)
            except Exception:
                # guard: the time that a load took is wrong; it must be waited for all the same
                self._failed_inside("load")
            try:
                loaded = under_way.finish()
            except Exception:  # guard: likewise
                self._failed_inside("load")
            self._end_loads(loads, loaded)
            with self._for_loads:
                self._arriving.popleft()
                self._for_loads.notify_all()

    def _wait_for_engine(self, loads: list[QueuedLoad], ready_s: float) -> None:
        """Counts a load's time from the end of the step that was under way: computing its blocks
        would have waited for that, too, and the cost model compares the two."""
        assert self.memory is not None
        self._engine_ready_s = max(self._engine_ready_s, ready_s)
        for job, _, mark in loads:
            if mark is not None and self.memory.copier.wait_for(mark):
                self._engine_ready_s = time.perf_counter()
            # also for others of the same step
            self._began_s[job] = max(self._began_s[job], self._engine_ready_s)

    def _run_registration(self, registration: Any) -> None:
        self._enter()
        registration.run(self._wake, lambda: self._closing)

    def _failed_inside(self, what: str) -> None:
        self.connection.counters.fail("internal_error")
        log.exception("kvkeep: a %s failed inside the client", what)

    # -- ends

    @property
    def _is_loading(self) -> bool:
        return bool(self._queued_loads or self._began_s or self._arriving)

    def _has_room(self, queued: int) -> bool:
        """Whether another job may begin; else the reason is counted. With the lock held."""
        if self._closing:
            reason = "closed"
        elif not self.is_registered:
            reason = "unregistered"
        elif queued >= _JOBS_QUEUED:
            reason = "queue_full"
        else:
            return True
        self.connection.counters.fail(reason)
        return False

    def _end_queued(self) -> None:
        """Ends jobs that have not begun, undone. With the lock held."""
        for load in self._queued_loads:
            self._end_load(load.job, load.request.outcome())
        for store in self._queued_stores:
            self._end_store(store.job)
        self._queued_loads.clear()
        self._queued_stores.clear()

    def _end_store(self, job: Hashable, written: int = 0, *, is_complete: bool = False) -> None:
        with self._wake:
            store = self._stores.pop(job, None)
            if store is not None:
                store.sources.close()
                if store.request.trace:
                    self._finished.times[job] = store.began_ns, time.time_ns()
            self._finished.stored[job] = written
            if not is_complete:
                self._finished.incomplete.append(job)
            if not self.is_registered:  # `unregister_kv_caches` waits for it
                self._wake.notify_all()

    def _end_loads(self, loads: list[QueuedLoad], loaded: list[NDArray[np.bool_]] | None) -> None:
        """None: nothing was loaded."""
        with self._wake:
            now_s = time.perf_counter()
            for number, (job, request, _) in enumerate(loads):
                took_s = now_s - self._began_s.get(job, now_s)
                in_place = None if loaded is None else loaded[number]
                if request.trace:
                    now_ns = time.time_ns()
                    self._finished.times[job] = now_ns - int(took_s * 1e9), now_ns
                self._end_load(job, request.outcome(in_place, took_s))

    def _end_load(self, job: Hashable, outcome: LoadOutcome) -> None:
        """With the lock held."""
        self._finished.loads[job] = outcome
        self._began_s.pop(job, None)
        self._wake.notify_all()
