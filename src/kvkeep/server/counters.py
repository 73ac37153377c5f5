"""What has happened since the server started, counted.

Each field of Counters and TenantCounts is a metric, and stands in `kvkeep status --json`: to add
one, add a field here and count it where it happens. docs/reference/metrics.md has a row for it.
Counters are plain integers, so that counting costs next to nothing in a request."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from kvkeep.server.figures import Figures, FiguresByModel
from kvkeep.server.figures import counter as _counter
from kvkeep.wire.messages import RequestReport

LATENCY_BUCKETS_US = (
    *(50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 250_000, 1_000_000, 10_000_000),
)
OTHER: Final = "other"  # the label of all tenants without one; no tenant has this id
# Blocks whose load a checksum stopped: bad in the pool, sound in the pool (so bad in the engine, or
# on the way there), or no longer in the pool.
LOAD_FAILURES: Final = ("bad_in_pool", "bad_in_engine", "gone")
TENANTS_LABELLED: Final = 20
TENANTS_COUNTED: Final = 4096  # beyond them, the tenant looked up longest ago is forgotten


@dataclass
class Latency:
    """A histogram of the time that requests of one kind, or turns of the loop, took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_US) + 1))
    total_us: float = 0.0
    longest_us: float = 0.0  # since the last snapshot

    def add(self, microseconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_US, microseconds)] += 1
        self.total_us += microseconds
        if microseconds > self.longest_us:
            self.longest_us = microseconds


@dataclass
class Counters(Figures):
    """Counters of the whole server. The store counts evictions, slab moves and withheld blocks
    itself; a snapshot adds them."""

    lookups: int = _counter("Lookups answered.")
    lookup_blocks: int = _counter("Blocks asked for in lookups.")
    hit_blocks: int = _counter("Blocks asked for in lookups that were ready.")
    stored_blocks: int = _counter("Shards of blocks that were stored.")
    stored_bytes: int = _counter("Bytes that were stored.")
    refused_blocks: int = _counter("Blocks not stored for want of room or of their parent.")
    orphan_blocks: int = _counter("Refused blocks whose parent was missing or refused.")
    abandoned_stores: int = _counter("Stores that were started and abandoned.")
    expired_leases: int = _counter("Leases and writes of network sessions that expired.")
    bad_blocks: int = _counter("Blocks that did not match their checksum and were dropped.")
    bad_frames: int = _counter("Messages without a kvkeep header, or damaged in transit.")
    connection_resets: int = _counter(
        "Connections closed because messages and replies took too much memory."
    )
    dropped_spans: int = _counter("Spans of traced requests that were not exported.")
    internal_errors: int = _counter("Requests that failed inside the server; each is in the log.")
    sessions_opened: int = _counter("Sessions opened.")
    sessions_ended: int = _counter("Sessions ended by Goodbye.")
    sessions_vanished: int = _counter("Sessions that ended without Goodbye and held nothing.")
    sessions_died: int = _counter("Sessions that ended without Goodbye while they held blocks.")
    network_bytes_in: int = _counter(
        "Bytes of blocks received from sessions on other hosts.", "kvkeep_network_in_bytes"
    )
    network_bytes_out: int = _counter(
        "Bytes of blocks sent to sessions on other hosts.", "kvkeep_network_out_bytes"
    )
    scrubbed_blocks: int = _counter("Adopted blocks whose bytes were checked in the background.")
    evictions: int = _counter("Blocks evicted to make room.")
    slab_moves: int = _counter("Slabs that changed their slot size.")
    withheld_blocks: int = _counter(
        "Blocks found and not leased: their tenant held as much as it may."
    )
    refusals: dict[str, int] = field(default_factory=dict)
    auth_failures: dict[str, int] = field(default_factory=dict)
    load_failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOAD_FAILURES, 0))
    latency: defaultdict[str, Latency] = field(default_factory=lambda: defaultdict(Latency))
    turns: Latency = field(default_factory=Latency)  # of the loop, between two waits
    models: FiguresByModel = field(default_factory=FiguresByModel)
    tenants: CountsByTenant = field(default_factory=lambda: CountsByTenant())

    def refuse(self, code: str) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def fail_load(self, cause: str) -> None:
        self.load_failures[cause] += 1

    def fail_auth(self, reason: str) -> None:
        self.auth_failures[reason] = self.auth_failures.get(reason, 0) + 1


