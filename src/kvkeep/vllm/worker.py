"""The worker's side in vLLM: moves this rank's blocks, and says in vLLM's words what came of it.

    handle_preemptions  before vLLM writes anything: blocks that may be overwritten are evacuated
    begin               before the forward pass: loads
    wait_for_save       after it: stores of what it computed
    collect             what has ended meanwhile; `received`, `failed` and `invalid` are what vLLM
                        asks for then

A failed load is told by its blocks, where vLLM can take a prefix of a load as it is, and otherwise
by its request.

What a step's results tell, vLLM reads a step later where it schedules ahead. A scheduler that is in
the same process need not wait for that: it asks this side itself (`hand_over`) for all that has
ended by then, but for loads that failed, which vLLM must hear of in its own words."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvkeep.client.options import CONNECT_PATIENCE_MS, ClientOptions
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest
from kvkeep.client.worker import WorkerAdapter
from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.step import save
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.vllm import versions
from kvkeep.vllm.attention import check_heads_apart, encodings_of
from kvkeep.vllm.groups import layout_of, locate
from kvkeep.vllm.identity import Part, Weights, parts_of_all_ranks, shape_of, strategy_of
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.siblings import is_child
from kvkeep.vllm.stats import KVKeepStats, counts_of

log = logging.getLogger(__name__)

# start-up waits that long for a small checkpoint to be hashed, and not for a large one
_HASH_PATIENCE_S = 0.4

# vLLM polls an engine that has nothing to compute once a millisecond or two.
# a load that ends while vLLM sleeps between two looks is heard of a millisecond late
_IDLE_WAIT_S = 0.008

_here: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()  # by name


def may_wait(vllm_config: Any) -> bool:
    """Whether an engine that has nothing to compute may wait a little for the cache. One of a
    data-parallel group has others who wait for it in each of their steps."""
    return bool(vllm_config.parallel_config.data_parallel_size == 1)


def find_here(name: str) -> WorkerSide | None:
    """The worker's side of that name, if it is in this process."""
    return _here.get(name)


def is_alone(worker: WorkerSide | None) -> bool:
    """Whether vLLM calls that side's connector itself, and not one that holds others beside it."""
    here = getattr(get_kv_transfer_group(), "half", None) if has_kv_transfer_group() else None
    return worker is not None and here is worker


def _refused(error: KVKeepError) -> Handshake:
    return Handshake(None, f"{error.message} ({error.hint})" if error.hint else error.message)


