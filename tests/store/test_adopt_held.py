"""What old processes may touch stays theirs: under leases that lost their end, in shards on their
way, however often adoption itself is cut off."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvkeep.kv.checksum import ABSENT
from kvkeep.store.adopt import adopt
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.store.table import PlainColumns
from kvkeep_lab.simulation.store_integrity import check_integrity

sys.path.insert(0, str(Path(__file__).parent))
from life import LAYOUTS, POOL, SLABS, SLOT, killed_after, new_store

KEYS = [bytes([letter]) * 16 for letter in b"abcd"]
CHAIN = b"".join(KEYS)


def leased(columns: PlainColumns) -> tuple[Store, set[int]]:
    """A chain of four blocks that one session has leased, and its slots."""
    store = new_store(columns)
    store.add_slabs(0, SLABS)
    store.open_session(1)
    layout = store.open_layout(1, *LAYOUTS[0]).number
    store.prepare_store(1, 1, "a", layout, 0, b"", CHAIN, 0)
    store.complete_store(1, 1, np.array([5, 6, 7, 8], np.uint64), 0)
    hit = store.lookup(1, 2, "a", layout, CHAIN, 0, 0)
    assert hit.blocks == 4
    return store, set(hit.slots.tolist())


def handed_out(store: Store) -> set[int]:
    """The slots that a client gets who stores as much as there is room for."""
    store.open_session(9)
    layout = store.open_layout(9, *LAYOUTS[0]).number
    flood = b"".join(bytes([at]).ljust(16, b"!") for at in range(POOL // SLOT + 9))
    return set(store.prepare_store(9, 1, "b", layout, 0, b"", flood, 10**6).slots.tolist())


@pytest.mark.parametrize("dropped", range(4))
def test_a_lease_whose_end_was_dropped_holds_the_beginning(dropped: int) -> None:
    columns = PlainColumns()
    old, slots = leased(columns)
    old.drop_blocks("a", [KEYS[dropped]])
    for _ in range(2):  # the server after the next one knows, too
        store = new_store(columns)
        assert adopt(store, SLABS, True, 0).blocks == dropped
        check_integrity(store)
    assert slots.isdisjoint(handed_out(store)), "a slot in two hands"
    store.close_session(OLD_SESSIONS, 10**6)
    check_integrity(store)
    store.close_session(9, 10**6)
    assert len(handed_out(store)) == POOL // SLOT, "with the last old process all is free"


def damage_the_end(store: Store) -> None:
    table = store.blocks.table
    table.seal[store.tenants.get("a").index.get(KEYS[3])] ^= 1  # type: ignore[union-attr]


def drop_from_the_middle(store: Store) -> None:
    store.drop_blocks("a", [KEYS[2]])


@pytest.mark.parametrize("harm", [damage_the_end, drop_from_the_middle])
def test_adoption_cut_off_anywhere_forgets_no_lease(harm: object) -> None:
    lines, cut = 0, True
    while cut:
        columns = PlainColumns()
        old, slots = leased(columns)
        harm(old)  # type: ignore[operator]
        cut = killed_after(lines, lambda columns=columns: adopt(new_store(columns), SLABS, True, 0))  # type: ignore[misc]
        store = new_store(columns)
        adopt(store, SLABS, True, 0)
        check_integrity(store)
        assert slots.isdisjoint(handed_out(store)), f"a slot in two hands, cut after {lines} lines"
        lines += 1
    assert lines > 100


def lacking(columns: PlainColumns) -> Store:
    """A block that is ready and was stored as lacking its second shard."""
    store = new_store(columns)
    store.add_slabs(0, SLABS)
    store.open_session(1)
    layout = store.open_layout(1, *LAYOUTS[1]).number
    for shard, check in enumerate((7, ABSENT)):
        store.prepare_store(1, shard, "a", layout, shard, b"", KEYS[0], 0)
        store.complete_store(1, shard, np.array([check], np.uint64), 0)
    return store


def offered(store: Store) -> list[int]:
    """Where another client would write the second shard."""
    if 9 not in store.sessions:
        store.open_session(9)
    layout = store.open_layout(9, *LAYOUTS[1]).number
    slots: list[int] = store.prepare_store(9, 1, "a", layout, 1, b"", KEYS[0], 0).slots.tolist()
    store.abandon_store(9, 1, 0)
    return slots


def test_a_shard_on_its_way_gets_no_second_writer() -> None:
    columns = PlainColumns()
    old = lacking(columns)
    place = old.prepare_store(1, 5, "a", 1, 1, b"", KEYS[0], 0).slots.tolist()
    assert len(place) == 1 and offered(old) == []
    for _ in range(2):
        store = new_store(columns)
        assert adopt(store, SLABS, True, 0).blocks == 1
        check_integrity(store)
        assert offered(store) == [], "the old writer may be at work there"
        assert store.lookup(9, 3, "a", 1, KEYS[0], 0, 0).blocks == 1, "what is there is found"
    store.release(9, 3, 0)
    store.close_session(OLD_SESSIONS, 0)
    check_integrity(store)
    assert offered(store) == place


@pytest.mark.parametrize("old_sessions", [True, False])
def test_a_shard_that_nobody_writes_is_offered(old_sessions: bool) -> None:
    columns = PlainColumns()
    lacking(columns)
    store = new_store(columns)
    adopt(store, SLABS, old_sessions, 0)
    assert len(offered(store)) == 1
    check_integrity(store)
