from __future__ import annotations

import pytest

from kvkeep_lab.chaos.record import FINDINGS, Record, Violation
from kvkeep_lab.simulation.simulation import Simulation


@pytest.mark.parametrize("detailed", [True, False])
def test_a_story_has_times_and_details_only_if_wanted(detailed: bool) -> None:
    simulation = Simulation(1)
    record = Record(simulation, detailed)
    simulation.run(1_500)
    record.tell("server", "is gone")
    record.tell_detail("network", "lost message")
    assert record.story[0].split() == ["1.500", "ms", "server", "is", "gone"]
    assert len(record.story) == 1 + detailed


def test_a_violation_is_a_finding_with_a_name() -> None:
    violation = Violation("wrong_bytes", "here")
    assert (violation.finding, str(violation)) == ("wrong_bytes", "wrong_bytes: here")
    with pytest.raises(AssertionError):
        Violation("something", "here")
    assert list(FINDINGS)[:6] == [
        "wrong_tokens",
        "wrong_bytes",
        "engine_errors",
        "stuck_requests",
        "leaked_blocks",
        "leaked_leases",
    ]
