"""What operators ask for and change while the server runs.

Called from any thread but the loop's. Whatever touches the store is done in the loop's thread, in
short pieces, and waited for with a limit; files are written in the caller's thread, so that a slow
disk keeps no engine waiting."""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from kvkeep import __version__
from kvkeep.errors import RequestError
from kvkeep.kv.identity import check_tenant
from kvkeep.server.counters import Counters
from kvkeep.server.daemon import Daemon
from kvkeep.server.quotas import KeptQuotas
from kvkeep.server.settings import TABLE, Settings
from kvkeep.server.sharing import NotShared
from kvkeep.server.snapshot import (
    PoolShown,
    QuotasShown,
    RestartShown,
    SessionShown,
    Snapshot,
    TenantShown,
    take,
    tenant_shown,
    tenants_shown,
)
from kvkeep.server.tenant_counts import TenantCounts
from kvkeep.store.operators import (
    check_default_limit,
    check_default_quota,
    check_limit,
    check_quota,
    clear,
    clear_all,
    set_default_limit,
    set_default_quota,
    set_limit,
    set_quota,
)
from kvkeep.store.store import Store
from kvkeep.store.tenants import Tenant
from kvkeep.units import format_size

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOP_WAIT_S = 4.0  # less than our commands wait, so that they hear of it
_TENANTS_CLEARED_A_TURN = 1024  # a few milliseconds, then engines have their turn
_TENANTS_SHOWN_A_TURN = 128


@dataclass(frozen=True)
class SecurityShown:
    """Who is asked to prove who they are: engines by TLS certificates, operators by the admin API's
    token."""

    tls: bool
    admin_token: bool


@dataclass(frozen=True)
class Status:
    """The server as `kvkeep status` shows it."""

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
    sessions: list[SessionShown]
    leases: int
    writes: int
    layouts: int
    tenants: int
    largest_tenants: list[TenantShown]
    tenant_counts: dict[str, TenantCounts]
    counters: dict[str, int]
    refusals: dict[str, int]
    auth_failures: dict[str, int]
    restart: RestartShown
    security: SecurityShown
    not_shared: list[NotShared]


@dataclass(frozen=True)
class TenantList:
    """The largest tenants first. `total` counts those that were left out as well."""

    total: int
    tenants: list[TenantShown]


@dataclass(frozen=True)
class Drain:
    """A server that was told to drain: what it waits for, how long at most, and what it will
    leave."""

    leases: int
    writes: int
    blocks: int
    grace_s: float
    keeps_pool: bool


@dataclass(frozen=True)
class SettingShown:
    """A setting, where its value came from, and whether it can change while the server runs."""

    name: str
    value: str
    source: str
    live: bool
    help: str


