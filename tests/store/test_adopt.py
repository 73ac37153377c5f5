"""What the next server finds: all that was ready, nothing that was not, and no slot in two
hands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvkeep.kv.checksum import ABSENT
from kvkeep.store import adopt as adopting
from kvkeep.store import operators
from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.blocks import Blocks
from kvkeep.store.seals import seals
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.store.table import KEPT, READY, WRITING, PlainColumns
from kvkeep.store.tenants import tenant_word
from kvkeep_lab.simulation.store_integrity import check_integrity

sys.path.insert(0, str(Path(__file__).parent))
from life import HALF_WRITTEN, LAYOUTS, POOL, SLABS, SLOT, Life, content, killed_after, new_store

KEY_A, KEY_B = b"a" * 16, b"b" * 16


def next_store(life: Life, old_sessions: bool = True) -> tuple[Store, Adoption]:
    store = new_store(life.columns)
    adoption = adopt(store, SLABS, old_sessions, life.now_ms)
    if not adoption.contradiction:
        check_integrity(store)
    return store, adoption


def found(store: Store) -> dict[tuple[str, bytes], int]:
    return {(owner.name, key): row for owner in store.tenants for key, row in owner.index.items()}


def check_bytes(life: Life, store: Store) -> None:
    """Every block that is there is what its key says, in every shard that it has."""
    table = store.blocks.table
    for (tenant, key), row in found(store).items():
        assert table.state[row] == READY
        layout = store.layouts[table.layout[row]]
        for shard, check in enumerate(layout.checks[table.check[row]].tolist()):
            if check != ABSENT:
                assert life.memory[table.slot[row], shard] == content(tenant, key, shard), (
                    "another's bytes"
                )
                assert check == int.from_bytes(content(tenant, key, shard), "little")


def slots_handed_out(store: Store) -> Iterator[int]:
    """Every slot that a new client can get by any means: it floods the pool in all sizes."""
    store.open_session(9)
    for number, (fingerprint, shards) in enumerate(LAYOUTS, 1):
        layout = store.open_layout(9, fingerprint, shards).number
        keys = b"".join(bytes([number, at]).ljust(16, b"!") for at in range(64))
        plan = store.prepare_store(9, number, "flood", layout, 0, b"", keys, 10**6)
        for slot in plan.slots.tolist():
            yield from range(slot, slot + store.layouts[layout].slot_bytes, SLOT)


def shards_offered(store: Store) -> Iterator[tuple[int, int]]:
    """Slot and shard of all that a new client would be let write in blocks that are there."""
    table = store.blocks.table
    store.open_session(8)
    for (tenant, key), row in found(store).items():
        layout = store.layouts[table.layout[row]]
        above = table.keys[table.parent[row]] if table.parent[row] >= 0 else b""
        for shard in range(layout.shards):
            plan = store.prepare_store(8, 1, tenant, layout.number, shard, above, key, 10**6)
            yield from ((slot, shard) for slot in plan.slots.tolist())
            store.abandon_store(8, 1, 10**6)
    store.close_session(8, 10**6)


def check_hands(life: Life, store: Store) -> None:
    """Nobody gets a slot that an old client may still touch, and what old clients read stays where
    it is."""
    table, there = store.blocks.table, found(store)
    for held in life.held.values():
        if held.shard < 0:
            for key, slot in zip(held.keys, held.slots, strict=True):
                row = there.get((held.tenant, key))
                assert (
                    row is None
                    or table.slot[row] == slot
                    or row not in store.sessions[OLD_SESSIONS].leases.values()
                )
    touchable = {
        at
        for held in life.held.values()
        for slot in held.slots
        for at in range(slot, slot + life.store.layouts[held.layout].slot_bytes, SLOT)
    }
    writing = {
        (slot, held.shard) for held in life.held.values() if held.shard >= 0 for slot in held.slots
    }
    assert writing.isdisjoint(shards_offered(store)), "a shard's place in two hands"
    assert touchable.isdisjoint(slots_handed_out(store)), "a slot in two hands"
    check_integrity(store)


def one_life(seed: int) -> tuple[Life, dict[tuple[str, bytes], int]]:
    """A life that was cut off, somewhere in the middle of a request. And what was READY before that
    request."""
    random = Random(seed)
    life = Life(random)
    life.live(random.randint(5, 60))
    before = life.ready()
    killed_after(random.randint(0, 250), life.step)
    return life, before


def check_life(seed: int) -> int:
    """All promises, for one life. Returns how many blocks were adopted."""
    life, before = one_life(seed)
    states = np.array(life.store.blocks.table.many.state)
    store, adoption = next_store(life)
    assert not adoption.contradiction
    after = found(store)
    check_bytes(life, store)
    assert after.keys() <= before.keys() | life.ready().keys(), "what was not ready is there"
    kept = {
        name
        for name, row in before.items()
        if states[row] == READY and name[1] not in life.under_way
    }
    table = life.store.blocks.table
    for name in kept:
        row = before[name]
        while row >= 0 and states[row] == READY:
            row = table.parent[row]
        cut_above = row >= 0  # an ancestor was on its way out
        assert name in after or cut_above or _lost_its_parent(life, before[name]), (
            "a ready block is lost"
        )
    for _ in range(3):  # killed once more, while it adopts
        killed_after(
            life.random.randint(0, 300),
            lambda: adopt(new_store(life.columns), SLABS, True, life.now_ms),
        )
    again, _ = next_store(life)
    assert found(again).keys() == after.keys()
    check_hands(life, again)
    if OLD_SESSIONS in again.sessions:
        again.close_session(OLD_SESSIONS, life.now_ms)
    check_integrity(again)
    return adoption.blocks


def _lost_its_parent(life: Life, row: int) -> bool:
    """Whether something above was part of the request that was cut off."""
    table = life.store.blocks.table
    while row >= 0:
        if table.keys[row] in life.under_way:
            return True
        row = table.parent[row]
    return False


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_a_store_cut_off_anywhere_is_taken_over(first: int) -> None:
    assert sum(check_life(seed) for seed in range(first, first + 100)) > 400


def test_with_nobody_left_all_memory_is_free_again() -> None:
    for seed in range(40):
        life, _ = one_life(seed)
        store, adoption = next_store(life, old_sessions=False)
        assert adoption.held == 0 and OLD_SESSIONS not in store.sessions
        operators.clear(store)
        assert store.slabs.unused_slabs == SLABS
        check_integrity(store)


# -- bugs that these lives must see: each was planted here once, and stays planted


def believe_all(table: object, rows: np.ndarray, layout: object, words: object) -> np.ndarray:
    return table.many.seal[rows]  # type: ignore[attr-defined, no-any-return]


def hold_nothing(table: object, rows: np.ndarray) -> np.ndarray:
    return rows[:0]


def say_so_first(
    blocks: Blocks, tenant: Any, layout: Any, parent: int, keys: list[bytes], *hints: int
) -> Any:
    """The state before what it says."""
    table = blocks.table
    rows = table.take(len(keys))
    table.give(rows[::-1].tolist())  # `create` takes the same rows
    table.many.state[rows] = WRITING
    return create(blocks, tenant, layout, parent, keys, *hints)


create = Blocks.create


def note_checks_only(blocks: Blocks, rows: Any, shard: int, layout: Any, checksums: Any) -> None:
    layout.checks[blocks.table.many.check[rows], shard] = checksums


def forget_pins(blocks: Blocks, row: int) -> None:
    """Leases that only this process knows of."""


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Blocks, "note_checksums", note_checks_only),
        (Blocks, "create", say_so_first),
        (adopting, "_one_a_slot", hold_nothing),
        (Blocks, "pin", forget_pins),
    ],
    ids=["seal never written", "state first", "nothing held", "pins ignored"],
)
def test_these_lives_see_a_planted_bug(
    owner: object, name: str, bug: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        sum(check_life(seed) for seed in range(200))


# -- bytes that nobody wrote


COLUMNS = [*KEPT, "keys", "tenants", "layouts", "checks-1", "checks-2"]


def column_of(life: Life, name: str) -> np.ndarray:
    return life.columns.grow(name, np.uint8, 0, 0)


def flip(random: Random, column: np.ndarray, row: int) -> None:
    raw = column[row : row + 1].view(np.uint8).reshape(-1)
    raw[random.randrange(raw.size)] ^= 1 << random.randrange(8)


def a_row(life: Life, name: str) -> int:
    """One that says something about a READY block, if there is any."""
    table = life.store.blocks.table
    rows = list(life.ready().values()) or [0]
    row = life.random.choice(rows)
    if name == "tenants":
        return table.tenant[row]
    if name == "layouts":
        numbers = column_of(life, "layouts")["number"]
        return int((numbers == table.layout[row]).argmax())
    return table.check[row] if name.startswith("checks") else row


@pytest.mark.parametrize("name", COLUMNS)
def test_a_flipped_bit_is_never_believed(name: str) -> None:
    for seed in range(30):
        life, _ = one_life(seed)
        flip(life.random, column_of(life, name), a_row(life, name))
        for old_sessions in (True, False):
            store, adoption = next_store(life, old_sessions)
            if not adoption.contradiction:
                check_bytes(life, store)


def test_unsealed_rows_would_be_believed_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees it if nobody compares seals."""
    monkeypatch.setattr(adopting, "seals", believe_all)
    with pytest.raises((AssertionError, KeyError)):
        test_a_flipped_bit_is_never_believed("keys")


