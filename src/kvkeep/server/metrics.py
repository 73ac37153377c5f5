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
from kvkeep.kv.outcomes import LACKED, NAMES
from kvkeep.server.counters import (
    LATENCY_BUCKETS_US,
    Counters,
    Latency,
    TenantCounts,
    metrics_of,
)
from kvkeep.server.status import Snapshot, Status
from kvkeep.store.departed import AGE_EDGES_S

# Metric without `kvkeep_`, where its value is in a Status, and help. A value of None: the gauge is
# absent.
_GAUGES: Final = (
    ("pool_bytes", "pool.pool_bytes", "Size of the pool."),
    ("pool_filled_bytes", "pool.filled_bytes", "Memory of the pool that is allocated."),
    ("pool_degraded", "pool.degraded", "1 when the pool got less memory than was set."),
    ("slabs", "pool.slabs", "Slabs of the pool."),
    ("unused_slabs", "pool.unused_slabs", "Slabs without blocks."),
    ("leases", "leases", "Lookups whose blocks are being loaded."),
    ("writes", "writes", "Stores under way."),
    ("layouts", "layouts", "Block layouts in use."),
    ("tenants", "tenants", "Tenants with blocks, or with an own quota or limit."),
    ("quota_promised_bytes", "quotas.promised_bytes", "Sum of tenants' own quotas, as set."),
    ("quota_in_force_bytes", "quotas.in_force_bytes", "Sum of all tenants' quotas."),
    ("quotas_overcommitted", "quotas.overcommitted", "1 when quotas exceed the pool."),
    ("quotas_scaled_down", "quotas.scaled_down", "1 when own quotas exceed the pool."),
    ("default_limit_bytes", "quotas.default_limit_bytes", "default_limit; absent if none."),
    ("default_quota_bytes", "quotas.default_bytes", "default_quota; absent if none."),
    ("adopted_blocks", "restart.adopted_blocks", "Blocks taken over from the last server."),
    ("adopted_bytes", "restart.adopted_bytes", "Memory in slots of adopted blocks."),
    ("adoption_seconds", "restart.adoption_seconds", "Time that adoption took."),
    ("dropped_at_adoption", "restart.dropped_at_adoption", "Blocks not adopted."),
    ("old_sessions", "restart.old_sessions", "Live processes of the last server."),
    (
        "held_by_old_sessions",
        "restart.held_by_old_sessions",
        "Blocks held unchanged for processes of the last server.",
    ),
)

# Of each tier: the field of TierShown, which is the metric without `kvkeep_tier_` and `is_`, and
# help. None: the sample is absent.
_TIER_GAUGES: Final = {
    "capacity_bytes": "Room for blocks on the tier.",
    "used_bytes": "Room that blocks take on the tier.",
    "blocks": "Blocks on the tier, or being written to it.",
    "in_flight_bytes": "Bytes of jobs under way.",
    "to_write_chains": "Chains that wait to be written.",
    "promotions": "Prefixes on their way to memory.",
    "is_slow": "1 while a job takes more than 2 seconds.",
    "is_set_aside": "1 while the tier is not used.",
    "read_seconds": "Time of a read job, averaged; absent if none.",
    "write_seconds": "Time of a write job, averaged; absent if none.",
}
# The same of its counts.
_TIER_COUNTERS: Final = {
    "written_blocks": "Blocks written to the tier.",
    "written_bytes": "Bytes of blocks written to the tier.",
    "promoted_blocks": "Blocks brought up to memory.",
    "promoted_bytes": "Bytes of blocks brought up to memory.",
    "verified_blocks": "Blocks that verify has read.",
    "bad_blocks": "Blocks read that did not match their checksum.",
    "lost_blocks": "Blocks that a shared tier had when it was asked, and not when they were read.",
    "refused_blocks": "Blocks for which a shared tier had no room.",
    "errors": "Jobs that failed.",
}
# Of each model: metric, the field of FiguresShown, and help.
_MODEL_COUNTERS: Final = (
    ("loaded_tokens", "tokens_loaded", "Tokens loaded and used, by model."),
    ("computed_tokens", "tokens_computed", "Prompt tokens computed, by model."),
    ("avoided_seconds", "avoided_s", "Estimated time of computing the loaded tokens, by model."),
    ("load_seconds", "load_s", "Time that their loads took, by model."),
)

_POOL_USED: Final = "Memory in slots of blocks, by state."
_TENANT_QUOTA: Final = "Quota in force, largest tenants; absent if none."
_TENANT_LIMIT: Final = "Limit in force, largest tenants; absent if none."
_PROMPT_BLOCKS: Final = "Blocks of the prompts of finished requests, by what became of them."
_LOAD_FAILURES: Final = "Loaded blocks that did not match their checksum, by what the server found."

