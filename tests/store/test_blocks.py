"""The states of a block: visible when whole and its prefix is, gone when nobody holds it, and
nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.store import operators

Hands = Callable[..., Any]


def test_a_block_is_visible_with_its_last_shard(hand: Hands) -> None:
    h = hand(4, shard_bytes=(64, 64, 64))
    for shard in (2, 0, 1):
        assert h.lookup("ab").blocks == 0
        write, _ = h.prepare("ab", shard=shard)
        assert h.lookup("ab").blocks == 0
        h.complete(write, checksum=shard + 10)
    hit = h.lookup("ab")
    assert hit.blocks == 2 and hit.checksums.tolist() == [[10, 11, 12]] * 2


def test_a_whole_block_waits_for_its_parent(hand: Hands) -> None:
    h = hand(4)
    parent, _ = h.prepare("a")
    child, _ = h.prepare("bc", after="a")
    h.complete(child)
    assert h.states() == ["waiting", "waiting", "writing"] and h.lookup("abc").blocks == 0
    h.complete(parent)
    assert h.lookup("abc").blocks == 3


def test_abandoned_blocks_go_at_once_with_empty_parents(hand: Hands) -> None:
    h = hand(4)
    first, _ = h.prepare("ab")
    second, _ = h.prepare("cd", after="ab")
    h.store.abandon_store(1, first, h.now_ms)
    assert h.chains() == {"a", "ab", "abc", "abcd"}
    h.store.abandon_store(1, second, h.now_ms)
    assert h.chains() == set() and h.store.slabs.available(4096) == 4


def test_a_long_empty_chain_goes_in_one_step(hand: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    h = hand(16)
    h.put("ab")
    write, _ = h.prepare("cdefghijkl", after="ab")
    freed: list[int] = []
    give = h.store.slabs.give
    monkeypatch.setattr(
        h.store.slabs, "give", lambda slots: (freed.append(len(slots)), give(slots))
    )
    h.store.abandon_store(1, write, h.now_ms)
    assert freed == [10] and h.chains() == {"a", "ab"}
    operators.clear(h.store, "t")
    assert freed == [10, 2] and h.chains() == set()


def test_another_session_fills_in_what_was_abandoned(hand: Hands) -> None:
    h = hand(4)
    h.store.open_session(2)
    first, _ = h.prepare("ab")
    second, _ = h.prepare("c", after="ab", session=2)
    h.store.close_session(1, h.now_ms)
    h.complete(second, session=2)
    assert h.lookup("abc", session=2).blocks == 0
    third, plan = h.prepare("abc", session=2)
    assert plan.positions.tolist() == [0, 1]
    h.complete(third, session=2)
    assert h.lookup("abc", session=2).blocks == 3
    assert first not in h.store.sessions[2].writes


def test_a_lease_on_the_deepest_block_protects_its_prefix(hand: Hands) -> None:
    h = hand(4)
    h.put("abc")
    lease, hit = h.lease("abc", skip=2)
    assert hit.blocks == 3 and len(hit.slots) == 1
    assert h.put("wxyz") == 3 and h.chains() == {"a", "ab", "abc", "w"}
    h.store.release(1, lease, h.now_ms)
    assert h.put("wxyz") == 0 and h.chains() == {"w", "wx", "wxy", "wxyz"}


def test_dropped_while_leased_is_freed_by_the_last_release(hand: Hands) -> None:
    h = hand(4)
    h.put("abc")
    (first, _), (second, _) = h.lease("abc"), h.lease("ab")
    assert h.store.drop_blocks("t", [h.key("ab")]) == 2
    assert (
        h.chains() == {"a"} and h.states() == ["evicting", "evicting", "ready"] and h.usage() == 3
    )
    assert h.put("xyz") == 2, "slots that somebody reads are not handed out"
    h.store.release(1, first, h.now_ms)
    assert h.states() == ["evicting", "ready", "ready"]
    h.store.release(1, second, h.now_ms)
    assert h.states() == ["ready", "ready"] and h.usage() == 2
    assert h.put("xyz") == 0


def test_a_block_stored_anew_while_its_old_self_is_still_read(hand: Hands) -> None:
    h = hand(4)
    h.put("ab")
    lease, before = h.lease("ab")
    h.store.drop_blocks("t", [h.key("ab")])
    assert h.put("ab") == 0
    after = h.lookup("ab")
    assert after.blocks == 2 and after.slots[1] != before.slots[1] and h.usage() == 3
    h.store.release(1, lease, h.now_ms)
    assert h.usage() == 2 and h.lookup("ab").slots.tolist() == after.slots.tolist()


def test_dropped_while_written_never_becomes_visible(hand: Hands) -> None:
    h = hand(4)
    write, _ = h.prepare("ab")
    h.store.drop_blocks("t", [h.key("a")])
    assert h.states() == ["evicting", "evicting"]
    assert h.complete(write) == 2
    assert h.states() == [] and h.lookup("ab").blocks == 0


def test_what_a_dropped_block_hung_on_can_be_evicted_again(hand: Hands) -> None:
    h = hand(2)
    h.put("ab")
    h.store.drop_blocks("t", [h.key("ab")])
    assert h.put("xy") == 0 and h.chains() == {"x", "xy"}


def test_the_last_block_of_a_tenant_makes_way_for_its_next(hand: Hands) -> None:
    h = hand(1)
    h.put("a")
    assert h.put("b") == 0 and h.chains() == {"b"} and h.usage() == 1
