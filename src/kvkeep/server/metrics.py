"""What Prometheus sees. Every family is described in docs/reference/metrics.md.

Counters come from the fields of counters.py, gauges from the table here. A scrape takes one
snapshot in the loop's thread, so its numbers belong together, and fails if the loop does not
answer: a graph that stops tells an operator more than one that goes on with old numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvkeep import __version__
from kvkeep.server.counters import (
    LATENCY_BUCKETS_US,
    Counters,
    Latency,
    TenantCounts,
    metrics_of,
)
from kvkeep.server.status import Snapshot, Status
from kvkeep.wire.messages import NETWORK, SHARED_MEMORY

NOT_ATTACHED = "none"

# Metric, where its value is in a Status, and help. A value of None: the gauge is absent.
_GAUGES: Final = (
    ("kvkeep_pool_bytes", "pool.pool_bytes", "Size of the pool."),
    ("kvkeep_pool_filled_bytes", "pool.filled_bytes", "Memory of the pool that is allocated."),
    ("kvkeep_pool_degraded", "pool.degraded", "1 when the pool got less memory than was set."),
    ("kvkeep_slabs", "pool.slabs", "Slabs of the pool."),
    ("kvkeep_unused_slabs", "pool.unused_slabs", "Slabs without blocks."),
    ("kvkeep_leases", "leases", "Lookups whose blocks are being loaded."),
    ("kvkeep_writes", "writes", "Stores under way."),
    ("kvkeep_layouts", "layouts", "Block layouts in use."),
    ("kvkeep_tenants", "tenants", "Tenants with blocks, or with an own quota or limit."),
    ("kvkeep_quota_promised_bytes", "quotas.promised_bytes", "Sum of tenants' own quotas, as set."),
    ("kvkeep_quota_in_force_bytes", "quotas.in_force_bytes", "Sum of all tenants' quotas."),
    ("kvkeep_quotas_overcommitted", "quotas.overcommitted", "1 when quotas exceed the pool."),
    ("kvkeep_quotas_scaled_down", "quotas.scaled_down", "1 when own quotas exceed the pool."),
    ("kvkeep_default_limit_bytes", "quotas.default_limit_bytes", "default_limit; absent if none."),
    ("kvkeep_default_quota_bytes", "quotas.default_bytes", "default_quota; absent if none."),
    ("kvkeep_adopted_blocks", "restart.adopted_blocks", "Blocks taken over from the last server."),
    ("kvkeep_adopted_bytes", "restart.adopted_bytes", "Memory in slots of adopted blocks."),
    ("kvkeep_adoption_seconds", "restart.adoption_seconds", "Time that adoption took."),
    ("kvkeep_dropped_at_adoption", "restart.dropped_at_adoption", "Blocks not adopted."),
    ("kvkeep_old_sessions", "restart.old_sessions", "Live processes of the last server."),
    (
        "kvkeep_held_by_old_sessions",
        "restart.held_by_old_sessions",
        "Blocks held unchanged for processes of the last server.",
    ),
)


class ServerCollector(Collector):
    """Takes a snapshot at every scrape. An exception of `snapshot` ends the scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot], started: float) -> None:
        self._snapshot = snapshot
        self._started = started

    def collect(self) -> Iterable[Metric]:
        return list(families(self._snapshot(), self._started))

    def describe(self) -> Iterable[Metric]:
        return []  # or registering would take a snapshot before the loop runs


def make_registry(snapshot: Callable[[], Snapshot], started: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ServerCollector(snapshot, started))
    return registry


def families(snapshot: Snapshot, started: float) -> Iterator[Metric]:
    """All families with their samples. `started` is seconds since 1970."""
    now = snapshot.status
    yield InfoMetricFamily("kvkeep_build", "The server's version.", {"version": __version__})
    yield GaugeMetricFamily(
        "kvkeep_start_time_seconds", "When the server started, in seconds since 1970.", started
    )
    is_ready = now.ready and not now.stopping
    yield GaugeMetricFamily("kvkeep_ready", "1 when engines may be sent here.", float(is_ready))
    for name, path, text in _GAUGES:
        value = attrgetter(path)(now)
        gauge = GaugeMetricFamily(name, text)
        if value is not None:
            gauge.add_metric([], float(bool(value) if isinstance(value, str) else value))
        yield gauge
    yield from _labelled_gauges(now)
    for field, (name, text) in metrics_of(Counters, "kvkeep_").items():
        yield CounterMetricFamily(name, text, now.counters[field])
    for field, (name, text) in metrics_of(TenantCounts, "kvkeep_tenant_").items():
        by_tenant = {each: getattr(counts, field) for each, counts in now.tenant_counts.items()}
        yield _labelled(CounterMetricFamily, name, "tenant", by_tenant, text)
    for name, label, values, text in (
        ("kvkeep_refusals", "code", now.refusals, "Requests refused, by code."),
        (
            "kvkeep_auth_failures",
            "reason",
            now.auth_failures,
            "Peers not authenticated, by reason.",
        ),
    ):
        yield _labelled(CounterMetricFamily, name, label, values, text)
    yield from _histograms(snapshot)


def _labelled_gauges(now: Status) -> Iterator[Metric]:
    planes = [session.plane or NOT_ATTACHED for session in now.sessions]
    largest = now.largest_tenants
    quotas = {each.tenant: each.quota_bytes for each in largest if each.quota_bytes is not None}
    limits = {each.tenant: each.limit_bytes for each in largest if each.limit_bytes is not None}
    shown = (SHARED_MEMORY, NETWORK, NOT_ATTACHED)
    usage = {each.tenant: each.usage_bytes for each in largest}
    for name, label, values, text in (
        ("pool_used_bytes", "state", now.pool.used_bytes, "Memory in slots of blocks, by state."),
        ("blocks", "state", now.pool.blocks, "Blocks, by state."),
        ("sessions", "plane", {each: planes.count(each) for each in shown}, "Open sessions."),
        ("tenant_usage_bytes", "tenant", usage, "Memory in use, largest tenants only."),
        (
            "tenant_quota_bytes",
            "tenant",
            quotas,
            "Quota in force, largest tenants; absent if none.",
        ),
        (
            "tenant_limit_bytes",
            "tenant",
            limits,
            "Limit in force, largest tenants; absent if none.",
        ),
    ):
        yield _labelled(GaugeMetricFamily, f"kvkeep_{name}", label, values, text)


def _labelled(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    label: str,
    values: Mapping[str, float],
    text: str,
) -> Metric:
    family = kind(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _histograms(snapshot: Snapshot) -> Iterator[Metric]:
    requests = HistogramMetricFamily(
        "kvkeep_request_duration_seconds",
        "Time inside the server, by kind of message.",
        labels=["kind"],
    )
    for kind, measured in sorted(snapshot.latency.items()):
        requests.add_metric([kind], _buckets(measured), measured.total_us / 1e6)
    yield requests
    turns = HistogramMetricFamily(
        "kvkeep_loop_turn_seconds", "Turns of the loop: other requests wait that long."
    )
    turns.add_metric([], _buckets(snapshot.turns), snapshot.turns.total_us / 1e6)
    yield turns
    yield GaugeMetricFamily(
        "kvkeep_loop_longest_turn_seconds",
        "The longest turn since the last scrape or status.",
        snapshot.turns.longest_us / 1e6,
    )


def _buckets(measured: Latency) -> list[tuple[str, float]]:
    edges = [*(str(edge / 1e6) for edge in LATENCY_BUCKETS_US), "+Inf"]
    counts = accumulate(measured.counts)
    return [(edge, float(count)) for edge, count in zip(edges, counts, strict=True)]
