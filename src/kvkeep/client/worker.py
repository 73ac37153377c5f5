"""What an engine's workers need: stores and loads that run in the background while the engine
computes.

The engine hands over a job and goes on; `poll` tells later which jobs are finished and which blocks
failed. Until a job is reported, its engine blocks must stay as they are. One thread stores and
another begins loads, because the engine waits for loads and for no store; two more wait until they
have arrived, so that the next ones can begin before that.

An engine on a GPU hands over a job while its kernels are still to run: calls here are ordered with
the work that it has given to its current stream before and after them (`kvkeep.gpu.copier`)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.at_once import AtOnce
from kvkeep.client.connection import Connection
from kvkeep.client.copier import Copier, copier_for
from kvkeep.client.departures import Departures
from kvkeep.client.loading import Load, Loading, take_together
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import Finished, LoadRequest, Stored, StoreRequest
from kvkeep.client.sources import Piece, Sources, check_sizes, physical_fingerprint, take_back
from kvkeep.client.transfer import Storing, Transfer
from kvkeep.errors import RequestError
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape

log = logging.getLogger(__name__)

_JOBS_QUEUED = 1024
_BYTES_TOGETHER = 64 << 20  # of loads that wait at the same time: few launches for many small ones
_LOADS_UNDER_WAY = _STORES_UNDER_WAY = 4
_ALL = slice(None)


class WorkerAdapter:
    """Stores and loads of one engine worker, over a connection of its own. (A `connection` can be
    given, to a server in this process or a simulated one; a scheduler that shared it would wait
    whenever this one does.)"""

    def __init__(
        self,
        shape: BlockShape,
        strategy: ParallelStrategy,
        options: ClientOptions | None = None,
        connection: Connection | None = None,
    ) -> None:
        if (given := strategy.kv_world_size) != (expected := shape.kv_world_size):
            raise RequestError(
                "bad_shards",
                f"the strategy has {given} shards, the shape {expected}",
                field="strategy",
            )
        self.shape, self.strategy = shape, strategy
        self.connection = connection or Connection(shape, options or ClientOptions())
        self.connection.role = f"worker {strategy.rank} of {strategy.world_size}"
        self._transfer: Transfer | None = None
        self._at_once: AtOnce | None = None  # loads of the engine's own thread
        self._loads: deque[Load] = deque()
        self._stores: deque[tuple[Hashable, StoreRequest]] = deque()
        self._sources: dict[Hashable, Sources] = {}  # of stores that are queued or under way
        self._begun: tuple[Hashable, Storing] | None = (
            None  # the next one to be copied, if the server has been asked
        )
        self._began: dict[Hashable, float] = {}  # when loads that are queued or under way did
        self._engine_got_there_s = 0.0  # where a load had to wait for it last
        self._finished = Finished(strategy.rank)
        threads, lock = self.connection.threads, self.connection.threads.RLock()
        # One lock, and a condition for each who waits: nobody is woken, and takes the interpreter,
        # for another's news.
        self._wake, self._for_stores, self._for_loads, self._for_arrivals = (
            threads.Condition(lock) for _ in range(4)
        )
        self._closing = self._all_begun = False
        self._registers_pool = False  # a thread of its own maps the pool
        self._is_unregistered = False  # the engine has taken its memory away: no job begins
        self._departures = Departures(
            self.connection, self._for_stores, self._end_store, self._failed_inside
        )
        runs = {"stores": self._run_stores, "loads": self._run_loads}
        runs |= {"arrivals": self._run_arrivals, "departures": self._run_departures}
        self._threads = [
            threads.Thread(target=run, name=f"kvkeep-{name}", daemon=True)
            for name, run in runs.items()
        ]
        self._arriving: deque[tuple[list[Load], Loading]] = deque()

    def register_kv_caches(
        self, layers: Mapping[str, Any] | Sequence[Any], block_dim: int = 0
    ) -> None:
        """Says, once, where the engine's blocks are, one tensor a layer. Raises for tensors that do
        not fit."""
        self.register_pieces([Piece(BlockRuns.of(layers, block_dim))])

    def register_pieces(self, pieces: Sequence[Piece]) -> None:
        """The same for an engine whose blocks come in several pieces."""
        if self._transfer is not None and not self._is_unregistered:
            problem = "the tensors are registered already"
            raise RequestError(
                "registered", problem, field="layers", hint="unregister_kv_caches comes first"
            )
        first_shard = self.strategy.kv_rank * self.shape.pieces
        check_sizes(pieces, self.shape.shard_bytes[first_shard : first_shard + self.shape.pieces])
        if self._transfer is not None:
            self._register_again(self._transfer, pieces)
            return
        copier = self.make_copier([piece.runs for piece in pieces])
        self._transfer = Transfer(self.connection, pieces, first_shard, copier)
        self._at_once = AtOnce(self._transfer, self.strategy.rank, self._failed_inside)
        self.connection.physical = (first_shard, physical_fingerprint(pieces))
        if self.connection.state != "down":
            # the server has not been told yet how the tensors lie in memory
            self.connection.start_over()
        registration = copier.pool_registration(self.connection)
        if registration is not None:
            self._registers_pool = True
            run = partial(self._run_registration, registration)
            self._threads.append(
                self.connection.threads.Thread(target=run, name="kvkeep-registration", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def _register_again(self, transfer: Transfer, pieces: Sequence[Piece]) -> None:
        if self._closing:
            raise RequestError("closed", "this adapter is closed", hint="make another")
        if physical_fingerprint(pieces) != self.connection.physical[1]:
            problem = "the tensors do not lie in memory as they did when they were first registered"
            raise RequestError(
                "bad_layer", problem, field="layers", hint="close this adapter and make another"
            )
        transfer.memory.relocate(pieces)
        self._is_unregistered = False

    def unregister_kv_caches(self) -> None:
        """The engine takes its tensors' memory away; for the thread that hands over jobs. Stores
        end with what they have read by now, and loads under way are waited for; each has a
        deadline. When this returns no copy reads or writes that memory, and every job ends at once,
        undone, until `register_kv_caches` or `register_pieces` says where the tensors are now."""
        if self._transfer is None or self._is_unregistered:
            return
        self.drop_ahead()
        with self._wake:
            self._is_unregistered = True
            self._end_queued()
        self.withdraw(None)
        with self._for_loads:
            self._for_loads.wait_for(lambda: not self._is_loading)
            self._wake.wait_for(lambda: not self._sources)
        self._transfer.memory.relocate(())

    @property
    def is_near(self) -> bool:  # whether it shares memory with the server
        return self.connection.segments is not None

    def make_copier(self, runs: Sequence[BlockRuns]) -> Copier:
        return copier_for(runs, self.connection.options.gpu_staging_bytes)

    def store(self, job: Hashable, request: StoreRequest) -> None:
        """Stores blocks in the background. A rank whose shard another rank stores has nothing to
        do."""
        self.store_all({job: request})

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        """The same for several that are computed by now, which holds an engine's thread up once:
        all begin, or none."""
        taken, ended = dict[Hashable, StoreRequest](), dict[Hashable, Stored]()
        with self._wake:
            for job, request in requests.items():
                if (
                    job in self._sources
                ):  # which store it means nobody could tell; the first one will be reported
                    self.connection.counters.fail("repeated_job")
                elif self.strategy.stores and self._has_room(len(self._stores) + len(taken)):
                    taken[job] = request
                else:
                    ended[job] = Stored(0, complete=not self.strategy.stores)
        try:
            sources = self._transfer.sources(taken.values()) if self._transfer else []
        except BaseException as error:
            # guard: raised again; of an interrupt nobody knows that none has begun
            for job in () if isinstance(error, Exception) else (*taken, *ended):
                self._end_store(job, Stored(0, complete=False))
            raise
        with self._wake:
            if self._closing:
                ended |= dict.fromkeys(taken, Stored(0, complete=False))
            elif taken:
                self._sources.update(zip(taken, sources, strict=self._transfer is not None))
                self._stores.extend(taken.items())
                self._for_stores.notify_all()
            for job, stored in ended.items():
                self._end_store(job, stored)

    def load(self, job: Hashable, request: LoadRequest) -> None:
        """Loads blocks in the background."""
        self.drop_ahead()
        with self._wake:
            if not self._has_room(len(self._loads)):
                self._end_load(job, request.ids_of(_ALL))
                return
            self._loads.append(
                (job, request, self._transfer.copier.mark() if self._transfer else None)
            )
            self._began[job] = time.perf_counter()
            self._for_loads.notify_all()

    def load_ahead(self, owner: Hashable, epoch: int, slots: NDArray[np.int64]) -> bool:
        """For a `load_now` of that owner; until then a lease must keep those slots. Whether
        anything has begun."""
        self.drop_ahead()
        with self._for_loads:
            if self._at_once is None or self._closing or self._is_unregistered or self._is_loading:
                return False
        return self._at_once.fetch(owner, epoch, slots)

    def drop_ahead(self) -> None:
        """There is no such load."""
        if self._at_once is not None:
            self._at_once.drop()

    def load_now(self, job: Hashable, request: LoadRequest, owner: Hashable = None) -> Finished:
        """Loads here and now, for an engine that has nothing else to do, when all other loads have
        ended. Copies give way to nobody then, until it says that it computes (`set_engine_busy`)."""
        assert self._at_once is not None
        with self._for_loads:
            self._for_loads.wait_for(lambda: not self._is_loading)
            if not self._has_room(0):
                return Finished(
                    self.strategy.rank, loaded=[job], failed={job: request.ids_of(_ALL)}
                )
        return self._at_once.load(job, request, owner)

    def withdraw(self, block_ids: Sequence[int] | None) -> None:
        """The engine will write into these blocks now (None: nobody knows which): stores that have
        not copied them yet set them aside, a few milliseconds' worth, or end with the part before.
        Waits for no server."""
        with self._wake:
            if block_ids is None:
                for sources in self._sources.values():
                    sources.give_up()
            else:
                self._finished.withdrawn += take_back(self._sources.values(), block_ids)
            if self._transfer is not None:
                self._transfer.copier.fence_reads()

    def set_engine_busy(self, busy: bool) -> None:
        """Whether the engine computes something, in what is begun from now on; for one that has
        registered memory."""
        if self._transfer is not None:
            self._transfer.copier.set_engine_busy(busy)

    def wait_for_load(self, seconds: float) -> None:
        """Waits until a load has ended, so long at most; for an engine that has nothing else to
        do."""
        with self._wake:
            self._wake.wait_for(lambda: self._finished.loaded or self._closing, seconds)

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
        assert self._transfer is not None
        try:
            self._transfer.copier.enter()
        except Exception:  # guard: then copies fail, one by one, and the engine hears of each
            self._failed_inside("thread")

    def _run_stores(self) -> None:
        """This one keeps the session, too."""
        self._enter()
        populating = False
        while not self._closing:
            self.connection.poll()
            self._departures.settle()
            room = len(self._departures) < _STORES_UNDER_WAY
            may_begin = (
                room and not self.connection.coming_up
            )  # an engine's first blocks are stored, too
            with self._for_stores:
                if not (
                    (may_begin and self._stores)
                    or self._closing
                    or populating
                    or self._begun
                    or self._departures
                ):
                    self._for_stores.wait(self.connection.rest_s)
            if may_begin:
                self._begin_store()
            if self._begun is not None and room:
                now, self._begun = self._begun, None
                self._copy_store(*now, partial(self._begin_store, hurry=False))
            elif self._departures:
                self._departures.wait(lambda more=may_begin: more and bool(self._stores))  # type: ignore[misc]
            elif not self._registers_pool:
                populating = self.connection.map_pool_ahead()
        if self._begun is not None:
            self._begun[1].end_copy()
            self._departures.add(*self._begun)
        self._departures.close()

    def _begin_store(self, *, hurry: bool = True) -> None:
        """The next one that waits, unless one has begun; the server is asked for slots."""
        assert self._transfer is not None
        while True:
            with self._wake:
                if self._begun is not None or not self._stores or self._closing:
                    return
                job, request = self._stores.popleft()
                sources, alone = self._sources.get(job), not self._stores
            try:
                storing = self._transfer.storing(
                    request, sources or self._transfer.sources([request])[0]
                )
                storing.begin(hurry=hurry, alone=alone)
                self._begun = job, storing
            except Exception:
                # guard: whatever goes wrong here is a block that was not stored, never the engine's
                # end
                self._failed_inside("store")
                self._end_store(job, Stored(0, complete=False))

    def _copy_store(
        self, job: Hashable, storing: Storing, begin_another: Callable[[], None]
    ) -> None:
        try:
            storing.copy(begin_another, lambda: self._departures.add(job, storing))
        except Exception:  # guard: likewise; it departs with what was copied before
            self._failed_inside("store")

    def _run_departures(self) -> None:
        self._enter()
        self._departures.run()

    def _run_loads(self) -> None:
        self._enter()
        while not self._closing:
            with self._for_loads:
                self._for_loads.wait_for(
                    lambda: (
                        self._closing or (self._loads and len(self._arriving) < _LOADS_UNDER_WAY)
                    )
                )
                loads = take_together(self._loads, sum(self.shape.shard_bytes), _BYTES_TOGETHER)
            if loads:
                self._begin_loads(loads)
        with self._for_arrivals:
            self._all_begun = True
            self._for_arrivals.notify_all()

    def _begin_loads(self, loads: list[Load]) -> None:
        assert self._transfer is not None
        try:
            marks = [mark for _, _, mark in loads if mark is not None]
            loading = self._transfer.loading([request for _, request, _ in loads], marks)
        except Exception:
            # guard: whatever goes wrong here is a failed load to the engine, never its end
            if len(loads) > 1:  # one that is wrong in itself costs the others nothing
                for load in loads:
                    self._begin_loads([load])
                return
            self._failed_inside("load")
            self._end_loads(loads, None)
            with self._for_loads:
                self._for_loads.notify_all()  # who waits until no other is left
            return
        with self._for_arrivals:
            self._arriving.append((loads, loading))
            self._for_arrivals.notify_all()

    def _run_arrivals(self) -> None:
        self._enter()
        while True:
            with self._for_arrivals:
                self._for_arrivals.wait_for(lambda: self._arriving or self._all_begun)
                if not self._arriving:
                    return
                loads, loading = self._arriving[0]
            loaded = None
            try:
                self._wait_for_engine(loads, loading.ready_s)
            except Exception:
                # guard: a load whose time is wrong; it must be waited for all the same
                self._failed_inside("load")
            try:
                loaded = loading.finish()
            except Exception:  # guard: likewise
                self._failed_inside("load")
            self._end_loads(loads, loaded)
            with self._for_loads:
                self._arriving.popleft()
                self._for_loads.notify_all()

    def _wait_for_engine(self, loads: list[Load], ready_s: float) -> None:
        """A load begins when the step that was under way has ended: computing its blocks would have
        waited for that, too, and what a load takes is compared with computing."""
        assert self._transfer is not None
        self._engine_got_there_s = max(self._engine_got_there_s, ready_s)
        for job, _, mark in loads:
            if mark is not None and self._transfer.copier.wait_for(mark):
                self._engine_got_there_s = time.perf_counter()
            self._began[job] = max(
                self._began[job], self._engine_got_there_s
            )  # also for others of the same step

    def _end_loads(self, loads: list[Load], loaded: list[NDArray[np.bool_]] | None) -> None:
        """None: nothing was loaded."""
        with self._wake:
            for number, (job, request, _) in enumerate(loads):
                self._end_load(job, request.ids_of(_ALL if loaded is None else ~loaded[number]))

    def _run_registration(self, registration: Any) -> None:
        self._enter()
        registration.run(self._wake, lambda: self._closing)

    def _failed_inside(self, what: str) -> None:
        self.connection.counters.fail("internal_error")
        log.exception("kvkeep: a %s failed inside the client", what)

    # -- with the lock held

    @property
    def _is_loading(self) -> bool:
        return bool(self._loads or self._began or self._arriving)

    def _has_room(self, queued: int) -> bool:
        if self._closing or self._is_unregistered or queued >= _JOBS_QUEUED:
            reason = (
                "closed"
                if self._closing
                else "unregistered"
                if self._is_unregistered
                else "queue_full"
            )
            self.connection.counters.fail(reason)
            return False
        return True

    def _end_queued(self) -> None:
        """Jobs that have not begun end undone."""
        for job, request, _ in self._loads:
            self._end_load(job, request.ids_of(_ALL))
        for job, _ in self._stores:
            self._end_store(job, Stored(0, complete=False))
        self._loads.clear()
        self._stores.clear()

    def _end_store(self, job: Hashable, stored: Stored) -> None:
        with self._wake:
            sources = self._sources.pop(job, None)
            if sources is not None:
                sources.close()
            self._finished.stored[job] = stored.written
            if not stored.complete:
                self._finished.incomplete.append(job)
            if self._is_unregistered:  # nobody else waits for it
                self._wake.notify_all()

    def _end_load(self, job: Hashable, failed: list[int]) -> None:
        self._finished.loaded.append(job)
        began = self._began.pop(job, None)
        if began is not None:
            self._finished.seconds[job] = time.perf_counter() - began
        self._wake.notify_all()
        if failed:
            self._finished.failed[job] = failed
