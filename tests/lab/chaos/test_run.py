from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.wire.frames import HEADER_BYTES, MAGIC
from kvkeep_lab.chaos import faults
from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.chaos.network import ChaosNetwork
from kvkeep_lab.chaos.plan import EngineItem, Moment, Plan, Rate, draw
from kvkeep_lab.chaos.run import ChaosRun
from kvkeep_lab.chaos.sockets import ChaosSocket


@pytest.mark.parametrize("shared_memory", [True, False])
def test_without_faults_engines_find_what_others_stored(
    make_plan: Callable[..., Plan], shared_memory: bool
) -> None:
    engines = [EngineItem(0, shared_memory, kept=False, longest_step_us=3_000)] * 3
    outcome = ChaosRun(make_plan(engines=engines, pool_blocks=150)).run()
    assert not outcome.violation
    assert outcome.finished == outcome.requests > 5
    assert outcome.hit_blocks > 20
    assert not outcome.faults


def test_after_a_crash_the_next_server_has_what_the_last_one_had(
    make_plan: Callable[..., Plan],
) -> None:
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
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert not list(directory.glob(f"kvkeep-chaos-{os.getpid()}-*"))


def test_a_failure_of_the_simulation_itself_is_a_finding(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChaosRun, "_arrive", lambda self, arrival: 1 // 0)
    outcome = ChaosRun(make_plan()).run()
    assert outcome.finding == "engine_errors"
    assert "ZeroDivisionError" in outcome.violation
    assert "ZeroDivisionError" in outcome.story[-1]


@pytest.mark.parametrize("mutant", ["", "stay-deaf"])
@pytest.mark.parametrize(
    ("side", "kind"), [("server", rb"Found\xa6blocks[^\0]"), ("engine", rb"Release")]
)
def test_a_flipped_bit_in_a_length_makes_nobody_deaf_for_long(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    kind: bytes,
    mutant: str,
) -> None:
    """The receiver waits for 16 KiB more, and takes what follows for them. The message is one about
    a lease, so an engine owes the server something for as long as one of them is deaf."""
    damaged = 0

    def send(self: ChaosNetwork, sender: ChaosSocket, data: bytes) -> int:
        nonlocal damaged
        is_message = data.startswith(MAGIC) and re.search(kind, data[HEADER_BYTES:])
        if is_message and not damaged and sender.process.name.startswith(side):
            damaged += 1
            data = data[:25] + bytes([data[25] ^ 0x40]) + data[26:]
        return right(self, sender, data)

    right = ChaosNetwork.send
    monkeypatch.setattr(ChaosNetwork, "send", send)
    engines = [EngineItem(0, shared_memory=True, kept=False, longest_step_us=3_000)]
    with planted(mutant):
        outcome = ChaosRun(make_plan(engines=engines)).run()
    assert damaged == 1
    assert outcome.finding == ("leaked_leases" if mutant else ""), outcome.violation
    if not mutant:
        assert outcome.finished == outcome.requests


@pytest.mark.parametrize(
    ("fault", "never_reads"),
    [("server_of_other_user", 0.0), ("stalled_connection", 0.0), ("stalled_connection", 1.0)],
)
def test_a_fault_of_connections_costs_nobody_an_answer(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    never_reads: float,
) -> None:
    monkeypatch.setattr(faults, "_NEVER_READS", never_reads)
    plan = make_plan(pool_blocks=150)
    outcome = ChaosRun(
        make_plan(Moment(plan.duration_ms // 2, fault, seed=3), pool_blocks=150)
    ).run()
    assert not outcome.violation and outcome.faults[fault] == 1
    assert outcome.finished == outcome.requests


@pytest.mark.parametrize(
    "fault", ["cut_connection", "half_message", "late_message", "corrupted_message"]
)
def test_nor_does_one_of_bytes_on_their_way(make_plan: Callable[..., Plan], fault: str) -> None:
    outcome = ChaosRun(make_plan(Rate(fault, 0.05), pool_blocks=150)).run()
    assert not outcome.violation and outcome.faults[fault] > 2
    assert outcome.finished == outcome.requests
