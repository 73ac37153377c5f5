"""Tenants: usage exact, quotas own or default, borrowing noted, and nobody remembered without a
reason."""

from __future__ import annotations

import pytest

from kvkeep.errors import RequestError
from kvkeep.store.tenants import COMMONS, Tenants


def test_a_tenant_without_a_quota_may_lose_everything_and_is_entitled_to_nothing() -> None:
    tenant = Tenants(4, None).get_or_add("t")
    tenant.usage_bytes = 10
    assert tenant.owner == COMMONS and tenant.may_lose(10) and not tenant.entitled_to(1)


def test_a_tenant_with_a_quota_loses_only_what_it_borrows() -> None:
    tenants = Tenants(4, 100)
    tenant = tenants.get_or_add("t")
    tenants.charge(tenant, 1, 90)
    assert tenant.owner == tenant.number and tenant.entitled_to(10) and not tenant.entitled_to(11)
    assert not tenant.may_lose(1) and tenant not in tenants.borrowers
    tenants.charge(tenant, 1, 30)
    assert tenant.may_lose(20) and not tenant.may_lose(21) and tenant in tenants.borrowers
    tenants.charge(tenant, -1, -20)
    assert tenant not in tenants.borrowers
    tenants.check_integrity()


def test_own_quotas_beat_the_default_and_give_way_to_it() -> None:
    tenants = Tenants(4, 100)
    own, default = tenants.get_or_add("own"), tenants.get_or_add("default")
    for tenant in (own, default):
        tenants.charge(tenant, 1, 60)
    tenants.set_quota(own, 50)
    tenants.set_default_quota(40)
    tenants.update(10)
    assert (own.quota_bytes, default.quota_bytes) == (50, 40) and set(tenants.borrowers) == {
        own,
        default,
    }
    tenants.set_default_quota(None)
    tenants.update(10)
    assert (own.quota_bytes, default.quota_bytes) == (50, None) and set(tenants.borrowers) == {own}
    tenants.set_quota(own, None)
    assert own.quota_bytes is None and not tenants.borrowers
    tenants.check_integrity()


def test_promises_are_own_quotas_only() -> None:
    tenants = Tenants(4, 100)
    a, b = tenants.get_or_add("a"), tenants.get_or_add("b")
    tenants.set_quota(a, 30)
    tenants.set_quota(b, 20)
    tenants.get_or_add("c")
    assert tenants.promised_bytes() == 50 and tenants.promised_bytes(without=a) == 20


def test_idle_tenants_are_forgotten_unless_they_have_a_quota_or_are_storing() -> None:
    tenants = Tenants(4, None)
    idle, promised, storing = (tenants.get_or_add(name) for name in ("idle", "promised", "storing"))
    tenants.set_quota(promised, 10)
    storing.storing = True
    for tenant in (idle, promised, storing):
        tenants.forget_if_idle(tenant)
    assert [tenant.name for tenant in tenants] == ["promised", "storing"]


def test_the_limit_names_its_field_and_remedy() -> None:
    tenants = Tenants(1, None)
    known = tenants.get_or_add("a")
    with pytest.raises(RequestError, match="1 tenants") as error:
        tenants.get_or_add("b")
    assert (error.value.code, error.value.field) == ("too_many_tenants", "tenant")
    assert "--max-tenants" in error.value.hint and tenants.get("b") is None
    assert tenants.get_or_add("a") is known


def test_integrity_finds_borrowing_that_nobody_noted() -> None:
    tenants = Tenants(4, 10)
    tenant = tenants.get_or_add("t")
    with pytest.raises(AssertionError, match="forgotten"):
        tenants.check_integrity()
    tenants.charge(tenant, 1, 5)
    tenant.usage_bytes = 11
    with pytest.raises(AssertionError, match="borrowing"):
        tenants.check_integrity()


def test_numbers_of_forgotten_tenants_are_used_again() -> None:
    tenants = Tenants(4, None)
    for i in range(10):
        tenant = tenants.get_or_add(f"t{i}")
        tenants.forget_if_idle(tenant)
        tenants.forget_if_idle(tenant)
    kept, other = tenants.get_or_add("kept"), tenants.get_or_add("other")
    tenants.forget_if_idle(tenant)
    assert (kept.number, other.number) == (0, 1) and tenants.by_number[0] is kept


def test_own_quotas_have_the_better_right() -> None:
    tenants = Tenants(4, 100)
    own, default = tenants.get_or_add("own"), tenants.get_or_add("default")
    tenants.set_quota(own, 50)
    for tenant in (own, default):
        tenants.charge(tenant, 1, 40)
    assert set(tenants.on_default) == {default}
    assert default.may_lose_to(own, 40, 10) and not default.may_lose_to(own, 40, 11)
    assert not own.may_lose_to(default, 40, 10) and not default.has_own_right_to(1)
    tenants.check_integrity()
    tenants.set_default_quota(None)
    tenants.update(10)
    assert not tenants.on_default


def test_the_largest_tenants_and_the_sum_of_quotas_are_known_without_looking_at_all() -> None:
    tenants = Tenants(1000, 10)
    known = [tenants.get_or_add(f"tenant-{number}") for number in range(200)]
    for tenant in known:
        tenants.charge(tenant, 1, tenant.number * 7 % 200)
    by_usage = sorted(known, key=lambda tenant: -(tenant.number * 7 % 200))
    assert tenants.largest(3) == by_usage[:3] and tenants.largest(1000) == by_usage
    assert tenants.in_force_bytes == 2000
    tenants.set_quota(known[5], 100)
    tenants.charge(known[143], -1, -(143 * 7 % 200))
    tenants.forget_if_idle(known[143])
    assert tenants.in_force_bytes == 198 * 10 + 100 and known[143] not in tenants.largest(1000)
    tenants.check_integrity()


def test_what_changes_for_all_is_put_in_force_for_some_tenants_at_a_time() -> None:
    """Also for those with quotas of their own: they may be many."""
    tenants = Tenants(20, None, pool_bytes=100)
    for number in range(10):
        tenants.set_quota(tenants.get_or_add(f"t{number}"), 10)
    others = [tenant for tenant in tenants if tenant.name != "t0"]
    first = tenants.get("t0")
    assert first is not None
    for change, quota_bytes in (
        (lambda: tenants.set_quota(first, 110), 5),
        (lambda: tenants.set_quota(first, 10), 10),
        (lambda: tenants.set_default_limit(7), 7),
    ):
        change()
        changed = 0
        while tenants.to_update:
            before = sum(tenant.quota_bytes == quota_bytes for tenant in others)
            tenants.update(3)
            changed = sum(tenant.quota_bytes == quota_bytes for tenant in others)
            assert changed - before <= 3
            tenants.check_integrity()
        assert changed == 9
