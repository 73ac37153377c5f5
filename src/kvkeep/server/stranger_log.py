"""Says what knocks at our ports and is no engine of ours: one line for each peer's address and
kind.

Whoever knocks must not fill the disk nor the memory: a limit on lines a minute, and on what is
remembered. Lines that are over the limit are said when the peer comes again."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvkeep.server.line_limit import LineLimit
from kvkeep.wire.peers import Stranger

log = logging.getLogger(__name__)

LINES_A_MINUTE: Final = 10
REMEMBERED: Final = 1_000  # the oldest are forgotten, and said again if they come again
_ADDRESS_CHARS = 100


class StrangerLog:
    """Safe for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._limit = LineLimit(LINES_A_MINUTE)

    def note(self, where: str, address: str, stranger: Stranger | None) -> None:
        """`where`: the port or socket of ours. None is one of ours, and is no news."""
        if stranger is None:
            return
        address = address[:_ADDRESS_CHARS] or "an unknown address"
        with self._lock:
            if not self._may_say((address, stranger.kind)):
                return
        log.warning(
            "%s talks to %s and seems to be %s: %s", address, where, stranger.kind, stranger.hint
        )

    def _may_say(self, what: tuple[str, str]) -> bool:
        if what in self._said:
            return False
        if not self._limit.allows("all", self._clock()):
            return False
        self._said[what] = None
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return True
