"""Who goes first: leaves before parents, tails before heads, hints before age."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.store import operators


def test_tails_go_first(hand: Callable[..., Any]) -> None:
    h = hand(4)
    h.put("abcd")
    h.put("x")
    assert h.chains() == {"a", "ab", "abc", "x"}
    h.put("xyz")
    assert h.chains() == {"a", "x", "xy", "xyz"}


def test_the_least_recently_used_chain_goes_first(hand: Callable[..., Any]) -> None:
    h = hand(4)
    h.put("ab")
    h.put("xy")
    h.lookup("ab")
    h.put("mn")
    assert h.chains() == {"a", "ab", "m", "mn"}


def test_a_use_of_the_head_keeps_the_head_only(hand: Callable[..., Any]) -> None:
    h = hand(4)
    h.put("abc")
    h.lookup("a")
    h.put("x")
    h.put("xyz")
    assert h.chains() == {"a", "x", "xy", "xyz"}


def test_a_parent_inherits_its_childs_last_use(hand: Callable[..., Any]) -> None:
    h = hand(3)
    h.put("ab")
    h.put("x")
    h.lookup("ab")
    h.put("m")  # x goes
    h.put("mn")  # ab goes, and a is now as young as ab was: older than m
    assert h.chains() == {"a", "m", "mn"}
    h.put("mno")
    assert h.chains() == {"m", "mn", "mno"}


def test_a_finished_session_goes_before_older_ones(hand: Callable[..., Any]) -> None:
    h = hand(4)
    h.put("ab")
    h.put("xy")
    assert h.finish("xy") and not h.finish("nothere")
    h.put("mn")
    assert h.chains() == {"a", "ab", "m", "mn"}


def test_a_finished_session_that_is_used_again_is_as_young_as_any(hand: Callable[..., Any]) -> None:
    h = hand(4)
    h.put("ab")
    h.put("xy")
    h.finish("xy")
    h.lookup("xy")
    h.put("mn")
    assert h.chains() == {"x", "xy", "m", "mn"}


def test_lower_priorities_go_first_whatever_their_age(hand: Callable[..., Any]) -> None:
    h = hand(3)
    h.put("a", priority=60)
    h.put("b", priority=40)
    h.put("c", priority=50)
    h.put("d", priority=100)
    h.put("e", priority=100)
    assert h.chains() == {"a", "d", "e"}


def test_hints_beat_priorities(hand: Callable[..., Any]) -> None:
    h = hand(3)
    h.put("a", priority=0)
    h.put("b", priority=100)
    h.put("c", priority=90, ttl_ms=5)
    h.finish("b")
    h.now_ms += 5
    h.put("d")
    assert h.chains() == {"a", "b", "d"}
    h.put("e")
    assert h.chains() == {"a", "d", "e"}


def test_the_expired_go_first_and_not_a_moment_sooner(hand: Callable[..., Any]) -> None:
    h = hand(3)
    h.put("a")
    h.put("b", ttl_ms=10)
    h.put("c", ttl_ms=50)
    h.now_ms += 9
    h.put("d")
    assert h.chains() == {"b", "c", "d"}
    h.now_ms += 50
    h.put("e")
    h.put("f")
    assert h.chains() == {"d", "e", "f"}


def test_blocks_that_expire_while_leased_go_first_afterwards(hand: Callable[..., Any]) -> None:
    h = hand(3)
    h.put("a")
    h.put("b", ttl_ms=10)
    lease, _ = h.lease("b")
    h.put("c")
    h.now_ms += 20
    h.put("d")
    assert h.chains() == {"b", "c", "d"}
    h.store.release(1, lease, h.now_ms)
    h.put("e")
    assert h.chains() == {"c", "d", "e"}


def test_half_written_blocks_are_as_young_as_any(hand: Callable[..., Any]) -> None:
    h = hand(3, shard_bytes=(64, 64))
    h.put("a")
    write, _ = h.prepare("b", shard=0)
    h.complete(write)
    h.put("c")
    h.put("d")
    write, plan = h.prepare("b", shard=1)
    h.complete(write)
    assert len(plan.positions) == 1 and h.chains() == {"b", "c", "d"}
    h.put("efg")
    assert h.chains() == {"e", "ef", "efg"}


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_rank_that_is_behind_another_completes_what_that_one_began(hand: Callable[..., Any], behind: int) -> None:
    """A full pool, and two ranks that store the same chains, one of them some stores later than the other."""
    h = hand(10, shard_bytes=(64, 64))
    for old in "abcdefghij":
        h.put(old)
    names = [f"{chr(0x100 + 2 * at)}{chr(0x101 + 2 * at)}" for at in range(20)]
    for at in range(len(names) + behind):
        for shard, name in ((0, names[at : at + 1]), (1, names[at - behind : at - behind + 1] if at >= behind else [])):
            for chain in name:
                write, _ = h.prepare(chain, shard=shard)
                h.complete(write)
    assert h.chains() == {part for name in names[-5:] for part in (name[:1], name)}


def test_queues_do_not_grow_with_what_has_passed_through(hand: Callable[..., Any]) -> None:
    h = hand(4)
    h.quota("t", 4)
    order = h.store.blocks.order
    for i in range(5000):
        h.put(chr(0x100 + i), ttl_ms=1_000_000)
        if i % 5 == 0:
            operators.clear(h.store, "t")
    assert len(order._expiring) < 2000
    assert sum(len(heap) for sizes in order._queues.values() for heap in sizes.values()) < 2000


@pytest.mark.parametrize("slots", [None, 4])
def test_the_queue_of_a_tenant_without_blocks_is_forgotten(hand: Callable[..., Any], slots: int | None) -> None:
    h = hand(4, default_quota=slots)
    h.put("ab")
    operators.clear(h.store)
    assert list(h.store.blocks.order._queues) == ([-1] if slots is None else [])
