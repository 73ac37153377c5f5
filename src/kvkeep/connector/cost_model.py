"""Decides whether blocks that the server has are loaded or computed, by what was measured to be
faster.

    a load       fixed + per block × (its blocks + those queued before it)
    computing    per token × its tokens: the step for the prompt's last token runs in any case;
                 it delays the requests that load meanwhile as long

Workers report how long each load took, from the moment it was handed over. The engine reports when
steps begin and end. Estimates are medians of recent samples, so one compilation or pause among them
has no effect. While there are too few samples every hit is loaded, which is how samples are
gathered. After `SKIPS_BEFORE_TRIAL` hits in a row that were computed, the next one is loaded as a
trial; if it turns out to be faster than computing, the old samples of loads are discarded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

LoadWhen = Literal["faster", "always"]

LEAST_SAMPLES = 4  # of loads and of steps, before anything is decided
SKIPS_BEFORE_TRIAL = 32
FEW_TOKENS = 32  # a single block of at most this many tokens is not loaded

_LOADS = 16  # samples that are kept
_STEPS = 32
_MAX_STEPS_UNDER_WAY = 16  # more than any engine has, unless it does not report their ends
_SHORT = 4  # a step is short beside a sample with this many times its tokens
_PATIENCE = 16  # after this many short steps the oldest sample of a long one is dropped
_DECODE_TOKENS = 4  # per request: a step with at most this many generates tokens
_PREFILL_TOKENS = 8  # per request: a step with at least this many computes prompts


@dataclass
class _Step:
    start_s: float
    tokens: int
    requests: int
    has_loads: bool


@dataclass(frozen=True)
class _Load:
    blocks: int
    blocks_before: int  # of loads that were under way when it began
    computing_s: float | None  # what computing its tokens would take; None: not known


class CostModel:
    """One for each engine. `loads_in_step`: a step first waits for the loads that it begins."""

    def __init__(
        self,
        when: LoadWhen = "faster",
        *,
        loads_in_step: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._always = when == "always"
        self._loads_in_step = loads_in_step
        self._clock = clock
        self._steps: deque[_Step] = deque()  # under way; workers run the first
        self._loads: dict[int, _Load] = {}  # under way, by job
        self._loading_blocks = 0
        self._next_step_loads = False
        self._requests = 0  # in the newest step
        self._skipped = 0  # since the last load
        self._took: deque[tuple[int, float]] = deque(maxlen=_LOADS)  # blocks and seconds of loads
        self._prefills: deque[tuple[int, float]] = deque(maxlen=_STEPS)  # tokens and seconds
        self._short_prefills = 0
        self._decodes: deque[float] = deque(maxlen=_STEPS)
        self._line: tuple[float, float] | None = None  # through `_took`; None: out of date

    def __repr__(self) -> str:
        return (
            f"CostModel(steps={len(self._steps)}, loads={len(self._loads)},"
            f" prefills={len(self._prefills)}, {self.figures()})"
        )

    # -- decisions

    def is_too_little(self, blocks: int, tokens: int) -> bool:
        """Whether such a hit is never loaded: the step that computes the rest of the prompt
        computes one small block in no measurable time."""
        return not self._always and blocks == 1 and tokens <= FEW_TOKENS

    def decide(self, blocks: int, tokens: int) -> bool:
        """Whether to load these blocks, which hold `tokens` tokens. Call it once for each hit: it
        counts the hits that are computed until the next trial."""
        if self.is_too_little(blocks, tokens):
            return False
        if self._always or self.is_faster(blocks, tokens):
            return True
        self._skipped += 1
        if self._skipped <= SKIPS_BEFORE_TRIAL:
            return False
        self._skipped = 0
        return True

    def is_faster(self, blocks: int, tokens: int) -> bool:
        """Whether a load that begins now is expected to cost less time than computing the tokens.
        True if too little is known, or nothing of loads of this length."""
        computing_s = self.computing_s(tokens)
        loading_s = self._loading_s(self._loading_blocks + blocks)
        if computing_s is None or loading_s is None or self.expected_s(blocks) is None:
            return True
        if self._loads_in_step:
            return loading_s < computing_s
        # A load in the background delays only this request: by the loads before it, and because it
        # joins the step after the current one. Computing its tokens delays all requests of that
        # step, and those whose loads end while it runs.
        waits_s = self._step_s() if self._requests else 0.0
        is_worth_the_queue = loading_s < computing_s * (1 + len(self._loads))
        return is_worth_the_queue and waits_s < computing_s * (1 + self._requests)

    def most_wait_s(self, blocks: int, tokens: int) -> float | None:
        """How long to wait at most for blocks that a tier brings up and that are loaded then: the
        request must not take longer than with computing them. None: no limit, or not known."""
        computing_s = None if self._always else self.computing_s(tokens)
        if computing_s is None:
            return None
        return max(0.0, computing_s - (self._loading_s(self._loading_blocks + blocks) or 0.0))

    def expected_s(self, blocks: int) -> float | None:
        """How long a load of `blocks` blocks takes with no other under way; None if too little is
        known, or nothing of loads of this length."""
        is_known = self._took and blocks <= 2 * max(blocks for blocks, _ in self._took)
        return self._loading_s(blocks) if is_known else None

    # -- measurements

    def begin_load(self, job: int, blocks: int, tokens: int) -> None:
        self._loads[job] = _Load(blocks, self._loading_blocks, self.computing_s(tokens))
        self._loading_blocks += blocks
        self._next_step_loads = True
        self._skipped = 0

    def end_load(self, job: int, took_s: float | None) -> None:
        """All workers have reported this load. `took_s` is the time of the slowest; None if the
        load failed, or its workers measure nothing: then there is no sample."""
        load = self._loads.pop(job, None)
        if load is None:
            return
        self._loading_blocks -= load.blocks
        if took_s is None:
            return
        blocks = load.blocks_before + load.blocks
        expected_s, computing_s = self._loading_s(blocks), load.computing_s
        if (
            expected_s is not None
            and computing_s is not None
            and took_s < computing_s <= expected_s
        ):
            self._took.clear()  # loads have become faster than computing
        self._took.append((blocks, took_s))
        self._line = None

    def begin_step(self, tokens: int, requests: int) -> None:
        """A step goes to the workers, together with the loads since the last one. It computes
        `tokens` tokens of `requests` requests."""
        if len(self._steps) == _MAX_STEPS_UNDER_WAY:
            self._steps.clear()
        self._steps.append(_Step(self._clock(), tokens, requests, self._next_step_loads))
        self._next_step_loads = False
        self._requests = requests

    def end_step(self) -> None:
        """The oldest step under way has ended."""
        if not self._steps:
            return
        now_s, step = self._clock(), self._steps.popleft()
        took_s = now_s - step.start_s
        if step.tokens and not (self._loads_in_step and step.has_loads):
            if step.tokens <= _DECODE_TOKENS * step.requests:
                self._decodes.append(took_s)
            elif step.tokens >= _PREFILL_TOKENS * step.requests:
                self._add_prefill(step.tokens - step.requests, took_s)
        if self._steps:  # the workers begin the next step only now
            self._steps[0].start_s = max(self._steps[0].start_s, now_s)

    def _add_prefill(self, tokens: int, took_s: float) -> None:
        """A short step says little about the time per token. It is ignored while samples of longer
        ones are there, which are dropped after some time."""
        if self._prefills and _SHORT * tokens < max(self._prefills)[0]:
            self._short_prefills += 1
            if self._short_prefills % _PATIENCE == 0:
                self._prefills.popleft()
        else:
            self._prefills.append((tokens, took_s))

    def drop_step(self) -> None:
        """The newest step has failed: it is no sample."""
        if self._steps:
            self._steps.pop()

    # -- estimates

    def figures(self) -> dict[str, int]:
        """The current estimates, for logs and metrics. What is not known is left out."""
        token_s = self.computing_s(1)
        found = {"prefill_tokens_per_s": round(1 / token_s)} if token_s else {}
        if len(self._took) >= LEAST_SAMPLES:
            fixed_s, block_s = self._load_line()
            found |= {"load_fixed_us": round(fixed_s * 1e6), "load_block_us": round(block_s * 1e6)}
        return found

    def computing_s(self, tokens: int) -> float | None:
        """What `tokens` more tokens add to a step."""
        if len(self._prefills) < LEAST_SAMPLES:
            return None
        step_s = self._step_s()
        return max(0, tokens) * _weighted_median(
            (max(0.0, took_s - step_s) / each, each) for each, took_s in self._prefills
        )

    def _step_s(self) -> float:
        """What a step takes that computes one token of each request."""
        return median(self._decodes) if self._decodes else 0.0

    def _loading_s(self, blocks: int) -> float | None:
        if len(self._took) < LEAST_SAMPLES:
            return None
        fixed_s, block_s = self._load_line()
        return fixed_s + block_s * blocks

    def _load_line(self) -> tuple[float, float]:
        if self._line is None:
            self._line = _line(list(self._took))
        return self._line


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope of a line through these points by medians (Theil-Sen), so that outliers
    do not move it. Neither is below 0. The intercept is 0 where it would be negative, and where all
    points have the same x."""
    slopes = [
        ((y - other_y) / (x - other_x), abs(x - other_x))
        for at, (x, y) in enumerate(points)
        for other_x, other_y in points[:at]
        if x != other_x
    ]
    slope = max(0.0, _weighted_median(slopes)) if slopes else 0.0
    height = median(y - slope * x for x, y in points)
    if slopes and height >= 0:
        return height, slope
    return 0.0, median(y / x for x, y in points)


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The weighted median."""
    values = sorted(weighted)
    half, below = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in values:
        below += weight
        if below >= half:
            return value
    raise ValueError("no values")
