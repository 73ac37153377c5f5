"""Whether blocks that the server has are loaded or computed: whichever was measured to be sooner.

    a load       fixed + per block × (its blocks, and those that are on their way before it)
    computing    per token × its tokens: the step that computes the prompt's last token takes place anyway

    steps        |── k: others ──|── k+1: others ──|          |k: nothing|k+1: nothing|
    a load        ●──────────────────────●                     ●─────────────────●
                  |←──── low ───→|                             |←──── low, high ─────→|
                  |←────────────── high ──────────→|

Workers tell how long a load took. Where they do not: an engine hears of its end when a step ends,
so where that step computed something the load took from `low` to `high`; where it computed nothing,
the engine did nothing but wait. What is believed changes only if it lies outside.

Medians of what was measured lately, so that a compilation or a pause among them counts for nothing.
While there is too little of it, everything is loaded: that is how one learns. And so that a
slowness that has passed does not turn the cache off for ever, a load is tried after so many that
were not; if it is faster after all, the old ones are forgotten."""

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
FEW_TOKENS = 32  # of a block that is not loaded by itself

_LOADS, _STEPS = 16, 32  # that are remembered
_MOST_STEPS = 16  # under way; no engine has more, unless it does not tell of their end
_SHORT, _PATIENCE = (
    4,
    16,
)  # a step is short beside one with so many times its tokens; so many make that one forgotten
_FEW_TOKENS, _MANY_TOKENS = (
    4,
    8,
)  # for each request: up to so many it generates, from so many on prompts are computed


@dataclass
class _Step:
    start_s: float
    tokens: int
    requests: int
    loaded_blocks: int = 0  # of the loads that it begins


@dataclass
class _Load:
    blocks: int
    before: int  # blocks that were on their way already
    computing_s: float | None  # what computing its tokens would take; None: not known
    step: _Step | None = None


