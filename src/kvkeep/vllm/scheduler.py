"""The scheduler's half of the connector: translates vLLM's requests, block tables and steps for the
planner.

No block is held here: vLLM may give a block to another request while it is still being stored.
Every step says which blocks it may write into, so that workers copy those aside first. A store
begins when the step that computes its blocks has ended."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.hints import Hints
from kvkeep.client.options import ClientOptions
from kvkeep.client.outage import Outage
from kvkeep.client.requests import NO_BLOCK, Finished, LoadOutcome
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.connector.cost_model import CostModel, LoadWhen
from kvkeep.connector.planner import BLOCKS_TOGETHER, CachePlanner
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job
from kvkeep.kv.identity import differing_parts
from kvkeep.kv.shape import BlockShape
from kvkeep.units import format_size
from kvkeep.vllm import versions
from kvkeep.vllm.events import CacheEvents, event_groups
from kvkeep.vllm.groups import layout_of
from kvkeep.vllm.keys import KeyMaker, RequestKeys, TokensChanged, tokens_that_say_all
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.siblings import SiblingLoads, holds_one_of, keys_of_siblings
from kvkeep.vllm.stats import KVKeepStats, counts_of
from kvkeep.vllm.step_loads import StepLoads
from kvkeep.vllm.worker import find_here, is_alone, may_wait

if TYPE_CHECKING:
    from kvkeep.wire.tracing import Tracing

log = logging.getLogger(__name__)

_IDLE_WAIT_MS = 2  # a little longer than vLLM sleeps when it has nothing to compute
_NULL_BLOCK = 0  # in vLLM's tables where a request needs no block
_LATE_STEPS = 2  # that may be under way when a connector becomes active between steps


@dataclass
class SchedulerContext:
    """What vLLM gave the connector in the scheduler's process."""

    vllm_config: Any
    kv_cache_config: Any
    options: ClientOptions
    load_when: LoadWhen = "faster"
    tables: versions.BlockTables = field(default_factory=versions.BlockTables)
    block_pool: Any = None
    tracing: Tracing | None = None


@dataclass(eq=False, kw_only=True)
class VllmRequest(RequestState):
    """A request of vLLM's that is cached.

    local_tokens   what vLLM's prefix cache had when vLLM last asked
    asked_in       the step that vLLM was scheduling then
    in_step        what is found is loaded before the step that computes the rest
    next_store     with fewer tokens computed there is nothing to store
    noted_blocks   leading blocks that are described for routers, or will be
    """

    request: Any
    new_keys: RequestKeys
    local_tokens: int = 0
    asked_in: int = -1
    in_step: bool = False
    next_store: int = 0
    noted_blocks: int = 0


