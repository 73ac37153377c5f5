"""What operators do: quotas that fit, clearing, dropping, and usage as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.errors import RequestError
from kvkeep.store import operators
from kvkeep.store.plans import TenantUsage

Hands = Callable[..., Any]


def test_usage_shows_blocks_bytes_and_whose_quota_it_is(hand: Hands) -> None:
    h = hand(8, default_quota=2)
    h.put("ab", "ann")
    h.quota("bob", 3)
    assert operators.usage(h.store) == [
        TenantUsage("ann", 2, 8192, 8192, False),
        TenantUsage("bob", 0, 0, 3 * 4096, True, 3 * 4096),
    ]


def test_own_quotas_together_fit_the_pool(hand: Hands) -> None:
    h = hand(8)
    h.quota("ann", 5)
    for slots in (4, -1):
        with pytest.raises(RequestError, match="does not fit") as error:
            h.quota("bob", slots)
        assert (error.value.code, error.value.field) == ("quota_too_large", "quota_bytes")
        assert "--pool-size" in error.value.hint and h.store.tenants.get("bob") is None
    h.quota("ann", 8)
    h.quota("ann", 2)
    h.quota("bob", 6)


def test_a_default_quota_fits_the_pool(hand: Hands) -> None:
    h = hand(8)
    for nbytes in (9 * 4096, -1):
        with pytest.raises(RequestError, match="does not fit") as error:
            operators.set_default_quota(h.store, nbytes, h.now_ms)
        assert error.value.field == "default_quota" and "--pool-size" in error.value.hint
    assert h.store.tenants.default_quota_bytes is None


def test_unsetting_a_quota_of_nobody_is_an_error_that_says_so(hand: Hands) -> None:
    h = hand()
    for request in (lambda: h.quota("nobody", None), lambda: operators.clear(h.store, "nobody")):
        with pytest.raises(RequestError, match="nobody has no blocks") as error:
            request()
        assert error.value.code == "unknown_tenant" and "kvkeep tenants list" in error.value.hint


def test_a_tenant_without_blocks_is_forgotten_with_its_quota(hand: Hands) -> None:
    h = hand()
    h.quota("ann", 1)
    h.quota("ann", None)
    assert operators.usage(h.store) == []


def test_quotas_count_from_the_moment_they_are_set(hand: Hands) -> None:
    h = hand(4)
    h.put("ab", "ann")
    h.put("x", "bob")
    h.quota("ann", 2)
    h.put("yz", "bob")
    assert (h.usage("ann"), h.usage("bob")) == (2, 2)
    h.quota("ann", None)
    h.put("mno", "bob")
    assert h.usage("ann") == 0 or h.chains("bob") >= {"m", "mn", "mno"}
    operators.set_default_quota(h.store, 4096, h.now_ms)
    h.put("abc", "ann")
    assert h.usage("bob") >= 1


def test_clear_takes_one_tenant_or_all(hand: Hands) -> None:
    h = hand(8)
    h.put("abc", "ann")
    h.put("abd", "ann")
    h.put("xy", "bob")
    assert operators.clear(h.store, "ann") == 4 and h.usage("bob") == 2
    h.put("a", "ann")
    lease, _ = h.lease("xy", "bob")
    assert operators.clear(h.store) == 3
    assert h.usage("ann") == 0 and h.usage("bob") == 2, "somebody still reads bob's"
    assert operators.clear(h.store) == 0
    h.store.release(1, lease, h.now_ms)
    assert operators.usage(h.store) == []


def test_drop_takes_what_hangs_on_the_block_and_no_more(hand: Hands) -> None:
    h = hand(8)
    h.put("abcd")
    h.put("abxy")
    h.put("q", "other")
    assert h.store.drop_blocks("t", [h.key("abc")]) == 2
    assert h.chains() == {"a", "ab", "abx", "abxy"} and h.lookup("abcd").blocks == 2
    assert h.store.drop_blocks("t", [h.key("abc")]) == 0
    assert h.store.drop_blocks("nobody", [h.key("a")]) == 0
    assert h.store.drop_blocks("t", [h.key("q")]) == 0
