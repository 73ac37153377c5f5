"""Time in tests: a clock that moves only when told to, and a wait for what must happen."""

from __future__ import annotations

import pytest

from kvkeep.testing.clock import SimulatedClock, eventually


def test_time_stands_still_until_it_is_moved() -> None:
    clock = SimulatedClock()
    assert (clock(), clock()) == (0, 0)
    clock.advance_to(250)
    assert (clock(), clock()) == (250, 250)


def test_time_does_not_go_back() -> None:
    clock = SimulatedClock()
    clock.advance_to(250)
    clock.advance_to(250)
    with pytest.raises(AssertionError):
        clock.advance_to(249)


def test_a_wait_ends_with_the_first_true_answer_or_at_its_limit() -> None:
    answers = iter([0, None, 7, 8])
    assert eventually(lambda: next(answers)) == 7 and next(answers) == 8
    assert eventually(lambda: 0, limit_s=0.01) == 0
