"""The server at one moment: what metrics and status are made from, taken at once in the loop's
thread.

Taking it must not keep engines waiting: with a million blocks and a hundred thousand tenants it
costs some milliseconds. Text, JSON and histograms are made of it in the thread that asked."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from kvkeep.server.counters import Counters
from kvkeep.server.daemon import Daemon
from kvkeep.server.sharing import NotShared, not_shared
from kvkeep.server.tenant_counts import CountsByTenant, TenantCounts
from kvkeep.store.operators import usage_of
from kvkeep.store.plans import TenantUsage
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.store.table import FREE, READY, STATE_NAMES
from kvkeep.store.tenants import Tenant

# Each tenant is a label value, and a metrics database pays for every one of them for months.
LARGEST_TENANTS = 20


@dataclass(frozen=True)
class SessionShown:
    """One engine process as operators see it. Its token stays with its owner."""

    session: int
    client: str
    pid: int
    plane: str
    leases: int
    writing_blocks: int
    model: str
    role: str
    identity: str


@dataclass(frozen=True)
class PoolShown:
    """The memory. `used_bytes` and `blocks` are by state: writing, waiting, ready, evicting."""

    pool_bytes: int
    filled_bytes: int
    slab_bytes: int
    slabs: int
    unused_slabs: int
    degraded: str
    used_bytes: dict[str, int]
    blocks: dict[str, int]


@dataclass(frozen=True)
class QuotasShown:
    """What is promised. `promised_bytes` is the sum of tenants' own quotas as they were set; where
    that exceeds the pool they are `scaled_down` to fit. `in_force_bytes` is the sum of all quotas
    in force, with the default for every tenant without one of its own; where that exceeds the pool,
    quotas are overcommitted, and a tenant may find that its default quota cannot be had."""

    default_bytes: int | None
    promised_bytes: int
    in_force_bytes: int
    overcommitted: bool
    scaled_down: bool = False
    default_limit_bytes: int | None = None


@dataclass(frozen=True)
class TenantShown(TenantUsage):
    """One tenant: what it has, and what it asked for and got since the server started. The counts
    of a tenant are kept as long as it is among those that were looked up last
    (`TENANTS_COUNTED`)."""

    lookups: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0
    loaded_tokens: int = 0


@dataclass(frozen=True)
class RestartShown:
    """What was taken over from the server before, and what its processes, as long as they live,
    still hold. A server that did not start warm says why: `why_cold`."""

    adopted_blocks: int = 0
    adopted_bytes: int = 0
    adoption_seconds: float = 0.0
    dropped_at_adoption: int = 0
    old_sessions: int = 0
    held_by_old_sessions: int = 0
    warm: bool = False
    why_cold: str = ""


@dataclass(frozen=True)
class Snapshot:
    """Everything at one moment. Nothing in it changes afterwards."""

    pool: PoolShown
    quotas: QuotasShown
    sessions: list[SessionShown]
    leases: int
    writes: int
    layouts: int
    tenants: int
    largest_tenants: list[TenantShown]
    evictions: int
    slab_moves: int
    counters: Counters
    ready: bool
    stopping: bool
    withheld_blocks: int = 0
    restart: RestartShown = RestartShown()
    tenant_counts: dict[str, TenantCounts] = field(
        default_factory=dict
    )  # by the label that metrics show
    not_shared: list[NotShared] = field(default_factory=list)


def take(daemon: Daemon) -> Snapshot:
    """Takes the snapshot. In the loop's thread only."""
    store, counters = daemon.store, daemon.service.counters
    copied = _copy(counters)
    counters.turns.longest_us = 0.0  # it is that since the last snapshot
    return Snapshot(
        pool=_pool(daemon),
        quotas=_quotas(store),
        sessions=_sessions(daemon),
        leases=sum(
            len(session.leases)
            for number, session in store.sessions.items()
            if number != OLD_SESSIONS
        ),
        writes=sum(len(session.writes) for session in store.sessions.values()),
        layouts=sum(1 for _ in store.layouts),
        tenants=len(store.tenants),
        largest_tenants=tenants_shown(store.tenants.largest(LARGEST_TENANTS), counters.tenants),
        tenant_counts=counters.tenants.by_label(),
        evictions=store.eviction.evictions,
        slab_moves=store.eviction.slab_moves,
        withheld_blocks=store.withheld_blocks,
        counters=copied,
        ready=daemon.ready.is_set(),
        stopping=daemon.stopping,
        restart=_restart(daemon),
        not_shared=not_shared(daemon.service.sessions.all()),
    )


