"""The store's requests one by one: what they answer, what they refuse, and that a refusal changes
nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import RequestError
from kvkeep.store import operators
from kvkeep.store.plans import Limits
from kvkeep.store.table import NO_ROW
from kvkeep_lab.simulation.store_integrity import check_integrity

Hands = Callable[..., Any]


def refused(request: Callable[[], object], code: str, field: str, hint: str = "") -> None:
    with pytest.raises(RequestError) as error:
        request()
    assert (error.value.code, error.value.field) == (code, field)
    assert hint in error.value.hint


# -- lookups ---------------------------------------------------------------------------------------


def test_a_hit_is_leased_and_described_from_skip_on(hand: Hands) -> None:
    h = hand()
    h.put("abc")
    _, hit = h.lease("abcd", skip=1)
    assert (
        hit.blocks == 3
        and hit.slots.tolist() == [4096, 8192]
        and hit.checksums.tolist() == [[7], [7]]
    )
    assert list(h.store.sessions[1].leases.values()) == [h.row("abc")]


@pytest.mark.parametrize(
    ("chain", "skip", "blocks"), [("abc", 3, 3), ("abcd", 4, 3), ("xyz", 0, 0), ("", 0, 0)]
)
def test_nothing_beyond_skip_is_no_lease(hand: Hands, chain: str, skip: int, blocks: int) -> None:
    h = hand()
    h.put("abc")
    _, hit = h.lease(chain, skip=skip)
    assert hit.blocks == blocks and len(hit.slots) == 0 and hit.checksums.shape == (0, 1)
    assert h.store.sessions[1].leases == {}


def test_tenants_never_share_blocks(hand: Hands) -> None:
    h = hand()
    h.put("ab", "ann")
    assert h.lookup("ab", "bob").blocks == 0 and h.put("ab", "bob") == 0
    assert set(h.lookup("ab", "ann").slots.tolist()).isdisjoint(
        h.lookup("ab", "bob").slots.tolist()
    )


def test_a_block_of_another_layout_is_a_miss(hand: Hands) -> None:
    h = hand()
    other = h.store.open_layout(1, b"other", (64,)).number
    h.put("ab")
    assert h.store.lookup(1, 1, "t", other, h.keys("ab"), 0, 0).blocks == 0


def test_lookups_are_refused_with_field_and_remedy(hand: Hands) -> None:
    h = hand(limits=Limits(blocks_per_request=4, leases_per_session=1))
    h.put("ab")
    look = h.store.lookup
    refused(lambda: look(9, 1, "t", 1, b"", 0, 0), "unknown_session", "session", "Hello")
    refused(lambda: look(1, 1, "t", 9, b"", 0, 0), "unknown_layout", "layout", "OpenLayout")
    refused(lambda: look(1, 1, "t", 1, b"x", 0, 0), "bad_keys", "keys")
    refused(
        lambda: look(1, 1, "t", 1, bytes(80), 0, 0),
        "too_many_blocks",
        "keys",
        "--max-blocks-per-request",
    )
    for skip in (-1, 3):
        refused(lambda skip=skip: look(1, 1, "t", 1, h.keys("ab"), skip, 0), "bad_skip", "skip")
    lease, _ = h.lease("ab")
    refused(lambda: look(1, lease, "t", 1, b"", 0, 0), "lease_exists", "lease")
    refused(
        lambda: look(1, lease + 1, "t", 1, b"", 0, 0),
        "too_many_leases",
        "lease",
        "--max-leases-per-session",
    )


def test_releasing_twice_is_no_error(hand: Hands) -> None:
    h = hand()
    h.put("ab")
    lease, _ = h.lease("ab")
    assert h.store.release(1, lease, 0) and not h.store.release(1, lease, 0)


# -- stores ----------------------------------------------------------------------------------------


def test_what_is_there_or_on_its_way_is_not_written_again(hand: Hands) -> None:
    h = hand(8)
    h.put("ab")
    h.store.open_session(2)
    _, mine = h.prepare("abcd")
    _, theirs = h.prepare("abcde", session=2)
    assert (
        mine.positions.tolist() == [2, 3]
        and theirs.positions.tolist() == [4]
        and theirs.refused == 0
    )


def test_each_shard_is_written_once_by_whoever_has_it(hand: Hands) -> None:
    h = hand(shard_bytes=(64, 64))
    h.store.open_session(2)
    first, left = h.prepare("ab", shard=0)
    second, right = h.prepare("ab", shard=1, session=2)
    assert left.slots.tolist() == right.slots.tolist()
    assert h.prepare("ab", shard=1)[1].positions.tolist() == []
    h.complete(second, session=2)
    assert h.lookup("ab").blocks == 0
    h.complete(first)
    assert h.lookup("ab").blocks == 2


def test_a_store_without_its_parent_is_an_orphan(hand: Hands) -> None:
    h = hand()
    _, plan = h.prepare("cd", after="ab")
    assert plan.orphan and plan.refused == 2 and len(plan.slots) == 0 and h.states() == []


def test_a_store_of_nothing_new_leaves_no_write(hand: Hands) -> None:
    h = hand()
    h.put("ab")
    for chain, after in (("ab", ""), ("", "ab"), ("", "")):
        _, plan = h.prepare(chain, after=after)
        assert len(plan.positions) == plan.refused == 0 and h.store.sessions[1].writes == {}


def test_keys_that_form_no_chain_are_refused(hand: Hands) -> None:
    h = hand(8)
    h.put("abc")
    other = h.store.open_layout(1, b"other", (64,)).number

    def store(parent: bytes, *keys: bytes, layout: int = 1) -> Callable[[], object]:
        return lambda: h.store.prepare_store(1, 50, "t", layout, 0, parent, b"".join(keys), 0)

    k = h.key
    for request in (
        store(b"", k("ab")),
        store(b"", k("a"), k("abc")),
        store(b"", k("x"), k("a")),
        store(b"", k("x"), k("x")),
        store(k("a"), k("a")),
        store(k("a"), k("x"), k("a")),
        store(b"", k("a"), layout=other),
    ):
        refused(request, "broken_chain", "keys")
    refused(store(k("a"), k("x"), layout=other), "broken_chain", "parent")
    assert h.chains() == {"a", "ab", "abc"} and h.store.sessions[1].writes == {}


def test_stores_are_refused_with_field_and_remedy(hand: Hands) -> None:
    h = hand(8, limits=Limits(blocks_per_request=4, writing_blocks_per_session=3, tenants=1))
    ask = h.prepare
    refused(lambda: ask("abcde"), "too_many_blocks", "keys", "--max-blocks-per-request")
    refused(lambda: ask("a", shard=1), "bad_shard", "shard")
    refused(lambda: ask("a", shard=-1), "bad_shard", "shard")
    refused(lambda: ask("a", priority=101), "bad_priority", "priority")
    refused(lambda: ask("a", priority=-1), "bad_priority", "priority")
    refused(lambda: ask("a", ttl_ms=-1), "bad_ttl", "ttl_ms")
    refused(lambda: h.store.prepare_store(1, 1, "t", 1, 0, b"short", b"", 0), "bad_keys", "parent")
    write, _ = ask("a")
    refused(lambda: ask("b", write=write), "write_exists", "write")
    refused(lambda: ask("a", "another"), "too_many_tenants", "tenant", "--max-tenants")
    _, plan = ask("bcde", after="a")
    assert plan.positions.tolist() == [0, 1] and plan.refused == 2
    refused(lambda: ask("x"), "too_many_writes", "keys", "--max-writing-blocks-per-session")


def test_the_limit_on_writes_counts_joined_blocks_too(hand: Hands) -> None:
    h = hand(8, shard_bytes=(64, 64), limits=Limits(writing_blocks_per_session=2))
    h.store.open_session(2)
    h.prepare("ab")
    h.prepare("cd", after="ab", session=2)
    h.store.open_session(3)
    _, plan = h.prepare("abcde", shard=1, session=3)
    assert plan.positions.tolist() == [0, 1] and plan.refused == 3


def test_completing_needs_a_checksum_a_block(hand: Hands) -> None:
    h = hand()
    write, _ = h.prepare("ab")
    refused(
        lambda: h.store.complete_store(1, write, np.zeros(1, np.uint64), 0),
        "bad_checksums",
        "checksums",
    )
    refused(
        lambda: h.store.complete_store(1, 999, np.zeros(0, np.uint64), 0), "unknown_write", "write"
    )
    assert h.lookup("ab").blocks == 0
    stored = h.store.complete_store(1, write, np.array([5, 2**64 - 1], np.uint64), 0)
    assert (stored.blocks, stored.nbytes) == (2, 128)
    assert h.lookup("ab").checksums.tolist() == [[5], [2**64 - 1]]


def test_abandoning_twice_is_no_error(hand: Hands) -> None:
    h = hand()
    write, _ = h.prepare("ab")
    assert h.store.abandon_store(1, write, 0) and not h.store.abandon_store(1, write, 0)
    assert h.states() == []


# -- sessions and layouts --------------------------------------------------------------------------


def test_a_session_that_ends_gives_everything_back(hand: Hands) -> None:
    h = hand(8)
    h.put("ab")
    h.store.open_session(2)
    h.lease("ab", session=2)
    h.prepare("cd", after="ab", session=2)
    h.prepare("xy", session=2)
    h.store.close_session(2, h.now_ms)
    assert h.chains() == {"a", "ab"} and 2 not in h.store.sessions and h.store.writers == {}
    refused(lambda: h.store.close_session(2, h.now_ms), "unknown_session", "session")


def test_sessions_are_limited_and_unique(hand: Hands) -> None:
    h = hand(limits=Limits(sessions=2))
    refused(lambda: h.store.open_session(1), "session_exists", "session")
    h.store.open_session(2)
    refused(lambda: h.store.open_session(3), "too_many_sessions", "session", "--max-sessions")


def test_layouts_have_shards_of_at_least_a_byte(hand: Hands) -> None:
    h = hand(limits=Limits(shards=2))
    for shard_bytes in ((), (1, 1, 1), (0,), (64, -1)):
        refused(
            lambda shard_bytes=shard_bytes: h.store.open_layout(1, b"x", shard_bytes),
            "bad_shards",
            "shard_bytes",
        )


def test_finish_says_whether_the_block_is_here(hand: Hands) -> None:
    h = hand()
    h.put("ab")
    assert h.finish("ab") and not h.finish("abc") and not h.finish("ab", "nobody")


def test_hundreds_of_blocks_in_one_request(hand: Hands) -> None:
    h = hand(512)
    keys = b"".join(i.to_bytes(16, "big") for i in range(512))
    plan = h.store.prepare_store(1, 1, "t", 1, 0, b"", keys, 0)
    assert plan.positions.tolist() == list(range(512)) and plan.slots.tolist() == list(
        range(0, 512 * 4096, 4096)
    )
    h.store.complete_store(1, 1, np.arange(512, dtype=np.uint64), 0)
    hit = h.store.lookup(1, 1, "t", 1, keys, 100, 0)
    assert hit.blocks == 512 and hit.checksums[:, 0].tolist() == list(range(100, 512))
    with pytest.raises(RequestError, match="513 keys in one store, of 512") as error:
        h.store.prepare_store(1, 2, "t", 1, 0, b"", keys + bytes(16), 0)
    assert error.value.code == "too_many_blocks"


def test_at_the_limit_the_coldest_layout_that_no_session_has_open_makes_way(hand: Hands) -> None:
    h = hand(8, limits=Limits(layouts=3))
    h.store.open_session(2)
    cold, warm = (h.store.open_layout(2, name, (64,)).number for name in (b"cold", b"warm"))
    h.put("ab", layout=warm)
    h.put("cd", layout=cold)
    h.put("ef")
    h.lookup("ab", layout=warm)
    refused(
        lambda: h.store.open_layout(1, b"new", (64,)),
        "too_many_layouts",
        "fingerprint",
        "--max-layouts",
    )
    h.store.close_session(2, h.now_ms)
    lease, _ = h.lease("c", layout=cold)
    new = h.store.open_layout(1, b"new", (64,)).number
    assert {layout.number for layout in h.store.layouts} == {h.layout, cold, new}, (
        "what somebody reads stays"
    )
    refused(lambda: h.store.open_layout(1, b"newer", (64,)), "too_many_layouts", "fingerprint")
    h.store.release(1, lease, h.now_ms)
    newer = h.store.open_layout(1, b"newer", (64,)).number
    assert {layout.number for layout in h.store.layouts} == {
        h.layout,
        new,
        newer,
    } and h.chains() == {"e", "ef"}


def test_at_the_limit_the_coldest_tenant_without_a_quota_of_its_own_makes_way(hand: Hands) -> None:
    h = hand(8, limits=Limits(tenants=3))
    h.quota("ann", 1)
    h.put("ab", "bob")
    h.put("c", "cy")
    h.lookup("a", "bob")
    assert h.put("d", "dee") == 0 and h.usage("cy") == 0 and h.usage("bob") == 2
    leases = [h.lease("ab", "bob")[0], h.lease("d", "dee")[0]]
    refused(lambda: h.prepare("e", "eve"), "too_many_tenants", "tenant", "--max-tenants")
    h.store.release(1, leases[0], h.now_ms)
    assert h.put("e", "eve") == 0 and h.usage("bob") == 0 and h.store.tenants.get("ann") is not None


# -- a turn does so much and no more


def turns_of(h: Any, request: Callable[[], Any], a_turn: int = 8) -> list[int]:
    """Blocks freed by the request, and by each turn after it until all is done. At no point a
    lookup contradicts."""
    blocks, turns = h.store.blocks, list[int]()
    blocks.a_turn = a_turn
    before = blocks.freed
    request()
    turns.append(blocks.freed - before)
    while h.store.has_to_tidy:
        check_integrity(h.store)
        before = blocks.freed
        h.store.tidy(h.now_ms)
        turns.append(blocks.freed - before)
        assert len(turns) < 500
    return turns


def long_chain(h: Any, name: str, blocks: int, tenant: str = "t") -> bytes:
    """Its keys."""
    keys = b"".join(f"{name}{at}".encode().ljust(16, b".") for at in range(blocks))
    write = next(h.numbers)
    h.store.prepare_store(1, write, tenant, h.layout, 0, b"", keys, h.now_ms)
    h.complete(write)
    return keys


def bush(h: Any, leaves: int, tenant: str = "t") -> bytes:
    """A root with that many children."""
    root = long_chain(h, "root", 1, tenant)
    for at in range(leaves):
        write, key = next(h.numbers), f"leaf{at}".encode().ljust(16, b".")
        h.store.prepare_store(1, write, tenant, h.layout, 0, root, key, h.now_ms)
        h.complete(write)
    return root


def test_a_prefix_stored_again_is_found_before_what_was_dropped_is_swept(hand: Hands) -> None:
    h = hand(20)
    h.put("abcdefgh")
    h.store.blocks.a_turn = 1
    h.store.drop_blocks("t", [h.key("a")])
    assert h.lookup("abcdefgh").blocks == 0
    for stored in ("ab", "abcd"):
        h.put(stored)
        assert h.store.blocks.unswept and h.lookup("abcdefgh").blocks == len(stored)
        h.store.drop_blocks("t", [h.key("a")])
        assert h.lookup("abcdefgh").blocks == 0, "a dropped block is never found"


@pytest.mark.parametrize("shape", ["chain", "bush"])
def test_a_large_tree_is_unreadable_at_once_and_freed_in_pieces(hand: Hands, shape: str) -> None:
    h = hand(128)
    keys = long_chain(h, "c", 100) if shape == "chain" else bush(h, 99)
    leaf = keys[-16:] if shape == "chain" else b"leaf0".ljust(16, b".")
    h.store.blocks.a_turn = 8
    h.store.drop_blocks("t", [keys[:16]])
    assert h.store.tenants.get("t").index.get(leaf) != NO_ROW, "the sweep has not come so far"
    prompt = keys if shape == "chain" else keys + leaf
    assert h.store.lookup(1, 900, "t", h.layout, prompt, 0, h.now_ms).blocks == 0
    plan = h.store.prepare_store(1, 901, "t", h.layout, 0, leaf, b"below".ljust(16), h.now_ms)
    assert plan.orphan, "nothing is hung on what is going"
    turns = turns_of(h, lambda: None)
    assert max(turns) <= 8 and not len(h.store.blocks.table)


def test_a_dropped_prompt_can_be_stored_again_before_it_is_swept(hand: Hands) -> None:
    h = hand(256)
    keys = long_chain(h, "c", 100)
    h.store.blocks.a_turn = 8
    h.store.drop_blocks("t", [keys[16:32]])
    assert h.store.lookup(1, 900, "t", h.layout, keys, 0, h.now_ms).blocks == 1
    h.store.release(1, 900, h.now_ms)
    assert long_chain(h, "c", 100) == keys
    assert h.store.lookup(1, 901, "t", h.layout, keys, 0, h.now_ms).blocks == 100
    turns_of(h, lambda: None)
    assert (
        h.store.lookup(1, 902, "t", h.layout, keys, 0, h.now_ms).blocks
        == 100
        == len(h.store.blocks.table)
    )


def test_clearing_detaches_the_index_and_frees_in_pieces(hand: Hands) -> None:
    h = hand(256)
    keys = long_chain(h, "c", 100)
    assert turns_of(h, lambda: operators.clear(h.store, "t")) == [8] * 12 + [4]
    long_chain(h, "c", 100)
    h.store.blocks.a_turn = 8
    assert operators.clear(h.store, "t") == 100
    long_chain(h, "c", 50)
    assert h.store.lookup(1, 900, "t", h.layout, keys, 0, h.now_ms).blocks == 50, (
        "stored again since"
    )
    turns_of(h, lambda: None)
    assert len(h.store.blocks.table) == 50 and len(h.store.tenants.get("t").index) == 50


def test_the_end_of_a_lease_on_a_long_chain_that_was_cleared_frees_it_in_pieces(
    hand: Hands,
) -> None:
    h = hand(128)
    keys = long_chain(h, "c", 100)
    h.store.lookup(1, 900, "t", h.layout, keys, 0, h.now_ms)
    turns_of(h, lambda: operators.clear(h.store, "t"))
    assert len(h.store.blocks.table) == 100
    turns = turns_of(h, lambda: h.store.release(1, 900, h.now_ms))
    assert max(turns) <= 8 and sum(turns) == 100


def test_a_session_gives_back_what_it_holds_in_pieces(hand: Hands) -> None:
    h = hand(256)
    h.store.open_session(2)
    for number in range(4):
        keys = b"".join(f"{number}w{at}".encode().ljust(16, b".") for at in range(50))
        h.store.prepare_store(2, number, "t", h.layout, 0, b"", keys, h.now_ms)
    turns = turns_of(h, lambda: h.store.close_session(2, h.now_ms))
    assert max(turns) <= 8 and sum(turns) == 200 and 2 not in h.store.sessions


def test_a_new_name_beyond_the_limit_does_not_wait_for_the_one_that_makes_way(hand: Hands) -> None:
    h = hand(256, limits=Limits(tenants=2))
    long_chain(h, "c", 100, "old")
    long_chain(h, "d", 1, "young")
    turns = turns_of(h, lambda: long_chain(h, "e", 1, "new"))
    assert max(turns) <= 8 and sum(turns) == 100
    assert {tenant.name for tenant in h.store.tenants} == {"young", "new"}


def test_a_tenant_that_has_made_way_and_comes_back_needs_a_place_again(hand: Hands) -> None:
    h = hand(256, limits=Limits(tenants=2))
    long_chain(h, "c", 100, "old")
    long_chain(h, "d", 1, "young")
    h.store.blocks.a_turn = 8
    long_chain(h, "e", 1, "new")
    assert len(h.store.tenants) == 3
    long_chain(h, "c", 2, "old")
    turns_of(h, lambda: None)
    assert {tenant.name: tenant.blocks for tenant in h.store.tenants} == {"new": 1, "old": 2}


def test_the_name_that_was_in_use_longest_ago_makes_way(hand: Hands) -> None:
    h = hand(16, limits=Limits(tenants=3))
    for tenant in ("ann", "bob", "cy"):
        h.put("a", tenant)
    lease, _ = h.lease("a", "ann")
    h.lookup("a", "bob")
    h.put("a", "dee")
    assert {tenant.name for tenant in h.store.tenants} == {"ann", "bob", "dee"}
    h.store.release(1, lease, h.now_ms)
    h.put("a", "eve")
    assert {tenant.name for tenant in h.store.tenants} == {"ann", "dee", "eve"}


def test_a_layout_makes_way_in_pieces(hand: Hands) -> None:
    h = hand(256, limits=Limits(layouts=2))
    h.store.open_session(2)
    h.layout = h.store.open_layout(2, b"cold", (64,)).number
    bush(h, 60)
    long_chain(h, "c", 30)
    h.store.close_session(2, h.now_ms)
    turns = turns_of(h, lambda: h.store.open_layout(1, b"new", (64,)))
    assert max(turns) <= 8 and sum(turns) == 91
    assert sorted(layout.fingerprint for layout in h.store.layouts) == [b"first", b"new"]


def test_a_layout_that_is_wanted_again_keeps_what_is_left_of_it(hand: Hands) -> None:
    h = hand(256, limits=Limits(layouts=2))
    h.store.open_session(2)
    cold = h.layout = h.store.open_layout(2, b"cold", (64,)).number
    for name in "abcdefghijklmnop":
        long_chain(h, name, 4)
    h.store.close_session(2, h.now_ms)
    h.store.blocks.a_turn = 4
    h.store.open_layout(1, b"new", (64,))
    assert h.store.open_layout(1, b"cold", (64,)).number == cold
    turns_of(h, lambda: None)
    assert 0 < h.store.layouts[cold].blocks < 64


def test_the_first_quota_of_a_tenant_moves_its_blocks_to_other_queues_in_pieces(
    hand: Hands,
) -> None:
    h = hand(128)
    bush(h, 100)
    h.store.blocks.a_turn = 8
    h.quota("t", 1)
    order, pieces = h.store.blocks.order, 0
    while h.store.has_to_tidy:
        check_integrity(h.store)
        h.store.tidy(h.now_ms)
        pieces += 1
    assert pieces >= 12 and not order.to_scan
    assert h.put("xy", "other") == 0 and h.usage("t") == 101


def test_while_its_blocks_move_to_other_queues_nobody_takes_what_a_tenant_is_promised(
    hand: Hands,
) -> None:
    h = hand(20)
    bush(h, 15, "ann")
    h.store.blocks.a_turn = 2
    h.quota("ann", 16)
    assert h.store.blocks.order.to_scan
    assert h.put("abcd", "bob") == 0 and h.put("wxyz", "bob") == 0
    assert (h.usage("ann"), h.usage("bob")) == (16, 4)


# -- all shards in one write -----------------------------------------------------------------------


def test_a_write_of_all_shards_makes_blocks_visible_at_once(hand: Hands) -> None:
    h = hand(shard_bytes=(64, 100))
    write, plan = h.prepare("abc", shard=None)
    assert plan.positions.tolist() == [0, 1, 2] and h.lookup("abc").blocks == 0
    half = np.ones(3, np.uint64)
    refused(lambda: h.store.complete_store(1, write, half, 0), "bad_checksums", "checksums")
    checks = np.array([[1, 2], [3, 4], [5, 6]], np.uint64)
    stored = h.store.complete_store(1, write, checks, 0)
    assert (stored.blocks, stored.nbytes) == (3, 3 * 164)
    _, hit = h.lease("abc")
    assert hit.checksums.tolist() == checks.tolist()


def test_a_write_of_all_shards_leaves_blocks_of_other_writers_alone(hand: Hands) -> None:
    h = hand(shard_bytes=(64, 64))
    one, _ = h.prepare("ab", shard=0)
    whole, plan = h.prepare("abc", shard=None)
    assert plan.positions.tolist() == [2]
    assert h.prepare("abc", shard=1)[1].positions.tolist() == [0, 1], "c has its writer"
    h.store.complete_store(1, whole, np.ones((1, 2), np.uint64), 0)
    assert h.lookup("abc").blocks == 0, "its ancestors are not complete"
    h.complete(one)
    assert h.store.abandon_store(1, one, 0) is False


def test_a_write_of_all_shards_can_be_abandoned(hand: Hands) -> None:
    h = hand(shard_bytes=(64, 64))
    write, _ = h.prepare("abc", shard=None)
    assert h.store.abandon_store(1, write, 0)
    assert h.states() == []


# -- several shards together -----------------------------------------------------------------------


def test_shards_that_are_written_together_are_one_write(hand: Hands) -> None:
    h = hand(shard_bytes=(64,) * 4)
    write, plan = h.prepare("ab", shard=0, further_shards=(1, 3))
    assert (len(plan.slots), plan.apart) == (2, False)
    assert h.complete(write) == 2 and h.states() == ["writing"] * 2
    write, _ = h.prepare("ab", shard=2)
    assert h.complete(write, checksum=9) == 2 and h.states() == ["ready"] * 2
    assert h.lookup("ab").checksums.tolist() == [[7, 7, 9, 7]] * 2


@pytest.mark.parametrize("is_in", [False, True], ids=["under way", "stored"])
def test_a_block_that_lacks_some_of_the_shards_is_written_shard_by_shard(
    hand: Hands, is_in: bool
) -> None:
    h = hand(shard_bytes=(64,) * 3)
    write, _ = h.prepare("ab", shard=1)
    if is_in:
        h.complete(write)
    together, plan = h.prepare("abc", shard=0, further_shards=(1,))
    assert (plan.positions.tolist(), plan.apart) == ([2], True), "the new block alone"
    _, plan = h.prepare("abc", shard=0)
    assert (plan.positions.tolist(), plan.apart) == ([0, 1], False)
    _, plan = h.prepare("abc", shard=1)
    assert plan.positions.tolist() == []
    _, plan = h.prepare("ab", shard=0, further_shards=(1,))
    assert (plan.positions.tolist(), plan.apart) == ([], False), "nothing is left to write"
    h.complete(together)


@pytest.mark.parametrize("shards", [(0, 3), (1, 1), (2, 1), (0, -1)])
def test_shards_that_are_none_or_out_of_order_are_refused(
    hand: Hands, shards: tuple[int, int]
) -> None:
    h = hand(shard_bytes=(64,) * 3)
    with pytest.raises(RequestError) as error:
        h.prepare("ab", shard=shards[0], further_shards=shards[1:])
    assert error.value.code == "bad_shard" and h.states() == []


def test_each_shard_of_each_block_has_a_checksum(hand: Hands) -> None:
    h = hand(shard_bytes=(64,) * 2)
    write, _ = h.prepare("ab", shard=0, further_shards=(1,))
    for count in (2, 3, 5):
        sums = np.zeros(count, np.uint64)
        refused(
            lambda sums=sums: h.store.complete_store(1, write, sums, h.now_ms),
            "bad_checksums",
            "checksums",
        )
    assert h.complete(write) == 2


def test_many_leases_end_in_pieces(hand: Hands) -> None:
    h = hand(128)
    leases = range(1000, 1100)
    for number, lease in enumerate(leases):
        h.put(chr(200 + number))
        hit = h.store.lookup(1, lease, "t", h.layout, h.key(chr(200 + number)), 0, h.now_ms)
        assert hit.blocks == 1
    layout = h.store.layouts.get(h.layout)
    h.store.blocks.a_turn = 8
    held = [layout.held_blocks]
    assert h.store.release_all(1, [*leases, 7], h.now_ms) == set(leases)
    assert not h.store.release_all(1, leases, h.now_ms), "none can be released twice"
    while h.store.has_to_tidy:
        held.append(layout.held_blocks)
        h.store.tidy(h.now_ms)
    assert held[0] == 100 and not layout.held_blocks
    assert max(before - after for before, after in itertools.pairwise(held)) == 8
