"""What operators do to the store: quotas, limits, usage, clearing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from kvkeep.errors import RequestError
from kvkeep.store.plans import TenantUsage
from kvkeep.store.store import Store
from kvkeep.store.tenants import Tenant
from kvkeep.units import TIB, format_size

LARGEST_LIMIT_BYTES = 64 * TIB  # as much as the largest pool
_TENANTS_SHRUNK_A_TURN = 64


def clear(store: Store, tenant: str | None = None) -> int:
    """Takes all blocks of one tenant, or of all tenants, out of use. Returns how many. `Store.tidy`
    frees their memory."""
    return clear_all(
        store,
        [each.name for each in store.tenants] if tenant is None else [_known(store, tenant).name],
    )


def clear_all(store: Store, tenants: Iterable[str]) -> int:
    """Clears some tenants, known or not."""
    owners = [owner for tenant in tenants if (owner := store.tenants.get(tenant))]
    cleared = sum(store.blocks.clear(owner) for owner in owners)
    store.blocks.sweep()
    return cleared


def check_quota(store: Store, tenant: str, quota_bytes: int | None) -> None:
    """Raises what `set_quota` would raise, and changes nothing: for a quota that does not fit the
    pool or exceeds the tenant's limit, or for an unknown tenant. Lowering is never refused."""
    if quota_bytes is None:
        _known(store, tenant)
        return
    owner = store.tenants.get(tenant)
    promised = store.tenants.promised_bytes(without=owner)
    set_now = (owner.own_quota_bytes if owner else None) or 0
    if not 0 <= quota_bytes <= max(store.pool_bytes - promised, set_now):
        raise RequestError(
            "quota_too_large",
            f"a quota of {_size(quota_bytes)} does not fit: the pool has {_size(store.pool_bytes)}, of which "
            f"{_size(promised)} are promised to other tenants",
            field="quota_bytes",
            hint="lower another tenant's quota first, or start the server with a larger --pool-size",
        )
    limit_bytes = store.tenants.limit_of(tenant)
    if limit_bytes is not None and set_now < quota_bytes and limit_bytes < quota_bytes:
        raise RequestError(
            "limit_below_quota",
            f"quota_bytes = {_size(quota_bytes)} is more than limit_bytes = {_size(limit_bytes)}, which the tenant may "
            "use at most",
            field="quota_bytes",
            hint="use a lower quota, or give the tenant a higher limit first: kvkeep tenants set-limit",
        )


def set_quota(store: Store, tenant: str, quota_bytes: int | None, now_ms: int) -> None:
    """Sets a tenant's own quota; None: the default again. All own quotas together fit the pool."""
    check_quota(store, tenant, quota_bytes)
    _set_quota(store, tenant, quota_bytes)
    _begin(store, now_ms)


def restore(
    store: Store,
    quotas: Mapping[str, int],
    limits: Mapping[str, int],
    default_quota_bytes: int | None,
    default_limit_bytes: int | None,
    now_ms: int,
) -> None:
    """Puts settings of an earlier run in force, perhaps in a smaller pool. Nothing is refused for
    its size: own quotas that exceed the pool together are scaled down by one factor, a default
    quota is at most the pool, and limits lower quotas that exceed them."""
    store.tenants.set_default_quota(default_quota_bytes)
    store.tenants.set_default_limit(default_limit_bytes)
    for name, quota_bytes in quotas.items():
        _set_quota(store, name, quota_bytes)
    for name, limit_bytes in limits.items():
        _set_limit(store, name, limit_bytes)
    while store.tidy(now_ms):
        pass


def follow(store: Store, leader: Store, tenants: Iterable[str]) -> None:
    """Gives these tenants the quotas and limits that they have in another store, and puts its
    defaults in force. Quotas that do not fit are scaled down. `Store.tidy` carries it out."""
    ours, leading = store.tenants, leader.tenants
    if ours.default_quota_bytes != leading.default_quota_bytes:
        ours.set_default_quota(leading.default_quota_bytes)
    if ours.default_limit_bytes != leading.default_limit_bytes:
        ours.set_default_limit(leading.default_limit_bytes)
    for name in tenants:
        led = leading.get(name)
        _set_quota(store, name, led.own_quota_bytes if led else None)
        _set_limit(store, name, led.own_limit_bytes if led else None)


def check_limit(store: Store, tenant: str, limit_bytes: int | None) -> None:
    """Raises what `set_limit` would raise, and changes nothing: for a limit out of range or below
    the tenant's own quota, or for an unknown tenant."""
    if limit_bytes is None:
        _known(store, tenant)
    _check_limit_range(limit_bytes, "limit_bytes")
    owner = store.tenants.get(tenant)
    in_force = store.tenants.default_limit_bytes if limit_bytes is None else limit_bytes
    quota_bytes = owner.own_quota_bytes if owner else None
    if in_force is not None and quota_bytes is not None and in_force < quota_bytes:
        kind = "default_limit" if limit_bytes is None else "limit_bytes"
        raise RequestError(
            "limit_below_quota",
            f"{kind} = {_size(in_force)} is less than quota_bytes = {_size(quota_bytes)}, which the tenant is promised",
            field="limit_bytes",
            hint="lower or unset the tenant's quota first: kvkeep tenants set-quota, unset-quota",
        )


