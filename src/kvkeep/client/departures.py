"""Stores whose blocks are read and still on their way. A thread waits for the copies and tells the
server of them, so that the thread that reads blocks waits for neither and the bus is never idle
while there is something to store.

    stores' thread       copy A ── copy B ── copy C ──────── settle: A has ended
    this one                  └─ A arrives, CompleteStore ─── B arrives, …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from kvkeep.client.connection import Connection
from kvkeep.client.requests import Stored
from kvkeep.client.transfer import Storing

_IDLE_S = 0.02
_LOOK_MS = 5


@dataclass(eq=False)
class _Departure:
    job: Hashable
    storing: Storing
    left: bool = False  # all has arrived, and the server was told
    failed: bool = False


class Departures:
    """`run` is for a thread of its own; all else is for the one that stores. `end` is told what
    came of each, `fail` of what went wrong inside. `wake` is notified whenever there is something
    new for either."""

    def __init__(
        self,
        connection: Connection,
        wake: Any,
        end: Callable[[Hashable, Stored], None],
        fail: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._wake = wake
        self._end = end
        self._fail = fail
        self._all: deque[_Departure] = deque()  # that have not ended
        self._leaving: deque[_Departure] = deque()
        self._closing = False

    def __len__(self) -> int:
        return len(self._all)

    def add(self, job: Hashable, storing: Storing) -> None:
        """Its copies have begun or are about to."""
        departure = _Departure(job, storing)
        with self._wake:
            self._all.append(departure)
            self._leaving.append(departure)
            self._wake.notify_all()

    def run(self) -> None:
        while True:
            with self._wake:
                while not self._leaving:
                    if self._closing:
                        return
                    self._wake.wait()
                departure = self._leaving[0]
            try:
                departure.storing.depart()
            except Exception:
                # guard: whatever goes wrong here is a block that was not stored, never the engine's
                # end
                departure.failed = True
                self._fail("store")
            with self._wake:
                departure.left = True
                self._leaving.popleft()
                self._wake.notify_all()

    def settle(self) -> None:
        """Ends those that the server has answered."""
        while self._all and self._all[0].left:
            first = self._all[0]
            if not first.failed and first.storing.unanswered() is not None:
                return
            stored = Stored(0, complete=False)
            try:
                if not first.failed:
                    stored = first.storing.finish()
            except Exception:  # guard: likewise
                self._fail("store")
            self._all.popleft()
            self._end(first.job, stored)

    def wait(self, more: Callable[[], bool] = lambda: False) -> None:
        """Until there may be something to settle, or there is `more` to do, or for a moment."""
        first = self._all[0]
        call = first.storing.unanswered() if first.left else None
        if call is not None:
            self._connection.wait(call, _LOOK_MS)
            return
        with self._wake:
            self._wake.wait_for(lambda: first.left or more(), _IDLE_S)

    def close(self) -> None:
        """Nothing more will be added. Waits until all have ended."""
        while self._all:
            self.wait()
            self.settle()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
