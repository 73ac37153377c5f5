"""What is said about a server that is not there: once when an outage begins, once when it is over."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def trouble(address: str, why: str, refusal: str) -> tuple[str, str]:
    """What is wrong with the server, and the remedy. `refusal` is what it said itself, if it did."""
    if refusal:
        return f"the server at {address} will not have us: {refusal}", ""
    return f"no server at {address}: {why}", "start one with `kvkeep serve`"


class Outage:
    """One clear message an outage: what was tried, what it means, what to do."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.told = False

    def begin(self, why: str, refusal: str) -> None:
        if not self.told:
            self.told = True
            what, remedy = trouble(self._address, why, refusal)
            log.warning(
                "kvkeep: %s. Serving without the cache; it will be used as soon as the server is there%s.",
                what,
                remedy and f" ({remedy})",
            )

    def stumble(self) -> None:
        """The same for a fault of our own, with its traceback."""
        if not self.told:
            self.told = True
            log.exception("kvkeep: the session with %s failed inside the client", self._address)

    def end(self) -> None:
        self.told = False
        log.warning("kvkeep: connected to %s", self._address)
