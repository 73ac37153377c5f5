"""A clock that moves only when told to."""

from __future__ import annotations


class SimulatedClock:
    """Milliseconds since the simulation began. Call it to read it."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def advance_to(self, now_ms: int) -> None:
        assert now_ms >= self.now_ms, "time does not go back"
        self.now_ms = now_ms
