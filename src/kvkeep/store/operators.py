"""What operators do to the store: quotas, usage, clearing, and the end of a block that proved bad."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvkeep.errors import RequestError
from kvkeep.store.plans import TenantUsage
from kvkeep.store.store import Store
from kvkeep.store.table import NO_ROW
from kvkeep.store.tenants import Tenant
from kvkeep.units import TIB, format_size


def drop_blocks(store: Store, tenant: str, keys: Iterable[bytes]) -> int:
    """Takes blocks out of use, with everything that hangs on them. Returns how many left; unknown keys are no error."""
    owner = store.tenants.get(tenant)
    rows = [owner.index.get(key, NO_ROW) for key in keys] if owner else []
    return store.blocks.drop([row for row in rows if row != NO_ROW])


def drop_block(store: Store, tenant: str, key: bytes) -> int:
    """Takes a block that proved bad out of use, with everything that hangs on it. Returns how many left."""
    return drop_blocks(store, tenant, [key])


def clear(store: Store, tenant: str | None = None) -> int:
    """Takes all blocks of one tenant, or of all, out of use. Returns how many."""
    if tenant is None:
        return sum(store.blocks.drop(list(each.index.values())) for each in list(store.tenants))
    return store.blocks.drop(list(_known(store, tenant).index.values()))


def check_quota(store: Store, tenant: str, quota_bytes: int | None) -> None:
    """Raises what `set_quota` would raise for a quota that does not fit, or a tenant nobody knows. Changes nothing."""
    if quota_bytes is None:
        _known(store, tenant)
        return
    promised = store.tenants.promised_bytes(without=store.tenants.get(tenant))
    if not 0 <= quota_bytes <= store.pool_bytes - promised:
        raise RequestError(
            "quota_too_large",
            f"a quota of {_size(quota_bytes)} does not fit: the pool has {_size(store.pool_bytes)}, of which "
            f"{_size(promised)} are promised to other tenants",
            field="quota_bytes",
            hint="lower another tenant's quota first, or start the server with a larger --pool-size",
        )


def set_quota(store: Store, tenant: str, quota_bytes: int | None, now_ms: int) -> None:
    """Promises a tenant memory, or with None puts it back to the default. All own quotas together fit the pool."""
    check_quota(store, tenant, quota_bytes)
    owner = store.tenants.get_or_add(tenant)
    before = owner.owner
    store.tenants.set_quota(owner, quota_bytes)
    _requeue(store, owner, before, now_ms)
    store.tenants.forget_if_idle(owner)


def check_default_quota(store: Store, quota_bytes: int | None) -> None:
    """Raises what `set_default_quota` would raise. Changes nothing."""
    if quota_bytes is not None and not 0 <= quota_bytes <= store.pool_bytes:
        raise RequestError(
            "quota_too_large",
            f"a default quota of {_size(quota_bytes)} does not fit a pool of {_size(store.pool_bytes)}",
            field="default_quota",
            hint="use a lower one, or start the server with a larger --pool-size",
        )


def set_default_quota(store: Store, quota_bytes: int | None, now_ms: int) -> None:
    """Changes the quota of every tenant that has none of its own. None: they have no promise and share one LRU."""
    check_default_quota(store, quota_bytes)
    before = [(tenant, tenant.owner) for tenant in store.tenants]
    store.tenants.set_default_quota(quota_bytes)
    for tenant, owner in before:
        _requeue(store, tenant, owner, now_ms)


def usage_of(tenant: Tenant) -> TenantUsage:
    """One tenant as operators see it."""
    own_quota = tenant.own_quota_bytes is not None
    return TenantUsage(tenant.name, tenant.blocks, tenant.usage_bytes, tenant.quota_bytes, own_quota)


def usage(store: Store) -> list[TenantUsage]:
    return [usage_of(tenant) for tenant in store.tenants]


def _known(store: Store, tenant: str) -> Tenant:
    owner = store.tenants.get(tenant)
    if owner is None:
        raise RequestError(
            "unknown_tenant",
            f"tenant {tenant} has no blocks and no quota of its own",
            field="tenant",
            hint="`kvkeep tenants list` shows those that have",
        )
    return owner


def _size(nbytes: int) -> str:
    """For people and exact. What is beyond all memory, and maybe beyond a float, is not put into units."""
    return f"{nbytes} bytes" if abs(nbytes) > 1_000_000 * TIB else f"{format_size(nbytes)} ({nbytes} bytes)"


def _requeue(store: Store, tenant: Tenant, owner_before: int, now_ms: int) -> None:
    """A tenant that gains or loses its quota moves to a queue of its own or back to the common one. Only leaves wait
    in queues."""
    if tenant.owner != owner_before:
        rows = np.fromiter(tenant.index.values(), dtype=np.int64, count=len(tenant.index))
        for row in rows[store.blocks.table.many.first_child[rows] == NO_ROW].tolist():
            store.blocks.order.enqueue(row, now_ms)
