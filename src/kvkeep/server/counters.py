"""What has happened since the server started. Plain integers: counting must cost nothing on the way
of a request."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from kvkeep.server.tenant_counts import CountsByTenant

LATENCY_BUCKETS_US = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 250_000)


@dataclass
class Latency:
    """A histogram of how long requests of one kind, or turns of the loop, took inside the
    server."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_US) + 1))
    total_us: float = 0.0
    longest_us: float = 0.0  # since it was last shown

    def add(self, microseconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_US, microseconds)] += 1
        self.total_us += microseconds
        self.longest_us = max(self.longest_us, microseconds)


@dataclass
class Counters:
    """Each becomes a metric of the same name; see metrics.py for what they mean to operators."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    loaded_tokens: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    refused_blocks: int = 0
    orphan_blocks: int = 0
    abandoned_stores: int = 0
    expired_leases: int = 0
    bad_blocks: int = 0
    bad_frames: int = 0
    connection_resets: int = 0
    internal_errors: int = 0
    sessions_opened: int = 0
    sessions_ended: int = 0
    sessions_died: int = 0
    network_bytes_in: int = 0
    network_bytes_out: int = 0
    scrubbed_blocks: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    latency: dict[str, Latency] = field(default_factory=dict)
    turns: Latency = field(
        default_factory=Latency
    )  # of the loop, from the end of its wait to its next one
    auth_failures: dict[str, int] = field(default_factory=dict)
    tenants: CountsByTenant = field(default_factory=CountsByTenant)

    def refuse(self, code: str) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def fail_auth(self, reason: str) -> None:
        self.auth_failures[reason] = self.auth_failures.get(reason, 0) + 1
