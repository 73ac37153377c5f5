"""Limits how many log lines a peer can cause, so that none can fill the disk."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

MOST_SUBJECTS: Final = 1_000  # remembered at a time; more of them in a minute get no lines
_MINUTE_S = 60.0


class LineLimit:
    """At most `lines` log lines a minute for each subject, such as a client. Not thread-safe."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._minutes: dict[Hashable, tuple[float, int]] = {}  # since when, and lines; oldest first

    def allows(self, subject: Hashable, now_s: float) -> bool:
        """Counts one line. False if the subject has had its lines of this minute."""
        since_s, count = self._minutes.get(subject, (now_s, 0))
        if _is_over(since_s, now_s):
            since_s, count = now_s, 0
            del self._minutes[subject]
        while self._minutes and _is_over(next(iter(self._minutes.values()))[0], now_s):
            del self._minutes[next(iter(self._minutes))]
        if subject not in self._minutes and len(self._minutes) >= MOST_SUBJECTS:
            return False
        self._minutes[subject] = since_s, count + 1
        return count < self._lines


def _is_over(since_s: float, now_s: float) -> bool:
    return not 0 <= now_s - since_s < _MINUTE_S  # a clock that was set back begins a new minute
