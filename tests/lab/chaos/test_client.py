from __future__ import annotations

from collections.abc import Callable

import pytest

from kvkeep.store.table import WRITING
from kvkeep_lab.chaos.client import ChaosClient, Stop
from kvkeep_lab.chaos.plan import EngineItem, Plan, Rate
from kvkeep_lab.chaos.run import ChaosRun, Cluster

SHARED = [EngineItem(0, shared_memory=True, kept=True, longest_step_us=3_000)] * 2


def run_with_stop(
    make_plan: Callable[..., Plan], action: Callable[[Cluster, ChaosClient], int]
) -> None:
    """Has this happen in the middle of the first copy into the pool. Nothing may be wrong."""

    def prepare(cluster: Cluster) -> None:
        stop = Stop(lambda client: action(cluster, client), in_store=True)
        cluster.clients[0].stops.append(stop)

    outcome = ChaosRun(make_plan(engines=SHARED), prepare=prepare).run()
    assert not outcome.violation


def test_a_crash_lets_go_of_the_locks_and_a_pause_does_not(make_plan: Callable[..., Plan]) -> None:
    held: dict[str, int] = {}

    def stop(cluster: Cluster, client: ChaosClient) -> int:
        def look(when: str) -> None:
            watches = [session.watch for session in cluster.server.service.sessions.all()]
            held[when] = sum(watch is not None and watch.is_held() for watch in watches)

        look("before")
        client.pause(50_000)
        look("paused")
        held["connections"] = len(client.connections)
        client.crash()
        look("crashed")
        return 1

    run_with_stop(make_plan, stop)
    assert held["paused"] == held["before"]
    assert held["crashed"] == held["before"] - held["connections"]


def test_in_the_middle_of_a_store_its_slot_is_half_written(make_plan: Callable[..., Plan]) -> None:
    """And nobody else has it."""
    writing: list[bool] = []

    def stop(cluster: Cluster, client: ChaosClient) -> int:
        writing.append(bool((cluster.server.store.blocks.table.many.state == WRITING).any()))
        return 200_000

    run_with_stop(make_plan, stop)
    assert writing == [True]


@pytest.mark.parametrize("fault", ["slow_tier", "failing_tier"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_tier_that_is_slow_or_fails_costs_nobody_an_answer(
    make_plan: Callable[..., Plan], fault: str, shared_memory: bool
) -> None:
    engines = [EngineItem(0, shared_memory, kept=False, longest_step_us=3_000)] * 2
    outcome = ChaosRun(make_plan(Rate(fault, 0.3), engines=engines)).run()
    assert not outcome.violation
    assert outcome.faults[fault] > 3
    assert outcome.finished == outcome.requests


def test_what_is_raised_in_an_engine_is_a_finding(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChaosClient, "_add", lambda *_: 1 // 0)
    outcome = ChaosRun(make_plan()).run()
    assert (outcome.finding, "ZeroDivisionError" in outcome.violation) == ("engine_errors", True)