def metrics_of(counts: type[Any], prefix: str) -> dict[str, tuple[str, str]]:
    """The metric's name (without `_total`) and help of each field that counts."""
    return {
        each.name: (each.metadata["metric"] or f"{prefix}{each.name}", each.metadata["help"])
        for each in fields(counts)
        if "metric" in each.metadata
    }


@dataclass
class TenantCounts(Figures):
    """Counters of one tenant."""

    lookups: int = _counter("Lookups answered, by tenant.")
    hit_blocks: int = _counter("Blocks asked for in lookups that were ready, by tenant.")
    missed_blocks: int = _counter("Blocks asked for in lookups that were not ready, by tenant.")

    @property
    def asked_blocks(self) -> int:
        return self.hit_blocks + self.missed_blocks


class CountsByTenant:
    """Counters of a bounded number of tenants.

    Metrics databases keep every label value for months, and clients choose tenant names. So only
    TENANTS_LABELLED tenants have a label of their own, those that ask for most; all others count
    under OTHER. The count of a label never falls: a tenant that gets a label begins at 0 there, and
    what it had until then stays under OTHER."""

    def __init__(self) -> None:
        self._counted: OrderedDict[str, TenantCounts] = OrderedDict()  # by their last lookup
        self._labelled: dict[str, TenantCounts] = {}
        self._other = TenantCounts()
        self._shown: dict[str, TenantCounts] = {}

    def count_lookup(self, tenant: str, hit_blocks: int, missed_blocks: int) -> None:
        for counts in self._places(tenant):
            counts.lookups += 1
            counts.hit_blocks += hit_blocks
            counts.missed_blocks += missed_blocks

    def count_more(self, tenant: str, hit_blocks: int) -> None:
        """Counts what a lookup found when it was repeated."""
        for counts in self._places(tenant):
            counts.hit_blocks += hit_blocks

    def count_loaded(self, tenant: str, tokens: int) -> None:
        for counts in self._places(tenant):
            counts.loaded_tokens += tokens

    def count_report(self, report: RequestReport) -> None:
        for counts in self._places(report.tenant):
            counts.count_report(report)

    def of(self, tenant: str) -> TenantCounts:
        """All counts of a tenant; zeros for one that is not counted, or no longer."""
        return replace(self._counted.get(tenant, TenantCounts()))

    def by_label(self) -> dict[str, TenantCounts]:
        """What metrics show: some tenants by name, and the rest together. A tenant without a label
        that has asked for more than twice as much as one with a label replaces it."""
        asked = {
            name: each.hit_blocks + each.missed_blocks
            for name, each in self._counted.items()
            if name not in self._labelled
        }
        largest = sorted(asked, key=asked.__getitem__, reverse=True)[:TENANTS_LABELLED]
        smallest = sorted(self._labelled, key=self._asked_blocks)
        for name, label in zip(largest, smallest, strict=False):
            if self._asked_blocks(name) > 2 * self._asked_blocks(label):
                self._withdraw(label)
                self._labelled[name] = TenantCounts()
        places = {**self._labelled, OTHER: self._other}
        self._shown = {name: replace(counts) for name, counts in places.items()}
        return dict(self._shown)

    def _withdraw(self, label: str) -> None:
        """Counts under OTHER what was counted under a label since it was last shown."""
        counts, seen = self._labelled.pop(label), self._shown.get(label, TenantCounts())
        for each in fields(TenantCounts):
            unseen = getattr(counts, each.name) - getattr(seen, each.name)
            setattr(self._other, each.name, getattr(self._other, each.name) + unseen)

    def _places(self, tenant: str) -> tuple[TenantCounts, TenantCounts]:
        """Where events of this tenant are counted: its own counts, and those of a label."""
        counted = self._counted
        if tenant not in counted:
            counted[tenant] = TenantCounts()
            if len(counted) > TENANTS_COUNTED:
                counted.popitem(last=False)
            if len(self._labelled) < TENANTS_LABELLED:
                self._labelled.setdefault(tenant, TenantCounts())
        else:
            counted.move_to_end(tenant)
        return counted[tenant], self._labelled.get(tenant, self._other)

    def _asked_blocks(self, tenant: str) -> int:
        counts = self._counted.get(tenant)
        return counts.asked_blocks if counts else 0
