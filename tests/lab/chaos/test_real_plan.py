from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kvkeep_lab.chaos.real_plan import (
    FLIP_BIT,
    KILL_ENGINE,
    KILL_SERVER,
    PAUSE_ENGINE,
    PAUSE_SERVER,
    Counts,
    draw,
)


def test_ten_minutes_have_all_that_is_asked_for() -> None:
    counts = Counts.of_minutes(10)
    assert counts.server_kills >= 20 and counts.server_pauses >= 20 and counts.engine_kills >= 10


@pytest.mark.parametrize("minutes", [0.01, 0.5, 3, 60])
def test_every_fault_happens_however_short_the_run_is(minutes: float) -> None:
    counts = Counts.of_minutes(minutes)
    plan = draw(1, minutes * 60, 4, counts)
    kinds = Counter(event.kind for event in plan)
    assert kinds[KILL_SERVER] == counts.server_kills and kinds[PAUSE_SERVER] == counts.server_pauses
    assert kinds[KILL_ENGINE] == counts.engine_kills and kinds[PAUSE_ENGINE] == counts.engine_pauses
    assert kinds[FLIP_BIT] + sum(event.flips for event in plan) == counts.bit_flips
    assert [event.at_s for event in plan] == sorted(event.at_s for event in plan)
    assert all(0 <= event.at_s <= minutes * 60 for event in plan)


def test_a_seed_is_a_plan() -> None:
    counts = Counts.of_minutes(2)
    assert draw(3, 120, 4, counts) == draw(3, 120, 4, counts) != draw(4, 120, 4, counts)


def test_faults_of_the_server_end_before_the_next_begins() -> None:
    for seed in range(20):
        plan = draw(seed, 600, 4, Counts.of_minutes(10))
        of_server = [event for event in plan if event.kind in (KILL_SERVER, PAUSE_SERVER)]
        for event, following in pairwise(of_server):
            assert event.at_s + event.seconds < following.at_s


def test_all_engines_have_their_turn_and_servers_begin_in_every_way() -> None:
    plan = [event for seed in range(5) for event in draw(seed, 600, 4, Counts.of_minutes(10))]
    assert {event.engine for event in plan if event.kind == KILL_ENGINE} == {0, 1, 2, 3}
    kills = [event for event in plan if event.kind == KILL_SERVER]
    assert {event.fresh for event in kills} == {event.paused for event in kills} == {True, False}
    assert sum(event.fresh for event in kills) < len(kills) / 4, "most of them adopt what is left"
