from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.chaos.plan import draw
from kvkeep_lab.chaos.run import ChaosRun
from kvkeep_lab.chaos.shrink import minimise, shrink


@pytest.mark.parametrize("needed", [{3}, {0, 19}, {4, 5, 6}, set(range(20))])
def test_only_what_is_needed_is_left(needed: set[int]) -> None:
    dropped = minimise(range(20), lambda left_out: needed.isdisjoint(left_out))
    assert set(range(20)) - set(dropped) == needed


def test_it_ends_when_it_has_tried_enough() -> None:
    tried: list[Sequence[int]] = []

    def fails_without(left_out: Sequence[int]) -> bool:
        tried.append(left_out)
        return False

    assert minimise(range(64), fails_without, runs_at_most=10) == []
    assert len(tried) == 10


def test_a_failing_run_becomes_a_short_story(quiet: None) -> None:
    with planted("release-without-unpin"):
        plan = draw(
            next(seed for seed in range(20) if ChaosRun(draw(seed)).run().finding == "broken_rules")
        )
        dropped, outcome = shrink(plan, "broken_rules")
        assert ChaosRun(plan.without(dropped)).run().story == outcome.story
    assert outcome.finding == "broken_rules"
    assert len(plan.items) - len(dropped) <= 6
    assert not ChaosRun(plan.without(dropped)).run().violation, "it is the mutant that is seen"
