"""What an engine's log says about loads that failed: one line for all that failed together, not one
a block or a rank.

kvkeep: 2 loads failed; 2 requests recomputed 1,024 tokens
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvkeep.connector.step import Job

log = logging.getLogger(__name__)

_TELL_AFTER_S = 1.0  # an engine that is never without loads does not keep the line back for longer


class Recoveries:
    """Failed loads of one engine that the log does not know of yet. `policy` says what becomes of
    their requests: "recompute" or "fail"."""

    def __init__(
        self, policy: str, block_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy, self._block_tokens, self._clock = policy, block_tokens, clock
        self._requests: set[str] = set()
        self._loads = self._tokens = 0
        self._since_s = 0.0

    def add(self, job: Job) -> None:
        """A load has ended, and not all of its blocks are good. Its request is still there."""
        self._since_s = self._since_s if self._loads else self._clock()
        self._loads += 1
        self._requests.add(job.request_id)
        self._tokens += (job.blocks - job.good_blocks()) * self._block_tokens

    def tell(self, *, more_to_come: bool) -> None:
        """Writes the line, if there is anything to say. While loads are under way that may fail
        too, it waits a moment for them."""
        if not self._loads or (more_to_come and self._clock() - self._since_s < _TELL_AFTER_S):
            return
        loads, requests = _counted(self._loads, "load"), _counted(len(self._requests), "request")
        if self._policy == "fail":
            log.warning(
                "kvkeep: %s failed; %s ended with an error (kv_load_failure_policy is fail)",
                loads,
                requests,
            )
        else:
            log.warning(
                "kvkeep: %s failed; %s recomputed %s",
                loads,
                requests,
                _counted(self._tokens, "token"),
            )
        self._requests = set()
        self._loads = self._tokens = 0


def log_policy(policy: str, source: str) -> None:
    """At start-up: what becomes of a request whose blocks cannot be loaded, and which setting says
    so."""
    log.info("kvkeep: kv_load_failure_policy is %s (%s)", policy, source)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
