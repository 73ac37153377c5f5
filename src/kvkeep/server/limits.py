"""What one client may do a second, and how many sessions it may have: so that none can slow the
others.

A session that asks too fast is refused, at once and cheaply, and nobody waits for it. Buckets hold
one second's worth: who was quiet may hurry for a moment. What a session has used up stays used up
when it ends: the client's next session goes on from there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvkeep.errors import RequestError


class Bucket:
    """So many a second, as many at once. The clock is the caller's, and may jump: backwards it
    stands still."""

    def __init__(self, per_second: float, now_ms: int) -> None:
        self._per_second = per_second
        self._level = float(per_second)
        self._at_ms = now_ms

    def refill(self, now_ms: int) -> float:
        """What is in it now; below zero where more was taken than there was."""
        elapsed_ms, self._at_ms = max(0, now_ms - self._at_ms), now_ms
        self._level = min(self._per_second, self._level + elapsed_ms * self._per_second / 1000)
        return self._level

    def is_full(self, now_ms: int) -> bool:
        return self.refill(now_ms) >= self._per_second

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
# with keys there are no more than sessions; who lies about its process could make any number
_PACES_RESTING = 1024


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
        """`too_fast` while bytes that were moved are more than may be. A message that is let
        through is so whole: the debt it leaves is waited for by the next."""
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

    def is_rested(self, now_ms: int) -> bool:
        """Whether it is as good as new."""
        return all(
            bucket is None or bucket.is_full(now_ms) for bucket in (self._requests, self._network)
        )


def client_of(key: str, pid: int) -> str | int:
    """Who counts as one client: a key; where there are none, a process, by the number it gives
    itself: of use against one that runs wild, not against one that lies."""
    return key or pid


class Paces:
    """Paces of sessions that ended, by client, until they are rested. Goodbye and Hello do not make
    anybody faster."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._resting: OrderedDict[int, tuple[str | int, Pace]] = OrderedDict()  # longest first
        self._next = 0

    def __len__(self) -> int:
        return len(self._resting)

    def begin(self, client: str | int, now_ms: int) -> Pace:
        """For a new session: one that this client has used, if there is one that has not rested.
        Hello counts as a request: `too_fast` if there were too many."""
        self._forget_rested(now_ms)
        for number, (owner, pace) in self._resting.items():
            if owner == client:
                pace.check_request(now_ms)
                del self._resting[number]
                return pace
        pace = Pace(self._limits, now_ms)
        pace.check_request(now_ms)
        return pace

    def end(self, client: str | int, pace: Pace, now_ms: int) -> None:
        """Takes back that of a session that ended."""
        self._forget_rested(now_ms)
        if pace.is_rested(now_ms):
            return
        self._next += 1
        self._resting[self._next] = (client, pace)
        if len(self._resting) > _PACES_RESTING:
            self._resting.popitem(last=False)

    def _forget_rested(self, now_ms: int) -> None:
        """From the oldest on. One with a debt keeps those behind it, which does no harm."""
        while self._resting:
            number, (_, pace) = next(iter(self._resting.items()))
            if not pace.is_rested(now_ms):
                return
            del self._resting[number]


class Owned(Protocol):
    """A session, as far as it matters whose it is."""

    key: str
    pid: int


def check_sessions(limits: ClientLimits, sessions: Iterable[Owned], key: str, pid: int) -> None:
    """`too_many_sessions` if the client has as many as it may."""
    most = limits.sessions_per_client
    if most is None:
        return
    held = sum(client_of(session.key, session.pid) == client_of(key, pid) for session in sessions)
    if held >= most:
        raise RequestError(
            "too_many_sessions",
            f"this client has {held} sessions",
            hint="end some, give engines keys of their own, or raise --max-sessions-per-client",
        )
