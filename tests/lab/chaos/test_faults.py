from __future__ import annotations

from collections.abc import Callable

import pytest

from kvkeep_lab.chaos.plan import DISK_MOMENTS, MOMENTS, DiskItem, Moment, Plan
from kvkeep_lab.chaos.run import ChaosRun


@pytest.mark.parametrize("fault", [*MOMENTS, *DISK_MOMENTS])
def test_every_fault_happens_is_counted_and_survived(
    make_plan: Callable[..., Plan], fault: str
) -> None:
    duration_ms = make_plan().duration_ms
    moments = [Moment(duration_ms * at // 8, fault, seed=at) for at in range(1, 7)]
    disk = [DiskItem(8, "wait")] if fault in DISK_MOMENTS else []
    outcome = ChaosRun(make_plan(*moments, *disk)).run()
    assert not outcome.violation
    assert outcome.faults.get(fault, 0) > 0
    assert any(fault.replace("_", " ") in line for line in outcome.story)


def test_what_is_impossible_just_then_does_not_happen(make_plan: Callable[..., Plan]) -> None:
    """A server that is down cannot crash."""
    crashes = [Moment(100, "server_crash", seed=3), Moment(100, "server_crash", seed=4)]
    outcome = ChaosRun(make_plan(*crashes)).run()
    assert outcome.faults == {"server_crash": 1}
