"""Hosts of a chaos run share blocks through a service, and each fault of the service happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.chaos.plan import (
    SERVICE_RATES,
    Arrival,
    EngineItem,
    HostsItem,
    Item,
    Moment,
    Plan,
    Rate,
)
from kvkeep_lab.chaos.record import Outcome
from kvkeep_lab.chaos.run import ChaosRun

MakePlan = Callable[..., Plan]
_DURATION_MS = 8_000


def run_with_hosts(
    make_plan: MakePlan, *faults: Item, emptied_every_ms: int = 300, seed: int = 2
) -> Outcome:
    """All requests come on one host and then on the other, and memory loses its blocks meanwhile."""
    engines = [
        EngineItem(0, shared_memory=True, kept=False, longest_step_us=3_000, host=host)
        for host in (0, 1)
    ]
    plan = make_plan(engines=engines, pool_blocks=150, duration_ms=_DURATION_MS, seed=seed)
    arrivals = [item for item in plan.items if isinstance(item, Arrival)]
    items: list[Item] = [*engines, HostsItem(2, "wait"), *faults]
    for number, arrival in enumerate(arrivals):
        for turn in range(3):
            at_ms = 1_500 + turn * 2_000 + number * 2_000 // len(arrivals)
            items.append(replace(arrival, at_ms=at_ms, engine=turn))
    emptied_ms = range(1_800, _DURATION_MS, emptied_every_ms)
    items += [Moment(at_ms, "evicted_memory", at_ms) for at_ms in emptied_ms]
    return ChaosRun(replace(plan, items=tuple(items))).run()


def test_what_one_host_stored_the_other_is_served(make_plan: MakePlan) -> None:
    outcome = run_with_hosts(make_plan)
    assert not outcome.violation, outcome.violation
    assert outcome.hosts == 2 and outcome.finished == outcome.requests
    assert outcome.written_blocks > outcome.tier_hits > 20
    assert outcome.hit_blocks > 20


@pytest.mark.parametrize("fault", SERVICE_RATES)
def test_every_fault_of_a_service_happens_and_is_survived(make_plan: MakePlan, fault: str) -> None:
    clear = Moment(4_000, "clear", 1)  # what is cleared is removed
    chance = 0.02 if fault in ("stalled_service", "evicting_service") else 0.2
    outcome = run_with_hosts(make_plan, Rate(fault, chance), *[clear] * 6)
    assert not outcome.violation, outcome.violation
    assert outcome.faults[fault] > 0
    assert outcome.finished == outcome.requests


@pytest.mark.parametrize("fault", ["cut_off", "service_restart", "lost_entry", "power_cut"])
def test_a_host_or_the_service_goes_and_comes_back(make_plan: MakePlan, fault: str) -> None:
    outcome = run_with_hosts(make_plan, *[Moment(at_ms, fault, at_ms) for at_ms in (2_500, 5_000)])
    assert not outcome.violation, outcome.violation
    assert outcome.faults[fault] == 2 and outcome.tier_hits > 0


def test_a_clear_is_complete_and_checked_on_all_hosts(make_plan: MakePlan) -> None:
    """The second host is told and does nothing: its memory keeps what was cleared."""
    clears = [Moment(at_ms, "clear", 2 * at_ms) for at_ms in (4_000, 5_500, 7_000)]
    outcome = run_with_hosts(make_plan, *clears, emptied_every_ms=_DURATION_MS)
    assert not outcome.violation, outcome.violation
    assert outcome.clears == 3
    with planted("confirm-unheard"):
        outcome = run_with_hosts(make_plan, *clears, emptied_every_ms=_DURATION_MS, seed=4)
    assert outcome.finding == "broken_rules" and "is in memory of host-" in outcome.violation
