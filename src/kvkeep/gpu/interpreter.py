"""How soon threads hand the interpreter to each other while there are jobs beside an engine that
computes.

An engine's thread lets go of the interpreter at every call of the GPU's driver. A thread of ours
that takes it then may keep it for 5 ms, which is Python's own interval, kernel after kernel. So it
is 0.2 ms while ours have something to do. And no longer: an engine has other threads, which would
take the interpreter from its main one as often in every step."""

from __future__ import annotations

import sys
import threading

QUICK_S = 0.0002
_MICROSECOND = 1e-6


class _Interpreter:
    """There is one in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._hurried = 0  # workers in whose way somebody may be
        self._usual_s = 0.0

    def hurry(self, on: bool) -> None:
        """With the lock held."""
        self._hurried += 1 if on else -1
        if on and self._hurried == 1:
            self._usual_s = sys.getswitchinterval()
            if self._usual_s > QUICK_S:
                sys.setswitchinterval(QUICK_S)
        elif (
            not self._hurried and self._usual_s > QUICK_S and self._is_quick()
        ):  # nobody else has set it meanwhile
            sys.setswitchinterval(self._usual_s + _MICROSECOND / 2)  # it is cut off there

    def _is_quick(self) -> bool:
        return abs(sys.getswitchinterval() - QUICK_S) < _MICROSECOND


_here = _Interpreter()


class QuickSwitches:
    """Of one worker, on while it has jobs and its engine computes. Safe to use from several
    threads. The last worker in a process that says so ends them."""

    def __init__(self) -> None:
        self._moves, self._computes = False, True
        self._on = False

    def moves(self, blocks: bool) -> None:
        """Or is about to, or waits for a server that will let it."""
        if blocks != self._moves:
            self._moves = blocks
            self._turn()

    def computes(self, something: bool) -> None:
        if something != self._computes:
            self._computes = something
            self._turn()

    def _turn(self) -> None:
        with _here.lock:
            on = self._moves and self._computes
            if on != self._on:
                self._on = on
                _here.hurry(on)
