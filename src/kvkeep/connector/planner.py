"""Decides what an engine looks up, loads and stores. Written once for every engine.

    arrive ──► lookup ──► prepare_load ──► build_step ──► complete     what the server has
                          prepare_store ──► build_step ──► complete    what was computed
    finish_request        releases what the request holds

The engine manages its own blocks; the planner decides about the server's. No call blocks, and none
raises because of a server, a network or a request's params. The rules:

- A lookup is sent when a request arrives. The engine may ask for the answer in every step. It does
  not wait for an answer about blocks that the server certainly lacks.
- Two requests that miss the same block load it once: the second waits, and then finds the block in
  the engine's prefix cache.
- Blocks that are computed faster than loaded are not loaded (cost_model.py). That is decided once,
  when the answer is there; a request of which one small block is missing does not wait for it.
- Blocks that the server brings up from a tier are waited for while patience lasts (tier_patience),
  and never longer than computing them takes.
- A request whose load failed is not offered a hit again, so it cannot fail for ever.
- Only blocks that are computed and verified are stored, generated tokens included. Blocks that the
  server has are not stored again.
- The salt is part of every lookup, load and store: keys are derived from it, and blocks belong to
  its tenant.
- A lease is held until the last worker has read from it, even if the request has finished before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.requests import NO_BLOCK, Finished, LoadRequest, StoreRequest
from kvkeep.client.scheduler import OUTAGE, Answer, Lookup
from kvkeep.connector.cost_model import CostModel
from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.recoveries import Recoveries
from kvkeep.connector.reports import RequestReports
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.request_trace import begin_trace
from kvkeep.connector.step import NOTHING, Completed, Job, LookupSide, StepMetadata
from kvkeep.kv import outcomes
from kvkeep.kv.keys import KEY_BYTES

if TYPE_CHECKING:
    from kvkeep.wire.tracing import Tracing

BlockIds = Sequence[int] | NDArray[np.int64]  # of one group, or a row for each part of a block

# Generated blocks are stored several at a time: no other request can ask for them before this one
# has ended.
BLOCKS_TOGETHER = 8


class CachePlanner:
    """One for each engine. Every job is reported by `world_size` workers. Without `costs`, every
    hit is loaded. `counts` are events since the engine last took them, by the names of its
    metrics."""

    def __init__(
        self,
        cache: LookupSide,
        layout: GroupLayout,
        world_size: int,
        costs: CostModel | None = None,
        load_failure_policy: str = "recompute",
        tracing: Tracing | None = None,
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._world_size = world_size
        self.costs = costs or CostModel("always")
        self._tracing = tracing
        self._dropped_spans = 0  # that are counted
        self.counts: Counter[str] = Counter()
        self._jobs: dict[int, Job] = {}
        self._next_job = 0
        self._loading: dict[int, Job] = {}  # the loads among the jobs
        self._readers = _Readers()
        # Jobs that wait for the next step.
        self._loads: dict[int, LoadRequest] = {}
        self._stores: dict[int, StoreRequest] = {}
        self._stores_after: dict[int, StoreRequest] = {}
        self._reports = RequestReports(self.costs, layout.block_tokens)
        self._recoveries = Recoveries(load_failure_policy, layout.block_tokens)

    @property
    def idle(self) -> bool:
        """Whether no job waits for a step or is under way."""
        return not self._jobs

    @property
    def has_stores(self) -> bool:
        """Whether a store waits for a step or is under way."""
        return len(self._jobs) > len(self._loading)

    @property
    def jobs(self) -> Sequence[Job]:
        return list(self._jobs.values())

    @property
    def handed_out(self) -> Sequence[Job]:
        """The jobs that do not wait for the next step: a step has taken them to the workers, or was
        lost on the way."""
        waiting = self._loads.keys() | self._stores.keys() | self._stores_after.keys()
        return [job for number, job in self._jobs.items() if number not in waiting]

    # -- lookups

    def arrive(self, state: RequestState, local_blocks: int = 0) -> None:
        """A request has come, with the keys of its full blocks. Asks the server at once for those
        after the first `local_blocks`, which the engine has."""
        if self._tracing is not None:
            headers, tokens = state.trace_headers, state.prompt_tokens
            name, tenant = state.request_id, state.tenant
            state.trace = begin_trace(self._tracing, name, tenant, tokens, headers)
        if state.hints.prefetch and state.tenant:
            self._cache.prefetch(state.salt, bytes(state.keys))
        if state.reads:
            self.counts["lookups"] += 1
            if local_blocks < state.num_blocks:
                self._ask(state, local_blocks)

    def lookup(self, state: RequestState, local_blocks: int, limit_blocks: int) -> int | None:
        """How many blocks after the first `local_blocks` to load, up to `limit_blocks` in all.
        None: not known yet; ask again in the next step. The server is asked only once."""
        if not state.reads or local_blocks >= limit_blocks:
            return 0
        if state.declined_after is not None and local_blocks >= state.declined_after:
            return 0
        most = limit_blocks - local_blocks
        if self.costs.is_too_little(most, most * self._layout.block_tokens):
            state.settle(local_blocks, limit_blocks, outcomes.NOT_WORTH)
            return 0
        if state.loads or self._is_being_loaded(state, local_blocks):
            return None
        lookup = state.lookup
        if (
            lookup is None
            or len(lookup.keys) < limit_blocks * KEY_BYTES
            or lookup.skip > local_blocks
        ):
            lookup = self._ask(state, local_blocks)
        known, answer = lookup.answer, self._cache.answer(lookup)
        if answer is None:
            # With several groups the answer also says which local blocks need no store.
            may_start = self._layout.whole or not local_blocks
            if not (may_start and self._cache.lacks(state.key(local_blocks))):
                return None
            state.lack(local_blocks)
            state.trace.decide("lacked")
            return 0
        if answer.failure and answer is not known:
            self.counts["lookup_failures"] += 1
        if answer.coming and self._waits_for_tier(state, answer, local_blocks, limit_blocks):
            state.trace.wait_for_tier(answer.coming)
            return None
        usable = self._layout.usable(answer.checksums, answer.skip, local_blocks, limit_blocks)
        # Blocks that lack a part are computed, and stored again with the parts they have here.
        state.stored = max(state.stored, answer.blocks if self._layout.whole else usable)
        _settle(state, answer, local_blocks, usable)
        loads = self._is_worth_loading(state, local_blocks, usable)
        self._trace_decision(state, answer, usable - local_blocks, loads=loads)
        return usable - local_blocks if loads else 0

    def wait(self, state: RequestState, milliseconds: int) -> None:
        """Waits for the answer to a lookup, up to `milliseconds`. For an engine that has nothing to
        compute. Does nothing while a load is under way: the engine must see it end."""
        if state.lookup is not None and not self._loading:
            self._cache.wait(state.lookup, milliseconds)

    def _ask(self, state: RequestState, skip: int) -> Lookup:
        if state.lookup is not None:
            self._cache.release(state.lookup)
        trace = state.trace.ask(state.num_blocks - skip)
        state.lookup = self._cache.lookup(state.salt, bytes(state.keys), skip, trace)
        return state.lookup

    def _trace_decision(
        self, state: RequestState, answer: Answer, blocks: int, *, loads: bool
    ) -> None:
        if state.trace.is_on:
            found = "load" if loads else "compute"
            state.trace.decide(
                found if blocks else "miss",
                answer,
                blocks=blocks,
                loading_s=self.costs.expected_s(blocks),
                computing_s=self.costs.computing_s(blocks * self._layout.block_tokens),
            )

    def _waits_for_tier(
        self, state: RequestState, answer: Answer, local_blocks: int, limit_blocks: int
    ) -> bool:
        """Whether the request waits for blocks that are coming from a tier.

        |0 … local_blocks|… answer.blocks|… + coming|… limit_blocks
        """
        blocks = min(answer.blocks + answer.coming, limit_blocks)
        blocks -= max(answer.blocks, local_blocks)
        if blocks <= 0 or state.hints.prefetch or state.lookup is None:
            return False
        most_s = self.costs.most_wait_s(blocks, blocks * self._layout.block_tokens)
        most_ms = None if most_s is None else most_s * 1000
        return self._cache.wait_for_tier(state.lookup, most_ms)

    def _is_worth_loading(self, state: RequestState, local_blocks: int, usable: int) -> bool:
        """Whether blocks local_blocks..usable-1 are loaded. If not, the lease is released: the
        server has these blocks, and they are computed."""
        extra = usable - local_blocks
        if extra == 0 or state.accepted_after == local_blocks:
            return True
        tokens = extra * self._layout.block_tokens
        if self.costs.decide(extra, tokens):
            state.accepted_after, state.declined_after, state.skipped = local_blocks, None, 0
            return True
        self._release(state)
        state.settle(local_blocks, usable, outcomes.NOT_WORTH)
        state.declined_after, state.skipped = local_blocks, extra
        self.counts.update(skipped_loads=1, skipped_tokens=tokens)
        return False

    def _is_being_loaded(self, state: RequestState, block: int) -> bool:
        key = state.key(block)  # it stands for all tokens up to the block's end
        loads = self._loading.values()
        return any(block in job.places and job.request.key(block) == key for job in loads)

    # -- loads

    def prepare_load(self, state: RequestState, local_blocks: int, block_ids: BlockIds) -> Job:
        """Loads the blocks after the first `local_blocks` into these, beginning with the next
        step."""
        state.hold_local(local_blocks)
        table = np.atleast_2d(np.asarray(block_ids, dtype=np.int64))
        load = state.load_request(local_blocks, table)
        job = self._new_job(state, local_blocks, table, is_load=True)
        state.loads += 1
        self._loading[job.number] = job
        self._loads[job.number] = state.trace.begin(job.number, load)
        self.costs.begin_load(job.number, job.blocks, job.blocks * self._layout.block_tokens)
        return job

    def take_load(self, job: Job) -> LoadRequest:
        """The load that was prepared, for an engine that makes it now and not with the step."""
        return self._loads.pop(job.number)

    def start_without_load(self, state: RequestState) -> None:
        """The request begins without a load: its lease is released. A lookup that is not answered
        yet stays, because its answer says what need not be stored."""
        state.trace.decide("not_awaited")
        if state.lookup is None or state.loads:
            return
        if state.answer is not None or not self._layout.whole:
            self._release(state)

    # -- stores

    def knows_stored(self, state: RequestState) -> bool:
        """Whether it is known how many leading blocks need no store."""
        lookup = state.lookup
        if lookup is None or lookup.answer is not None or state.loads:
            return True
        # If the server lacks the next block, no answer changes anything.
        if not self._cache.lacks(state.key(state.stored)):
            answer = self._cache.answer(lookup)
            if answer is None:
                return False
            self.counts["lookup_failures"] += bool(answer.failure)
            state.stored = max(state.stored, answer.blocks if self._layout.whole else 0)
        self._release(state)
        return True

    def prepare_store(
        self,
        state: RequestState,
        block_ids: Sequence[int] | Callable[[int, int], NDArray[np.int64]],
        computed_blocks: int,
        *,
        at_once: bool = True,
        after_step: bool = False,
    ) -> Job | None:
        """Stores the blocks that are computed and not stored, beginning with the next step, or at
        its end if that step computes them. Unless `at_once`, waits for several: each job costs
        every worker a round trip or two. `block_ids` are those of the whole request, or a function
        that returns the table of blocks start..stop-1."""
        if not state.writes:
            return None
        if not self.knows_stored(state):
            self._release(state)  # the answer would be too late, and a lease must not last so long
        if computed_blocks - state.stored < (1 if at_once else BLOCKS_TOGETHER):
            return None
        if computed_blocks < state.retry_from and not at_once:
            return None
        first = state.stored
        if callable(block_ids):
            ids: BlockIds = block_ids(first, computed_blocks)
        else:
            ids = block_ids[first:computed_blocks]
        table = np.atleast_2d(np.asarray(ids, dtype=np.int64))
        request = StoreRequest(
            state.tenant,
            state.key(first - 1),
            state.keys_of(first, computed_blocks),
            table.squeeze(0) if len(table) == 1 else table,
            state.hints.priority,
            state.hints.ttl_ms,
        )
        job = self._new_job(state, first, table, is_load=False)
        request = state.trace.begin(job.number, request)
        if after_step:
            self._stores_after[job.number] = request
        else:
            self._stores[job.number] = request
            self._readers.add(job.number, job.block_ids)
        state.stored = computed_blocks
        return job

    # -- ends

    def forget(self, state: RequestState) -> None:
        """Nothing more of the request is loaded or stored. What it was given still counts."""
        state.reads = state.writes = False
        if not state.loads:
            self._release(state)

    def finish_request(self, state: RequestState) -> dict[str, int] | None:
        """The request has ended. Returns its `kv_transfer_params`; None if it came without any."""
        state.finished = True
        if not state.loads:
            # Now, and not when its stores end: an idle engine makes no step that would tell of it.
            self._release(state)
        self._finish_conversation(state)
        report = self._reports.of(state) if state.tenant else None
        if report is not None:
            self._cache.report(report, state.lacked_by)
        state.trace.finish(report)
        if self._tracing is not None:
            dropped = self._tracing.dropped - self._dropped_spans
            self.counts["dropped_spans"] += dropped
            self._dropped_spans += dropped
        return state.hints.reply(state.loaded * self._layout.block_tokens)

    def close(self) -> None:
        self._cache.close()
        if self._tracing is not None:
            self._tracing.close()

    def _release(self, state: RequestState, loaded_tokens: int = 0) -> None:
        if state.lookup is not None:
            self._cache.release(state.lookup, loaded_tokens)
        state.lookup = state.accepted_after = None

    def _finish_conversation(self, state: RequestState) -> None:
        """Tells the server once the last job has ended: before, a block may still be stored."""
        if state.jobs == 0 and state.hints.conversation_finished and state.tenant:
            self._cache.finish_conversation(state.salt, state.key(state.stored - 1))

    # -- steps

    def build_step(
        self, written_blocks: Collection[int] = (), *, tokens: int = 0, requests: int = 0
    ) -> StepMetadata:
        """The jobs that were prepared since the last step, for every worker. The step may write
        into `written_blocks`, and computes `tokens` tokens of `requests` requests."""
        self.costs.begin_step(tokens, requests)
        self._recoveries.tell(more_to_come=bool(self._loading))
        withdrawn = self._readers.among(written_blocks) if written_blocks else []
        if not (self._loads or self._stores or self._stores_after or withdrawn):
            return NOTHING  # most steps
        request_ids = {number: self._jobs[number].request_id for number in self._loads}
        for number in self._stores_after:  # from now on they are under way
            self._readers.add(number, self._jobs[number].block_ids)
        metadata = StepMetadata(
            self._loads, self._stores, self._stores_after, withdrawn, request_ids
        )
        # Only now: if anything above fails, the loads go with the next step.
        self._loads, self._stores, self._stores_after = {}, {}, {}
        return metadata

    def drop_stores(self) -> Completed:
        """Drops the stores that wait for a step: one was lost, and by the next one their blocks may
        hold something else."""
        dropped = [self._jobs[number] for number in (*self._stores, *self._stores_after)]
        self._stores, self._stores_after = {}, {}
        with ExitStack() as ending:  # each job ends, also if ending another one fails
            for job in dropped:
                job.incomplete = True
                ending.callback(self._end_job, job)
        return Completed(stores=dropped)

    def complete(self, reports: Sequence[Finished]) -> Completed:
        """Takes in what workers report. Jobs that are not known are ignored."""
        completed = Completed()
        for report in reports:
            for number in (*report.loads, *report.stored):
                job = self._jobs.get(number)  # type: ignore[call-overload]
                if job is None:
                    continue
                outcome = report.loads.get(number)
                times = report.times.get(number)
                job.request.trace.report(job.number, report.rank, times, outcome)
                if outcome is not None:
                    job.outcome = job.outcome.joined(outcome)
                    completed.invalid_block_ids |= outcome.failed
                    job.request.reads &= not outcome.failed
                job.incomplete |= number in report.incomplete
                job.reports.add(report.rank)
                if len(job.reports) == self._world_size:
                    self._end_job(job)
                    (completed.loads if job.is_load else completed.stores).append(job)
        self._recoveries.tell(more_to_come=bool(self._loading))
        return completed

    # -- jobs

    def _new_job(
        self, state: RequestState, first_block: int, table: NDArray[np.int64], *, is_load: bool
    ) -> Job:
        self._next_job += 1
        block_ids, blocks = table[table != NO_BLOCK].tolist(), table.shape[1]
        job = Job(
            self._next_job, state, first_block, block_ids, is_load, blocks, self._layout.whole
        )
        self._jobs[job.number] = job
        state.jobs += 1
        return job

    def _end_job(self, job: Job) -> None:
        del self._jobs[job.number]
        job.request.jobs -= 1
        if job.is_load:
            self._end_load(job)
        else:
            self._end_store(job)
        if job.request.finished:
            self._finish_conversation(job.request)

    def _end_load(self, job: Job) -> None:
        state, good = job.request, job.good_blocks()
        state.trace.end(job.number, is_complete=good == job.blocks)
        del self._loading[job.number]
        state.loads -= 1
        self.costs.end_load(job.number, None if job.outcome.failed else job.outcome.seconds)
        if state.load_s is not None and good:
            seconds = job.outcome.seconds
            state.load_s = None if seconds is None else state.load_s + seconds
        state.count_loaded(job.first_block + good)
        if good < job.blocks:
            if not state.finished:
                self._recoveries.add(job)
            # The server's blocks from here on were bad; those that are computed now are not.
            state.stored = min(state.stored, job.first_block + good)
        used = 0 if state.finished else good
        self._release(state, used * self._layout.block_tokens)

    def _end_store(self, job: Job) -> None:
        state = job.request
        state.trace.end(job.number, is_complete=not job.incomplete)
        self._readers.remove(job.number)
        if job.incomplete and not self._layout.whole:
            # The engine no longer has the windows and states of the earlier blocks. Stored without
            # them, those blocks would keep another engine from storing them whole.
            state.writes = False
        elif job.incomplete:
            # The server was away, is another one, or had no room. It takes no block without those
            # before it, so all are offered again; it does not store a block twice.
            state.stored = 0
            state.retry_from = job.first_block + job.blocks + BLOCKS_TOGETHER


def _settle(state: RequestState, answer: Answer, local_blocks: int, usable: int) -> None:
    """Notes what becomes of the prompt after the first `local_blocks` blocks, by the answer. Blocks
    that are to be loaded count as failed until their load has ended well.

    |0 … local_blocks|… usable|… answer.blocks|… + late|… prompt_blocks
                      to load  incomplete      too late  lacked
    """
    if answer.failure:
        outcome = outcomes.UNREACHABLE if answer.failure in OUTAGE else outcomes.REFUSED
        state.settle(local_blocks, state.prompt_blocks, outcome)
        return
    late = answer.blocks + max(answer.coming, answer.late)
    state.settle(local_blocks, usable, outcomes.LOAD_FAILED)
    state.settle(max(local_blocks, usable), answer.blocks, outcomes.INCOMPLETE)
    state.settle(max(local_blocks, answer.blocks), late, outcomes.TOO_LATE)
    if late < state.prompt_blocks:
        state.lack(max(local_blocks, late))


class _Readers:
    """Which engine blocks are read by stores under way, so that a step can name those of them that
    it writes into. A store has thousands of blocks, and a step asks about a few."""

    def __init__(self) -> None:
        self._blocks: dict[int, NDArray[np.int64]] = {}  # of each store, by its number
        self._counts = np.zeros(0, dtype=np.int32)  # by block id

    def add(self, store: int, block_ids: Sequence[int]) -> None:
        """That store reads these blocks."""
        ids = np.asarray(block_ids, dtype=np.int64)
        most = int(ids.max(initial=-1))
        if most >= len(self._counts):
            self._counts = np.pad(self._counts, (0, max(most + 1, 64)))
        np.add.at(self._counts, ids, 1)
        self._blocks[store] = ids

    def remove(self, store: int) -> None:
        """That store has ended. One that was never added reads nothing."""
        ids = self._blocks.pop(store, None)
        if ids is not None:
            np.subtract.at(self._counts, ids, 1)

    def among(self, block_ids: Iterable[int]) -> list[int]:
        """Those of these blocks that a store reads, in order, each once."""
        if not self._blocks:
            return []
        ids = np.fromiter(block_ids, dtype=np.int64)
        ids = ids[(ids >= 0) & (ids < len(self._counts))]
        return np.unique(ids[self._counts[ids] > 0]).tolist()  # type: ignore[no-any-return]
