"""A limit is a ceiling: never exceeded, paid for by the tenant's own blocks, and in force from the
moment it is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.errors import RequestError
from kvkeep.store import operators
from kvkeep.store.plans import Limits

Hands = Callable[..., Any]

SLOT = 4096


def limit(hand: Any, tenant: str, slots: int | None) -> bool:
    """Returns whether that was all."""
    operators.set_limit(hand.store, tenant, None if slots is None else slots * SLOT, hand.now_ms)
    return not hand.store.has_to_tidy


def default_limit(hand: Any, slots: int | None) -> bool:
    operators.set_default_limit(hand.store, None if slots is None else slots * SLOT, hand.now_ms)
    return not hand.store.has_to_tidy


def test_a_store_beyond_the_limit_evicts_the_tenants_own_blocks_and_no_others(hand: Hands) -> None:
    h = hand(16)
    h.put("xy", "bob")
    limit(h, "ann", 4)
    assert h.put("abc", "ann") == 0
    assert h.put("pqr", "ann") == 0
    assert h.chains("ann") == {"a", "p", "pq", "pqr"} and h.chains("bob") == {"x", "xy"}
    assert h.usage("ann") == 4 and h.store.slabs.available(SLOT) == 10


def test_a_chain_longer_than_the_limit_is_stored_as_far_as_it_fits(hand: Hands) -> None:
    h = hand(16)
    limit(h, "ann", 3)
    assert h.put("abcde", "ann") == 2
    assert h.chains("ann") == {"a", "ab", "abc"}


def test_blocks_being_written_count_and_leased_ones_make_no_way(hand: Hands) -> None:
    h = hand(16)
    limit(h, "ann", 4)
    write, _ = h.prepare("abc", "ann")
    _, plan = h.prepare("xy", "ann")
    assert (len(plan.slots), plan.refused, h.usage("ann")) == (1, 1, 4)
    h.complete(write)
    lease, _ = h.lease("abc", "ann")
    _, plan = h.prepare("uv", "ann")
    assert (len(plan.slots), plan.refused, h.usage("ann")) == (0, 2, 4)
    h.store.release(1, lease, h.now_ms)
    _, plan = h.prepare("uv", "ann")
    assert (len(plan.slots), h.usage("ann")) == (2, 4)


def test_blocks_of_other_sizes_make_way_for_the_limit_too(hand: Hands) -> None:
    h = hand(8, slabs=2)
    large = h.store.open_layout(1, b"large", (3 * SLOT,)).number
    limit(h, "ann", 4)
    h.put("abcd", "ann")
    assert h.put("L", "ann", layout=large) == 0
    assert h.usage("ann") == 4 and h.chains("ann") == {"a", "L"}


def test_a_limit_of_0_stores_nothing_and_drops_what_was_there(hand: Hands) -> None:
    h = hand(8)
    h.put("abc", "ann")
    h.put("x", "bob")
    assert limit(h, "ann", 0)
    assert (h.usage("ann"), h.lookup("abc", "ann").blocks, h.usage("bob")) == (0, 0, 1)
    assert h.put("abc", "ann") == 3
    assert (h.usage("ann"), h.lookup("abc", "ann").blocks) == (0, 0)
    limit(h, "ann", None)
    assert h.put("abc", "ann") == 0 and h.lookup("abc", "ann").blocks == 3


def test_a_tenant_that_may_store_nothing_takes_no_place_among_tenants(hand: Hands) -> None:
    h = hand(8, limits=Limits(tenants=1))
    limit(h, "ann", 8)
    h.put("x", "ann")
    limit(h, "ann", None)
    default_limit(h, 1)
    operators.set_default_limit(h.store, SLOT - 1, h.now_ms)
    assert h.usage("ann") == 0
    operators.set_default_limit(h.store, None, h.now_ms)
    h.put("x", "ann")
    limit(h, "ann", 1)
    default_limit(h, 0)
    assert h.put("y", "bob") == 1
    assert h.chains("ann") == {"x"}, "nothing of others made way for what is never stored"


def test_lowering_a_limit_evicts_down_to_it_at_once_oldest_leaves_first(hand: Hands) -> None:
    h = hand(16)
    h.put("abc", "ann")
    h.put("xyz", "ann")
    h.lookup("abc", "ann")
    assert limit(h, "ann", 4)
    assert h.chains("ann") == {"a", "ab", "abc", "x"} and h.usage("ann") == 4


def test_leased_blocks_leave_the_index_at_once_and_count_until_they_are_released(
    hand: Hands,
) -> None:
    h = hand(16)
    h.put("abcd", "ann")
    lease, _ = h.lease("abcd", "ann")
    assert limit(h, "ann", 2)
    assert h.usage("ann") == 4 and h.chains("ann") == set(), "out of the index, and still there"
    assert h.lookup("abcd", "ann").blocks == 0
    assert h.put("xy", "ann") == 2, "nothing is stored while the tenant is over its limit"
    assert h.usage("ann") == 4
    h.store.release(1, lease, h.now_ms)
    assert h.usage("ann") == 0
    assert h.put("xy", "ann") == 0 and h.chains("ann") == {"x", "xy"}


def test_leased_blocks_that_fit_the_limit_stay(hand: Hands) -> None:
    h = hand(16)
    h.put("abcd", "ann")
    h.lease("ab", "ann")
    assert limit(h, "ann", 2)
    assert h.usage("ann") == 2 and h.chains("ann") == {"a", "ab"}


def test_blocks_being_written_go_when_their_write_ends(hand: Hands) -> None:
    h = hand(16, shard_bytes=(64, 64))
    first, _ = h.prepare("abc", "ann", shard=0)
    second, _ = h.prepare("abc", "ann", shard=1)
    assert limit(h, "ann", 1)
    assert h.usage("ann") == 3 and h.chains("ann") == set()
    h.complete(first)
    assert h.usage("ann") == 3
    h.complete(second)
    assert h.usage("ann") == 0


def test_a_limit_is_reached_in_pieces_whether_or_not_anybody_waits_for_it(hand: Hands) -> None:
    h = hand(16)
    h.put("abcdefgh", "ann")
    h.store.blocks.a_turn = 1
    assert not limit(h, "ann", 2) and h.usage("ann") == 7
    for usage in range(6, 2, -1):
        assert h.store.tidy(h.now_ms) and h.usage("ann") == usage
    h.store.tidy(h.now_ms)
    assert not h.store.tidy(h.now_ms)
    assert h.chains("ann") == {"a", "ab"}


def test_a_tenant_whose_limit_is_not_reached_yet_comes_nearer_to_it_with_each_store(
    hand: Hands,
) -> None:
    h = hand(16)
    h.put("abcdefgh", "ann")
    h.store.blocks.a_turn = 2
    assert not limit(h, "ann", 3) and h.usage("ann") == 6
    assert h.put("xy", "ann") == 2 and h.usage("ann") == 4
    assert h.put("xy", "ann") == 0 and h.usage("ann") == 3


def test_the_default_limit_is_for_tenants_without_one_of_their_own(hand: Hands) -> None:
    h = hand(16)
    h.put("abc", "ann")
    h.put("xyz", "bob")
    limit(h, "bob", 8)
    assert default_limit(h, 1)
    assert (h.usage("ann"), h.usage("bob")) == (1, 3)
    shown = {each.tenant: (each.limit_bytes, each.own_limit) for each in operators.usage(h.store)}
    assert shown == {"ann": (SLOT, False), "bob": (8 * SLOT, True)}
    limit(h, "bob", None)
    assert h.usage("bob") == 1


def test_a_limit_below_the_quota_is_refused_and_names_both(hand: Hands) -> None:
    h = hand(16)
    h.quota("ann", 4)
    limit(h, "bob", 2)
    default = "default_limit = 12KiB (12288 bytes) is less than quota_bytes of 1 tenants"
    for request, field, text in (
        (
            lambda: limit(h, "ann", 3),
            "limit_bytes",
            "limit_bytes = 12KiB (12288 bytes) is less than quota_bytes",
        ),
        (
            lambda: h.quota("bob", 3),
            "quota_bytes",
            "quota_bytes = 12KiB (12288 bytes) is more than limit_bytes = 8KiB",
        ),
        (lambda: default_limit(h, 3), "default_limit", default),
    ):
        with pytest.raises(RequestError) as error:
            request()
        assert (error.value.code, error.value.field) == ("limit_below_quota", field)
        assert text in error.value.message and "kvkeep tenants set-" in error.value.hint
    limit(h, "ann", 4)
    default_limit(h, 3)
    with pytest.raises(
        RequestError, match=r"default_limit = 12KiB .* is less than quota_bytes = 16KiB"
    ):
        limit(h, "ann", None)


@pytest.mark.parametrize("nbytes", [-1, (64 << 40) + 1, 10**400])
def test_a_limit_out_of_range_is_refused(hand: Hands, nbytes: int) -> None:
    h = hand()
    for request in (
        lambda: operators.set_limit(h.store, "ann", nbytes, h.now_ms),
        lambda: operators.set_default_limit(h.store, nbytes, h.now_ms),
    ):
        with pytest.raises(RequestError) as error:
            request()
        assert error.value.code == "bad_limit" and error.value.hint
    assert operators.usage(h.store) == []


def test_a_limit_lowers_the_default_quota_of_its_tenant(hand: Hands) -> None:
    h = hand(16, default_quota=4)
    limit(h, "ann", 1)
    h.put("x", "bob")
    assert {u.tenant: u.quota_bytes for u in operators.usage(h.store)} == {
        "ann": SLOT,
        "bob": 4 * SLOT,
    }


def test_tenants_with_a_limit_alone_still_make_way_for_others_oldest_first(hand: Hands) -> None:
    h = hand(4)
    h.put("a", "ann")
    limit(h, "bob", 3)
    h.put("xy", "bob")
    h.put("z", "cy")
    h.put("n", "dee")
    assert h.usage("ann") == 0, "one order of eviction over all tenants without quotas"
    h.put("m", "dee")
    assert (h.usage("bob"), h.usage("cy"), h.usage("dee")) == (1, 1, 2)


# -- quotas kept from a larger pool


def test_own_quotas_that_exceed_the_pool_are_scaled_down_to_fit_it_exactly(hand: Hands) -> None:
    h = hand(10)
    operators.restore(
        h.store, {"ann": 20 * SLOT, "bob": 5 * SLOT, "cy": 1}, {}, None, None, h.now_ms
    )
    shown = {
        each.tenant: (each.quota_bytes, each.set_quota_bytes) for each in operators.usage(h.store)
    }
    pool, promised = 10 * SLOT, 25 * SLOT + 1
    assert shown == {
        "ann": (20 * SLOT * pool // promised, 20 * SLOT),
        "bob": (5 * SLOT * pool // promised, 5 * SLOT),
        "cy": (0, 1),
    }
    assert sum(in_force for in_force, _ in shown.values()) <= pool


def test_scaled_quotas_protect_what_they_promise(hand: Hands) -> None:
    h = hand(10)
    operators.restore(h.store, {"ann": 12 * SLOT, "bob": 8 * SLOT}, {}, None, None, h.now_ms)
    h.put("abcdefgh", "ann")
    h.put("qrstuvwxyz", "bob")
    assert (h.usage("ann"), h.usage("bob")) == (6, 4)


def test_scaled_quotas_can_be_lowered_but_not_raised_and_return_when_they_fit(hand: Hands) -> None:
    h = hand(10)
    operators.restore(h.store, {"ann": 12 * SLOT, "bob": 8 * SLOT}, {}, None, None, h.now_ms)
    for tenant, slots in (("ann", 13), ("cy", 1)):
        with pytest.raises(RequestError) as error:
            h.quota(tenant, slots)
        assert error.value.code == "quota_too_large"
    h.quota("ann", 7)
    assert h.store.tenants.get("bob").quota_bytes == 8 * SLOT * 10 // 15
    h.quota("ann", 2)
    assert not h.store.tenants.is_scaled
    assert {u.tenant: u.quota_bytes for u in operators.usage(h.store)} == {
        "ann": 2 * SLOT,
        "bob": 8 * SLOT,
    }


def test_restored_limits_hold_for_adopted_blocks(hand: Hands) -> None:
    h = hand(10)
    h.put("abcd", "ann")
    h.put("xyz", "bob")
    operators.restore(h.store, {"ann": 8 * SLOT}, {"ann": 2 * SLOT}, 20 * SLOT, SLOT, h.now_ms)
    shown = {
        u.tenant: (u.usage_bytes, u.quota_bytes, u.limit_bytes) for u in operators.usage(h.store)
    }
    assert shown == {"ann": (2 * SLOT, 2 * SLOT, 2 * SLOT), "bob": (SLOT, SLOT, SLOT)}
