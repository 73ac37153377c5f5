"""What is said about a server that is not there: once when an outage begins, once when the server
has said why, if it does, and once when it is over."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import ClassVar

log = logging.getLogger(__name__)

SILENT = "it has fallen silent"  # though there is a session
UNTRUSTED = "it is not trusted"  # so we will not have it; `refusal` is why


def trouble(address: str, why: str, refusal: str) -> tuple[str, str]:
    """What is wrong with the server, and the remedy. `refusal` is what it said itself, if it
    did."""
    if why == UNTRUSTED:
        return f"the server at {address} is not trusted: {refusal}", ""
    if refusal:
        return f"the server at {address} will not have us: {refusal}", ""
    if why == SILENT:
        return f"the server at {address} does not answer", "it hangs, or its host is overloaded"
    return f"no server at {address}: {why}", "start one with `kvkeep serve`"


class Outage:
    """One clear message an outage: what was tried, what it means, what to do. An engine has a
    connection for each rank and one for its scheduler: what one of them has said about an address,
    the others of this process do not repeat.

    Ranks in processes of their own do not speak (`speaks`): they report their `trouble`, and an
    Outage beside the scheduler says it for them, if the scheduler's own has not."""

    # who has met this trouble at this address
    _said: ClassVar[dict[tuple[str, str], weakref.WeakSet[Outage]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, address: str) -> None:
        self._address = address
        self.told = self._explained = False
        self.speaks = True  # else only at debug level
        # while it lasts: why, and the server's own words
        self.trouble: tuple[str, str] | None = None

    def begin(self, why: str, refusal: str) -> None:
        """Said again only if it was a guess before and the server's own words are there now: the
        remedy is another."""
        if self.told and (self._explained or not refusal):
            return
        self.told, self._explained, self.trouble = True, bool(refusal), (why, refusal)
        what, remedy = trouble(self._address, why, refusal)
        if not self.speaks:
            log.debug("kvkeep: %s", what)
            return
        with self._lock:
            others = self._said.setdefault((self._address, refusal), weakref.WeakSet())
            first = not others
            others.add(self)
        if first:
            log.warning(
                "kvkeep: %s. Serving without the cache; it will be used as soon as the server is"
                " there%s.",
                what,
                remedy and f" ({remedy})",
            )

    def stumble(self) -> None:
        """The same for a fault of our own, with its traceback."""
        if not self.told:
            self.told = self._explained = True
            log.exception("kvkeep: the session with %s failed inside the client", self._address)

    def end(self) -> None:
        """The last of those who met trouble there says that it is over."""
        self.told, self._explained, self.trouble = False, False, None
        if not self.speaks:
            log.debug("kvkeep: connected to %s", self._address)
            return
        with self._lock:
            met = [
                key
                for key, others in self._said.items()
                if key[0] == self._address and self in others
            ]
            for key in met:
                self._said[key].discard(self)
            over = all(not others for key, others in self._said.items() if key[0] == self._address)
            for key in [key for key, others in self._said.items() if not others]:
                del self._said[key]
        if over:
            log.warning("kvkeep: connected to %s", self._address)
