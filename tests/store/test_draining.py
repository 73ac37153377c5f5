"""Slabs that a tenant within its quota needs for another block size, while others read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.store.draining import LASTS_MS
from kvkeep_lab.simulation.store_integrity import check_integrity

Hands = Callable[..., Any]
SLABS, SMALL_A_SLAB = 4, 8
ROOTS = [chr(0x100 + at) for at in range(SLABS * SMALL_A_SLAB)]  # each a chain of one block
LARGE = [chr(0x400 + at) for at in range(SLABS * SMALL_A_SLAB // 4)]  # what bob's quota allows


@pytest.fixture
def world(hand: Hands) -> Any:
    """A pool full of small blocks of ann, who has no quota, and a layout of blocks of twice the
    size for bob, whose quota is half of the pool."""
    h = hand(SMALL_A_SLAB, slabs=SLABS)
    h.large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.quota("bob", SLABS * SMALL_A_SLAB // 2)
    for root in ROOTS:
        h.put(root, "ann")
    return h


def one_in_each_slab(h: Any) -> list[str]:
    slab_bytes = h.store.slabs.slab_bytes
    found = {h.store.blocks.table.slot[h.row(root, "ann")] // slab_bytes: root for root in ROOTS}
    assert len(found) == SLABS
    return list(found.values())


def leases_of(h: Any, roots: list[str]) -> list[int]:
    """Leases of ann on those of these blocks that she may lease."""
    taken = [h.lease(root, "ann") for root in roots]
    return [lease for lease, hit in taken if hit.blocks]


def store_large(h: Any) -> int:
    """How many of bob's blocks are stored of as many as his quota allows. Each is offered twice: an
    emptied slab serves the next request."""
    for block in 2 * LARGE:
        h.put(block, "bob", layout=h.large)
        while h.store.has_to_tidy:
            h.store.tidy(h.now_ms)
        check_integrity(h.store)
    return int(h.usage("bob")) // 2


def release(h: Any, leases: list[int]) -> None:
    for lease in leases:
        assert h.store.release(1, lease, h.now_ms)


def test_a_tenant_gets_its_quota_although_a_block_of_each_slab_is_always_leased(world: Any) -> None:
    held = one_in_each_slab(world)
    leases = leases_of(world, held)
    assert len(leases) == SLABS and store_large(world) == 0, "all slabs are read from"
    further = leases_of(world, ROOTS)  # before the others end
    assert 0 < len(further) < len(ROOTS), "but for the slabs that bob needs"
    release(world, leases)
    assert store_large(world) == len(LARGE), "all that his quota promises"
    assert world.usage("ann") == SLABS * SMALL_A_SLAB // 2


def test_only_as_many_slabs_are_drained_as_the_quota_fills(world: Any) -> None:
    held = one_in_each_slab(world)
    leases = leases_of(world, held)
    store_large(world)
    before = world.store.withheld_blocks
    again = leases_of(world, held)
    assert len(again) == SLABS // 2 and world.store.withheld_blocks - before == SLABS // 2
    release(world, leases + again)


def test_a_chain_is_found_up_to_the_drained_slab_and_not_extended_below_it(hand: Hands) -> None:
    h = hand(4, slabs=3)
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.quota("bob", 4)
    for word in ("abcdef", "x", "y", "p", "q", "r", "s"):  # slabs: abcd, efxy, pqrs
        h.put(word, "ann")
    leases = leases_of(h, ["x", "p", "a"])  # the middle one is the coldest
    assert h.put("B", "bob", layout=large) == 1
    assert h.lookup("abcdef", "ann").blocks == 4
    assert h.lookup("abcdef", "ann", skip=5).blocks == 5, "what the engine has is not leased"
    assert h.put("abcdefg", "ann") == 1, "it would hold what is drained"
    assert h.put("abcdz", "ann") == 0
    release(h, leases)
    assert h.put("B", "bob", layout=large) == 0
    assert h.lookup("abcdef", "ann").blocks == 4


def test_what_is_half_written_in_a_drained_slab_is_held_no_further(hand: Hands) -> None:
    """The second shard of a block may still come while somebody reads or writes the block. Later it
    would keep the slab from becoming free."""
    h = hand(4, slabs=2, shard_bytes=(2048, 2048))
    large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.quota("bob", 4)
    for word in ("ab", "xyz"):  # slabs: abxy, z
        write, _ = h.prepare(word, "ann", shard=0)
        h.complete(write)
    write, plan = h.prepare("x", "ann", shard=1)
    h.prepare("z", "cy", shard=0)
    assert len(plan.slots) == 1 and h.put("B", "bob", layout=large) == 1
    assert h.store.blocks.draining.is_active(h.now_ms)
    _, refused = h.prepare("ab", "ann", shard=1)
    assert not len(refused.slots) and refused.refused == 2
    h.complete(write)


def test_a_slab_is_opened_again_if_the_tenant_does_not_come_back(world: Any) -> None:
    held = one_in_each_slab(world)
    leases = leases_of(world, held)
    store_large(world)
    release(world, leases)
    world.now_ms += LASTS_MS
    assert len(leases_of(world, held)) == SLABS
    assert world.store.slabs.available(4096) == 0
    assert world.put("x", "ann") == 0, "its slots are given out again"


def test_no_slab_is_drained_for_a_tenant_without_a_quota(world: Any) -> None:
    leases = leases_of(world, one_in_each_slab(world))
    assert world.put("B", "cy", layout=world.large) == 1
    assert len(leases_of(world, ROOTS)) == SLABS * SMALL_A_SLAB // 2, "what ann may hold"
    release(world, leases)


def test_blocks_within_a_quota_are_not_drained(world: Any) -> None:
    world.quota("ann", SLABS * SMALL_A_SLAB // 2)
    for root in ROOTS[: SLABS * SMALL_A_SLAB // 2]:
        world.store.drop_blocks("ann", [world.key(root)])
    kept = ROOTS[SLABS * SMALL_A_SLAB // 2 :]
    leases = leases_of(world, kept)
    assert len(leases) == len(kept)
    store_large(world)
    assert len(leases_of(world, kept)) == len(kept), "they are within ann's own quota"
    release(world, leases)
