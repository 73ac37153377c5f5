from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.testing.chaos import ChaosRun
from kvkeep.testing.chaos_plan import EngineItem, Moment, Plan, draw

_STORY = """
import hashlib, logging
logging.disable(logging.CRITICAL)
from kvkeep.testing.chaos import ChaosRun
from kvkeep.testing.chaos_plan import draw
for seed in range(4):
    outcome = ChaosRun(draw(seed), detailed=True).run()
    print(seed, outcome.events, hashlib.sha256("".join(outcome.story).encode()).hexdigest())
"""


def test_a_seed_is_the_same_story_in_every_process() -> None:
    stories = [
        subprocess.run(
            [sys.executable, "-c", _STORY],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(set(stories[0].splitlines())) == 4


@pytest.mark.parametrize("shared_memory", [True, False])
def test_without_faults_engines_find_what_others_stored(make_plan: Callable[..., Plan], shared_memory: bool) -> None:
    engines = [EngineItem(0, shared_memory, kept=False, longest_step_us=3_000)] * 3
    outcome = ChaosRun(make_plan(engines=engines, pool_blocks=150)).run()
    assert not outcome.violation
    assert outcome.finished == outcome.requests > 5
    assert outcome.hit_blocks > 20
    assert not outcome.faults


def test_after_a_crash_the_next_server_has_what_the_last_one_had(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(pool_blocks=150)
    crash = Moment(plan.duration_ms // 2, "server_crash", seed=1)
    outcome = ChaosRun(make_plan(crash, pool_blocks=150)).run()
    assert not outcome.violation
    assert outcome.faults == {"server_crash": 1}
    assert outcome.adopted_blocks > 5
    fresh = Moment(plan.duration_ms // 2, "server_crash_then_fresh", seed=1)
    assert ChaosRun(make_plan(fresh, pool_blocks=150)).run().adopted_blocks == 0


def test_nothing_of_a_run_stays_behind(quiet: None) -> None:
    directory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    gc.collect()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for seed in range(6):
        ChaosRun(draw(seed)).run()
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert not list(directory.glob(f"kvkeep-chaos-{os.getpid()}-*"))


def test_a_failure_of_the_simulation_itself_is_a_finding(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ChaosRun(make_plan())
    monkeypatch.setattr(run, "_arrive", lambda arrival: 1 // 0)
    outcome = run.run()
    assert outcome.finding == "engine_errors"
    assert "ZeroDivisionError" in outcome.violation
    assert "ZeroDivisionError" in outcome.story[-1]
