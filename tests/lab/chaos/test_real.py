"""What is counted, and what is held to be wrong. A whole run is in tests/chaos/test_real.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvkeep_lab.chaos import real as chaos_real
from kvkeep_lab.chaos.real import RealRun, pairs_during, ttft
from kvkeep_lab.chaos.real_engine import Answer
from kvkeep_lab.chaos.real_plan import Counts

NONE = Counts(0, 0, 0, 0, 0)


def answer(arrived_s: float, ttft_ms: float = 100.0, plain_ttft_ms: float = 100.0) -> Answer:
    return Answer(False, "length", 0, 0, arrived_s, ttft_ms, arrived_s + 0.2, plain_ttft_ms)


def test_pairs_of_an_outage_are_those_that_arrived_in_it() -> None:
    answers = [answer(1.0), answer(2.0), answer(3.0), answer(3.9), answer(4.0)]
    assert pairs_during(answers, [(2.0, 4.0)], []) == answers[1:4]
    assert pairs_during(answers, [(1.0, 1.5), (3.5, 9.0)], []) == [answers[0], *answers[3:]]


@pytest.mark.parametrize(
    ("paused", "counts"),
    [((1.9, 2.1), False), ((2.25, 9.0), False), ((1.0, 2.0), True), ((2.31, 9.0), True)],
)
def test_a_pair_whose_engine_was_paused_says_nothing(
    paused: tuple[float, float], counts: bool
) -> None:
    assert (pairs_during([answer(2.0)], [(0.0, 9.0)], [paused]) != []) == counts


def test_percentiles_and_their_ratio() -> None:
    pairs = [answer(at, ttft_ms=at, plain_ttft_ms=at / 2) for at in range(1, 101)]
    said = ttft(pairs)
    assert (
        said["ttft_p99_ms_none"],
        said["ttft_p99_ms_outage"],
        said["ttft_p99_outage_ratio"],
    ) == (49.5, 99.0, 2.0)
    assert not any(ttft([]).values())


def test_one_bad_moment_of_the_machine_costs_one_window() -> None:
    calm = [answer(at) for at in range(2000)]
    storm = [answer(at, ttft_ms=5_000.0) if at < 40 else each for at, each in enumerate(calm)]
    assert (
        ttft(storm)["ttft_p99_outage_ratio"] == 1.0 and ttft(storm)["ttft_p99_ms_outage"] == 5_000.0
    )
    always = [answer(at, ttft_ms=500.0) if at % 50 == 0 else each for at, each in enumerate(calm)]
    assert ttft(always)["ttft_p99_outage_ratio"] == 5.0, (
        "two in a hundred, all the time, are no accident"
    )


@pytest.mark.parametrize("name", [*chaos_real._ZEROS, *chaos_real._MORE_ZEROS])
def test_whatever_is_not_zero_is_a_violation(name: str) -> None:
    run = RealRun(0, 60, NONE)
    run._all = []
    assert run._result(1.0)["violations"] == []
    run.tally[name] = 1
    assert run._result(1.0)["violations"] == [f"{name} is 1"]


def test_slow_first_tokens_are_one_if_there_are_enough_to_tell() -> None:
    class Engine:
        said: dict[str, str] = {}  # noqa: RUF012
        paused: list[tuple[float, float]] = []  # noqa: RUF012

        def __init__(self, count: int, ttft_ms: float) -> None:
            self.answers = [answer(at, ttft_ms=ttft_ms) for at in range(count)]

    for count, ttft_ms, wrong in ((2000, 109.0, False), (2000, 120.0, True), (500, 120.0, False)):
        run = RealRun(0, 60, NONE, outages=[(0.0, 1e9)])
        run._all = [Engine(count, ttft_ms)]  # type: ignore[list-item]
        violations = run._result(1.0)["violations"]
        assert bool(violations) == wrong and all(
            "ttft_p99_outage_ratio is 1.2" in each for each in violations
        )


def test_processes_that_are_left_are_seen() -> None:
    before = chaos_real._children()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert chaos_real._children() - before == {child.pid}
    assert chaos_real._children() == before