class SchedulerConnector:
    """One for each engine, made when every worker has registered its KV (registration.py).
    `is_late`: steps are under way already, and requests are `running` that are not cached."""

    def __init__(
        self,
        context: SchedulerContext,
        shape: BlockShape,
        handshake: Handshake,
        *,
        patience_ms: int,
        generation: bytes = b"",
        running: Collection[str] = (),
        is_late: bool = False,
    ) -> None:
        config, kv_cache_config = context.vllm_config, context.kv_cache_config
        self._options = context.options
        self._tables = context.tables
        self._layout = layout_of(config, kv_cache_config)
        hash_tokens = versions.hash_tokens(
            kv_cache_config, [group.block_tokens for group in self._layout.groups]
        )
        self._keys = KeyMaker(config, shape.identity, hash_tokens)
        self._keys.generation = generation
        self._adapter = SchedulerAdapter(shape, context.options)
        self._block_bytes = sum(shape.shard_bytes)
        self._costs = CostModel(context.load_when)
        self._world_size = world_size = config.parallel_config.world_size
        policy = config.kv_transfer_config.kv_load_failure_policy
        self.planner = CachePlanner(
            self._adapter, self._layout, world_size, self._costs, policy, context.tracing
        )
        self._requests: dict[str, VllmRequest] = {}
        self._running: set[str] = set(running)  # all of vLLM's requests, also those not cached
        # The only worker, if it is in this process: it hands over what has ended without a step.
        self._worker = find_here(handshake.name) if world_size == 1 else None
        if self._worker is not None:
            self._worker.join()
        self._may_wait = may_wait(config)
        # When a step begins vLLM zeroes new blocks of some models, and other connectors read what
        # they have to store.
        zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", True)
        may_load_in_step = (
            is_alone(self._worker) and self._layout.whole and not zeroes and self._may_wait
        )
        self.step_loads = StepLoads(config)
        self.step_loads.pool = context.block_pool
        self.step_loads.worker = self._worker if may_load_in_step else None
        self.events = self._make_events(config, kv_cache_config, shape, hash_tokens)
        self._has_siblings = bool(handshake.siblings)
        self._sibling_loads = SiblingLoads()
        self.keys_of_siblings = keys_of_siblings(handshake.siblings)
        self._accepts_requests = True
        self._sleeps = 0  # of all workers
        self._is_reset = False  # and nothing was computed since
        # The step that vLLM is scheduling.
        self._written: list[int] = []  # blocks that it may write into
        self._lost: dict[str, LoadOutcome] = {}  # loads that could not be prepared
        self._all_withdrawn = False  # which blocks it writes into is not known
        self._has_waited = False  # for an answer
        self._skips_unloaded = False  # it skips all requests that are not loaded
        # Steps before it.
        late_steps = _LATE_STEPS if is_late and self._worker is not None else 0
        self._uncounted_steps = late_steps  # under way that were built before this object
        self._under_way = 0  # steps whose results have not come
        # The last step computed nothing, or the only running request is the one that asks now.
        self._is_idle = not late_steps
        self._loaded: set[str] = set()  # requests whose loads ended, until vLLM looks at them
        self._counts: Counter[str] = Counter()
        self._rank_outages: dict[int, Outage] = {}  # as those ranks report them
        self.faults = 0
        self._connect(shape, patience_ms)

    def _make_events(
        self,
        config: Any,
        kv_cache_config: Any,
        shape: BlockShape,
        hash_tokens: int,
    ) -> CacheEvents:
        groups = event_groups(kv_cache_config, self._layout, hash_tokens)
        events = CacheEvents(
            config, groups, self._layout.block_tokens, shape.fingerprint, self._keys.scope
        )
        if events.enabled:
            self._adapter.connection.background = events.feed.turn
        return events

    def _connect(self, shape: BlockShape, patience_ms: int) -> None:
        if self._adapter.connection.wait_until_up(patience_ms):
            log.info("kvkeep: connected to %s", self._options.address)
        identity = shape.identity
        log.info(
            "kvkeep: identity %s: model %s, weights %s, blocks of %d tokens and %s, attention %s,"
            " keys from %s",
            shape.digest,
            identity.model,
            identity.revision[:12],
            self._layout.block_tokens,
            format_size(self._block_bytes),
            dict(identity.details)["attention"],
            "vLLM's hashes" if self._keys.uses_hashes else "tokens",
        )

    # -- workers

    def register_workers(self, handshakes: Sequence[Handshake]) -> SchedulerConnector:
        """vLLM hands all handshakes over once more after it has slept: the workers' memory was
        taken away and is there again.

        Before it sleeps, vLLM resets its prefix cache and, with `reset_cache`, this connector: its
        weights may be replaced meanwhile (always at level 2, at level 1 by a trainer), and no key
        would tell. If vLLM has not done so, it happens here."""
        sleeps = sum(each.sleeps for each in handshakes)
        if sleeps != self._sleeps and not self._is_reset:
            self.reset_cache()
        self._sleeps = sleeps
        self._refuse(refusals(handshakes, self._world_size))
        return self

    def add_handshakes(self, handshakes: Sequence[Handshake]) -> SchedulerConnector:
        """Takes those that came with a step's results: from a worker that cannot go on."""
        self._refuse(sorted({each.refusal for each in handshakes if each.shape is None}))
        return self

    def _refuse(self, reasons: Sequence[str]) -> None:
        """If there are any, no request is cached from now on."""
        if reasons:
            self._accepts_requests = False
            log.error(
                "kvkeep: from now on this engine is served without the cache: %s",
                "; ".join(reasons),
            )
            self._forget(*self._requests)

    # -- a request

    def on_new_request(self, request: Any) -> None:
        """Asks the server at once for all full blocks of the prompt."""
        self._running.add(request.request_id)
        new_keys = self._keys.keys_of(request) if self._accepts_requests else None
        if new_keys is None:
            return
        state = VllmRequest(
            request_id=request.request_id,
            salt=request.cache_salt,
            hints=Hints.of(request.kv_transfer_params),
            keys=bytearray(new_keys.grow()),
            prompt_blocks=(request.num_prompt_tokens - 1) // self._layout.block_tokens,
            reads=not getattr(request, "skip_reading_prefix_cache", False),
            request=request,
            new_keys=new_keys,
            prompt_tokens=request.num_prompt_tokens,
            tokens=tokens_that_say_all(request),
            adapter=request.lora_request.lora_name if request.lora_request else "",
            trace_headers=getattr(request, "trace_headers", None),
        )
        self.planner.arrive(state)
        self._requests[request.request_id] = state

    def get_num_new_matched_tokens(
        self, request: Any, local_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens after the first `local_tokens` can be loaded, and whether vLLM waits for
        the load. None: not known yet, or vLLM is to skip the request in this step."""
        found = self._lookup(request, local_tokens)
        return found, bool(found) and not self._requests[request.request_id].in_step

    def _lookup(self, request: Any, local_tokens: int) -> int | None:
        self._loaded.discard(request.request_id)
        if self._skips_unloaded:
            return None
        state = self._requests.get(request.request_id)
        if state is None:
            return 0
        state.local_tokens, state.asked_in = local_tokens, self._sibling_loads.step
        if not self._add_new_keys(state):
            return 0
        self._is_idle |= not (self._under_way or self._uncounted_steps) and len(self._running) == 1
        if self._is_idle and self._worker is not None and self.planner.has_stores:
            self._take_in(self._worker.stores_handed_over(), counted=False)
        state.in_step = self._may_load_in_step(state)
        # Of a prompt that the server has as a whole, one token is computed and not a block: that is
        # a decode step, for which vLLM has a CUDA graph. Windows and states are found at the ends
        # of blocks only, so with them the last block is left out.
        limit = (request.num_tokens - (not self._layout.whole)) // self._layout.block_tokens
        blocks = local_tokens // self._layout.block_tokens
        found = self.planner.lookup(state, blocks, limit)
        if found is None and self._is_idle and self._may_wait and not self._has_waited:
            self._has_waited = True
            self.planner.wait(state, _IDLE_WAIT_MS)
            found = self.planner.lookup(state, blocks, limit)
        if not found:
            return found
        expected_s = self._costs.expected_s(found)
        state.in_step &= self.step_loads.is_short(expected_s, found * self._block_bytes)
        if state.in_step:
            self.step_loads.fetch_ahead(request.request_id, *state.slots(blocks, found))
        # For a load in the background vLLM leaves the last token out by itself.
        most: int = request.num_tokens - state.in_step
        return min((blocks + found) * self._layout.block_tokens, most) - local_tokens

    def _may_load_in_step(self, state: VllmRequest) -> bool:
        """Whether the request is the only one, nothing is loaded, stored or computed, and vLLM's
        prefix cache has no part of a block."""
        is_only_one = self._is_idle and len(self._running) == 1 and self.planner.idle
        has_whole_blocks = not state.local_tokens % self._layout.block_tokens
        return is_only_one and has_whole_blocks and self.step_loads.may_load(state.request)

    def _add_new_keys(self, state: VllmRequest) -> bool:
        """Adds the keys of blocks that have become full. False if the request's earlier tokens have
        changed: then it is not cached any more."""
        if not (state.reads or state.writes):
            return False
        try:
            state.keys += state.new_keys.grow()
        except TokensChanged:
            self._forget(state.request_id)
            return False
        return True

    def update_state_after_alloc(self, request: Any, blocks: Any, loaded_tokens: int) -> None:
        """vLLM has given the request all these blocks. If `loaded_tokens` is not 0, it waits for a
        load of as many."""
        tables: Sequence[Sequence[int]] = blocks.get_block_ids()
        self._loaded.discard(request.request_id)
        state = self._requests.get(request.request_id)
        local_tokens = state.local_tokens if state is not None else 0
        try:
            self._tables.allocated(request.request_id, tables)
            computed = request.num_computed_tokens or local_tokens
            for table, group in zip(tables, self._layout.groups, strict=True):
                self._written += table[computed // group.block_tokens :]
            if loaded_tokens:
                assert state is not None and state.reads, "nothing was offered"
                self._load(state, tables, loaded_tokens)
            else:
                self.step_loads.drop_ahead()
                if state is not None:
                    state.hold_local(local_tokens // self._layout.block_tokens)
                    self.planner.start_without_load(state)
        except Exception:
            # guard: vLLM waits for this load, so it must hear that it failed
            self._failed("kvkeep: a load could not be prepared")
            self._all_withdrawn = True
            if loaded_tokens:
                self._lose_load(request, tables, local_tokens)
                self._forget(request.request_id)  # else vLLM is offered the same again, for ever

    def _load(
        self, state: VllmRequest, tables: Sequence[Sequence[int]], loaded_tokens: int
    ) -> None:
        block_tokens, local_tokens = self._layout.block_tokens, state.local_tokens
        first = local_tokens // block_tokens
        stop = -(-(local_tokens + loaded_tokens) // block_tokens)
        is_whole = local_tokens + loaded_tokens == stop * block_tokens
        assert is_whole or state.in_step, "vLLM takes what it was offered, or nothing"
        rows = self._layout.rows(tables, first, stop, _NULL_BLOCK)
        rows = self._layout.without_tokens(rows, local_tokens, first)
        job = self.planner.prepare_load(state, first, rows)
        self._note(job, state)
        self._counts["hit_tokens"] += loaded_tokens
        if state.in_step:  # the engine has nothing else to do: load now, and wait
            outcome = self.step_loads.load_now(self.planner, job)
            self._take_in([Finished(loads={job.number: outcome})], counted=False)
            if outcome.failed:
                there = first + job.good_blocks()
                rest = list(tables[0][there:])
                self.step_loads.fell_short(state.request, there * block_tokens, rest)

    def _lose_load(self, request: Any, tables: Sequence[Sequence[int]], local_tokens: int) -> None:
        first = local_tokens // self._layout.block_tokens
        rows = self._layout.rows(tables, first, max(map(len, tables)), _NULL_BLOCK)
        lost = rows[rows != NO_BLOCK].tolist()
        state = self._requests.get(request.request_id)
        if state is not None and state.in_step:
            self.step_loads.fell_short(request, local_tokens, lost)
        else:
            self._lost[request.request_id] = LoadOutcome(frozenset(lost))

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, int] | None]:
        """The request has ended. Returns its `kv_transfer_params`, and False: vLLM may have its
        blocks back at once, stored or not."""
        reply = self._finish(request)
        taken = self.keys_of_siblings
        return False, reply and {key: count for key, count in reply.items() if key not in taken}

    def _finish(self, request: Any) -> dict[str, int] | None:
        state = self._requests.pop(request.request_id, None)
        self._running.discard(request.request_id)
        self._loaded.discard(request.request_id)
        self.step_loads.drop_ahead()
        try:
            # The last token's place may hold the KV of a guess that was wrong.
            known_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
            computed = min(request.num_computed_tokens, known_tokens)
            if state is not None and computed:
                self._store(state, computed, after_step=False)
        except Exception:
            # guard: the request has ended, whatever happens to its store
            self._failed("kvkeep: a store could not be prepared")
        self._tables.forget(request.request_id)
        if state is None:
            return Hints.of(request.kv_transfer_params).reply(0)
        return self.planner.finish_request(state)

    # -- steps

    def build_connector_meta(self, scheduled: Any) -> Step:
        try:
            self.step_loads.drop_ahead()
            self.step_loads.correct(scheduled)
            return self._build_step(scheduled)
        except Exception:
            # guard: raised again; the step is computed, and which blocks it writes is not known
            self._is_idle = False
            self._under_way += 1
            self.events.completed(self.planner.drop_stores())
            self._forget(*self._requests)
            raise
        finally:
            self._sibling_loads.build_step()

    def _build_step(self, scheduled: Any) -> Step:
        cached = scheduled.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None and request_id not in cached.resumed_req_ids:
                self._tables.grown(request_id, more)
                self._written += chain(*more)
        # States that vLLM copies by itself go into blocks that no table shows.
        if scheduled.kv_cache_block_copies:
            self._written += (copy.dst_block_id for copy in scheduled.kv_cache_block_copies)
        self._written += scheduled.new_block_ids_to_zero or ()
        work, tokens = scheduled.num_scheduled_tokens, scheduled.total_num_scheduled_tokens
        is_new = bool(scheduled.scheduled_new_reqs or cached.resumed_req_ids)
        if is_new and self._has_siblings:
            self._look_for_sibling_loads(work)
        self._store_computed(work)
        jobs = self.planner.build_step(self._written, tokens=tokens, requests=len(work))
        self._is_idle = not (tokens or self._uncounted_steps)
        self._has_waited = False
        self._is_reset &= self._is_idle
        self._under_way += 1
        # vLLM's scan of waiting requests, before 0.32, stops at the first one that does not fit. If
        # that one needs blocks that loaded requests behind it hold, nothing is ever computed again.
        # While that lasts, `lookup` makes vLLM skip every request that it asks about in every other
        # step, so that the scan reaches the loaded ones.
        self._skips_unloaded = self._is_idle and bool(self._loaded) and not self._skips_unloaded
        step = Step(jobs, self._lost, self._all_withdrawn, self._is_idle)
        self._written, self._lost, self._all_withdrawn = [], {}, False
        return step

    def _store_computed(self, work: Mapping[str, int]) -> None:
        """Prepares the stores of what a step computes: so many tokens of each request."""
        for request_id, count in work.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            computed = state.request.num_computed_tokens + count
            if computed < state.next_store:  # most steps
                continue
            try:
                state.hold(computed // self._layout.block_tokens)
                self._store(state, computed, after_step=True)
            except Exception:
                # guard: other requests' blocks are stored, and loads that vLLM waits for begin
                self._failed("kvkeep: a store could not be prepared")
                self._forget(request_id)

    def _store(self, state: VllmRequest, computed_tokens: int, *, after_step: bool) -> None:
        """Stores what is computed by now, or by the end of the step. Tokens that are only guessed
        have no key yet."""
        layout, prompt_tokens = self._layout, state.request.num_prompt_tokens
        if self._sibling_loads.may_have_failed:
            return  # the next step tries again
        if not self._add_new_keys(state):
            return
        if not self.planner.knows_stored(state) and after_step:
            return  # the next step tries again
        # Old blocks of a window and old states are gone soon: only blocks of full attention can
        # wait until there are several.
        at_once = not layout.whole or not after_step or computed_tokens <= prompt_tokens
        blocks = min(computed_tokens // layout.block_tokens, state.num_blocks)
        # RequestState.hold must hear of every new block of a prompt, also if none is stored.
        if computed_tokens < prompt_tokens:
            next_blocks = blocks + 1
        else:
            next_blocks = max(blocks, state.stored) + (BLOCKS_TOGETHER if layout.whole else 1)
        state.next_store = next_blocks * layout.block_tokens
        if blocks <= state.stored:
            return

        def rows(start: int, stop: int) -> NDArray[np.int64]:
            table = layout.rows(self._tables.of(state.request_id), start, stop, _NULL_BLOCK)
            return table if layout.whole else layout.without_states(table, computed_tokens, start)

        job = self.planner.prepare_store(
            state, rows, blocks, at_once=at_once, after_step=after_step
        )
        if job is not None:
            self._note(job, state)

    def update_connector_output(self, output: Any, reports: Reports) -> None:
        """Takes in a step's results. Adds to `output`, which vLLM reads next, the requests whose
        loads have ended well since the workers made it."""
        self._distrust(output.invalid_block_ids, reports.finished)
        self._report_outages(reports.outages)
        if self._uncounted_steps:  # they were built first, so they end first
            self._uncounted_steps -= 1
        else:
            self._under_way = max(0, self._under_way - 1)
        more = self._worker.hand_over() if self._worker is not None else []
        arrived: set[str] = set()
        if ended := {number for report in more for number in report.loads}:
            arrived = {job.request_id for job in self.planner.jobs if job.number in ended}
        try:
            self._take_in(more, counted=False)
            self._take_in(reports.finished, counted=True)
        except Exception:
            # guard: vLLM waits for what has arrived, and would not hear of it again
            self._failed("kvkeep: the results of a step could not be taken in")
        if arrived:
            output.finished_recving = {*(output.finished_recving or ()), *arrived}
        self._loaded |= self._running & set(output.finished_recving or ())

    def _take_in(self, reports: Sequence[Finished], *, counted: bool) -> None:
        """`counted`: the worker's own statistics have these reports."""
        if not reports:
            return
        self._counts.update({} if counted else counts_of(reports))
        completed = self.planner.complete(reports)
        self._counts["loaded_blocks"] += sum(job.good_blocks() for job in completed.loads)
        self.events.completed(completed)

    # -- siblings

    def _look_for_sibling_loads(self, work: Iterable[str]) -> None:
        """Notes that a sibling loads in this step: a request that asked in this step has more
        computed tokens than vLLM and kvkeep gave it. Background loads of siblings need no note:
        they have ended, well or not, before their request is scheduled."""
        for request_id in work:
            state = self._requests.get(request_id)
            if state is None or state.asked_in != self._sibling_loads.step:
                continue
            if state.request.num_computed_tokens > state.local_tokens:
                self._sibling_loads.load_in_step()

    def _distrust(self, block_ids: Collection[int] | None, reports: Sequence[Finished]) -> None:
        """Loads of these blocks failed, kvkeep's own or a sibling's. What a sibling left in a
        block, and what was computed from that, is not stored."""
        if not block_ids or not self._has_siblings:
            return
        theirs = set(block_ids).difference(*(report.failed_blocks for report in reports))
        if theirs:
            names = [name for name in self._requests if holds_one_of(self._tables.of(name), theirs)]
            self._forget(*names)

    # -- the rest

    def reset_cache(self) -> bool:
        """This engine finds nothing again that was stored so far, and others find nothing that it
        stores from now on: the weights may have changed."""
        self._keys.generation = os.urandom(16)
        self._is_reset = True
        self._forget(*self._requests)
        self.events.reset(self._keys.scope)
        return True

    def _report_outages(self, outages: Mapping[int, tuple[str, str] | None]) -> None:
        """Ranks have lost the server, or found it again. Logs that once for all of them, and not if
        the scheduler's own connection has logged it."""
        for rank, trouble in outages.items():
            outage = self._rank_outages.setdefault(rank, Outage(self._options.address))
            if trouble is not None:
                outage.begin(*trouble)
            elif outage.told:
                outage.end()

    def stats(self) -> KVKeepStats | None:
        """vLLM asks for them at the end of each step; nothing else tells that a step without news
        has ended."""
        self._sibling_loads.end_step()
        self._costs.end_step()
        self._counts.update(self.planner.counts)
        self.planner.counts.clear()
        if not any(self._counts.values()):  # most steps
            return None
        counts, self._counts = +self._counts, Counter()
        is_worker_answered = self._worker is None or self._worker.is_answered
        connected = int(self._adapter.connection.answering and is_worker_answered)
        return KVKeepStats.of(**counts, connected=connected, **self._costs.figures())

    def take_events(self) -> Sequence[Any]:
        return self.events.take()

    def __repr__(self) -> str:
        return (
            f"SchedulerConnector(requests={sorted(self._requests)},"
            f" running={sorted(self._running)},"
            f" jobs={len(self.planner.jobs)}, loaded={sorted(self._loaded)}, lost={self._lost},"
            f" steps={self._under_way}, {self._tables}, {self.step_loads})"
        )

    def close(self) -> None:
        self.planner.close()

    def _failed(self, message: str) -> None:
        log.exception(message)
        self.faults += 1

    def _note(self, job: Job, state: VllmRequest) -> None:
        try:
            self.events.prepared(job, state)
        except Exception:
            # guard: the job goes out with the next step, whether or not there is an event of it
            self._failed("kvkeep: the event of a job could not be noted")

    def _forget(self, *request_ids: str) -> None:
        """These requests are not cached any more."""
        self.step_loads.drop_ahead()
        for request_id in request_ids:
            if state := self._requests.get(request_id):
                self.planner.forget(state)


def refusals(handshakes: Sequence[Handshake], world_size: int) -> list[str]:
    """Why these workers cannot be cached; empty if they can."""
    reasons = {each.refusal for each in handshakes if each.shape is None}
    shapes = [each.shape for each in handshakes if each.shape is not None]
    others = [shape for shape in shapes[1:] if shape.fingerprint != shapes[0].fingerprint]
    reasons |= {_difference(shapes[0], other) for other in others}
    if len(handshakes) != world_size:
        reasons.add("not all of its workers registered their KV")
    return sorted(reasons)


def _difference(one: BlockShape, other: BlockShape) -> str:
    """Why two ranks of one engine cannot hold parts of the same blocks."""
    here, there = one.parts, other.parts
    differs = [
        f"{name} ({here.get(name)} | {there.get(name)})" for name in differing_parts(here, there)
    ]
    return f"its ranks do not agree on {', '.join(differs)}"
