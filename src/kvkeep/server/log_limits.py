"""Limits how many log lines a peer can cause, so that no peer can fill the disk.

LineLimit     counts lines for each subject
ProblemLog    refusals and failures: one line a minute for each kind
StrangerLog   peers that do not speak our protocol: one line for each address and kind"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from kvkeep.wire.peers import Stranger

log = logging.getLogger(__name__)

MOST_SUBJECTS: Final = 1_000  # remembered at a time; further ones get no lines within the minute
STRANGERS_A_MINUTE: Final = 10
STRANGERS_REMEMBERED: Final = 1_000  # a forgotten stranger is logged again when it comes again
_MINUTE_S = 60.0
_ADDRESS_CHARS = 100


class LineLimit:
    """At most `lines` log lines a minute for each subject, such as a client. Not thread-safe."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._minutes: dict[Hashable, tuple[float, int]] = {}  # its start, and lines; oldest first

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


class ProblemLog:
    """Logs one line a minute for each kind of problem, with how many there were since the last.
    For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._limit = LineLimit(1)

    def note(self, kind: str, message: str, error: Exception | None = None) -> None:
        """An `error` is logged with its traceback."""
        self._counts[kind] += 1
        if self._limit.allows(kind, self._clock()):
            level = logging.WARNING if error is None else logging.ERROR
            text = "%s (%s, %d times since the last such line)"
            log.log(level, text, message, kind, self._counts.pop(kind), exc_info=error)


class StrangerLog:
    """Logs each stranger once. Safe for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._limit = LineLimit(STRANGERS_A_MINUTE)

    def note(self, where: str, address: str, stranger: Stranger | None) -> None:
        """`where`: our port or socket. None is a peer of ours, and is not logged."""
        if stranger is None:
            return
        address = address[:_ADDRESS_CHARS] or "an unknown address"
        with self._lock:
            is_new = (address, stranger.kind) not in self._logged
            if not is_new or not self._limit.allows("all", self._clock()):
                return
            self._logged[address, stranger.kind] = None
            if len(self._logged) > STRANGERS_REMEMBERED:
                self._logged.popitem(last=False)
        log.warning(
            "%s talks to %s and seems to be %s: %s", address, where, stranger.kind, stranger.hint
        )
