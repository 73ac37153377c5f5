"""Ctrl-C while a command waits."""

from __future__ import annotations

import signal

import pytest

from kvkeep.cli.interrupts import interrupts


def test_the_first_ctrl_c_is_noted_and_the_second_one_raises() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts() as is_interrupted:  # noqa: PT012
        assert not is_interrupted()
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        signal.raise_signal(signal.SIGINT)


def test_afterwards_it_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
