"""The server at one moment: what `kvkeep status` and metrics show, taken in the loop's thread.

Taking it must not keep engines waiting: with a million blocks and a hundred thousand tenants it
costs some milliseconds. Text, JSON and histograms are made in the thread that asked."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from kvkeep import __version__
from kvkeep.server.counters import Counters, CountsByTenant, Latency, TenantCounts, metrics_of
from kvkeep.server.daemon import Daemon
from kvkeep.server.figures import UNKNOWN_MODEL, Figures, FiguresShown
from kvkeep.server.lower_tier import TierShown
from kvkeep.server.sessions import NotShared, ServerSession, not_shared
from kvkeep.store.operators import usage_of
from kvkeep.store.plans import TenantUsage
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.store.table import FREE, READY, STATE_NAMES
from kvkeep.store.tenants import Tenant
from kvkeep.wire.messages import NETWORK, SHARED_MEMORY

NOT_ATTACHED = "none"
LARGEST_TENANTS = 20  # each is a label value, which a metrics database keeps for months


@dataclass(frozen=True)
class SessionShown:
    """One engine process. Its token is not shown. `engine` is what it calls itself, `identity` the
    digest that engines that share blocks have in common."""

    session: int
    engine: str
    pid: int
    plane: str
    leases: int
    writing_blocks: int
    model: str
    role: str
    identity: str
    bytes_per_token: float | None
    figures: FiguresShown


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
    quotas are overcommitted, and a tenant may not get its default quota."""

    default_bytes: int | None
    promised_bytes: int
    in_force_bytes: int
    overcommitted: bool
    scaled_down: bool = False
    default_limit_bytes: int | None = None


@dataclass(frozen=True)
class TenantShown(TenantUsage):
    """One tenant: what it has, and what it asked for and got since the server started, while it is
    among the TENANTS_COUNTED tenants that were looked up last."""

    lookups: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0
    figures: FiguresShown = field(default_factory=FiguresShown)


@dataclass(frozen=True)
class ModelShown:
    """A model whose engines have connected since the server started: some 32 of them, and the rest
    together as `other`. `unknown` is the memory of blocks that an earlier server stored and whose
    engines have not connected again."""

    model: str
    figures: FiguresShown
    blocks: int = 0
    usage_bytes: int = 0


@dataclass(frozen=True)
class RestartShown:
    """What was adopted from the last server, and what its processes still hold while they live. A
    server that did not start warm says why: `why_cold`."""

    adopted_blocks: int = 0
    adopted_bytes: int = 0
    adoption_seconds: float = 0.0
    dropped_at_adoption: int = 0
    old_sessions: int = 0
    held_by_old_sessions: int = 0
    warm: bool = False
    why_cold: str = ""


@dataclass(frozen=True)
class SecurityShown:
    """What proof is asked for: engines show TLS certificates, operators the admin API's token."""

    tls: bool
    admin_token: bool


@dataclass(frozen=True)
class Status:
    """The server as `GET /v1/status` shows it. `open_sessions` counts sessions by data plane;
    `sessions` and `not_shared` are None for those without the token. `tenant_counts` is by the label that metrics use,
    `prompt_blocks` by the outcome of blocks (kv/outcomes.py), `evicted_blocks` by reason
    (store/departed.py). `evicted_age_s` is the median time since the last use of what was evicted
    lately; None if nothing was."""

    name: str
    version: str
    pid: int
    epoch: str
    address: str
    http_address: str
    uptime_s: float
    ready: bool
    stopping: bool
    pool: PoolShown
    quotas: QuotasShown
    open_sessions: dict[str, int]
    sessions: list[SessionShown] | None
    leases: int
    writes: int
    layouts: int
    tenants: int
    largest_tenants: list[TenantShown]
    tenant_counts: dict[str, TenantCounts]
    figures: FiguresShown
    models: list[ModelShown]
    prompt_blocks: dict[str, int]
    evicted_blocks: dict[str, int]
    evicted_age_s: float | None
    load_failures: dict[str, int]
    counters: dict[str, int | float]
    refusals: dict[str, int]
    auth_failures: dict[str, int]
    restart: RestartShown
    security: SecurityShown
    not_shared: list[NotShared] | None
    tiers: list[TierShown]


@dataclass(frozen=True)
class Snapshot:
    """A status, and the histograms that only metrics show. Nothing in it changes afterwards."""

    status: Status
    latency: dict[str, Latency]
    turns: Latency
    tiers: dict[tuple[str, str], Latency] = field(default_factory=dict)  # by tier and kind of job
    eviction_ages: list[int] = field(default_factory=list)
    eviction_age_sum_s: float = 0.0


