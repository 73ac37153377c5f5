"""Slabs that change their size, a piece at a time: what a turn does, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvkeep.store import operators
from kvkeep_lab.simulation.store_integrity import check_integrity

Hands = Callable[..., Any]
SLABS, SMALL_A_SLAB = 4, 16


@pytest.fixture
def world(hand: Hands) -> Any:
    """A pool full of two chains of small blocks, each in two slabs, and a layout of blocks that are
    as large as a slab. A turn evicts four blocks."""
    h = hand(SMALL_A_SLAB, slabs=SLABS)
    h.large = h.store.open_layout(1, b"large", (SMALL_A_SLAB * 4096,)).number
    for name in "ab":
        h.put(chain(name))
    h.store.blocks.a_turn = 4
    return h


def chain(name: str, blocks: int = 2 * SMALL_A_SLAB) -> str:
    return "".join(chr(0x100 * ord(name) + at) for at in range(blocks))


def tidied(h: Any) -> list[int]:
    """The blocks that each turn evicts until there is nothing to do."""
    turns = list[int]()
    while h.store.has_to_tidy:
        before = h.store.eviction.evictions
        h.store.tidy(h.now_ms)
        check_integrity(h.store)
        turns.append(h.store.eviction.evictions - before)
        assert len(turns) < 200
    return turns


def test_a_slab_is_emptied_in_turns_and_gives_out_nothing_meanwhile(world: Any) -> None:
    assert world.put("L", layout=world.large) == 1, "refused, for now"
    assert world.store.has_to_tidy and world.store.eviction.evictions <= 8
    world.store.tidy(world.now_ms)
    evicted = world.store.eviction.evictions
    turns = tidied(world)
    assert max(turns) == 4 and evicted + sum(turns) == SMALL_A_SLAB
    assert world.store.eviction.slab_moves == 1 and world.store.slabs.unused_slabs == 1
    assert world.lookup(chain("a")).blocks == SMALL_A_SLAB, "the end of the oldest chain is gone"
    assert world.lookup(chain("b")).blocks == 2 * SMALL_A_SLAB
    assert world.put("L", layout=world.large) == 0


@pytest.mark.parametrize("block", [0, SMALL_A_SLAB + 3])
def test_what_is_leased_while_a_slab_is_emptied_stays(world: Any, block: int) -> None:
    world.lookup(chain("b"))
    world.put("L", layout=world.large)
    while not world.store.eviction.evictions:
        world.store.tidy(world.now_ms)
    lease, hit = world.lease(chain("a")[: block + 1])
    before = world.store.blocks.table.many.slot[world.row(chain("a")[: block + 1])]
    tidied(world)
    assert hit.blocks == block + 1 and world.lookup(chain("a")).blocks >= block + 1
    assert world.store.blocks.table.many.slot[world.row(chain("a")[: block + 1])] == before
    world.store.release(1, lease, world.now_ms)
    tidied(world)
    while world.put("L", layout=world.large):
        assert tidied(world), "each request goes on"


def test_what_is_stored_below_while_a_slab_is_emptied_stays(world: Any) -> None:
    world.put("L", layout=world.large)
    while not world.store.eviction.evictions:
        world.store.tidy(world.now_ms)
    left = world.lookup(chain("a")).blocks
    assert 0 < left < 2 * SMALL_A_SLAB
    tidied(world)
    assert world.lookup(chain("a")).blocks == left, "it was used since the slab was chosen"


def test_a_slab_whose_owner_gets_a_quota_meanwhile_is_left_to_it(world: Any) -> None:
    world.put("L", "other", layout=world.large)
    while not world.store.eviction.evictions:
        world.store.tidy(world.now_ms)
    left = world.usage("t")
    operators.set_quota(world.store, "t", 2 * SLABS * SMALL_A_SLAB * 2048, world.now_ms)
    tidied(world)
    assert world.usage("t") == left and world.store.eviction.slab_moves == 0
    assert world.put("L", "other", layout=world.large) == 1


def test_a_tenant_without_blocks_is_remembered_until_its_slab_is_empty(world: Any) -> None:
    assert world.put("L", "new", layout=world.large) == 1
    assert world.store.tenants.get("new") is not None
    tidied(world)
    assert world.store.tenants.get("new") is None, "it has not come again"
    assert world.put("L", "new", layout=world.large) == 0


def test_a_slab_is_left_as_it_is_when_another_becomes_free(world: Any) -> None:
    world.put("L", layout=world.large)
    while not world.store.eviction.evictions:
        world.store.tidy(world.now_ms)
    evicted = world.store.eviction.evictions
    operators.clear(world.store, "t")
    tidied(world)
    assert world.store.eviction.evictions == evicted and world.store.slabs.unused_slabs == SLABS


def test_a_bush_below_a_slab_is_evicted_in_turns_too(hand: Hands) -> None:
    h = hand(SMALL_A_SLAB, slabs=SLABS)
    large = h.store.open_layout(1, b"large", (SMALL_A_SLAB * 4096,)).number
    for at in range(SLABS * SMALL_A_SLAB - 1):
        h.put("r" + chr(0x1000 + at))
    h.store.blocks.a_turn = 4
    lease, _ = h.lease("r")
    for _ in range(SLABS):
        h.put("L", layout=large)
        assert max(tidied(h), default=0) <= 4
    h.store.release(1, lease, h.now_ms)
    for _ in range(2 * SLABS):
        h.put("LMNO", layout=large)
        assert max(tidied(h), default=0) <= 4
    assert h.put("LMNO", layout=large) == 0 and h.lookup("r").blocks == 0


def test_one_request_does_only_so_much_and_the_next_goes_on(world: Any) -> None:
    world.store.blocks.a_turn = 14
    assert world.put("LMNO", layout=world.large) == 3 and world.store.eviction.slab_moves == 1
    assert world.put("LMNO", layout=world.large) <= 2


@pytest.mark.parametrize("seed", range(12))
def test_requests_of_both_sizes_beside_a_slab_that_is_emptied(hand: Hands, seed: int) -> None:
    """A request for small blocks may continue to empty a slab that holds its own next victim."""
    chance, h = Random(seed), hand(6, slabs=3)
    h.large = h.store.open_layout(1, b"large", (2 * 4096,)).number
    h.store.blocks.a_turn = chance.randint(1, 3)
    for _ in range(150):
        word = chance.choice("abcdef") + "".join(chance.choices("xy", k=chance.randrange(6)))
        h.put(word, layout=chance.choice([h.layout, h.large]))
        if chance.random() < 0.3:
            h.store.tidy(h.now_ms)
        check_integrity(h.store)
    tidied(h)


@pytest.mark.parametrize("turns", range(12))
def test_a_slab_may_be_closed_beside_a_request_for_the_slots_that_were_free_in_it(
    hand: Hands, turns: int
) -> None:
    """bob has a quota and needs a slab for large blocks. One of ann's two slabs has a leased block,
    so the other one is emptied. cy wants small blocks, and may evict none."""
    h = hand(SMALL_A_SLAB, slabs=2)
    large = h.store.open_layout(1, b"large", (SMALL_A_SLAB * 4096,)).number
    h.put(chain("x", SMALL_A_SLAB), "ann")
    h.put(chain("y", SMALL_A_SLAB - 1), "ann")
    h.lease(chain("x", 1), "ann")
    h.lookup(chain("y", SMALL_A_SLAB - 1), "ann")
    h.quota("bob", SMALL_A_SLAB)
    h.quota("cy", 1)
    for at in range(40):  # to look at all of them takes several turns
        h.quota(f"tenant {at}", 0)
    h.store.blocks.a_turn = 1
    assert h.put("L", "bob", layout=large) == 1
    for _ in range(turns):
        h.store.tidy(h.now_ms)
    assert h.put("ccc", "cy") >= 1
    check_integrity(h.store)


@pytest.mark.parametrize("turns", range(24))
def test_a_slab_that_becomes_free_while_others_are_looked_at_is_not_drained(
    hand: Hands, turns: int
) -> None:
    """Each of ann's two slabs has a leased block. While bob waits for two slabs, one becomes free."""
    h = hand(SMALL_A_SLAB, slabs=2)
    large = h.store.open_layout(1, b"large", (SMALL_A_SLAB * 4096,)).number
    for name in "xy":
        h.put(chain(name, SMALL_A_SLAB), "ann")
    leases = [h.lease(chain(name, 1), "ann")[0] for name in "xy"]
    h.quota("bob", 2 * SMALL_A_SLAB)
    for at in range(40):  # to look at all of them takes several turns
        h.quota(f"tenant {at}", 0)
    h.store.blocks.a_turn = 1
    assert h.put("LM", "bob", layout=large) == 2
    for _ in range(turns):
        h.store.tidy(h.now_ms)
    h.store.release(1, leases[0], h.now_ms)
    h.store.drop_blocks("ann", [h.key(chain("x", 1))])
    while h.store.blocks.has_to_sweep:
        h.store.blocks.sweep()
    for _ in range(24):
        h.put("LM", "bob", layout=large)
        check_integrity(h.store)
    assert h.usage("bob") == SMALL_A_SLAB