# Always shown: an alert on the increase of a counter misses one that appears with its first failure.
_OUTCOMES = {name: 0 for number, name in enumerate(NAMES) if number != LACKED}
_AUTH_FAILURES = ("other_user", "handshake", "handshake_timeout", "unknown_client", "admin_token")


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
        gauge = GaugeMetricFamily(f"kvkeep_{name}", text)
        if value is not None:
            gauge.add_metric([], float(bool(value) if isinstance(value, str) else value))
        yield gauge
    for field, (name, text) in metrics_of(Counters, "kvkeep_").items():
        yield CounterMetricFamily(name, text, now.counters[field])
    yield from _by_label(now)
    yield from _tiers(now)
    yield from _histograms(snapshot)


def _by_label(now: Status) -> Iterator[Metric]:
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    largest = now.largest_tenants
    quotas = {each.tenant: each.quota_bytes for each in largest if each.quota_bytes is not None}
    limits = {each.tenant: each.limit_bytes for each in largest if each.limit_bytes is not None}
    usage = {each.tenant: each.usage_bytes for each in largest}
    by_model = {each.model: each.usage_bytes for each in now.models}
    auth_failures = dict.fromkeys(_AUTH_FAILURES, 0) | now.auth_failures
    for kind, name, label, values, text in (
        (gauge, "pool_used_bytes", "state", now.pool.used_bytes, _POOL_USED),
        (gauge, "blocks", "state", now.pool.blocks, "Blocks, by state."),
        (gauge, "sessions", "plane", now.open_sessions, "Open sessions."),
        (gauge, "model_usage_bytes", "model", by_model, "Memory in use, by model."),
        (gauge, "tenant_usage_bytes", "tenant", usage, "Memory in use, largest tenants only."),
        (gauge, "tenant_quota_bytes", "tenant", quotas, _TENANT_QUOTA),
        (gauge, "tenant_limit_bytes", "tenant", limits, _TENANT_LIMIT),
        (counter, "prompt_blocks", "outcome", _OUTCOMES | now.prompt_blocks, _PROMPT_BLOCKS),
        (counter, "evicted_blocks", "reason", now.evicted_blocks, "Blocks evicted, by reason."),
        (counter, "load_failures", "cause", now.load_failures, _LOAD_FAILURES),
        (counter, "refusals", "code", now.refusals, "Requests refused, by code."),
        (counter, "auth_failures", "reason", auth_failures, "Peers not authenticated, by reason."),
    ):
        yield _labelled(kind, f"kvkeep_{name}", label, values, text)
    for field, (name, text) in metrics_of(TenantCounts, "kvkeep_tenant_").items():
        by_tenant = {each: getattr(counts, field) for each, counts in now.tenant_counts.items()}
        yield _labelled(counter, name, "tenant", by_tenant, text)
    for name, field, text in _MODEL_COUNTERS:
        figures = {each.model: getattr(each.figures, field) for each in now.models}
        yield _labelled(counter, f"kvkeep_model_{name}", "model", figures, text)


def _tiers(now: Status) -> Iterator[Metric]:
    for field, text in _TIER_GAUGES.items():
        values = {tier.tier: getattr(tier, field) for tier in now.tiers}
        known = {tier: value for tier, value in values.items() if value is not None}
        name = f"kvkeep_tier_{field.removeprefix('is_')}"
        yield _labelled(GaugeMetricFamily, name, "tier", known, text)
    for field, text in _TIER_COUNTERS.items():
        counts = {tier.tier: getattr(tier.counts, field) for tier in now.tiers}
        yield _labelled(CounterMetricFamily, f"kvkeep_tier_{field}", "tier", counts, text)
    yield CounterMetricFamily(
        "kvkeep_evicted_unwritten",
        "Chains of blocks that left memory before they were written to a tier.",
        max((tier.evicted_unwritten for tier in now.tiers), default=0),
    )


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
    tiers = HistogramMetricFamily(
        "kvkeep_tier_job_seconds",
        "Time of jobs of a tier's process, by kind of job.",
        labels=["tier", "job"],
    )
    for labels, measured in sorted(snapshot.tiers.items()):
        tiers.add_metric(labels, _buckets(measured), measured.total_us / 1e6)
    yield tiers
    ages = HistogramMetricFamily(
        "kvkeep_evicted_age_seconds", "Time between a block's last use and its eviction."
    )
    edges = [*map(str, AGE_EDGES_S), "+Inf"]
    counts = accumulate(snapshot.eviction_ages or [0] * len(edges))
    ages.add_metric(
        [], list(zip(edges, map(float, counts), strict=True)), snapshot.eviction_age_sum_s
    )
    yield ages
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
