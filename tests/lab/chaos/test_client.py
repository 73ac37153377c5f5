from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.store.table import WRITING
from kvkeep_lab.chaos.client import ChaosClient, Stop
from kvkeep_lab.chaos.plan import EngineItem, Plan, Rate
from kvkeep_lab.chaos.run import ChaosRun

SHARED = [EngineItem(0, shared_memory=True, kept=True, longest_step_us=3_000)] * 2


def in_the_first_store(run: ChaosRun, action: Callable[[ChaosClient], int]) -> None:
    """Has this happen in the middle of the first copy into the pool."""
    set_up = run._set_up

    def and_stop(directory: Any) -> None:
        set_up(directory)
        run._clients[0].stops.append(Stop(action, in_store=True))

    run._set_up = and_stop  # type: ignore[method-assign]


def test_a_crash_lets_go_of_the_locks_and_a_pause_does_not(make_plan: Callable[..., Plan]) -> None:
    run = ChaosRun(make_plan(engines=SHARED))
    held: list[tuple[str, int]] = []

    def look(when: str) -> None:
        sessions = run._server.service.sessions.all()
        held.append((when, sum(s.watch is not None and s.watch.is_held() for s in sessions)))

    def stop(client: ChaosClient) -> int:
        look("before")
        client.pause(50_000)
        look("paused")
        held.append(("connections", len(client.connections)))
        client.crash()
        look("crashed")
        return 1

    in_the_first_store(run, stop)
    outcome = run.run()
    assert not outcome.violation
    counts = dict(held)
    assert counts["paused"] == counts["before"]
    assert counts["crashed"] == counts["before"] - counts["connections"]


def test_in_the_middle_of_a_store_its_slot_is_half_written(make_plan: Callable[..., Plan]) -> None:
    """And nobody else has it."""
    run = ChaosRun(make_plan(engines=SHARED))
    writing: list[bool] = []

    def stop(client: ChaosClient) -> int:
        writing.append(bool((run._server.store.blocks.table.many.state == WRITING).any()))
        return 200_000

    in_the_first_store(run, stop)
    assert not run.run().violation
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
