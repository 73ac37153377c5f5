"""Rate limits of sessions, and how many sessions one client may have, so that no client can slow
the others.

A session that asks too fast is refused at once, and delays no other. A bucket holds one second's
worth, so a quiet session may burst. What a session has used up stays used up when it ends: the
client's next session continues with the same buckets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvkeep.errors import RequestError


class Bucket:
    """A token bucket: `per_second` a second, as many at once. The caller's clock may jump; backwards
    it counts as standing still."""

    def __init__(self, per_second: float, now_ms: int) -> None:
        self._per_second = per_second
        self._level = float(per_second)
        self._at_ms = now_ms

    def refill(self, now_ms: int) -> float:
        """The level now; below zero if more was taken than there was."""
        elapsed_ms, self._at_ms = max(0, now_ms - self._at_ms), now_ms
        self._level = min(self._per_second, self._level + elapsed_ms * self._per_second / 1000)
        return self._level

    def is_full(self, now_ms: int) -> bool:
        return self.refill(now_ms) >= self._per_second

    def take(self, amount: float) -> None:
        """Takes the amount even if it is not there: later requests wait for the debt."""
        self._level -= amount


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits for each client. None: no limit."""

    sessions_per_client: int | None = None
    requests_per_second: int | None = None
    network_bytes_per_second: int | None = None


NO_LIMITS: Final = ClientLimits()
# Without TLS a client that lies about its process could cause any number.
_PACES_RESTING = 1024


class Pace:
    """The buckets of one session."""

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
        """`too_fast` while the session has moved more bytes than it may. A message passes whole: the
        next one waits for the debt."""
        if self._network is not None and self._network.refill(now_ms) <= 0:
            raise RequestError(
                "too_fast",
                "this session has sent or fetched more bytes than it may in a second",
                field="bytes",
                hint="slow down, or raise --max-network-rate",
            )

    def count_network(self, nbytes: int) -> None:
        if self._network is not None:
            self._network.take(nbytes)

    def is_rested(self, now_ms: int) -> bool:
        """Whether all its buckets are full."""
        buckets = (self._requests, self._network)
        return all(bucket is None or bucket.is_full(now_ms) for bucket in buckets)


def client_of(key: str, pid: int) -> str | int:
    """What counts as one client: a key; without TLS a process, by the pid that it gives, which
    helps against a runaway process and not against one that lies."""
    return key or pid


class Paces:
    """Paces of ended sessions, by client, until their buckets are full again: reconnecting does not
    refill them."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._resting: OrderedDict[int, tuple[str | int, Pace]] = OrderedDict()  # oldest first
        self._next = 0

    def __len__(self) -> int:
        return len(self._resting)

    def begin(self, client: str | int, now_ms: int) -> Pace:
        """The pace of a new session: that of an ended session of this client, if there is one.
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
        """Keeps the pace of a session that ended."""
        self._forget_rested(now_ms)
        if pace.is_rested(now_ms):
            return
        self._next += 1
        self._resting[self._next] = (client, pace)
        if len(self._resting) > _PACES_RESTING:
            self._resting.popitem(last=False)

    def _forget_rested(self, now_ms: int) -> None:
        """Forgets full ones, from the oldest on. One with a debt keeps those behind it, which does
        no harm."""
        while self._resting:
            number, (_, pace) = next(iter(self._resting.items()))
            if not pace.is_rested(now_ms):
                return
            del self._resting[number]


class Owned(Protocol):
    """A session's owner."""

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