class Admin:
    """One for each daemon: changes go one after the other."""

    def __init__(self, daemon: Daemon, loop_wait_s: float = LOOP_WAIT_S) -> None:
        self.daemon = daemon
        self.http_address = ""
        self._loop_wait_s = loop_wait_s
        self._changing = threading.Lock()

    def in_loop(self, duty: Callable[[], T]) -> T:
        """Runs `duty` in the loop's thread. `loop_busy` if it was not begun in time, and then it
        never will be."""
        future = self.daemon.run_in_loop(duty)
        with contextlib.suppress(TimeoutError, CancelledError):
            return future.result(self._loop_wait_s)
        if future.cancel():
            raise RequestError(
                "loop_busy",
                f"the server's loop did not answer within {self._loop_wait_s:g} s; nothing was done",
                hint="try again; if it stays so, see the server's log",
            )
        try:
            return future.result(self._loop_wait_s)
        except TimeoutError:
            raise RequestError(
                "outcome_unknown",
                "the request is still being carried out",
                hint="ask for the status later",
            ) from None

    # -- asking

    def snapshot(self) -> Snapshot:
        return self.in_loop(lambda: take(self.daemon))

    def status(self) -> Status:
        daemon, now = self.daemon, self.snapshot()
        by_label = ("refusals", "latency", "auth_failures", "tenants", "turns")
        counted = [field.name for field in fields(Counters) if field.name not in by_label]
        counters = {name: getattr(now.counters, name) for name in counted}
        return Status(
            name=daemon.settings.name,
            version=__version__,
            pid=os.getpid(),
            epoch=f"{daemon.epoch:016x}",
            address=daemon.address,
            http_address=self.http_address,
            uptime_s=round(time.time() - daemon.started, 1),
            ready=now.ready,
            stopping=now.stopping,
            pool=now.pool,
            quotas=now.quotas,
            sessions=now.sessions,
            leases=now.leases,
            writes=now.writes,
            layouts=now.layouts,
            tenants=now.tenants,
            largest_tenants=now.largest_tenants,
            tenant_counts=now.tenant_counts,
            counters=counters
            | {
                "evictions": now.evictions,
                "slab_moves": now.slab_moves,
                "withheld_blocks": now.withheld_blocks,
            },
            refusals=now.counters.refusals,
            auth_failures=now.counters.auth_failures,
            restart=now.restart,
            security=SecurityShown(
                tls=daemon.settings.tls_cert is not None,
                admin_token=daemon.settings.admin_token is not None
                or not daemon.settings.http_is_local,
            ),
            not_shared=now.not_shared,
        )

    def tenants(self, limit: int) -> TenantList:
        """Tenants are ranked in the caller's thread and looked at a few at a time: there may be
        100,000."""
        store, counts = self.daemon.store, self.daemon.service.counters.tenants
        tenants = self.in_loop(lambda: list(store.tenants))
        largest = heapq.nlargest(limit, tenants, key=attrgetter("usage_bytes"))
        shown: list[TenantShown] = []
        for at in range(0, len(largest), _TENANTS_SHOWN_A_TURN):
            some = largest[at : at + _TENANTS_SHOWN_A_TURN]
            shown += self.in_loop(partial(tenants_shown, some, counts))
        return TenantList(len(tenants), shown)

    def tenant(self, tenant: str) -> TenantShown:
        _check_tenant(tenant)
        store, counts = self.daemon.store, self.daemon.service.counters.tenants
        return self.in_loop(lambda: tenant_shown(_known(store, tenant), counts))

    def settings(self) -> list[SettingShown]:
        return [SettingShown(*row) for row in self.daemon.settings.describe()]

    # -- changing

    def set_quota(self, tenant: str, quota_bytes: int | None) -> None:
        """Gives a tenant a quota of its own, or with None the default again. EvacuatedBlock before it is in
        force."""
        _check_tenant(tenant)
        store, now_ms = self.daemon.store, self.daemon.now_ms()
        with self._one_change_at_a_time():
            self.in_loop(lambda: check_quota(store, tenant, quota_bytes))
            others = {
                name: quota
                for name, quota in self.daemon.kept_quotas.tenants.items()
                if name != tenant
            }
            kept = others if quota_bytes is None else others | {tenant: quota_bytes}
            with self._saved(replace(self.daemon.kept_quotas, tenants=kept)):
                self.in_loop(lambda: set_quota(store, tenant, quota_bytes, now_ms))
        log.info(
            "quota of tenant %s: %s",
            tenant,
            "the default" if quota_bytes is None else format_size(quota_bytes),
        )

    def set_limit(self, tenant: str, limit_bytes: int | None) -> None:
        """Lets a tenant use so much at most, or with None as much as the default limit. EvacuatedBlock
        before it is in force; and in force, so that nothing more is stored, before the blocks that
        are too many go, a few at a time. They go even if nobody waits for it any more."""
        _check_tenant(tenant)
        store, now_ms = self.daemon.store, self.daemon.now_ms()
        with self._one_change_at_a_time():
            self.in_loop(lambda: check_limit(store, tenant, limit_bytes))
            others = {
                name: limit
                for name, limit in self.daemon.kept_quotas.limits.items()
                if name != tenant
            }
            kept = others if limit_bytes is None else others | {tenant: limit_bytes}
            with self._saved(replace(self.daemon.kept_quotas, limits=kept)):
                self.in_loop(lambda: set_limit(store, tenant, limit_bytes, now_ms))
            self._tidy()
        log.info(
            "limit of tenant %s: %s",
            tenant,
            "the default" if limit_bytes is None else format_size(limit_bytes),
        )

    def change_settings(self, changes: Mapping[str, str]) -> list[SettingShown]:
        """Changes live settings, all or none. Defaults of quota and limit are saved like a
        tenant's; others last until the end."""
        store = self.daemon.store
        with self._one_change_at_a_time():
            changed, kept = self.daemon.settings.changed_all(changes), self.daemon.kept_quotas
            if "default_quota" in changes:
                self.in_loop(lambda: check_default_quota(store, changed.default_quota))
                kept = replace(kept, default_set=True, default_bytes=changed.default_quota)
            if "default_limit" in changes:
                self.in_loop(lambda: check_default_limit(store, changed.default_limit))
                kept = replace(
                    kept, default_limit_set=True, default_limit_bytes=changed.default_limit
                )
            with self._saved(kept) if kept != self.daemon.kept_quotas else contextlib.nullcontext():
                self.in_loop(lambda: self._put_in_force(changed))
            self._tidy()
        for name in changes:
            log.info("%s = %s", name, TABLE[name].kind.show(getattr(changed, name)))
        return self.settings()

    def drain(self) -> Drain:
        """Has the server stop: it admits nothing more, and ends when leases and writes have, or its
        grace is over."""
        now, settings = self.snapshot(), self.daemon.settings  # first: the loop may end at once
        log.info("draining: an operator asked for it")
        self.daemon.stop()
        blocks = now.pool.blocks["ready"]
        return Drain(now.leases, now.writes, blocks, settings.shutdown_grace, settings.keep_pool)

    def clear(self, tenant: str) -> int:
        """Takes all blocks out of use that the tenant has now, all of them at once, and then frees
        their memory. Returns how many."""
        _check_tenant(tenant)
        dropped = self.in_loop(lambda: clear(self.daemon.store, tenant))
        self._tidy()
        log.info("cleared %d blocks of tenant %s", dropped, tenant)
        return dropped

    def clear_all(self) -> int:
        """Takes all blocks out of use. Returns how many."""
        store, dropped = self.daemon.store, 0
        names = [tenant.name for tenant in self.in_loop(lambda: list(store.tenants))]
        for at in range(0, len(names), _TENANTS_CLEARED_A_TURN):
            some = names[at : at + _TENANTS_CLEARED_A_TURN]
            dropped += self.in_loop(partial(clear_all, store, some))
        self._tidy()
        log.info("cleared all %d blocks", dropped)
        return dropped

    # -- inside

    def _tidy(self) -> None:
        """Waits until what a change has begun is done, and helps: pieces of it between engines'
        requests."""
        store = self.daemon.store
        while self.in_loop(lambda: store.tidy(self.daemon.now_ms())):
            pass

    def _put_in_force(self, changed: Settings) -> None:
        daemon = self.daemon
        if changed.default_quota != daemon.settings.default_quota:
            set_default_quota(daemon.store, changed.default_quota, daemon.now_ms())
        if changed.default_limit != daemon.settings.default_limit:
            set_default_limit(daemon.store, changed.default_limit, daemon.now_ms())
        daemon.service.verify = changed.verify
        logging.getLogger("kvkeep").setLevel(changed.log_level.upper())
        daemon.settings = changed

    @contextlib.contextmanager
    def _one_change_at_a_time(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._loop_wait_s):
            raise RequestError("loop_busy", "another change is being saved", hint="try again")
        try:
            yield
        finally:
            self._changing.release()

    @contextlib.contextmanager
    def _saved(self, kept: KeptQuotas) -> Iterator[None]:
        """Saves `kept` before the body puts it in force, and what was kept before if the body did
        not."""
        before = self.daemon.kept_quotas
        try:
            self.daemon.quotas.save(kept)
        except OSError as error:
            raise RequestError(
                "not_saved",
                f"{self.daemon.quotas.path} cannot be written: {error.strerror}; nothing was changed",
                hint="see that --state-dir can be written and has room",
            ) from error
        try:
            yield
        except RequestError as error:
            if error.code != "outcome_unknown":
                self.daemon.quotas.save(before)
            else:  # it is being put in force, and the next change must not take it back
                self.daemon.kept_quotas = kept
            raise
        self.daemon.kept_quotas = kept


def _check_tenant(tenant: str) -> None:
    check_tenant(tenant, "`kvkeep tenants id` makes it from a salt")


def _known(store: Store, tenant: str) -> Tenant:
    check_quota(store, tenant, None)  # raises unknown_tenant
    owner = store.tenants.get(tenant)
    assert owner is not None
    return owner
