"""Tests for the clock that moves only when told to."""

from __future__ import annotations

import pytest

from kvkeep.testing.clock import SimulatedClock


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
