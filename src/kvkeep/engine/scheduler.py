"""Decides, step by step, which tokens of which requests are computed, and what becomes of the
outcome.

    schedule()            running requests go on, then waiting ones are admitted, within a budget of
                          tokens
        a waiting request first takes what the prefix cache has, then what the external cache has
        beyond it, where that is loaded sooner than computed:
          asynchronously   it waits, LOADING, while others run; then it is admitted with its prefix
                           computed
          synchronously    its prefix is loaded inside the step that also computes the rest
    the workers run the step
    update_from_output()  failed loads set requests back (recovery.py), sampled tokens are taken,
                          full blocks are stored

Counting: `num_computed_tokens` advances when a step is scheduled, so that the next one could be
scheduled at once. Blocks that a step will fill are remembered in the prefix cache at the same
moment, so that a request admitted later in the same step shares them: a model writes all KV of a
layer before it reads any."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable

from kvkeep.connector.planner import CachePlanner
from kvkeep.connector.step import Job, StepMetadata
from kvkeep.engine.blocks import BlockPool
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.models.model import Segment
from kvkeep.engine.recovery import Affected, Rebuilding, spread, truncate
from kvkeep.engine.request import Request, Status
from kvkeep.engine.step import Step, StepOutput


class Scheduler:
    """All requests of one engine. Not safe for several threads."""

    def __init__(self, config: EngineConfig, planner: CachePlanner | None = None) -> None:
        self.config = config
        self.planner = planner
        self.pool = BlockPool(config.num_blocks, prefix_caching=config.enable_prefix_caching)
        self.waiting: list[Request] = []  # in the order in which they are served
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self._rebuilding = Rebuilding()
        self._next_number = 0
        # blocks that workers have yet to hear of: steps may write into them
        self._given: set[int] = set()
        self.finished: list[Request] = []  # that nobody has taken yet

    # -- requests come and go

    def add(self, request: Request) -> None:
        """A request arrives. The external cache is asked at once, so that the answer is there when
        it is its turn."""
        self.config.check_length(request.prompt_tokens, request.sampling.max_tokens)
        request.number = self._next_number
        self._next_number += 1
        if self.planner is not None:
            local = self.pool.longest_prefix(request.chain, self._prefix_limit(request))
            self.planner.arrive(request, len(local))
        self._enqueue(request)

    def abort(self, request: Request) -> None:
        """Ends a request at any moment; of one that has ended already, nothing is left to end."""
        if request.status is not Status.FINISHED:
            self._finish(request, "abort")

    def preempt(self, request: Request) -> None:
        """Takes a request's blocks away and lets it wait for others. It computes, finds or loads
        them again."""
        if request.status is Status.FINISHED:
            return
        self._drop_blocks(request)
        request.metrics.preemptions += 1
        self._leave_queue(request)
        self._enqueue(request)

    @property
    def unfinished(self) -> list[Request]:
        return [*self.running, *self.loading, *self.waiting]

    def take_finished(self) -> list[Request]:
        """The requests that have ended since this was last asked."""
        finished, self.finished = self.finished, []
        return finished

    # -- a step begins

    def schedule(self) -> Step:
        """Plans one step. Its requests count as computed as far as the step will take them."""
        plan: dict[Request, int] = {}
        budget, preempted = self._go_on(plan, self.config.max_num_batched_tokens)
        for request, count in plan.items():
            self._remember(request, request.num_computed_tokens + count)
        if not preempted:  # else there is no room for more
            self._admit(plan, budget)
        segments = [
            Segment(
                each.request_id,
                each.salt,
                each.tokens,
                each.num_computed_tokens,
                count,
                each.block_ids,
            )
            for each, count in plan.items()
        ]
        for request, count in plan.items():
            request.num_computed_tokens += count
        metadata = StepMetadata()
        if self.planner is not None:
            self._given |= self.pool.take_given()
            metadata = self.planner.build_step(
                self._given, tokens=sum(plan.values()), requests=len(plan)
            )
        return Step(
            segments, list(plan), {each.request_id: count for each, count in plan.items()}, metadata
        )

    def _go_on(self, plan: dict[Request, int], budget: int) -> tuple[int, bool]:
        """Running requests come first. Where blocks run out, of all who hold some the one that came
        last gives them up."""
        preempted = False
        for request in list(self.running):
            if budget == 0:
                break
            if request.status is not Status.RUNNING or self._rebuilding.blocks(
                request, self.config.block_tokens
            ):
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._grow(request, request.num_computed_tokens + count):
                holders = [*self.running, *(each for each in self.waiting if each.block_ids)]
                victim = max(holders, key=lambda each: each.order)
                budget += plan.pop(victim, 0)
                preempted |= victim.status is Status.RUNNING
                self.preempt(victim)
                if victim is request:
                    break
            else:
                plan[request] = count
                budget -= count
        return budget, preempted

    def _admit(self, plan: dict[Request, int], budget: int) -> None:
        """Waiting requests in their order. One that has to wait for an answer or a load is passed
        by the next."""
        for request in list(self.waiting):
            if budget == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            count = self._begin(request, budget)
            while count is None and not self.running and self._drop_last_waiting(request):
                count = self._begin(request, budget)
            if count is None:  # others wait behind it: whoever needs much must get a turn
                return
            if count > 0:
                plan[request] = count
                budget -= count
                self._remember(request, request.num_computed_tokens + count)

    def _begin(self, request: Request, budget: int) -> int | None:
        """How many of the request's tokens this step computes. 0: it has to wait for an answer or a
        load; None: there is no room for it."""
        if request.num_computed_tokens == 0:
            found = self._find_prefix(request)
            if not found:
                return None if found is None else 0
        count = request.num_tokens - request.num_computed_tokens
        fits = count <= budget or self.config.enable_chunked_prefill
        count = min(count, budget)
        if not fits or not self._grow(request, request.num_computed_tokens + count):
            # it can find these again; a load would be lost
            if len(request.block_ids) == request.local_blocks:
                self._drop_blocks(request)
            return None
        if self.planner is not None:
            request.hold_local(request.local_blocks)
            self.planner.start_without_load(request)
        self._leave_queue(request)
        request.status = Status.RUNNING
        request.admitted = True
        self.running.append(request)
        return count

    def _find_prefix(self, request: Request) -> bool | None:
        """Takes what the caches have of the request. False: it has to wait for that; None: there is
        no room for it."""
        local = self.pool.longest_prefix(request.chain, self._prefix_limit(request))
        extra = (
            self.planner.lookup(request, len(local), self._prefix_limit(request))
            if self.planner
            else 0
        )
        if extra is None:
            return False
        request.metrics.skipped_tokens = request.skipped * self.config.block_tokens
        self.pool.share(local)
        taken = self.pool.take(extra)
        if taken is None:
            self.pool.release(local)
            return None
        request.block_ids = [*local, *taken]
        request.local_blocks = request.remembered_blocks = len(local)
        request.num_computed_tokens = len(request.block_ids) * self.config.block_tokens
        if not request.admitted:
            request.metrics.local_cached_tokens = len(local) * self.config.block_tokens
            request.admitted = extra > 0  # else not before it runs: there may be no room for it
        if self.planner is None or not extra:
            return True
        request.load = self.planner.prepare_load(request, len(local), taken)
        # the job's own hold: an abort must not free what is still being written
        self.pool.share(taken)
        if self.config.sync_loads:
            return True
        self._leave_queue(request)
        request.status = Status.LOADING
        self.loading.append(request)
        return False

    # -- a step has ended

    def update_from_output(self, step: Step, output: StepOutput) -> None:
        """Takes in what the workers did: first what failed, then what was computed."""
        void: set[Request] = set()
        self._given = set()
        if self.planner is not None:
            completed = self.planner.complete(output.reports)
            self.planner.costs.end_step()
            void = self._recover(step, completed.invalid_block_ids)
            for job in completed.loads:
                self._end_load(job)
        for request, token in zip(step.requests, output.tokens, strict=True):
            # Not if it was aborted or preempted meanwhile; and who shares a bad block must not
            # store it either.
            if request.status is Status.RUNNING and request not in void:
                self._take_token(request, token)

    def undo(self, step: Step) -> None:
        """The step failed in the middle, nobody knows where. What it was to fill is not there, nor
        what it was to load: its requests begin again, and nobody finds those blocks."""
        if self.planner is not None:
            self.planner.costs.drop_step()
        for load in step.metadata.loads.values():
            self.pool.forget(load.block_ids.tolist())
        unfilled: set[int] = set()
        for segment in step.segments:
            unfilled.update(segment.block_ids[segment.start // self.config.block_tokens :])
        self.pool.forget(unfilled)
        for request in self.unfinished:
            if request in step.requests or not unfilled.isdisjoint(request.block_ids):
                self.preempt(request)

    def start_over(self, requests: Iterable[Request]) -> None:
        """Something failed while requests and blocks changed hands, nobody knows where. These
        requests wait again, with nothing; only loads hold blocks, and nobody finds any. Who had its
        last token ends."""
        loads = (
            [job for job in self.planner.jobs if job.is_load] if self.planner is not None else []
        )
        if self.planner is not None:
            self.planner.costs.drop_step()
        self.pool.start_over(block for job in loads for block in job.block_ids)
        self.waiting, self.loading, self.running, self._rebuilding = [], [], [], Rebuilding()
        for request in requests:
            if request in self.finished:
                continue
            request.metrics.preemptions += bool(request.block_ids)
            request.block_ids, request.num_computed_tokens, request.remembered_blocks = [], 0, 0
            request.chain.extend(request.tokens[request.chain.num_tokens :])
            self._enqueue(request)
            reason = request.finish_reason or (
                request.stop_reason() if request.output_tokens else ""
            )
            if reason:
                self._finish(request, reason)

    def _recover(self, step: Step, invalid_block_ids: set[int]) -> set[Request]:
        """Applies the rules for failed loads. Returns the requests whose outcome of this step is
        void."""
        if not invalid_block_ids:
            return set()
        block_tokens = self.config.block_tokens
        invalid_block_ids = spread(step.segments, invalid_block_ids, block_tokens)
        affected = truncate(
            self.unfinished, invalid_block_ids, step.num_scheduled_tokens, block_tokens
        )
        # Nobody may find a bad block, or one computed on top of it. Who could have remembered one
        # is in this step, even if it was aborted meanwhile: blocks of an asynchronous load are
        # remembered when they are known to be good.
        for segment in step.segments:
            bad = [at for at, block in enumerate(segment.block_ids) if block in invalid_block_ids]
            self.pool.forget(segment.block_ids[min(bad) :] if bad else ())
        for each in affected:
            each.request.metrics.failed_loads += 1
            self._set_back(each)
        if self.config.kv_load_failure_policy == "fail":
            for each in affected:
                each.request.error = (
                    f"block {each.first_bad} of its prefix could not be loaded "
                    "(kv_load_failure_policy is fail)"
                )
                self._finish(each.request, "error")
        else:
            self._rebuilding.add(each for each in affected if each.request.status is Status.RUNNING)
        return {each.request for each in affected}

    def _set_back(self, affected: Affected) -> None:
        request = affected.request
        request.remembered_blocks = min(request.remembered_blocks, affected.first_bad)
        # it had no room in this step; what is good of its load, it finds again
        if request.status is Status.WAITING:
            self._drop_blocks(request)

    def _end_load(self, job: Job) -> None:
        """Every worker has done its part of a load. What is good of it may be found by others."""
        request = next((each for each in self.unfinished if each.load is job), None)
        if request is not None:
            request.load = None
            good = job.good_blocks()
            self._count_external(request)
            for at in range(job.first_block, job.first_block + good):
                self.pool.remember(job.block_ids[at - job.first_block], request.chain.key(at))
            if request.status is Status.LOADING:
                request.remembered_blocks = max(request.remembered_blocks, job.first_block + good)
                if request.num_computed_tokens == 0:
                    self._drop_blocks(request)
                self._leave_queue(request)
                self._enqueue(request)
        self.pool.release(job.block_ids)

    def _count_external(self, request: Request) -> None:
        request.metrics.external_cached_tokens = request.loaded * self.config.block_tokens

    def _take_token(self, request: Request, token: int) -> None:
        self._rebuilding.progress(request, self.config.block_tokens)
        reason = ""
        # else its prompt is not computed to the end yet
        if request.num_computed_tokens == request.num_tokens:
            if request.metrics.first_token_s is None:
                request.metrics.first_token_s = time.monotonic()
            request.append(token)
            # All keys that are missing: the last step may have failed here.
            request.keys += request.chain.keys(request.num_blocks)
            reason = request.stop_reason()
        # somebody else may have the same
        is_prompt = request.num_computed_tokens <= request.prompt_tokens
        self._store(request, at_once=is_prompt or bool(reason))
        if reason:
            self._finish(request, reason)

    def _store(self, request: Request, *, at_once: bool) -> None:
        """What is proven to be computed goes to the external cache. Nobody holds the blocks for
        that: who gets one of them before it is copied says so to the workers, and they see to it
        (`take_given`)."""
        if self.planner is not None:
            full = request.num_computed_tokens // self.config.block_tokens
            request.hold(full)
            self.planner.prepare_store(request, request.block_ids, full, at_once=at_once)

    # -- blocks

    def _prefix_limit(self, request: Request) -> int:
        """How many blocks a request can find: at least one token is left to compute, for its
        logits."""
        return (request.num_tokens - 1) // self.config.block_tokens

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Makes sure that the request has blocks for this many tokens. All or nothing."""
        missing = -(-num_tokens // self.config.block_tokens) - len(request.block_ids)
        taken = self.pool.take(max(0, missing))
        if taken is None:
            return False
        request.block_ids.extend(taken)
        return True

    def _remember(self, request: Request, num_tokens: int) -> None:
        """Blocks that are full after this step may be found by others from now on."""
        full = min(num_tokens // self.config.block_tokens, len(request.chain))
        for at in range(request.remembered_blocks, full):
            self.pool.remember(request.block_ids[at], request.chain.key(at))
        request.remembered_blocks = max(request.remembered_blocks, full)

    def _drop_last_waiting(self, keep: Request) -> bool:
        """With nobody running, requests that wait with a loaded prefix can keep each other from
        running: the last of them gives its blocks up."""
        holders = [each for each in self.waiting if each.block_ids and each is not keep]
        if not holders:
            return False
        self.preempt(holders[-1])
        return True

    def _drop_blocks(self, request: Request) -> None:
        block_ids, request.block_ids = request.block_ids, []
        request.num_computed_tokens = request.remembered_blocks = 0
        self._rebuilding.leave(request, self.running, self.config.block_tokens)
        self.pool.release(block_ids)

    # -- queues

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        bisect.insort(self.waiting, request, key=lambda each: each.order)

    def _leave_queue(self, request: Request) -> None:
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)

    def _finish(self, request: Request, reason: str) -> None:
        """The one way out, whatever the state. A load under way keeps its own hold on its
        blocks."""
        request.finish_reason = reason
        self._drop_blocks(request)
        self._leave_queue(request)
        request.status = Status.FINISHED
        request.metrics.finished_s = time.monotonic()
        if self.planner is not None:
            self._count_external(request)
            request.reply_params = self.planner.finish_request(request)
        self.finished.append(request)

    def check_integrity(self) -> None:
        """Raises AssertionError if requests, blocks and jobs contradict each other. Between steps
        only."""
        loads = [job for job in self.planner.jobs if job.is_load] if self.planner else ()
        held = [block for each in self.unfinished for block in each.block_ids]
        self.pool.check_integrity([*held, *(block for job in loads for block in job.block_ids)])
        for request in self.unfinished:
            assert 0 <= request.num_computed_tokens <= request.num_tokens, (
                f"{request.request_id} has computed too much"
            )
            room = len(request.block_ids) * self.config.block_tokens
            assert request.num_computed_tokens <= room, (
                f"{request.request_id} has computed more than its blocks hold"
            )
            assert request.remembered_blocks <= len(request.block_ids), (
                f"{request.request_id} remembers blocks it lacks"
            )
