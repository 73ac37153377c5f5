from __future__ import annotations

import os

import pytest

from kvkeep.errors import SettingsError
from kvkeep_lab.commands.seeds import chosen, in_processes, span


def test_what_is_chosen() -> None:
    assert chosen(None, None) == range(100)
    assert chosen(7, None) == range(7, 8)
    assert chosen(None, "3:9") == range(3, 9)


@pytest.mark.parametrize("text", ["9:3", "3:3", "ten", "1:", ":5", "-1:4", "1:2:3"])
def test_a_span_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--seeds is"):
        span(text)


def test_contradictions_are_refused() -> None:
    with pytest.raises(SettingsError, match="contradict"):
        chosen(1, "1:2")
    with pytest.raises(SettingsError, match="--seed is -1"):
        chosen(-1, None)
    with pytest.raises(SettingsError, match="--jobs is -2"):
        list(in_processes(abs, [1, 2], -2))


def test_one_job_runs_here_and_several_elsewhere_in_order() -> None:
    assert list(in_processes(_where, [1, 2, 3], 1)) == [(each, os.getpid()) for each in (1, 2, 3)]
    results = list(in_processes(_double, list(range(10)), 2))
    assert results == [2 * each for each in range(10)]


def _where(number: int) -> tuple[int, int]:
    return number, os.getpid()


_double = (2).__mul__