def _copy(counters: Counters) -> Counters:
    """Without what is counted of each tenant: that is shown for some of them only."""
    return copy.deepcopy(replace(counters, tenants=CountsByTenant()))


def tenant_shown(tenant: Tenant, counts: CountsByTenant) -> TenantShown:
    return TenantShown(**vars(usage_of(tenant)), **vars(counts.of(tenant.name)))


def tenants_shown(tenants: Iterable[Tenant], counts: CountsByTenant) -> list[TenantShown]:
    return [tenant_shown(tenant, counts) for tenant in tenants]


def _pool(daemon: Daemon) -> PoolShown:
    slabs = daemon.store.slabs
    blocks, used_bytes = _by_state(daemon.store)
    return PoolShown(
        pool_bytes=daemon.pool.pool_bytes,
        filled_bytes=daemon.pool.filled_bytes,
        slab_bytes=daemon.pool.slab_bytes,
        slabs=slabs.slabs,
        unused_slabs=slabs.unused_slabs,
        degraded=daemon.degraded,
        used_bytes=used_bytes,
        blocks=blocks,
    )


def _by_state(store: Store) -> tuple[dict[str, int], dict[str, int]]:
    """Blocks and bytes in each state. Nearly all are ready: only the others are looked at."""
    many = store.blocks.table.many
    others = np.flatnonzero((many.state != READY) & (many.state != FREE))
    blocks = dict.fromkeys(STATE_NAMES[1:], 0)
    used_bytes = dict.fromkeys(STATE_NAMES[1:], 0)
    blocks[STATE_NAMES[READY]] = len(store.blocks.table) - len(others)
    used_bytes[STATE_NAMES[READY]] = sum(
        layout.blocks * layout.slot_bytes for layout in store.layouts
    )
    layouts = sorted(store.layouts, key=attrgetter("number"))
    which = np.searchsorted([layout.number for layout in layouts], many.layout[others])
    counts = np.bincount(
        which * len(STATE_NAMES) + many.state[others], minlength=len(layouts) * len(STATE_NAMES)
    )
    for layout, of_layout in zip(
        layouts, counts.reshape(-1, len(STATE_NAMES)).tolist(), strict=True
    ):
        for state, count in zip(STATE_NAMES, of_layout, strict=True):
            if count:
                blocks[state] += count
                used_bytes[state] += count * layout.slot_bytes
                used_bytes[STATE_NAMES[READY]] -= count * layout.slot_bytes
    return blocks, used_bytes


def _restart(daemon: Daemon) -> RestartShown:
    adoption, held = daemon.warm_start.adoption, daemon.store.sessions.get(OLD_SESSIONS)
    return RestartShown(
        adopted_blocks=adoption.blocks,
        adopted_bytes=adoption.nbytes,
        adoption_seconds=round(daemon.warm_start.seconds, 3),
        dropped_at_adoption=adoption.dropped,
        old_sessions=daemon.pool.old_sessions(),
        held_by_old_sessions=len(held.leases) if held else 0,
        warm=not daemon.warm_start.why_cold,
        why_cold=daemon.warm_start.why_cold,
    )


def _quotas(store: Store) -> QuotasShown:
    tenants = store.tenants
    return QuotasShown(
        default_bytes=tenants.default_in_force,
        promised_bytes=tenants.promised_bytes(),
        in_force_bytes=tenants.in_force_bytes,
        overcommitted=tenants.in_force_bytes > store.pool_bytes,
        scaled_down=tenants.is_scaled,
        default_limit_bytes=tenants.default_limit_bytes,
    )


def _sessions(daemon: Daemon) -> list[SessionShown]:
    rows = []
    for session in daemon.service.sessions.all():
        held = daemon.store.sessions[session.number]
        rows.append(
            SessionShown(
                session.number,
                session.client,
                session.pid,
                session.plane,
                len(held.leases),
                held.writing_blocks,
                session.parts.get("model", ""),
                session.role,
                session.identity,
            )
        )
    return rows