def take(daemon: Daemon) -> Snapshot:
    """Takes the snapshot. In the loop's thread only."""
    counters = daemon.service.counters
    latency, turns = copy.deepcopy((counters.latency, counters.turns))
    counters.turns.longest_us = 0.0  # it is that since the last snapshot
    tiers = daemon.movement.tiers if daemon.movement is not None else []
    times = {(tier.name, job): each for tier in tiers for job, each in tier.times.items()}
    departures = daemon.store.remember_departures()
    return Snapshot(
        *(_status(daemon), latency, turns, copy.deepcopy(times)),
        *(list(departures.ages), departures.age_sum_s),
    )


def _status(daemon: Daemon) -> Status:
    store, counters, settings = daemon.store, daemon.service.counters, daemon.settings
    departures = store.remember_departures()
    ours = [held for number, held in store.sessions.items() if number != OLD_SESSIONS]
    return Status(
        name=settings.name,
        version=__version__,
        pid=os.getpid(),
        epoch=f"{daemon.epoch:016x}",
        address=daemon.address,
        http_address=daemon.http_address,
        uptime_s=round(time.time() - daemon.started, 1),
        ready=daemon.ready.is_set(),
        stopping=daemon.stopping,
        pool=_pool(daemon),
        quotas=_quotas(store),
        open_sessions=_open_sessions(daemon),
        sessions=_sessions(daemon),
        leases=sum(len(held.leases) for held in ours),
        writes=sum(len(held.writes) for held in store.sessions.values()),
        layouts=sum(1 for _ in store.layouts),
        tenants=len(store.tenants),
        largest_tenants=tenants_shown(store.tenants.largest(LARGEST_TENANTS), counters.tenants),
        tenant_counts=counters.tenants.by_label(),
        figures=FiguresShown.of(counters),
        models=_models(daemon),
        prompt_blocks=dict(daemon.service.explanations.outcomes),
        evicted_blocks=dict(departures.counts),
        evicted_age_s=departures.age_s,
        load_failures=dict(counters.load_failures),
        counters=_counts(daemon),
        refusals=dict(sorted(counters.refusals.items())),
        auth_failures=dict(sorted(counters.auth_failures.items())),
        restart=_restart(daemon),
        security=SecurityShown(
            tls=settings.tls_cert is not None,
            admin_token=settings.admin_token is not None or not settings.http_is_local,
        ),
        not_shared=not_shared(daemon.service.sessions.all()),
        tiers=daemon.movement.shown() if daemon.movement is not None else [],
    )


def _counts(daemon: Daemon) -> dict[str, int | float]:
    """With what the store and the spans' queue count themselves."""
    store, counters = daemon.store, daemon.service.counters
    return {name: getattr(counters, name) for name in metrics_of(Counters, "kvkeep_")} | {
        "evictions": store.eviction.evictions,
        "slab_moves": store.eviction.slab_moves,
        "withheld_blocks": store.withheld_blocks,
        "dropped_spans": daemon.tracing.dropped if daemon.tracing is not None else 0,
    }


def tenant_shown(tenant: Tenant, counts: CountsByTenant) -> TenantShown:
    counted = counts.of(tenant.name)
    return TenantShown(
        **vars(usage_of(tenant)),
        lookups=counted.lookups,
        hit_blocks=counted.hit_blocks,
        missed_blocks=counted.missed_blocks,
        figures=FiguresShown.of(counted),
    )


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


def _models(daemon: Daemon) -> list[ModelShown]:
    """Every model that has memory or figures."""
    service, used = daemon.service, dict[str, tuple[int, int]]()
    for layout in daemon.store.layouts:
        model = service.layout_models.get(layout.fingerprint, UNKNOWN_MODEL)
        blocks, nbytes = used.get(model, (0, 0))
        used[model] = blocks + layout.blocks, nbytes + layout.blocks * layout.slot_bytes
    figures = service.counters.models.all()
    used = {model: each for model, each in used.items() if each[0] or model in figures}
    return [
        ModelShown(model, FiguresShown.of(figures.get(model, Figures())), *used.get(model, (0, 0)))
        for model in dict.fromkeys((*figures, *used))
    ]


def _open_sessions(daemon: Daemon) -> dict[str, int]:
    planes = Counter(session.plane or NOT_ATTACHED for session in daemon.service.sessions.all())
    return {plane: planes[plane] for plane in (SHARED_MEMORY, NETWORK, NOT_ATTACHED)}


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
                _bytes_per_token(daemon.store, session),
                FiguresShown.of(session.figures),
            )
        )
    return rows


def _bytes_per_token(store: Store, session: ServerSession) -> float | None:
    """What one token takes of the pool; None if the session has not said how many a block has."""
    layout = next((each for each in store.layouts if each.number == session.layout), None)
    block_tokens = session.parts.get("block_tokens", "")
    if layout is None or not (block_tokens.isdecimal() and int(block_tokens[:9])):
        return None
    return round(layout.slot_bytes / int(block_tokens[:9]), 1)