class CostModel:
    """Decides for one engine. `in_step`: its loads are over before the step that begins them
    computes."""

    def __init__(
        self,
        when: LoadWhen = "faster",
        *,
        in_step: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._always = when == "always"
        self._in_step = in_step
        self._clock = clock
        self._steps: deque[_Step] = deque()  # under way; workers are at the first
        self._loads: dict[int, _Load] = {}
        self._next_loads: list[_Load] = []  # they go out with the next step
        self._loading_blocks = 0
        self._requests = 0  # in the newest step
        self._skipped = 0  # since the last load
        self._took: deque[tuple[int, float]] = deque(maxlen=_LOADS)  # blocks of loads, and seconds
        self._prefills: deque[tuple[int, float]] = deque(
            maxlen=_STEPS
        )  # tokens of prompts, and seconds of the step
        self._passed_over = 0  # steps that computed prompts, but little of them
        self._decodes: deque[float] = deque(maxlen=_STEPS)
        self._line: tuple[float, float] | None = (
            None  # of the loads that took so long; None: has to be drawn anew
        )

    # -- what is decided

    def is_too_little(self, blocks: int, tokens: int) -> bool:
        """Whether so many blocks are never loaded: the step that computes the rest of the prompt
        takes them along."""
        return not self._always and blocks == 1 and tokens <= FEW_TOKENS

    def decide(self, blocks: int, tokens: int) -> bool:
        """Whether to load so many blocks, which hold so many tokens. To be asked once for each
        load."""
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
        """Whether a load that begins now is expected to be over before the tokens would be
        computed; True if too little is known, or nothing of loads as long as this one."""
        computing_s, loading_s = (
            self._computing_s(tokens),
            self._loading_s(self._loading_blocks + blocks),
        )
        if computing_s is None or loading_s is None or self.expected_s(blocks) is None:
            return True
        # Who loads in the background joins the step after, which the others run in any case. That
        # time is lost for one request alone, while all of them would wait for what is computed.
        waits_s = self._step_s() if self._requests and not self._in_step else 0.0
        return loading_s < computing_s and waits_s < computing_s * (1 + self._requests)

    def expected_s(self, blocks: int) -> float | None:
        """What a load of so many blocks takes by itself; None if too little is known, or nothing of
        loads as long."""
        is_known = self._took and blocks <= 2 * max(blocks for blocks, _ in self._took)
        return self._loading_s(blocks) if is_known else None

    # -- what is measured

    def begin_load(self, job: int, blocks: int, tokens: int) -> None:
        """A load goes out with the next step."""
        self._loads[job] = load = _Load(blocks, self._loading_blocks, self._computing_s(tokens))
        self._next_loads.append(load)
        self._loading_blocks += blocks
        self._skipped = 0

    def begin_step(self, tokens: int, requests: int) -> None:
        """A step goes to the workers, with the loads since the last one. It computes so many tokens
        of so many requests."""
        step = _Step(self._clock(), tokens, requests)
        for load in self._next_loads:
            load.step = step
            step.loaded_blocks += load.blocks
        self._next_loads = []
        if len(self._steps) == _MOST_STEPS:
            self._steps.clear()
        self._steps.append(step)
        self._requests = requests

    def end_load(self, job: int, *, good: bool, took_s: float | None = None) -> None:
        """The workers have reported a load, with the end of the first step under way, and perhaps
        how long it took. One that failed says nothing of that."""
        load = self._loads.pop(job, None)
        if load is None:
            return
        self._loading_blocks -= load.blocks
        # One that is over before the step that it would have gone out with belongs to none.
        self._next_loads = [each for each in self._next_loads if each is not load]
        blocks = load.before + load.blocks
        now_s, last = self._clock(), self._steps[0] if self._steps else None
        if not good:
            return
        if took_s is not None:
            low_s = high_s = took_s
        elif load.step is None:
            return
        elif self._in_step:
            computing_s = self._computing_s(load.step.tokens - load.step.requests)
            if computing_s is None:
                return
            since_s = now_s - load.step.start_s
            blocks, low_s = (
                load.step.loaded_blocks,
                max(0.0, since_s - computing_s - self._step_s()),
            )
            high_s = low_s
        else:
            low_s = high_s = now_s - load.step.start_s
            if last is not None and last.tokens:
                low_s = max(0.0, last.start_s - load.step.start_s)
        expected_s = self._loading_s(blocks)
        if (
            expected_s is not None
            and load.computing_s is not None
            and low_s < load.computing_s <= expected_s
        ):
            self._took.clear()
            expected_s = None
        self._took.append(
            (blocks, low_s if expected_s is None else min(max(expected_s, low_s), high_s))
        )
        self._line = None

    def end_step(self) -> None:
        """The first of the steps under way has ended."""
        if not self._steps:
            return
        now_s, step = self._clock(), self._steps.popleft()
        if step.tokens and not (self._in_step and step.loaded_blocks):
            if step.tokens <= _FEW_TOKENS * step.requests:
                self._decodes.append(now_s - step.start_s)
            elif step.tokens >= _MANY_TOKENS * step.requests:
                self._take_prefill(step.tokens - step.requests, now_s - step.start_s)
        if self._steps:  # only now workers come to it
            self._steps[0].start_s = max(self._steps[0].start_s, now_s)

    def _take_prefill(self, tokens: int, took_s: float) -> None:
        """What a short step takes says little about tokens: it is passed over while longer ones are
        remembered, which is not for ever."""
        if self._prefills and _SHORT * tokens < max(self._prefills)[0]:
            self._passed_over += 1
            if self._passed_over % _PATIENCE == 0:
                self._prefills.popleft()
        else:
            self._prefills.append((tokens, took_s))

    def drop_step(self) -> None:
        """The newest step has failed: how long it took says nothing."""
        if self._steps:
            self._steps.pop()

    # -- what is believed

    def figures(self) -> dict[str, int]:
        """What is believed by now, for people. What is not known is left out."""
        token_s = self._computing_s(1)
        found = {"prefill_tokens_per_s": round(1 / token_s)} if token_s else {}
        if len(self._took) >= LEAST_SAMPLES:
            fixed_s, block_s = self._load_line()
            found |= {"load_fixed_us": round(fixed_s * 1e6), "load_block_us": round(block_s * 1e6)}
        return found

    def _computing_s(self, tokens: int) -> float | None:
        """What so many more tokens add to a step."""
        if len(self._prefills) < LEAST_SAMPLES:
            return None
        step_s = self._step_s()
        return max(0, tokens) * _middle(
            (max(0.0, took_s - step_s) / each, each) for each, took_s in self._prefills
        )

    def _step_s(self) -> float:
        """What a step takes that computes next to nothing."""
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
    """Height at 0 and slope of the line through the middle of these points, neither below 0. A few
    points that lie apart do not move it. Where the height would be below 0, and where all points
    lie above one place, it is 0."""
    slopes = [
        ((y - other_y) / (x - other_x), abs(x - other_x))
        for at, (x, y) in enumerate(points)
        for other_x, other_y in points[:at]
        if x != other_x
    ]
    slope = max(0.0, _middle(slopes)) if slopes else 0.0
    height = median(y - slope * x for x, y in points)
    if slopes and height >= 0:
        return height, slope
    return 0.0, median(y / x for x, y in points)


def _middle(weighted: Iterable[tuple[float, float]]) -> float:
    """The median of values with weights."""
    values = sorted(weighted)
    half, below = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in values:
        below += weight
        if below >= half:
            return value
    raise ValueError("no values")
