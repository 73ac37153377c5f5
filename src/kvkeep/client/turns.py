"""A lock that threads have in turn."""

from __future__ import annotations

import threading

from kvkeep.client.threads import Threads


class Turns:
    """For `with`, also inside one another. Who waits for a reply takes the lock again and again; of
    a plain one nobody else might get hold meanwhile."""

    def __init__(self, threads: Threads = threading) -> None:
        self._threads = threads
        self._lock = threads.RLock()
        self._next_in_line = (
            threads.Lock()
        )  # one waits for the lock, the others wait for that place
        self._owner = self._depth = 0

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
