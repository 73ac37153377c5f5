"""Makes a failing chaos run small: items of its plan are left out for as long as it fails in the
same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvkeep_lab.chaos.plan import EngineItem, Plan
from kvkeep_lab.chaos.record import Outcome
from kvkeep_lab.chaos.run import ChaosRun

RUNS_AT_MOST = 150


def shrink(plan: Plan, finding: str) -> tuple[list[int], Outcome]:
    """The numbers of the items that can be left out, and the outcome of what remains."""
    numbers = list(range(len(plan.items)))
    best: dict[tuple[int, ...], Outcome] = {}

    def fails_without(dropped: Sequence[int]) -> bool:
        if not any(
            isinstance(plan.items[at], EngineItem) for at in numbers if at not in set(dropped)
        ):
            return False
        outcome = ChaosRun(plan.without(dropped)).run()
        if outcome.finding == finding:
            best[tuple(dropped)] = outcome
        return outcome.finding == finding

    dropped = minimise(numbers, fails_without)
    outcome = best.get(tuple(dropped)) or ChaosRun(plan.without(dropped)).run()
    return dropped, outcome


def minimise(
    numbers: Sequence[int],
    fails_without: Callable[[Sequence[int]], bool],
    runs_at_most: int = RUNS_AT_MOST,
) -> list[int]:
    """The numbers that are not needed for the failure: first many at a time, then fewer, then one
    by one."""
    needed, dropped = list(numbers), list[int]()
    size, runs = len(needed) // 2, 0
    while size and runs < runs_at_most:
        before, at = len(needed), 0
        while at < len(needed) and runs < runs_at_most:
            attempt = sorted([*dropped, *needed[at : at + size]])
            runs += 1
            if fails_without(attempt):
                dropped = attempt
                del needed[at : at + size]
            else:
                at += size
        if size > 1 or len(needed) == before:
            size //= 2  # with ones that are left out again and again until none can be
    return dropped
