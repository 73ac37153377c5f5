"""What this package uses of `threading` and `time`, so that a simulation can decide which thread
runs when; and a fair lock."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol


def monotonic_ms() -> int:
    return int(time.monotonic() * 1000)


class Threads(Protocol):
    """The module `threading`, or `kvkeep_lab.simulation.threads`."""

    @property
    def Thread(self) -> Any: ...
    @property
    def Lock(self) -> Any: ...
    @property
    def RLock(self) -> Any: ...
    @property
    def Condition(self) -> Any: ...
    @property
    def Event(self) -> Any: ...

    def get_ident(self) -> int: ...


class FairLock:
    """A fair, reentrant lock. A thread that waits for a reply takes the lock again and again; with
    a plain lock no other thread might get hold of it meanwhile."""

    def __init__(self, threads: Threads = threading) -> None:
        self._threads = threads
        self._lock = threads.RLock()
        self._next_in_line = threads.Lock()  # one thread waits for the lock, others for this
        self._owner = 0
        self._depth = 0

    def __repr__(self) -> str:
        is_waited_for = self._next_in_line.locked()
        return f"FairLock(depth={self._depth}{', waited for' if is_waited_for else ''})"

    def __enter__(self) -> None:
        if self._owner == self._threads.get_ident():
            self._lock.acquire()
        else:
            with self._next_in_line:
                self._lock.acquire()
            self._owner = self._threads.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()
