"""The disk of a chaos run moves blocks, and each of its faults happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvkeep_lab.chaos.plan import DISK_RATES, Arrival, DiskItem, Moment, Plan, Rate
from kvkeep_lab.chaos.record import Outcome
from kvkeep_lab.chaos.run import ChaosRun


def run_with_disk(plan: Plan, *faults: Rate) -> Outcome:
    """All requests come several times, and memory loses its blocks between them."""
    again = [
        replace(item, at_ms=(item.at_ms + shift) % plan.duration_ms)
        for item in plan.items
        if isinstance(item, Arrival)
        for shift in (300, 700)
    ]
    moments = [Moment(at_ms, "evicted_memory", at_ms) for at_ms in range(100, plan.duration_ms, 90)]
    items = (*plan.items, DiskItem(40, "wait"), *again, *moments, *faults)
    return ChaosRun(replace(plan, items=items)).run()


def test_engines_get_blocks_from_the_disk(make_plan: Callable[..., Plan]) -> None:
    outcome = run_with_disk(make_plan())
    assert not outcome.violation
    assert outcome.written_blocks and outcome.promoted_blocks and outcome.hit_blocks
    assert outcome.finished == outcome.requests


@pytest.mark.parametrize("fault", DISK_RATES)
def test_every_fault_of_a_disk_happens_and_is_survived(
    make_plan: Callable[..., Plan], fault: str
) -> None:
    outcome = run_with_disk(make_plan(), Rate(fault, 0.2))
    assert not outcome.violation, outcome.violation
    assert outcome.faults.get(fault, 0) > 0
    assert outcome.finished == outcome.requests
