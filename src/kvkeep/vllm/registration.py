"""The scheduler's half of the connector until every worker has registered its KV.

    InactiveScheduler ── handshakes of all workers ──► SchedulerConnector
           └── a worker refuses, or the workers differ: inactive for good

vLLM hands all handshakes over at start-up, before the first request. Two cases are later: beside
siblings they come with the results of the first step (siblings.py), and so do those of workers
whose weights are hashed for the first time on a host. Requests that arrive before are served
without the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from kvkeep.client.hints import Hints
from kvkeep.client.options import CONNECT_PATIENCE_MS
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.scheduler import SchedulerConnector, SchedulerContext, refusals

log = logging.getLogger(__name__)


class InactiveScheduler:
    """Stands in for a SchedulerConnector: finds, loads and stores nothing."""

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context
        self._world_size = context.vllm_config.parallel_config.world_size
        self.faults = 0
        self._handshakes: list[Handshake] = []  # while some are missing
        self._is_hashing = False  # some worker's weights
        self._generation = b""
        self._running: set[str] = set()

    def register_workers(
        self, handshakes: Sequence[Handshake], *, is_late: bool = False
    ) -> InactiveScheduler | SchedulerConnector:
        """Takes the handshakes of all workers. Returns the scheduler to use from now on."""
        ready = [each for each in handshakes if not each.is_pending]
        if len(ready) < len(handshakes):
            self._handshakes = ready
            self._wait_for_weights()
            return self
        reasons = refusals(handshakes, self._world_size)
        if reasons or handshakes[0].shape is None:
            log.error("kvkeep: this engine is served without the cache: %s", "; ".join(reasons))
            return self
        return SchedulerConnector(
            self.context,
            handshakes[0].shape,
            handshakes[0],
            patience_ms=0 if is_late else CONNECT_PATIENCE_MS,
            generation=self._generation,
            running=self._running,
            is_late=is_late,
        )

    def add_handshakes(
        self, handshakes: Sequence[Handshake]
    ) -> InactiveScheduler | SchedulerConnector:
        """Takes those that came with a step's results, one of each worker sooner or later."""
        self._handshakes += [each for each in handshakes if not each.is_pending]
        if len(self._handshakes) >= self._world_size:
            collected, self._handshakes = self._handshakes, []
            return self.register_workers(collected, is_late=True)
        if any(each.is_pending for each in handshakes):
            self._wait_for_weights()
        return self

    def _wait_for_weights(self) -> None:
        if not self._is_hashing:
            self._is_hashing = True
            log.info(
                "kvkeep: hashing the weights of %s for the first time on this host; the cache is"
                " used once that is done",
                self.context.vllm_config.model_config.model,
            )

    def on_new_request(self, request: Any) -> None:
        self._running.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, loaded_tokens: int) -> None:
        """Nothing was offered, so nothing is loaded."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, int] | None]:
        self._running.discard(request.request_id)
        return False, Hints.of(request.kv_transfer_params).reply(0)

    def build_connector_meta(self, scheduled: Any) -> Step:
        return Step()

    def update_connector_output(self, output: Any, reports: Reports) -> None:
        """No job was begun."""

    def reset_cache(self) -> bool:
        self._generation = os.urandom(16)
        return True

    def take_events(self) -> Sequence[Any]:
        return ()

    def stats(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""
