"""What stays of a pool that becomes smaller: what was used last, in slots that are its own."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.store import Store
from kvkeep.store.table import PlainColumns
from kvkeep_lab.simulation.store_integrity import check_integrity

sys.path.insert(0, str(Path(__file__).parent))
from life import LAYOUTS, LIMITS, POOL, SLAB, SLABS, SLOT, Life, killed_after
from test_adopt import check_bytes, found, slots_handed_out

KEYS = [bytes([number]) * 16 for number in range(1, 200)]


def shrunk(life: Life, slabs: int, old_sessions: bool) -> tuple[Store, Adoption]:
    """The next server's store over fewer slabs, with what the move did to the pool's memory."""

    def move(offsets: NDArray[np.int64], to: NDArray[np.int64], nbytes: int) -> None:
        for source, target in zip(offsets.tolist(), to.tolist(), strict=True):
            for shard in (0, 1):
                life.memory.pop((target, shard), None)
                if (source, shard) in life.memory:
                    life.memory[target, shard] = life.memory[source, shard]

    store = Store(slabs * SLAB, SLAB, LIMITS, columns=life.columns)
    adoption = adopt(store, SLABS, old_sessions, life.now_ms, slabs, move)
    if not adoption.contradiction:
        check_integrity(store)
    return store, adoption


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_in_smaller_pools(seed: int) -> None:
    """No block has another's bytes, and no slot that an old process may touch is given out."""
    random = Random(seed)
    life = Life(random)
    life.live(150)
    slabs = random.randint(1, SLABS - 1)
    old = random.random() < 0.5
    may_touch = {slot for held in life.held.values() for slot in held.slots}
    known = set(found(life.store))
    store, adoption = shrunk(life, slabs, old)
    assert not adoption.contradiction
    check_bytes(life, store)
    assert set(found(store)) <= known
    assert all(slot < slabs * SLAB for slot in store.blocks.table.many.slot[adoption.rows])
    given = set(slots_handed_out(store))
    assert all(slot < slabs * SLAB for slot in given)
    if old:
        assert not given & may_touch


@pytest.mark.parametrize("seed", range(20))
def test_a_server_that_is_killed_while_it_shrinks_leaves_what_the_next_can_adopt(
    seed: int,
) -> None:
    random = Random(seed)
    life = Life(random)
    life.live(120)
    slabs = random.randint(1, SLABS - 1)
    killed_after(random.randint(1, 400), lambda: shrunk(life, slabs, old_sessions=False))
    store = Store(POOL, SLAB, LIMITS, columns=life.columns)
    adopt(store, SLABS, False, life.now_ms)
    check_integrity(store)
    check_bytes(life, store)


def stored(chains: list[list[bytes]]) -> PlainColumns:
    """A store of one-slot blocks that these chains fill, in this order."""
    columns = PlainColumns()
    store = Store(POOL, SLAB, LIMITS, columns=columns)
    store.add_slabs(0, SLABS)
    store.open_session(1)
    layout = store.open_layout(1, *LAYOUTS[0]).number
    for number, keys in enumerate(chains, start=1):
        store.prepare_store(1, number, "a", layout, 0, b"", b"".join(keys), number)
        sums = np.arange(1, len(keys) + 1, dtype=np.uint64)
        store.complete_store(1, number, sums, number)
    return columns


def test_what_fits_stays_wherever_it_was() -> None:
    """Sixteen blocks, most in slabs that go: all stay."""
    chains = [KEYS[at * 4 : at * 4 + 4] for at in range(10)]
    columns = stored(chains)
    store = Store(POOL, SLAB, LIMITS, columns=columns)
    adopt(store, SLABS, False, 100)
    for chain in chains[:6]:
        store.drop_blocks("a", [chain[0]])
    store.tidy(100)
    moves: list[tuple[int, int]] = []
    smaller = Store(2 * SLAB, SLAB, LIMITS, columns=columns)
    adoption = adopt(
        smaller,
        SLABS,
        False,
        100,
        2,
        lambda source, to, nbytes: moves.extend(zip(source.tolist(), to.tolist(), strict=True)),
    )
    check_integrity(smaller)
    assert adoption.blocks == 16 and adoption.unfit == 0
    assert {key for _, key in found(smaller)} == {key for chain in chains[6:] for key in chain}
    assert moves and all(source >= 2 * SLAB > to for source, to in moves)


def test_what_was_used_last_stays_with_its_ancestors() -> None:
    chains = [KEYS[at * 8 : at * 8 + 8] for at in range(5)]
    columns = stored(chains)
    store = Store(POOL, SLAB, LIMITS, columns=columns)
    adopt(store, SLABS, False, 100)
    store.open_session(1)
    layout = store.open_layout(1, *LAYOUTS[0]).number
    store.lookup(1, 1, "a", layout, b"".join(chains[1][:5]), 0, 200)
    smaller = Store(2 * SLAB, SLAB, LIMITS, columns=columns)
    adoption = adopt(smaller, SLABS, False, 300, 2, lambda source, to, nbytes: None)
    check_integrity(smaller)
    left = {key for _, key in found(smaller)}
    assert adoption.blocks == 16 and adoption.unfit == 24
    assert set(chains[1][:5]) <= left, "a use counts for all ancestors"
    assert set(chains[4]) <= left, "the chain that was stored last"
    assert left - set(chains[1][:5]) - set(chains[4]) == set(chains[3][:3])
    assert SLOT * 16 == 2 * SLAB
