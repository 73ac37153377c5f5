"""The interpreter changes hands quickly while blocks are moved beside an engine that computes, and
only then."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from kvkeep.gpu.interpreter import QUICK_S, QuickSwitches, _here


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    yield interval()
    sys.setswitchinterval(before)


def interval() -> float:
    return round(sys.getswitchinterval(), 6)


def test_on_and_off_however_often_it_is_said(usual: float) -> None:
    switches = QuickSwitches()
    for _ in range(2):
        switches.moves(False)
        assert interval() == usual
        for _ in range(2):
            switches.moves(True)
            assert interval() == QUICK_S
        switches.moves(False)
    assert interval() == usual


def test_the_last_of_several_workers_ends_it(usual: float) -> None:
    workers = [QuickSwitches() for _ in range(3)]
    for worker in workers:
        worker.moves(True)
    for worker in workers:
        assert interval() == QUICK_S
        worker.moves(False)
    assert interval() == usual


def test_what_somebody_else_sets_meanwhile_stands() -> None:
    switches = QuickSwitches()
    switches.moves(True)
    sys.setswitchinterval(0.001)
    switches.moves(False)
    assert interval() == 0.001


def test_who_is_quicker_already_stays_so() -> None:
    switches = QuickSwitches()
    sys.setswitchinterval(0.0001)
    before = interval()
    for on in (True, False):
        switches.moves(on)
        assert interval() == before


def test_it_comes_back_to_the_microsecond_however_often() -> None:
    switches = QuickSwitches()
    for microseconds in (201, 777, 1234, 5000):
        sys.setswitchinterval(microseconds / 1e6)
        before = interval()
        for _ in range(50):
            switches.moves(True)
            switches.moves(False)
        assert interval() == before


def test_an_engine_that_computes_nothing_is_in_nobodys_way(usual: float) -> None:
    switches = QuickSwitches()
    seen = []
    for moves, computes in (
        (True, True),
        (True, False),
        (True, True),
        (False, True),
        (False, False),
        (True, False),
    ):
        switches.moves(moves)
        switches.computes(computes)
        seen.append(interval() == QUICK_S)
    assert seen == [True, False, True, False, False, False] and interval() == usual


def test_several_threads_of_several_workers_come_to_an_end_together(usual: float) -> None:
    workers = [QuickSwitches() for _ in range(3)]

    def live(worker: QuickSwitches, seed: int) -> None:
        flips = random.Random(seed)
        for _ in range(2000):
            flips.choice([worker.moves, worker.computes])(flips.random() < 0.5)

    sys.setswitchinterval(1e-5)  # so that they meet
    threads = [threading.Thread(target=live, args=(workers[at % 3], at)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.moves(False)
    assert _here._hurried == 0
    sys.setswitchinterval(usual)
    workers[0].computes(True)
    workers[0].moves(True)
    assert interval() == QUICK_S
    workers[0].moves(False)
    assert interval() == usual