@pytest.mark.parametrize("old_sessions", [True, False])
def test_random_bytes_neither_raise_nor_hang(old_sessions: bool) -> None:
    for seed in range(150):
        life, _ = one_life(seed)
        random = np.random.default_rng(seed)
        for name in random.choice(
            COLUMNS, random.integers(1, len(COLUMNS) + 1), replace=False
        ).tolist():
            column = column_of(life, name)
            raw = column.view(np.uint8).reshape(-1)[: 64 * column.nbytes // len(column)]
            raw[:] = (
                random.integers(0, 256, raw.size) if seed % 3 else random.integers(0, 5, raw.size)
            )
        next_store(life, old_sessions)


def test_a_circle_of_parents_is_dropped() -> None:
    life = Life(Random(0))
    life.live(60)
    table = life.store.blocks.table
    rows = table.live_rows()[:5]
    table.many.parent[rows] = np.roll(rows, 1)
    store, _ = next_store(life, old_sessions=False)
    assert not set(rows.tolist()) & set(found(store).values())


# -- one thing at a time


def stored(columns: PlainColumns, checksums: list[int], keys: bytes = KEY_A + KEY_B) -> Store:
    store = new_store(columns)
    store.add_slabs(0, SLABS)
    store.open_session(1)
    layout = store.open_layout(1, *LAYOUTS[0]).number
    store.prepare_store(1, 1, "a", layout, 0, b"", keys, 0, priority=70, ttl_ms=500)
    store.complete_store(1, 1, np.array(checksums, np.uint64), 0)
    return store


def test_hints_quotas_and_uses_go_on() -> None:
    columns = PlainColumns()
    old = stored(columns, [5, 6])
    old.finish(1, "a", KEY_B, 0)
    store = new_store(columns)
    assert adopt(store, SLABS, False, 0).blocks == 2
    row = found(store)["a", KEY_B]
    table = store.blocks.table
    assert (table.priority[row], table.expires_ms[row], table.finished[row] == table.used[row]) == (
        70,
        500,
        True,
    )
    operators.set_quota(store, "a", SLOT, 0)
    assert [tenant.tenant for tenant in operators.usage(store)] == ["a"]
    assert store.tenants.get("a").usage_bytes == 2 * SLOT  # type: ignore[union-attr]
    check_integrity(store)
    store.blocks.order.note_expired(501)
    assert table.queued[row] >> 56 == 0, "its time to live goes on"


@pytest.mark.parametrize(("checksums", "adopted"), [([5, 0], 1), ([0, 6], 0), ([5, ABSENT], 2)])
def test_what_was_stored_without_a_checksum_is_dropped_with_all_below(
    checksums: list[int], adopted: int
) -> None:
    columns = PlainColumns()
    stored(columns, checksums)
    store = new_store(columns)
    assert adopt(store, SLABS, False, 0).blocks == adopted
    assert store.layouts[1].lacking == (ABSENT in checksums)


def test_memory_that_is_not_there_any_more_takes_its_blocks_along() -> None:
    columns = PlainColumns()
    stored(columns, [5, 6])
    store = new_store(columns)
    assert adopt(store, 0, False, 0) == Adoption(dropped=2)
    store.add_slabs(0, SLABS)
    check_integrity(store)
    contradiction = new_store(stored_columns())
    assert adopt(contradiction, 0, True, 0).contradiction, "whose memory it was, nobody knows"


def stored_columns() -> PlainColumns:
    columns = PlainColumns()
    stored(columns, [5, 6])
    return columns


def test_a_slot_that_two_claim_is_neithers() -> None:
    columns = PlainColumns()
    old = stored(columns, [5, 6])
    layout = old.layouts[1]
    table = old.blocks.table
    first, second = found(old)["a", KEY_A], found(old)["a", KEY_B]
    table.slot[second] = table.slot[first]
    rows = np.array([first, second])
    table.many.seal[rows] = seals(table, rows, layout, np.uint64(tenant_word("a")))
    store = new_store(columns)
    assert adopt(store, SLABS, True, 0) == Adoption(dropped=2, held=1)
    assert store.slabs.available(SLOT) == POOL // SLOT - 1
    store.close_session(OLD_SESSIONS, 0)
    check_integrity(store)


@pytest.mark.parametrize(("tenant", "layout"), [("b", 1), ("a", 2)])
def test_a_block_that_hangs_on_another_tenants_or_layouts_block_is_dropped(
    tenant: str, layout: int
) -> None:
    """Its seal matches all the same: that knows the parent's key, and two tenants may have a block
    of the same key."""
    columns = PlainColumns()
    old = stored(columns, [5, 6])
    fingerprint, shards = LAYOUTS[layout - 1]
    assert old.open_layout(1, fingerprint, shards).number == layout
    root, child = (KEY_A, KEY_B) if tenant != "a" else (b"c" * 16, b"d" * 16)
    for shard in range(len(shards)):
        old.prepare_store(1, 9, tenant, layout, shard, b"", root + child, 0)
        old.complete_store(1, 9, np.array([7, 8], np.uint64), 0)
    table, row = old.blocks.table, found(old)[tenant, child]
    table.parent[row] = found(old)["a", KEY_A]
    rows = np.array([row])
    sealed = seals(table, rows, old.layouts[layout], np.uint64(tenant_word(tenant)))
    assert (sealed == table.many.seal[rows]).all() or tenant == "a"
    table.many.seal[rows] = sealed
    store = new_store(columns)
    assert adopt(store, SLABS, False, 0).dropped == 1
    assert found(store).keys() == {("a", KEY_A), ("a", KEY_B), (tenant, root)}
    check_integrity(store)


def test_what_an_old_reader_leased_stays_and_is_found() -> None:
    columns = PlainColumns()
    old = stored(columns, [5, 6])
    old.lookup(1, 2, "a", 1, KEY_A + KEY_B, 0, 0)
    store = new_store(columns)
    assert adopt(store, SLABS, True, 0) == Adoption(2, 2 * SLOT, 0, 1)
    store.open_session(1)
    layout = store.open_layout(1, *LAYOUTS[0]).number
    flood = b"".join(bytes([at]).ljust(16, b"f") for at in range(64))
    store.prepare_store(1, 1, "b", layout, 0, b"", flood, 10**6)
    assert store.lookup(1, 2, "a", layout, KEY_A + KEY_B, 0, 10**6).blocks == 2
    store.release(1, 2, 10**6)
    store.close_session(OLD_SESSIONS, 10**6)
    check_integrity(store)


def test_the_old_sessions_take_nobodys_place() -> None:
    columns = PlainColumns()
    old = stored(columns, [5, 6])
    old.prepare_store(1, 3, "a", 1, 0, b"", b"c" * 16, 0)
    assert WRITING in old.blocks.table.many.state
    store = new_store(columns)
    assert adopt(store, SLABS, True, 0) == Adoption(2, 2 * SLOT, 1, 1)
    for session in (1, 2, 3):
        store.open_session(session)
    check_integrity(store)


def test_physical_layouts_are_remembered() -> None:
    columns = PlainColumns()
    old = stored(columns, [5, 6])
    old.layouts.agree(old.layouts[1], [0], b"rows first")
    store = new_store(columns)
    adopt(store, SLABS, False, 0)
    store.layouts.agree(store.layouts[1], [0], b"rows first")
    with pytest.raises(Exception, match="orders the tensors of shard 0 differently"):
        store.layouts.agree(store.layouts[1], [0], b"columns first")


def test_half_written_is_what_lives_leave_behind() -> None:
    """Else the lives above would show nothing."""
    lives = [one_life(seed)[0] for seed in range(50)]
    assert sum(HALF_WRITTEN in life.memory.values() for life in lives) > 40
    assert sum(bool(life.held) for life in lives) > 30