class WorkerSide:
    """One for each rank."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ClientOptions,
        siblings: tuple[str, ...] = (),
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._siblings = siblings
        self._is_told = False  # the handshake, to the scheduler
        self.adapter: WorkerAdapter | None = None
        self._pieces: GroupLayout | None = None
        self._kv_caches: Mapping[str, Any] = {}  # vLLM's tensors
        # jobs that vLLM has not heard of, and whose they are
        self._loading: dict[Any, tuple[str, LoadRequest]] = {}
        self._reports: list[Finished] = []
        self._is_joined = False  # with a scheduler's side in this process
        self._may_wait = True
        self._saved: Step | None = None  # the step whose blocks are saved
        self._unfinished: Step | None = None  # the step that is being computed
        self._is_idle = self._was_idle = False  # the step, and the one before it, compute nothing
        self._is_asleep = False  # vLLM has taken the KV's memory away
        self._rank = 0
        # being hashed; then `_start_late` is called with the next step
        self._pending: Weights | None = None
        self._start_late: Callable[[], None] | None = None
        # what the scheduler knows of the connection to the server
        self._told_trouble: tuple[str, str] | None = None
        self.faults = 0
        self.handshake: Handshake | None = None
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.invalid: set[int] = set()

    def __repr__(self) -> str:
        loading = sorted(request_id for request_id, _ in self._loading.values())
        return (
            f"WorkerSide(loading={loading}, reports={len(self._reports)},"
            f" untold={sorted(self.received | self.failed)}, invalid={sorted(self.invalid)},"
            f" computes={self._unfinished is not None}, joined={self._is_joined})"
        )

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM has made the KV memory. From here on blocks move, unless this is no engine that can
        be cached."""
        located: tuple[list[GroupMemory], dict[str, str]] | KVKeepError
        self._kv_caches = kv_caches
        try:
            pieces = layout_of(self._vllm_config, self._kv_cache_config)
            strategy = strategy_of(self._vllm_config, self._kv_cache_config, pieces)
            encodings = encodings_of(self._vllm_config, kv_caches)
            if strategy.shards_per_rank > 1:
                check_heads_apart(encodings)
            memory = locate(pieces, self._kv_cache_config, kv_caches, strategy.shards_per_rank)
            located = memory, encodings
        except KVKeepError as error:
            located = error
        except Exception as error:
            # guard: the other ranks wait for this one below; they hear why it is not cached
            self._failed("kvkeep: the KV of this rank could not be described")
            located = SettingsError(f"the KV of a rank could not be described: {error}")
        try:
            parts = parts_of_all_ranks(located)  # refused or not: the other ranks wait for us here
            if isinstance(located, KVKeepError):
                raise located
        except KVKeepError as error:
            self.handshake = _refused(error)
            return
        weights = Weights(self._vllm_config)
        weights.wait(_HASH_PATIENCE_S)
        start = partial(self._start, pieces, memory, strategy, parts, weights)
        if not weights.pending:
            start()
            if self.adapter is not None:
                self.adapter.connection.wait_until_up(CONNECT_PATIENCE_MS)
            return
        self.handshake = Handshake(None, is_pending=True)
        self._pending, self._start_late = weights, start

    def _start(
        self,
        pieces: GroupLayout,
        memory: Sequence[GroupMemory],
        strategy: ParallelStrategy,
        parts: Sequence[Part],
        weights: Weights,
    ) -> None:
        """The weights are known, and with them what blocks are called: from now on blocks move. In
        the engine's thread."""
        try:
            shape = shape_of(self._vllm_config, pieces, strategy, parts, weights.revision)
            adapter = WorkerAdapter(shape, strategy, self._options)
            adapter.connection.outage.speaks = False  # the scheduler does, for all ranks
            try:
                adapter.register_groups(memory)
            except KVKeepError:
                adapter.close()
                raise
        except KVKeepError as error:
            self.handshake = _refused(error)
            return
        self.handshake = Handshake(shape, name=uuid.uuid4().hex)
        self._pieces, self.adapter, self._rank = pieces, adapter, strategy.rank
        self._may_wait = may_wait(self._vllm_config)
        _here[self.handshake.name] = self

    def _start_if_hashed(self) -> None:
        """Starts a worker whose weights have become known meanwhile. In the engine's thread: it is
        on the right GPU and captures no graph now, and as a step begins the engine is awake."""
        start = self._start_late
        if start is None or self._pending is None or self._pending.pending:
            return
        self._start_late = self._pending = None
        self._is_told = False  # the scheduler knows only that it was pending
        try:
            start()
        except Exception as error:
            # guard: the scheduler must hear that this worker will never be ready
            self._failed("kvkeep: a worker could not be started")
            self.handshake = Handshake(None, f"a worker could not be started: {error}")

    def first_handshake(self) -> Handshake | None:
        """The handshake, at start-up. None as one of several connectors: MultiConnector would give
        it to the siblings, or theirs to us. Then it comes with the first reports."""
        if is_child(self):
            return None
        self._is_told = self.handshake is not None
        return self.handshake

    def unregister_kv_caches(self) -> None:
        """vLLM takes the memory of its KV away: when this returns, no copy reads or writes it.
        Until `restore` every store ends undone and every load fails; those under way do, too,
        because what a load has brought goes with the memory. vLLM hears of all that with the next
        step's results. Again: nothing happens."""
        adapter = self.adapter
        if adapter is None or self._is_asleep:
            return
        self._is_asleep = True
        try:
            self.wait_for_save()  # not every rank is told by vLLM that a step is over
            adapter.unregister_kv_caches()
        except Exception:  # guard: whatever failed, nothing may be copied when this returns
            self._failed(
                "kvkeep: the KV could not be unregistered, so this worker does not cache any more"
            )
            adapter.close()
        finished = adapter.poll()
        finished.loads.update({job: load.outcome() for job, (_, load) in self._loading.items()})
        self._take_in(finished)

    def restore_kv_caches(self) -> None:
        """vLLM has given its KV memory again: the tensors are the same, whether or not they lie
        where they did. What they hold is nobody's: vLLM has reset its own prefix cache and this
        connector's before it took the memory."""
        if self.adapter is None or self._pieces is None or not self._is_asleep:
            return
        try:
            self.adapter.register_groups(
                locate(
                    self._pieces,
                    self._kv_cache_config,
                    self._kv_caches,
                    self.adapter.strategy.shards_per_rank,
                )
            )
        except Exception as error:
            # guard: vLLM goes on; its scheduler hears that this rank does not
            self._failed("kvkeep: the KV could not be registered again")
            self.handshake = Handshake(
                None, f"after vLLM had slept: {getattr(error, 'message', error)}"
            )
            self._is_told = False
            return
        self._is_asleep = False
        assert self.handshake is not None
        self.handshake = replace(self.handshake, sleeps=self.handshake.sleeps + 1)

    def join(self) -> None:
        """From now on `hand_over` is called after every step."""
        self._is_joined = True

    def handle_preemptions(self, step: Step) -> None:
        """The first that a worker hears of a step, before vLLM zeroes or copies any block for it:
        blocks that stores still have to read are saved. Once for each step."""
        self._start_if_hashed()
        if self.adapter is None or self._saved is step:
            return
        self._saved = step
        self.wait_for_save()  # not every rank is told by vLLM that a step is over
        try:
            save(step.step, self.adapter)
            if step.all_withdrawn:
                self.adapter.withdraw(None)
        except Exception:
            # guard: stores must not read what is written, and the scheduler must hear of them
            self._failed("kvkeep: a step could not be begun")
            self._never_began(step.step.stores)
            self.adapter.withdraw(None)

    def begin(self, step: Step) -> None:
        """Loads begin. `handle_preemptions` comes first, where vLLM has not called it already."""
        self._start_if_hashed()
        for request_id, outcome in step.lost.items():
            self._tell(request_id, outcome)
        if self.adapter is None:
            return
        self.handle_preemptions(step)
        self._unfinished = step
        self._was_idle, self._is_idle = self._is_idle, step.idle
        # its tokens may still be on their way out
        self.adapter.set_engine_busy(not (self._is_idle and self._was_idle))
        for job, load in step.step.loads.items():
            self._loading[job] = step.step.requests[job], load
            try:
                self.adapter.load(job, load)
            except Exception:  # guard: vLLM waits for this load; it hears that it failed
                self._failed("kvkeep: a load could not be begun")
                self._take_in(Finished(self._rank, loads={job: load.outcome()}))

    def load_now(self, request_id: str, load: LoadRequest) -> LoadOutcome:
        """Loads now, while nothing is computed or stored, and waits for the end."""
        assert self.adapter is not None
        try:
            return self.adapter.load_now(load, request_id)
        except Exception:  # guard: then it was not begun
            self._failed("kvkeep: a load could not be begun")
            return load.outcome()

    def stores_handed_over(self) -> list[Finished]:
        """What has ended while nothing is loaded. An engine without requests makes no steps, and
        hears of nothing."""
        return [] if self._loading else self.hand_over()

    def wait_for_save(self) -> None:
        """The step is computed: what it computed is stored from now on."""
        step, self._unfinished = self._unfinished, None
        if self.adapter is None or step is None or not step.step.stores_after:
            return
        stores = step.step.stores_after
        try:
            self.adapter.store_all(stores)
        except Exception:
            # guard: the scheduler must hear of these stores, and those that have begun must not
            # read on
            self._failed("kvkeep: stores could not be begun")
            self._never_began(stores)
            self.adapter.withdraw(None)

    def _never_began(self, stores: Mapping[int, Any]) -> None:
        self._reports.append(Finished(self._rank, dict.fromkeys(stores, 0), list(stores)))

    def collect(self) -> None:
        """Takes in what has ended, for the step's results. Each load is told once."""
        if self.adapter is not None and not self._is_joined:
            self._wait_if_idle()
            self._take_in(self.adapter.poll())

    def hand_over(self) -> list[Finished]:
        """What has ended, for a scheduler in this process. Where a load failed it comes with the
        next step's results instead: vLLM takes failed blocks from there only."""
        if self.adapter is None:
            return []
        self._wait_if_idle()
        finished = self.adapter.poll()
        if finished.failed_blocks:
            self._take_in(finished)
            return []
        for job in finished.loads:
            self._loading.pop(job, None)
        return [] if finished.is_nothing else [finished]

    def _wait_if_idle(self) -> None:
        """Not right after a step that computed something: its tokens may still be on their way
        out."""
        is_idle = self._may_wait and self._is_idle and self._was_idle
        if is_idle and self._loading and self.adapter is not None:
            self.adapter.wait_for_load(_IDLE_WAIT_S)

    def _take_in(self, finished: Finished) -> None:
        for job, outcome in finished.loads.items():
            if job in self._loading:
                self._tell(self._loading.pop(job)[0], outcome)
        if not finished.is_nothing:
            self._reports.append(finished)

    def get_finished(self, request_ids: set[str]) -> tuple[None, set[str] | None]:
        self.collect()
        received, _ = self.take_received()
        return None, received or None

    def get_transfer_results(self, request_ids: set[str]) -> Any:
        self.collect()
        return versions.transfer_results(*self.take_received())

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that failed as a whole."""
        received, failed = self.received, self.failed
        self.received, self.failed = set(), set()
        return received, failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> Reports | None:
        """Also with nothing to say, if `hand_over` is to be called: for empty results vLLM asks no
        connector."""
        reports, self._reports = self._reports, []
        handshakes = []
        if not self._is_told and self.handshake is not None:
            self._is_told = True
            handshakes = [replace(self.handshake, siblings=self._siblings)]
        trouble = self.adapter.connection.outage.trouble if self.adapter is not None else None
        outages = {} if trouble == self._told_trouble else {self._rank: trouble}
        self._told_trouble = trouble
        is_news = reports or handshakes or outages or self._is_joined
        return Reports(reports, handshakes, outages) if is_news else None

    def stats(self) -> KVKeepStats | None:
        """What the reports that wait say, in numbers. Before
        `build_connector_worker_meta`."""
        if self.adapter is None or not self._reports:
            return None
        return KVKeepStats.of(**counts_of(self._reports), connected=int(self.is_answered))

    @property
    def is_answered(self) -> bool:
        """Whether its connection to the server is up."""
        return self.adapter is not None and self.adapter.connection.answering

    @property
    def is_near(self) -> bool:
        """Whether it shares memory with the server: a load takes as long as a copy, and asks
        nobody."""
        return self.adapter is not None and self.adapter.is_near and not self._is_asleep

    def close(self) -> None:
        self._start_late = None
        if self.adapter is not None:
            self.adapter.close()

    def _failed(self, message: str) -> None:
        log.exception(message)
        self.faults += 1

    def _tell(self, request_id: str, outcome: LoadOutcome) -> None:
        """vLLM hears, when it asks next, that the load of this request has ended."""
        self.received.add(request_id)
        if self._pieces is None or self._pieces.whole:
            self.invalid.update(outcome.failed)
        elif outcome.failed:
            self.failed.add(request_id)
