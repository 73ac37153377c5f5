"""The spans of one request on the engine's side, all made in the scheduler's process.

    request ─┬─ lookup ─── tier_wait     until the answer is taken in and decided on
             ├─ load  ─┬─ load.worker    on each rank, as it reports: copied and verified
             │         └─ …
             └─ store ─┬─ store.worker   likewise; may end after the request
                       └─ …

The server's spans hang below `lookup` and `store`, whose places go to it with the messages
(`Span.trace`). No span has tokens, keys or a salt; a tenant is named by its digest, as in logs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvkeep.client.requests import LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer
from kvkeep.wire.messages import MAX_REQUEST_CHARS, RequestReport

if TYPE_CHECKING:  # imported where tracing is switched on, and nowhere else
    from kvkeep.wire.tracing import Span, Tracing

R = TypeVar("R", LoadRequest, StoreRequest)

_MISSING = "blocks are missing"
SERVICE = "kvkeep-engine"  # unless OTEL_SERVICE_NAME says otherwise


def start_tracing(is_on: bool) -> Tracing | None:
    """None if it is off. SettingsError if it cannot be switched on."""
    if not is_on:
        return None
    from kvkeep.wire.tracing import Tracing

    return Tracing(SERVICE)


class RequestTrace:
    """What the planner tells of a request. Without a span of the request nothing happens."""

    def __init__(self, request: Span | None = None) -> None:
        self._request = request
        self._lookup: Span | None = None
        self._tier_wait: Span | None = None
        self._jobs: dict[int, tuple[Span, str, list[int]]] = {}  # and when ranks ended

    @property
    def is_on(self) -> bool:
        return self._request is not None

    def ask(self, blocks: int) -> str:
        """The server is asked for these blocks. Returns what the Lookup carries."""
        if self._request is None:
            return ""
        self.decide("asked_again")
        self._lookup = self._request.begin("lookup", kind="client", blocks=blocks)
        return self._lookup.trace

    def wait_for_tier(self, coming: int) -> None:
        """The request waits for blocks that come from a tier."""
        if self._lookup is not None and self._tier_wait is None:
            self._tier_wait = self._lookup.begin("tier_wait", blocks=coming)

    def decide(
        self,
        decision: str,
        answer: Answer | None = None,
        *,
        blocks: int = 0,
        loading_s: float | None = None,
        computing_s: float | None = None,
    ) -> None:
        """The wait for the answer is over: `blocks` of its blocks are of use, and loading and
        computing them is expected to take so long. Only the first call after `ask` counts."""
        if self._tier_wait is not None:
            self._tier_wait.end()
        if self._lookup is not None:
            self._lookup.end(
                failure=answer.failure if answer is not None else "",
                decision=decision,
                found_blocks=answer.blocks if answer is not None else None,
                usable_blocks=blocks,
                late_blocks=answer.late if answer is not None else None,
                loading_s=loading_s,
                computing_s=computing_s,
            )
        self._lookup = self._tier_wait = None

    def begin(self, job: int, request: R) -> R:
        """A load or store was prepared. Returns it as workers get it."""
        if self._request is None:
            return request
        name = "load" if isinstance(request, LoadRequest) else "store"
        span = self._request.begin(name, blocks=request.blocks)
        self._jobs[job] = span, name, []
        return replace(request, trace=span.trace)

    def report(
        self, job: int, rank: int, times: tuple[int, int] | None, outcome: LoadOutcome | None
    ) -> None:
        """A rank has done its part, a load with this outcome. `times`: when it began and ended."""
        if job not in self._jobs:
            return
        if times is None and outcome is not None and outcome.seconds is not None:
            # The load was made in the scheduler's thread, and has ended this moment.
            now_ns = time.time_ns()
            times = now_ns - int(outcome.seconds * 1e9), now_ns
        if times is None:
            return
        span, name, ended_ns = self._jobs[job]
        ended_ns.append(times[1])
        part = span.begin(f"{name}.worker", start_ns=times[0], rank=rank)
        failed = len(outcome.failed) if outcome is not None else None
        part.end(times[1], failure=_MISSING if failed else "", failed_blocks=failed)

    def end(self, job: int, *, is_complete: bool) -> None:
        """All ranks have."""
        if job in self._jobs:
            span, _, ended_ns = self._jobs.pop(job)
            span.end(max(ended_ns, default=None), failure="" if is_complete else _MISSING)

    def finish(self, report: RequestReport | None) -> None:
        """The request has ended."""
        self.decide("not_awaited")
        if self._request is None:
            return
        if report is None:
            self._request.end()
            return
        self._request.end(
            loaded_tokens=report.loaded_tokens,
            local_tokens=report.local_tokens,
            computed_tokens=report.computed_tokens,
            outcomes=[f"{count} {outcome}" for outcome, count in report.runs],
        )


UNTRACED = RequestTrace()


def begin_trace(
    tracing: Tracing,
    request_id: str,
    tenant: str,
    prompt_tokens: int,
    headers: Mapping[str, str] | None,
) -> RequestTrace:
    """The trace of a request that has come. `headers` may name the trace that it is part of."""
    span = tracing.begin(
        "request",
        headers,
        request_id=request_id[:MAX_REQUEST_CHARS],
        tenant=tenant,
        prompt_tokens=prompt_tokens,
    )
    return UNTRACED if span is None else RequestTrace(span)
