"""Time in tests: a clock that moves only when told to, and a wait for what must happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(happens: Callable[[], T], limit_s: float = 120.0) -> T:
    """Asks until the answer is true, and returns it. The limit only ends a test that has failed:
    then the answer is the last one."""
    deadline_s = time.monotonic() + limit_s
    while not (answer := happens()) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return answer


class SimulatedClock:
    """Milliseconds since the simulation began. Call it to read it."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def advance_to(self, now_ms: int) -> None:
        assert now_ms >= self.now_ms, "time does not go back"
        self.now_ms = now_ms
