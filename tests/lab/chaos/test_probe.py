"""Whether hosts share blocks at the end of a run."""

from __future__ import annotations

import pytest

from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.chaos.plan import HostsItem, draw
from kvkeep_lab.chaos.run import ChaosRun


@pytest.mark.usefixtures("quiet")
def test_hosts_that_do_not_share_again_are_noticed() -> None:
    plan = next(
        plan
        for plan in map(draw, range(100))
        if any(isinstance(item, HostsItem) for item in plan.items)
    )
    outcome = ChaosRun(plan).run()
    assert not outcome.violation and any("share a prompt" in line for line in outcome.story)
    with planted("miss-for-ever"):
        outcome = ChaosRun(plan).run()
    assert outcome.violation.startswith("the shared tier never")
