"""Requests on their way, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeep.wire.messages import Reply


@dataclass(eq=False)
class Call:
    """One request. It ends exactly once: with a reply, or with a failure that says why there is none."""

    number: int
    deadline_ms: int
    gives: str = ""  # what the answer gives that must be given back: a "lease", a "write" or nothing
    reply: Reply | None = None
    payload: Sequence[bytes] = ()
    failure: str = ""

    @property
    def done(self) -> bool:
        return self.reply is not None or bool(self.failure)


@dataclass
class Breaker:
    """After several failures in a row every call fails at once, until a ping has come back."""

    failures_to_open: int
    failures: int = 0
    opened: int = 0  # how often

    @property
    def is_open(self) -> bool:
        return self.failures >= self.failures_to_open

    def succeed(self) -> None:
        self.failures = 0

    def fail(self) -> None:
        self.failures += 1
        if self.failures == self.failures_to_open:
            self.opened += 1


@dataclass
class ClientCounters:
    """What happened to a client's requests. Every fault is counted under the reason it was given."""

    sent: int = 0
    answered: int = 0
    late_replies: int = 0
    sessions: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1
