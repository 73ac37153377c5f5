"""The check of all blocks on one disk that `kvkeep verify` asks for.

One job at a time is in flight, and the mover carries it out when no read and no write waits. Blocks
that do not match their checksums are dropped, as on promotion."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import numpy as np

from kvkeep.tiers.disk_check import CheckCounts, DiskCheck
from kvkeep.tiers.mover import Check, Result

_BLOCKS_A_JOB = 128


@dataclass(frozen=True)
class VerificationShown:
    """The check of one disk as operators see it.

    state               "running", "done", "cancelled" or "failed", for which `problem` says why
    total_blocks        when it began; blocks that are evicted meanwhile are not checked
    unreadable_blocks   that the disk did not give; they stay
    bad_by_tenant       tenant id -> blocks that did not match their checksums
    """

    tier: str
    state: str
    problem: str
    blocks: int
    total_blocks: int
    nbytes: int
    bad_blocks: int
    unreadable_blocks: int
    bad_by_tenant: dict[str, int]
    seconds: float


def failed_verification(tier: str, problem: str) -> VerificationShown:
    """Of a disk that could not be opened."""
    return VerificationShown(tier, "failed", problem, 0, 0, 0, 0, 0, {}, 0.0)


class Verification:
    """For the loop's thread."""

    def __init__(self, tier: str, check: DiskCheck) -> None:
        self._tier = tier
        self._check = check
        self._job: Check | None = None
        self._state, self._problem = "running", ""
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    @property
    def counts(self) -> CheckCounts:
        return self._check.counts

    @property
    def is_running(self) -> bool:
        return self._state == "running"

    @property
    def may_check(self) -> bool:
        """Whether `next` may be called: no job is in flight."""
        return self.is_running and self._job is None

    def next(self, number: int, most_bytes: int) -> Check | None:
        """The next job for the mover; None if all blocks have been checked."""
        self._job = self._check.next(number, _BLOCKS_A_JOB, most_bytes)
        if self._job is None:
            self._end("done")
        return self._job

    def ended(self, result: Result, now_ms: int) -> dict[str, int]:
        """Takes in the result of its job. Returns the bad blocks by tenant."""
        job, self._job = self._job, None
        assert job is not None
        good = np.frombuffer(result.good, np.uint8) != 0
        bad = self._check.ended(job, good, result.error, now_ms)
        if not self.is_running:  # it was cancelled meanwhile
            self._check.drop_bad()
        return bad

    def cancel(self) -> None:
        """Begins no further job. What was found stays."""
        if self.is_running:
            self._end("cancelled")

    def fail(self, problem: str) -> None:
        """The disk is used no more."""
        if self.is_running:
            self._end("failed", problem)

    def shown(self) -> VerificationShown:
        ended_s = time.monotonic() if self._ended_s is None else self._ended_s
        return VerificationShown(
            tier=self._tier,
            state=self._state,
            problem=self._problem,
            total_blocks=self._check.total_blocks,
            seconds=round(ended_s - self._began_s, 3),
            **asdict(self.counts),
        )

    def _end(self, state: str, problem: str = "") -> None:
        self._state, self._problem = state, problem
        self._check.drop_bad()
        self._ended_s = time.monotonic()