def set_limit(store: Store, tenant: str, limit_bytes: int | None, now_ms: int) -> None:
    """Sets the most that a tenant may use; 0: nothing; None: the default limit again.

    If the tenant uses more, its blocks are evicted, least recently used leaves first, now and by
    `Store.tidy`. Blocks with leases or writes leave the index and count until the last one ends.
    Until the tenant is within its limit, nothing of it is stored."""
    check_limit(store, tenant, limit_bytes)
    _set_limit(store, tenant, limit_bytes)
    _begin(store, now_ms)


def check_default_limit(store: Store, limit_bytes: int | None) -> None:
    """Raises what `set_default_limit` would raise. Changes nothing."""
    _check_limit_range(limit_bytes, "default_limit")
    if limit_bytes is None:
        return
    if count := store.tenants.unlimited_above(limit_bytes):
        raise RequestError(
            "limit_below_quota",
            f"default_limit = {_size(limit_bytes)} is less than quota_bytes of {count} tenants without limit_bytes of "
            "their own",
            field="default_limit",
            hint="give those tenants limits of their own first: kvkeep tenants set-limit; or lower their quotas",
        )


def set_default_limit(store: Store, limit_bytes: int | None, now_ms: int) -> None:
    """Changes the limit of every tenant without one of its own, with the effects of `set_limit`."""
    check_default_limit(store, limit_bytes)
    store.tenants.set_default_limit(limit_bytes)
    _begin(store, now_ms)


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
    """Changes the quota of every tenant without one of its own. None: they share one LRU."""
    check_default_quota(store, quota_bytes)
    store.tenants.set_default_quota(quota_bytes)
    _begin(store, now_ms)


def usage_of(tenant: Tenant) -> TenantUsage:
    """One tenant as operators see it."""
    return TenantUsage(
        tenant.name,
        tenant.blocks,
        tenant.usage_bytes,
        tenant.quota_bytes,
        tenant.own_quota_bytes is not None,
        tenant.own_quota_bytes,
        tenant.limit_bytes,
        tenant.own_limit_bytes is not None,
    )


def usage(store: Store) -> list[TenantUsage]:
    return [usage_of(tenant) for tenant in store.tenants]


def _known(store: Store, tenant: str) -> Tenant:
    owner = store.tenants.get(tenant)
    if owner is None:
        raise RequestError(
            "unknown_tenant",
            f"tenant {tenant} has no blocks, and no quota or limit of its own",
            field="tenant",
            hint="`kvkeep tenants list` shows those that have",
        )
    return owner


def _set_quota(store: Store, tenant: str, quota_bytes: int | None) -> None:
    owner = store.tenants.get_or_add(tenant)
    store.tenants.set_quota(owner, quota_bytes)
    store.tenants.forget_if_idle(owner)


def _set_limit(store: Store, tenant: str, limit_bytes: int | None) -> None:
    owner = store.tenants.get_or_add(tenant)
    store.tenants.set_limit(owner, limit_bytes)
    store.tenants.forget_if_idle(owner)


def _begin(store: Store, now_ms: int) -> None:
    """Carries out a change of quotas or limits, for one turn."""
    tenants, left = store.tenants, store.blocks.a_turn
    tenants.update(left)
    if store.blocks.order.to_scan:
        store.blocks.order.move(now_ms, left)
    for tenant in list(islice(tenants.to_shrink, _TENANTS_SHRUNK_A_TURN)):
        before = store.eviction.evictions
        if left <= 0 or not store.eviction.shrink_to_limit(tenant, now_ms, left):
            return
        tenants.to_shrink.pop(tenant, None)
        left -= store.eviction.evictions - before


def _check_limit_range(limit_bytes: int | None, field: str) -> None:
    if limit_bytes is not None and not 0 <= limit_bytes <= LARGEST_LIMIT_BYTES:
        raise RequestError(
            "bad_limit",
            f"a limit of {_size(limit_bytes)} is not in 0 to {_size(LARGEST_LIMIT_BYTES)}",
            field=field,
            hint="0: nothing is stored; unset it for no limit",
        )


def _size(nbytes: int) -> str:
    """A size for people, and exact. One beyond any memory, and perhaps any float, without units."""
    return (
        f"{nbytes} bytes"
        if abs(nbytes) > 1_000_000 * TIB
        else f"{format_size(nbytes)} ({nbytes} bytes)"
    )
