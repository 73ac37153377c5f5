"""What Prometheus sees. Every family is listed here and described in docs/reference/metrics.md.

A scrape takes one snapshot in the loop's thread, so its numbers belong together, and gives up with
an error if the loop does not answer: a graph that stops tells an operator more than one that goes
on with old numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
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
from kvkeep.server.counters import LATENCY_BUCKETS_US, Latency
from kvkeep.server.snapshot import Snapshot
from kvkeep.wire.messages import NETWORK, SHARED_MEMORY

# Field of Counters -> metric (without `_total`) and help.
COUNTED: Final[dict[str, tuple[str, str]]] = {
    "lookups": ("kvkeep_lookups", "Lookups answered."),
    "lookup_blocks": ("kvkeep_lookup_blocks", "Blocks asked for in lookups."),
    "hit_blocks": ("kvkeep_hit_blocks", "Blocks asked for in lookups that were ready."),
    "loaded_tokens": (
        "kvkeep_loaded_tokens",
        "Tokens whose blocks engines loaded, verified and used.",
    ),
    "stored_blocks": ("kvkeep_stored_blocks", "Shards of blocks that were stored."),
    "stored_bytes": ("kvkeep_stored_bytes", "Bytes that were stored."),
    "refused_blocks": (
        "kvkeep_refused_blocks",
        "Blocks that were to be stored and found no room or no parent.",
    ),
    "orphan_blocks": (
        "kvkeep_orphan_blocks",
        "Those of the refused blocks whose parent was not here or refused.",
    ),
    "abandoned_stores": ("kvkeep_abandoned_stores", "Stores that were begun and given up."),
    "expired_leases": (
        "kvkeep_expired_leases",
        "Leases and writes of network sessions that ended by their age.",
    ),
    "bad_blocks": (
        "kvkeep_bad_blocks",
        "Blocks that did not match their checksum and were dropped.",
    ),
    "bad_frames": (
        "kvkeep_bad_frames",
        "Messages without a kvkeep header, or damaged on their way.",
    ),
    "connection_resets": (
        "kvkeep_connection_resets",
        "Connections closed because messages and replies took too much memory.",
    ),
    "internal_errors": (
        "kvkeep_internal_errors",
        "Requests that failed inside the server; each is in the log.",
    ),
    "sessions_opened": ("kvkeep_sessions_opened", "Sessions that said Hello."),
    "sessions_ended": ("kvkeep_sessions_ended", "Sessions that said Goodbye."),
    "sessions_died": ("kvkeep_sessions_died", "Sessions that ended without Goodbye."),
    "network_bytes_in": (
        "kvkeep_network_in_bytes",
        "Bytes of blocks received from sessions on other hosts.",
    ),
    "network_bytes_out": (
        "kvkeep_network_out_bytes",
        "Bytes of blocks sent to sessions on other hosts.",
    ),
    "scrubbed_blocks": (
        "kvkeep_scrubbed_blocks",
        "Adopted blocks whose bytes were looked through in the background.",
    ),
}

# Field of TenantCounts -> metric (without `_total`) and help.
COUNTED_BY_TENANT: Final[dict[str, tuple[str, str]]] = {
    "lookups": ("kvkeep_tenant_lookups", "Lookups answered, by tenant."),
    "hit_blocks": (
        "kvkeep_tenant_hit_blocks",
        "Blocks asked for in lookups that were ready, by tenant.",
    ),
    "missed_blocks": (
        "kvkeep_tenant_missed_blocks",
        "Blocks asked for in lookups that were not ready, by tenant.",
    ),
    "loaded_tokens": (
        "kvkeep_tenant_loaded_tokens",
        "Tokens whose blocks engines loaded, verified and used, by tenant.",
    ),
}

NOT_ATTACHED = "none"


class ServerCollector(Collector):
    """Asks for a snapshot at every scrape. Whatever `snapshot` raises ends the scrape."""

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


def families(now: Snapshot, started: float) -> Iterator[Metric]:
    """All families with their samples. `started` is seconds since 1970."""
    yield InfoMetricFamily("kvkeep_build", "The server's version.", {"version": __version__})
    yield _gauge(
        "kvkeep_start_time_seconds", "When the server started, in seconds since 1970.", started
    )
    yield _gauge(
        "kvkeep_ready", "1 when the pool is filled and the server is not stopping.", _is_ready(now)
    )
    yield from _pool(now)
    yield from _holders(now)
    yield from _quotas(now)
    yield from _restart(now)
    counters = now.counters
    for field, (name, text) in COUNTED.items():
        yield CounterMetricFamily(name, text, getattr(counters, field))
    for field, (name, text) in COUNTED_BY_TENANT.items():
        family = CounterMetricFamily(name, text, labels=["tenant"])
        for tenant, counts in now.tenant_counts.items():
            family.add_metric([tenant], getattr(counts, field))
        yield family
    yield CounterMetricFamily("kvkeep_evictions", "Blocks that made way for others.", now.evictions)
    yield CounterMetricFamily(
        "kvkeep_slab_moves", "Slabs that changed their slot size.", now.slab_moves
    )
    yield CounterMetricFamily(
        "kvkeep_withheld_blocks",
        "Blocks found and not leased: their tenant held all that it may.",
        now.withheld_blocks,
    )
    refusals = CounterMetricFamily(
        "kvkeep_refusals", "Requests that were refused, by code.", labels=["code"]
    )
    for code, count in sorted(counters.refusals.items()):
        refusals.add_metric([code], count)
    yield refusals
    turned_away = CounterMetricFamily(
        "kvkeep_auth_failures",
        "Peers and requests that were turned away for want of a certificate or token, by reason.",
        labels=["reason"],
    )
    for reason, count in sorted(counters.auth_failures.items()):
        turned_away.add_metric([reason], count)
    yield turned_away
    yield _latency(counters.latency)
    yield from _turns(counters.turns)


def _is_ready(now: Snapshot) -> bool:
    return now.ready and not now.stopping


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, float(value))


def _pool(now: Snapshot) -> Iterator[Metric]:
    pool = now.pool
    yield _gauge("kvkeep_pool_bytes", "Memory that the pool was given.", pool.pool_bytes)
    yield _gauge(
        "kvkeep_pool_filled_bytes", "Memory of the pool that is there already.", pool.filled_bytes
    )
    yield _gauge(
        "kvkeep_pool_degraded",
        "1 when less memory could be had than was asked for.",
        bool(pool.degraded),
    )
    used = GaugeMetricFamily(
        "kvkeep_pool_used_bytes", "Memory in slots of blocks, by state.", labels=["state"]
    )
    blocks = GaugeMetricFamily("kvkeep_blocks", "Blocks, by state.", labels=["state"])
    for state, count in pool.blocks.items():
        used.add_metric([state], pool.used_bytes[state])
        blocks.add_metric([state], count)
    yield used
    yield blocks
    yield _gauge("kvkeep_slabs", "Slabs that the pool is cut into.", pool.slabs)
    yield _gauge("kvkeep_unused_slabs", "Slabs without a single block.", pool.unused_slabs)


def _holders(now: Snapshot) -> Iterator[Metric]:
    sessions = GaugeMetricFamily(
        "kvkeep_sessions", "Open sessions, by data plane.", labels=["plane"]
    )
    for plane in (SHARED_MEMORY, NETWORK, NOT_ATTACHED):
        sessions.add_metric(
            [plane], sum((session.plane or NOT_ATTACHED) == plane for session in now.sessions)
        )
    yield sessions
    yield _gauge("kvkeep_leases", "Lookups whose blocks are being loaded.", now.leases)
    yield _gauge("kvkeep_writes", "Stores under way.", now.writes)
    yield _gauge("kvkeep_layouts", "Block layouts in use.", now.layouts)
    yield _gauge(
        "kvkeep_tenants", "Tenants with blocks, or a quota or limit of their own.", now.tenants
    )


def _quotas(now: Snapshot) -> Iterator[Metric]:
    quotas = now.quotas
    yield _gauge(
        "kvkeep_quota_promised_bytes",
        "Sum of the tenants' own quotas, as set.",
        quotas.promised_bytes,
    )
    yield _gauge(
        "kvkeep_quota_in_force_bytes",
        "Sum of all tenants' quotas, the default included.",
        quotas.in_force_bytes,
    )
    yield _gauge(
        "kvkeep_quotas_overcommitted",
        "1 when quotas in force exceed the pool.",
        quotas.overcommitted,
    )
    yield _gauge(
        "kvkeep_quotas_scaled_down",
        "1 when own quotas exceed the pool and less than each is in force.",
        quotas.scaled_down,
    )
    default_limit = GaugeMetricFamily(
        "kvkeep_default_limit_bytes", "Limit of tenants without one of their own; absent if none."
    )
    if quotas.default_limit_bytes is not None:
        default_limit.add_metric([], quotas.default_limit_bytes)
    yield default_limit
    default = GaugeMetricFamily(
        "kvkeep_default_quota_bytes", "Quota of tenants without one of their own; absent if none."
    )
    if quotas.default_bytes is not None:
        default.add_metric([], quotas.default_bytes)
    yield default
    usage = GaugeMetricFamily(
        "kvkeep_tenant_usage_bytes", "Memory in use, largest tenants only.", labels=["tenant"]
    )
    quota = GaugeMetricFamily(
        "kvkeep_tenant_quota_bytes",
        "Quota in force, largest tenants only; absent if none.",
        labels=["tenant"],
    )
    limit = GaugeMetricFamily(
        "kvkeep_tenant_limit_bytes",
        "Limit in force, largest tenants only; absent if none.",
        labels=["tenant"],
    )
    for tenant in now.largest_tenants:
        usage.add_metric([tenant.tenant], tenant.usage_bytes)
        if tenant.quota_bytes is not None:
            quota.add_metric([tenant.tenant], tenant.quota_bytes)
        if tenant.limit_bytes is not None:
            limit.add_metric([tenant.tenant], tenant.limit_bytes)
    yield usage
    yield quota
    yield limit


def _restart(now: Snapshot) -> Iterator[Metric]:
    restart = now.restart
    yield _gauge(
        "kvkeep_adopted_blocks",
        "Blocks taken over from the server before this one.",
        restart.adopted_blocks,
    )
    yield _gauge(
        "kvkeep_adopted_bytes", "Memory in slots of adopted blocks.", restart.adopted_bytes
    )
    yield _gauge("kvkeep_adoption_seconds", "How long adopting took.", restart.adoption_seconds)
    yield _gauge(
        "kvkeep_dropped_at_adoption",
        "Blocks left by the server before that were not adopted.",
        restart.dropped_at_adoption,
    )
    yield _gauge(
        "kvkeep_old_sessions",
        "Processes of the server before this one that still live.",
        restart.old_sessions,
    )
    yield _gauge(
        "kvkeep_held_by_old_sessions",
        "Blocks that are kept as they are for those.",
        restart.held_by_old_sessions,
    )


def _latency(latency: dict[str, Latency]) -> Metric:
    family = HistogramMetricFamily(
        "kvkeep_request_duration_seconds",
        "Time inside the server, by kind of message.",
        labels=["kind"],
    )
    for kind, measured in sorted(latency.items()):
        family.add_metric([kind], _buckets(measured), measured.total_us / 1e6)
    return family


def _turns(turns: Latency) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "kvkeep_loop_turn_seconds", "Turns of the loop: so long others wait for it."
    )
    family.add_metric([], _buckets(turns), turns.total_us / 1e6)
    yield family
    yield _gauge(
        "kvkeep_loop_longest_turn_seconds",
        "The longest turn since metrics were last asked for.",
        turns.longest_us / 1e6,
    )


def _buckets(measured: Latency) -> list[tuple[str, float]]:
    edges = [*(str(edge / 1e6) for edge in LATENCY_BUCKETS_US), "+Inf"]
    return [
        (edge, float(count)) for edge, count in zip(edges, accumulate(measured.counts), strict=True)
    ]
