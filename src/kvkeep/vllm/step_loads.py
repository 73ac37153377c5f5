"""Loads that are over before the step which computes the rest of their prompt, for an engine with
nothing else to do.

A load in the background is heard of steps later: vLLM sleeps a millisecond between two steps that
compute nothing, and reads the results of a step when the next one has begun. A request that is
alone in an engine gains nothing by that. So vLLM is told that its tokens are there, and they are
when it is told where the blocks lie:

    schedule   get_num_new_matched_tokens: so many, at once        slots ──► the GPU's staging memory
               vLLM looks for blocks                               … as many as there is room for
               update_state_after_alloc: loaded, verified          staging memory ──► blocks, and all the rest
               build_connector_meta: what was no good is not counted
    step       computes the rest of the prompt

What crosses the bus before vLLM has blocks is for that load of that request within this call of
`schedule`, which the lease of its lookup outlives; if it does not come it is dropped.

vLLM's own recovery from such a load that failed may deliver a token that was computed from bad
blocks. It is not needed: the step is still being made when the failure is known, so the step is
made with what is there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import NewRequestData

from kvkeep.client.requests import LoadOutcome
from kvkeep.connector.options import load_failure_policy, load_mode
from kvkeep.connector.planner import CachePlanner
from kvkeep.connector.step import Job
from kvkeep.vllm import versions
from kvkeep.vllm.worker import WorkerSide

# requests that come meanwhile wait as long, as they do for a step that computes a prompt
LONGEST_S = 0.1
LARGEST_BYTES = 512 << 20  # of a load, where nobody knows yet how long it takes
_PAUSE_S = 60.0  # after one that took longer


class StepLoads:
    """Which requests may be loaded so, and what vLLM has to hear of those that were not."""

    def __init__(self, vllm_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        is_wanted = load_mode(extra) == "auto" and load_failure_policy(extra) == "recompute"
        self._is_possible = is_wanted and vllm_config.speculative_config is None and _is_known()
        # requests, and how many of their tokens are there
        self._short: dict[str, tuple[Any, int]] = {}
        self._not_before_s = 0.0
        self._ahead_for = ""  # the last request that was fetched for and is not loaded
        self._is_ahead = False  # something may be fetched
        self.pool: BlockPool | None = None
        # the only one, if it may load before a step and be waited for
        self.worker: WorkerSide | None = None

    def __repr__(self) -> str:
        return f"StepLoads(short={sorted(self._short)})"

    def is_short(self, expected_s: float | None, nbytes: int) -> bool:
        """Whether a load of so many bytes, which is expected to take that long, can be waited
        for."""
        is_short = nbytes <= LARGEST_BYTES if expected_s is None else expected_s < LONGEST_S
        return is_short and time.monotonic() >= self._not_before_s

    def took(self, seconds: float) -> None:
        """One was waited for."""
        if seconds > LONGEST_S:
            self._not_before_s = time.monotonic() + _PAUSE_S

    def may_load(self, request: Any) -> bool:
        """Whether the worker is near, and it is a request that has just come, of which vLLM
        computes no more than tokens."""
        is_new = not (request.num_computed_tokens or request.num_preemptions)
        return (
            self._is_possible
            and self.pool is not None
            and self.worker is not None
            and self.worker.is_near
            and is_new
            and not request.mm_features
            and request.pooling_params is None
        )

    def fetch_ahead(self, request_id: str, epoch: int, slots: NDArray[np.int64]) -> None:
        """vLLM hears that this request is loaded, and will say where to. If it does not, for want
        of blocks, it asks again and again: the bus is busy for nothing once."""
        assert self.worker is not None and self.worker.adapter is not None
        if request_id != self._ahead_for:
            self._is_ahead = True
            if self.worker.adapter.load_ahead(request_id, epoch, slots):
                self._ahead_for = request_id

    def load_now(self, planner: CachePlanner, job: Job) -> LoadOutcome:
        """Makes that load in the calling thread."""
        assert self.worker is not None
        self._ahead_for = ""
        outcome = self.worker.load_now(job.request_id, planner.take_load(job))
        self.took(outcome.seconds or 0.0)
        return outcome

    def drop_ahead(self) -> None:
        """What was fetched ahead is of no use: the slots may be somebody else's from now on."""
        if self._is_ahead and self.worker is not None and self.worker.adapter is not None:
            self._is_ahead = False
            self.worker.adapter.drop_ahead()

    def fell_short(self, request: Any, tokens: int, block_ids: list[int]) -> None:
        """Only so many of its tokens are there. These are its other blocks: vLLM counts some of
        them as cached, and offers them to others from the next request on."""
        self._short[request.request_id] = request, tokens
        assert self.pool is not None
        self.pool.evict_blocks(set(block_ids))

    def correct(self, scheduled: Any) -> None:
        """The step that is being made computes as many tokens of such a request as it was to, but
        from there on. vLLM counts the others as cached until now, and publishes that with the first
        token."""
        short, self._short = self._short, {}
        for new in scheduled.scheduled_new_reqs if short else ():
            if new.req_id in short:
                request, tokens = short.pop(new.req_id)
                request.num_computed_tokens = new.num_computed_tokens = tokens
                versions.correct_cached_tokens(request, tokens)
        assert not short, "a request was loaded for a step that it is not in"


def _is_known() -> bool:
    """Whether vLLM has what this relies on."""
    return "num_computed_tokens" in NewRequestData.__annotations__ and hasattr(
        BlockPool, "evict_blocks"
    )
