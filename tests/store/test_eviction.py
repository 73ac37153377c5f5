"""Making room: who gives way to whom, never more than needed, and slabs that change their size."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

BORROWERS_LOOKED_AT = 16

Hands = Callable[..., Any]


def test_exactly_what_is_needed_goes(hand: Hands) -> None:
    h = hand(8)
    h.put("abcdefg")
    h.put("xyz")
    assert h.store.eviction.evictions == 2 and h.chains() == {
        "a",
        "ab",
        "abc",
        "abcd",
        "abcde",
        "x",
        "xy",
        "xyz",
    }


def test_without_quotas_the_pool_is_one_lru(hand: Hands) -> None:
    h = hand(4)
    h.put("ab", "ann")
    h.put("cd", "bob")
    h.put("e", "bob")
    assert (h.usage("ann"), h.usage("bob")) == (1, 3)


def test_a_flood_takes_nothing_from_a_tenant_within_its_quota(hand: Hands) -> None:
    h = hand(6)
    h.quota("ann", 3)
    h.put("abc", "ann")
    for word in ("defg", "hijk", "lmno"):
        h.put(word, "bob")
    assert h.usage("ann") == 3 and h.usage("bob") == 3


def test_a_tenant_beyond_its_quota_evicts_its_own(hand: Hands) -> None:
    h = hand(6, default_quota=3)
    h.put("abc", "ann")
    h.put("xyz", "bob")
    h.put("def", "ann")
    assert h.usage("ann") == 3 and h.usage("bob") == 3 and h.chains("ann") == {"d", "de", "def"}


def test_unused_quota_is_borrowed_and_given_back(hand: Hands) -> None:
    h = hand(6)
    h.quota("ann", 3)
    h.quota("bob", 3)
    assert h.put("abc", "ann") == 0 and h.put("def", "ann") == 0 and h.usage("ann") == 6
    assert h.put("xyz", "bob") == 0
    assert h.chains("ann") == {"d", "de", "def"} and h.usage("bob") == 3
    h.put("w", "bob")
    assert (h.usage("ann"), h.usage("bob")) == (3, 3)


def test_a_tenant_without_a_quota_lives_on_what_others_leave(hand: Hands) -> None:
    h = hand(5)
    h.quota("ann", 4)
    h.put("abc", "ann")
    assert h.put("x", "bob") == 0 and h.put("y", "bob") == 0 and h.usage("bob") == 2
    assert h.put("abcd", "ann") == 0 and h.usage("bob") == 1
    assert h.put("z", "bob") == 0 and h.chains("bob") == {"z"}


def test_what_a_tenant_reads_beyond_its_quota_leaves_room_for_the_quotas_of_others(
    hand: Hands,
) -> None:
    h = hand(8)
    for chain in ("abcd", "efgh"):
        h.put(chain, "ann")
    h.quota("bob", 3)
    h.quota("ann", 2)
    first, hit = h.lease("abcd", "ann")
    assert hit.blocks == 4, "two by right, and two of the three that nobody is promised"
    _, hit = h.lease("efgh", "ann")
    assert hit.blocks == 1 and h.store.withheld_blocks == 3, "the rest would be bob's"
    _, hit = h.lease("abc", "ann")
    assert hit.blocks == 3, "what is read already costs nothing more"
    assert h.put("xyz", "bob") == 0
    h.store.release(1, first, h.now_ms)
    assert h.lookup("efgh", "ann").blocks == 1, "its other blocks made way for bob"


def test_what_a_tenant_writes_beyond_its_quota_leaves_room_for_the_quotas_of_others(
    hand: Hands,
) -> None:
    h = hand(8)
    h.quota("bob", 6)
    write, plan = h.prepare("abcd", "ann")
    assert (len(plan.slots), plan.refused) == (2, 2)
    assert h.prepare("e", "cy")[1].refused == 1
    assert h.prepare("uvwxyz", "bob")[1].refused == 0
    h.complete(write)
    assert h.prepare("e", "cy")[1].refused == 0, "ann's are evictable now"


def test_a_chain_is_held_as_a_whole_by_who_extends_it(hand: Hands) -> None:
    h = hand(8)
    h.put("abcd", "ann")
    h.quota("bob", 3)
    assert h.prepare("ef", "ann", after="abcd")[1].refused == 1, "five may be held"
    h.quota("bob", 4)
    assert h.prepare("xyz", "cy")[1].refused == 3
    assert len(h.prepare("wxyz", "bob")[1].slots) == 3, (
        "the quota was raised while ann held more than is left"
    )


def test_a_shard_that_may_not_be_held_is_not_written(hand: Hands) -> None:
    h = hand(4, shard_bytes=(64, 64))
    write, _ = h.prepare("ab", "ann")
    h.complete(write)
    h.quota("bob", 3)
    _, plan = h.prepare("ab", "ann", shard=1)
    assert (len(plan.slots), plan.refused) == (0, 2)
    h.quota("bob", 2)
    assert h.prepare("ab", "ann", shard=1)[1].refused == 0


def test_a_borrower_never_falls_below_its_quota_by_a_large_block(hand: Hands) -> None:
    h = hand(6)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.quota("ann", 3)
    h.put("ab", "ann", layout=large)  # 4 slots' worth: one above its quota
    h.put("xy", "bob")
    assert h.put("pq", "cy", layout=large) == 1, (
        "cy gets bob's; ann may lose one slot, and has only pairs"
    )
    assert h.usage("ann") == 4


def test_the_chain_that_is_extended_does_not_make_way_for_itself(hand: Hands) -> None:
    h = hand(3)
    h.put("abc")
    _, plan = h.prepare("de", after="abc")
    assert plan.refused == 2 and h.chains() == {"a", "ab", "abc"}


def test_the_beginning_is_stored_if_there_is_no_room_for_all(hand: Hands) -> None:
    h = hand(4)
    _, plan = h.prepare("abcdef")
    assert plan.positions.tolist() == [0, 1, 2, 3] and plan.refused == 2


def test_with_very_many_borrowers_old_ones_still_go(hand: Hands) -> None:
    count = 3 * BORROWERS_LOOKED_AT
    h = hand(count, default_quota=0)
    for i in range(count):
        h.put("a", f"tenant-{i}")
    h.quota("new", 20)
    assert h.put("abcdefghij", "new") == 0 and h.store.eviction.evictions == 10


def test_a_stale_model_gives_slabs_to_one_of_another_size(hand: Hands) -> None:
    h = hand(4, slabs=4)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    for word in ("abcd", "efgh", "ijkl", "mnop"):
        h.put(word)
    assert h.usage() == 16
    for word in ("ABCD", "EFGH", "IJKL", "MNOP"):
        assert h.put(word, layout=large) == 0
    assert (
        h.store.slabs.sizes() == {8192: 4} and h.store.eviction.slab_moves == 4 and h.usage() == 16
    )
    assert h.put("abcd") == 0 and h.store.slabs.sizes() == {8192: 3, 4096: 1}


def test_a_new_model_beside_a_busy_one_gets_slabs_and_does_not_starve(hand: Hands) -> None:
    h = hand(4, slabs=4)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    for word in ("abcd", "efgh", "ijkl", "mnop"):
        h.put(word)
    for i in range(200):
        h.put(chr(0x100 + i))  # the first model goes on
        assert h.put(chr(0x1000 + i % 4), layout=large) == 0
    assert set(h.store.slabs.sizes()) == {4096, 8192}
    assert all(h.lookup(chr(0x1000 + i), layout=large).blocks for i in range(4)), (
        "what is in use has stayed"
    )


def test_slabs_of_the_prefix_of_a_busy_chain_are_not_cold(hand: Hands) -> None:
    h = hand(4, slabs=3)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.put("abcd")  # a slab that is never the end of a hit
    h.put("efgh")
    h.put("abcdijkl")
    h.lookup("abcdijkl")
    assert h.put("A", layout=large) == 0
    assert h.lookup("abcdijkl").blocks == 8 and h.lookup("e").blocks == 0


def test_a_leased_slab_does_not_move_and_the_next_one_does(hand: Hands) -> None:
    h = hand(2, slabs=3)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    for word in ("ab", "cd", "ef"):
        h.put(word)
    leases = [h.lease("ab")[0], h.lease("c")[0]]
    assert h.put("AB", layout=large) == 1 and h.chains() >= {"a", "ab", "c"}
    for lease in leases:
        h.store.release(1, lease, h.now_ms)
    assert h.put("ABC", layout=large) == 0


def test_borrowed_memory_comes_back_across_sizes(hand: Hands) -> None:
    h = hand(2, slabs=4)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.quota("ann", 6)
    h.put("ab", "ann")
    h.put("XYZ", "bob", layout=large)
    for i in range(20):
        h.lookup("XYZ", "bob", layout=large)  # bob's are always the youngest
        h.put(chr(0x100 + i), "ann")
    assert h.usage("ann") == 6 and h.usage("bob") == 2


def test_slabs_move_only_within_quotas(hand: Hands) -> None:
    h = hand(4, slabs=2)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.quota("ann", 5)
    h.put("abcdefgh", "ann")
    assert h.put("XY", "bob", layout=large) == 2, "either slab would take ann below its quota"
    assert h.usage("ann") == 8 and h.store.eviction.slab_moves == 0
    h.quota("ann", 4)
    assert h.put("XY", "bob", layout=large) == 0 and h.usage("ann") == 4


def test_emptied_slabs_leave_what_others_hang_on_in_line(hand: Hands) -> None:
    h = hand(2, slabs=3)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.put("abcdef")
    h.lookup("abcdef")
    used = h.store.blocks.table.used[h.row("abcdef")]
    assert (
        h.put("A", layout=large) == 0
        and h.chains() >= {"a", "ab", "abc", "abcd"}
        and "abcde" not in h.chains()
    )
    assert h.store.blocks.table.used[h.row("abcd")] == used, (
        "the first that stays inherits the last use"
    )


def test_minted_tenants_on_the_default_quota_keep_nothing_from_one_with_its_own(
    hand: Hands,
) -> None:
    h = hand(6, default_quota=2)
    for name in ("m1", "m2", "m3"):
        h.put("ab", name)
    assert h.put("x", "m4") == 1, "on the default quota too"
    h.quota("ann", 4)
    assert h.put("pqrs", "ann") == 0 and (h.usage("m1"), h.usage("m2"), h.usage("m3")) == (0, 0, 2)
    h.put("t", "ann")
    assert h.usage("ann") == 4 and h.usage("m3") == 2, "beyond its own quota it takes its own"


def test_borrowers_give_way_before_tenants_on_the_default_quota(hand: Hands) -> None:
    h = hand(6, default_quota=2)
    h.put("ab", "m1")
    h.put("cdef", "m2")
    h.quota("ann", 3)
    h.put("xy", "ann")
    assert (h.usage("m1"), h.usage("m2")) == (2, 2)
    h.put("xyz", "ann")
    assert (h.usage("m1"), h.usage("m2")) == (1, 2)


def test_slabs_of_tenants_on_the_default_quota_go_to_one_with_its_own(hand: Hands) -> None:
    h = hand(4, slabs=2, default_quota=4)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.put("abcd", "m1")
    h.put("efgh", "m2")
    assert h.put("XY", "bob", layout=large) == 2
    h.quota("ann", 4)
    assert h.put("XY", "ann", layout=large) == 0 and h.usage("m1") == 0 and h.usage("m2") == 4


def test_a_nearly_empty_slab_is_nobodys(hand: Hands) -> None:
    h = hand(16, slabs=2)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    largest = h.store.open_layout(1, b"largest", (4 * 4096,)).number
    h.quota("ann", 4)
    h.quota("bob", 16)
    h.put("a", "ann")
    h.put("A", "ann", layout=large)
    assert h.put("X", "cy", layout=largest) == 1, "not for one without a quota of its own"
    lease, _ = h.lease("a", "ann")
    assert h.put("X", "bob", layout=largest) == 1, "one is in use, an eighth of the other is full"
    h.store.release(1, lease, h.now_ms)
    assert h.put("X", "bob", layout=largest) == 0 and h.usage("ann") == 2


def test_a_store_for_which_single_blocks_make_way_evicts_so_many_and_the_next_goes_on(
    hand: Hands,
) -> None:
    h, most = hand(400), 96
    for i in range(400):
        h.put(chr(0x100 + i))
    long = "".join(chr(0x1000 + i) for i in range(3))
    keys = b"".join(i.to_bytes(16, "big") for i in range(300))
    plan = h.store.prepare_store(1, 1 << 30, "t", h.layout, 0, b"", keys, h.now_ms)
    assert len(plan.slots) == h.store.eviction.evictions == most
    h.store.complete_store(1, 1 << 30, np.ones(most, np.uint64), h.now_ms)
    rest, parent = keys[16 * most :], keys[16 * (most - 1) : 16 * most]
    plan = h.store.prepare_store(1, 1 << 31, "t", h.layout, 0, parent, rest, h.now_ms)
    assert len(plan.slots) == most and h.store.eviction.evictions == 2 * most
    assert h.put(long) == 0


@pytest.mark.parametrize("seed", range(20))
def test_room_that_is_made_in_pieces_is_what_the_store_would_make(hand: Hands, seed: int) -> None:
    at_once, in_pieces, chance = hand(24), hand(24), Random(seed)
    for h in (at_once, in_pieces):
        h.quota("b", 10)
    for _ in range(80):
        tenant, chain = chance.choice("abc"), "".join(chance.choices("xyz", k=chance.randint(1, 9)))
        known = max(
            n for n in range(len(chain) + 1) if not n or holds(in_pieces, chain[:n], tenant)
        )
        if known < len(chain):
            parent = in_pieces.key(chain[:known]) if known else b""
            ask = tenant, in_pieces.layout, parent, len(chain) - known, in_pieces.now_ms
            while in_pieces.store.make_some_room(*ask):
                pass
        is_used = chance.random() < 0.5
        for h in (at_once, in_pieces):
            h.put(chain, tenant)
            if is_used:
                h.lookup(chain, tenant)
        assert all(content(at_once, each) == content(in_pieces, each) for each in "abc")


def holds(h: Any, chain: str, tenant: str) -> bool:
    return h.store.tenants.get(tenant) is not None and h.row(chain, tenant) >= 0


def content(h: Any, tenant: str) -> set[bytes]:
    owner = h.store.tenants.get(tenant)
    return set() if owner is None else {key for key, _ in owner.index.items()}


def test_a_piece_of_room_is_small_and_leaves_the_chain_that_it_is_for(hand: Hands) -> None:
    h = hand(300)
    h.put("p", "a")
    h.put("".join(chr(0x100 + i) for i in range(250)), "a")
    ask, sizes = ("a", h.layout, h.key("p"), 200, h.now_ms), list[int]()
    while True:
        before = h.store.eviction.evictions
        if not h.store.make_some_room(*ask):
            break
        sizes.append(h.store.eviction.evictions - before)
    assert sizes == [64, 64, 23] and h.row("p", "a") >= 0
    assert not h.store.make_some_room("a", h.layout, b"unknown parent..", 300, h.now_ms)
    assert h.store.make_some_room("nobody", h.layout, b"", 300, h.now_ms)
    assert h.store.tenants.get("nobody") is None, "one without blocks is not remembered"
