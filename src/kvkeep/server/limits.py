"""What one client may do a second, and how many sessions it may have: so that none can slow the others.

A session that asks too fast is refused, at once and cheaply, and nobody waits for it. Buckets hold one second's worth:
who was quiet may hurry for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvkeep.errors import RequestError


class Bucket:
    """So many a second, as many at once. The clock is the caller's, and may jump: backwards it stands still."""

    def __init__(self, per_second: float, now_ms: int) -> None:
        self._per_second = per_second
        self._level = float(per_second)
        self._at_ms = now_ms

    def refill(self, now_ms: int) -> float:
        """What is in it now; below zero where more was taken than there was."""
        elapsed_ms, self._at_ms = max(0, now_ms - self._at_ms), now_ms
        self._level = min(self._per_second, self._level + elapsed_ms * self._per_second / 1000)
        return self._level

    def take(self, amount: float) -> None:
        """Takes it whether or not it is there; what is missing has to come back first."""
        self._level -= amount


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits for each client. None: without."""

    sessions_per_client: int | None = None
    requests_per_second: int | None = None
    network_bytes_per_second: int | None = None


NO_LIMITS: Final = ClientLimits()


class Pace:
    """How fast one session goes."""

    def __init__(self, limits: ClientLimits = NO_LIMITS, now_ms: int = 0) -> None:
        requests, network_bytes = limits.requests_per_second, limits.network_bytes_per_second
        self._requests = None if requests is None else Bucket(requests, now_ms)
        self._network = None if network_bytes is None else Bucket(network_bytes, now_ms)

    def check_request(self, now_ms: int) -> None:
        """Counts a request; `too_fast` if there were too many."""
        if self._requests is None:
            return
        if self._requests.refill(now_ms) < 1:
            raise RequestError(
                "too_fast",
                "this session has sent more requests than it may in a second",
                hint="slow down, or raise --max-requests-per-second",
            )
        self._requests.take(1)

    def check_network(self, now_ms: int) -> None:
        """`too_fast` while bytes that were moved are more than may be. A message that is let through is so whole: the
        debt it leaves is waited for by the next."""
        if self._network is not None and self._network.refill(now_ms) <= 0:
            raise RequestError(
                "too_fast",
                "this session has moved more bytes through the socket than it may in a second",
                field="bytes",
                hint="slow down, or raise --max-network-rate",
            )

    def count_network(self, nbytes: int) -> None:
        if self._network is not None:
            self._network.take(nbytes)


class Owned(Protocol):
    """A session, as far as it matters whose it is."""

    key: str
    pid: int


def check_sessions(limits: ClientLimits, sessions: Iterable[Owned], key: str, pid: int) -> None:
    """`too_many_sessions` if the client has as many as it may. A client is a key; where there are none, a process, by
    the number it gives itself: of use against one that runs wild, not against one that lies."""
    most = limits.sessions_per_client
    if most is None:
        return
    held = sum(session.key == key and (bool(key) or session.pid == pid) for session in sessions)
    if held >= most:
        raise RequestError(
            "too_many_sessions",
            f"this client has {held} sessions",
            hint="end some, give engines keys of their own, or raise --max-sessions-per-client",
        )
