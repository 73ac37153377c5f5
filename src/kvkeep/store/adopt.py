"""Takes over the blocks that a previous server left in its columns: those that can be verified.

    READY, seal matches, parents adopted   adopted: a lookup finds it as before
    leased when the old server ended       adopted, and held while an old process lives
    READY, a shard may still be written    adopted; no other writer gets that shard meanwhile
    in any other state, or not verified    dropped; its slot is held while an old process lives
    slots that no row names                free
    no room in a pool that became smaller  dropped; others move to free slots (shrink.py)

Processes of the old server's sessions may still live, paused in the middle of a copy. The session
OLD_SESSIONS holds what they may touch until the last of them ends: it is neither evicted nor handed
out.

Whatever bytes the columns hold, adoption neither raises nor hangs. It can be interrupted at any
point and repeated: a row is free or held before anything else gets its slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import ABSENT
from kvkeep.store.layouts import Layout
from kvkeep.store.seals import fold, seals
from kvkeep.store.shrink import Slots, that_fit
from kvkeep.store.store import OLD_SESSIONS, Session, Store, Write
from kvkeep.store.table import EVICTING, FREE, NO_ROW, READY, WORDS_A_KEY, BlockTable
from kvkeep.store.tenants import tenant_word
from kvkeep.store.tree import link_all, split_keys

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Move = Callable[[NDArray[np.int64], NDArray[np.int64], int], None]  # from, to, bytes of a slot

_WORDS_AT_A_TIME = 1 << 19  # of seals that are computed at once: the temporaries stay small


@dataclass(frozen=True)
class Adoption:
    """The result. `rows` are those of the adopted blocks, `held` counts slots kept for old
    processes, `unfit` the blocks for which a smaller pool has no room."""

    blocks: int = 0
    nbytes: int = 0
    dropped: int = 0
    held: int = 0
    contradiction: bool = False
    unfit: int = 0
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)


def adopt(
    store: Store,
    slabs: int,
    old_sessions: bool,
    now_ms: int,
    fewer: int | None = None,
    move: Move | None = None,
) -> Adoption:
    """Adopts what the columns of a new, unused store hold, for a pool whose first `slabs` slabs are
    unchanged. If the pool has `fewer` slabs from now on, `move` copies blocks into them.

    If old processes live and the columns do not tell which memory they may touch, the result is a
    `contradiction`: the store is of no use then, and only other memory is safe."""
    found = _Found(store, slabs)
    adopted = proven = found.provable()
    if old_sessions and not found.all_placed():
        return Adoption(contradiction=True)
    if fewer is not None and move is not None:
        adopted = _shrink(store, found, proven, fewer, old_sessions, move)
        slabs = fewer
    dropped = found.live[~np.isin(found.live, adopted, assume_unique=True)]
    held = np.empty(0, np.int64)
    if old_sessions:
        within = store.blocks.table.many.slot[dropped] < slabs * store.slabs.slab_bytes
        held = _one_a_slot(store.blocks.table, dropped[within])
    many = store.blocks.table.many
    # A lease pins the last block of a chain. If that is not verified, any block may be leased.
    pinned = (many.pins[adopted] > 0) | (many.state[dropped] == READY).any()
    # A lease on a dropped block also covers its parent, which only the dropped child protected.
    pinned |= np.isin(adopted, many.parent[dropped])
    leased = adopted[pinned] if old_sessions else held[:0]
    _settle(store, adopted, held, leased)
    _rebuild(store, slabs, adopted, held, now_ms)
    store.blocks.presence.add(store.blocks.table.keys.words[store.blocks.table.live_rows(), 0])
    nbytes = sum(layout.blocks * layout.slot_bytes for layout in store.layouts)
    nbytes -= sum(
        store.layouts[layout].slot_bytes for layout in store.blocks.table.many.layout[held].tolist()
    )
    unfit = len(proven) - len(adopted)
    return Adoption(
        *(len(adopted), nbytes, len(dropped) - unfit, len(held) + len(leased)),
        unfit=unfit,
        rows=adopted,
    )


def _shrink(
    store: Store, found: _Found, rows: Rows, slabs: int, old_sessions: bool, move: Move
) -> Rows:
    """Moves blocks into the first slabs; returns the rows of those that fit. A slot that an old
    process may touch is not given to another block."""
    table, many, slab_bytes = store.blocks.table, store.blocks.table.many, store.slabs.slab_bytes
    nbytes = found.slot_bytes(rows)
    live = found.live if old_sessions else found.live[:0]
    taken = Slots(many.slot[live], found.slot_bytes(live))
    kept = that_fit(table, rows, nbytes, taken, slab_bytes, slabs)
    if not old_sessions:  # before their slots get other bytes
        many.state[np.setdiff1d(found.live, kept.rows)] = FREE
    sizes = found.slot_bytes(kept.moved)
    for size in np.unique(sizes).tolist():
        of_size = sizes == size
        move(many.slot[kept.moved[of_size]], kept.to[of_size], size)
    many.slot[kept.moved] = kept.to
    found.seal_again(kept.moved)
    return kept.rows


class _Found:
    """The rows that were not free, and what is known of each."""

    def __init__(self, store: Store, slabs: int) -> None:
        self._store = store
        self._table = table = store.blocks.table
        self.live: Rows = np.flatnonzero(table.many.state != FREE)
        numbers = np.unique(table.many.tenant[self.live]).tolist()
        self._names = store.tenants.names_left(numbers)
        self._layouts = {layout.number: layout for layout in store.layouts.take_over()}
        # by number; the last is of all unknown
        sizes = np.zeros(max(self._layouts, default=0) + 2, dtype=np.int64)
        for number, layout in self._layouts.items():
            sizes[number] = layout.slot_bytes
        numbers = table.many.layout[self.live]
        self._slot_bytes = sizes[np.where((numbers > 0) & (numbers < len(sizes) - 1), numbers, -1)]
        self._placed = self._has_place(slabs)
        self._mixed = self._is_mixed(slabs)

    def all_placed(self) -> bool:
        """Whether the memory of every row is known, and all slots of a slab have one size."""
        return bool(self._placed.all() and not self._mixed.any())

    def slot_bytes(self, rows: Rows) -> NDArray[np.int64]:
        return self._slot_bytes[np.searchsorted(self.live, rows)]

    def seal_again(self, rows: Rows) -> None:
        """Seals verified blocks that got other slots."""
        many = self._table.many
        for number, of_layout in _split(rows, many.layout[rows]):
            words = self._tenant_words()[many.tenant[of_layout]]
            many.seal[of_layout] = seals(self._table, of_layout, self._layouts[number], words)

    def _tenant_words(self) -> NDArray[np.uint64]:
        """By tenant number."""
        words = np.zeros(max(self._names, default=-1) + 1, dtype=np.uint64)
        for number, name in self._names.items():
            words[number] = tenant_word(name)
        return words

    def provable(self) -> Rows:
        """The rows of verified blocks whose ancestors are verified too."""
        many, live = self._table.many, self.live
        good = self._placed & (many.state[live] == READY) & ~self._mixed
        good &= _once(many.slot[live], self._placed)
        parents = many.parent[live]
        good &= (parents >= NO_ROW) & (parents < len(many.state))
        self._check_seals(good)
        good &= _once(many.layout[live].astype(np.int64) << 32 | many.check[live], good)
        good &= _once(self._names_of_blocks(), good)
        return self._with_all_above(good)

    def _has_place(self, slabs: int) -> Mask:
        """Whether tenant and layout are known, and the slot is valid for that layout."""
        many, live, slab_bytes = self._table.many, self.live, self._store.slabs.slab_bytes
        known = np.isin(many.tenant[live], list(self._names))
        slot, size = many.slot[live], np.maximum(self._slot_bytes, 1)
        within = slot % slab_bytes
        inside: Mask = (
            (slot >= 0)
            & (slot < slabs * slab_bytes)
            & (within + size <= slab_bytes)
            & (within % size == 0)
        )
        inside &= known & (self._slot_bytes > 0)
        return inside

    def _is_mixed(self, slabs: int) -> Mask:
        """Rows in slabs where other rows have another slot size."""
        slab = np.where(
            self._placed, self._table.many.slot[self.live] // self._store.slabs.slab_bytes, slabs
        )
        smallest = np.full(slabs + 1, np.iinfo(np.int64).max)
        largest = np.zeros(slabs + 1, dtype=np.int64)
        np.minimum.at(smallest, slab, self._slot_bytes)
        np.maximum.at(largest, slab, self._slot_bytes)
        mixed: Mask = (smallest != largest)[slab]
        return self._placed & mixed

    def _check_seals(self, good: Mask) -> None:
        """Removes rows whose seal does not match, or with a shard without a checksum."""
        many = self._table.many
        words = self._tenant_words()
        for number, of_layout in _split(np.flatnonzero(good), many.layout[self.live[good]]):
            layout = self._layouts[number]
            check = many.check[self.live[of_layout]]
            sound = (check >= 0) & (check < len(layout.checks))
            good[of_layout[~sound]] = False
            of_layout = of_layout[sound]
            at_a_time = max(1, _WORDS_AT_A_TIME // (16 + layout.shards))
            for at in range(0, len(of_layout), at_a_time):
                some = of_layout[at : at + at_a_time]
                rows = self.live[some]
                proven = (
                    seals(self._table, rows, layout, words[many.tenant[rows]]) == many.seal[rows]
                )
                proven &= layout.checks[many.check[rows]].all(axis=1)
                good[some[~proven]] = False

    def _names_of_blocks(self) -> NDArray[np.uint64]:
        """Tenant and key of each row, hashed to 64 bits. Two rows with the same hash are both
        dropped."""
        names = np.empty((len(self.live), WORDS_A_KEY + 1), dtype=np.uint64)
        names[:, :WORDS_A_KEY] = self._table.keys.words[self.live]
        names[:, WORDS_A_KEY] = self._table.many.tenant[self.live]
        return fold(names)

    def _with_all_above(self, good: Mask) -> Rows:
        """The good rows whose ancestors, up to a root, are good and of the same tenant and layout.
        Every round doubles how far up a row looks; a row that has found no root after all rounds is
        its own ancestor."""
        many = self._table.many
        sound = np.zeros(len(many.state) + 1, dtype=np.bool_)  # one more, which NO_ROW finds
        sound[self.live[good]] = True
        sound[NO_ROW] = True
        rows = self.live[good]
        above = np.full(len(sound), NO_ROW, dtype=np.int64)
        above[rows] = many.parent[rows]
        has_parent = rows[above[rows] != NO_ROW]
        for column in (many.tenant, many.layout):
            sound[has_parent] &= column[has_parent] == column[above[has_parent]]
        for _ in range(len(sound).bit_length() + 1):
            has_parent = has_parent[above[has_parent] != NO_ROW]
            if not len(has_parent):
                break
            sound[has_parent] &= sound[above[has_parent]]
            above[has_parent] = above[above[has_parent]]
        sound[has_parent] = False
        return rows[sound[rows]]


def _split(items: Rows, by: NDArray[Any]) -> list[tuple[int, Rows]]:
    """Groups the items by number; returns each number with its items."""
    order = np.argsort(by, kind="stable")
    pieces = np.split(order, np.flatnonzero(np.diff(by[order])) + 1) if len(items) else []
    return [(int(by[piece[0]]), items[piece]) for piece in pieces]


def _once(values: NDArray[Any], among: Mask) -> Mask:
    """Marks values that occur once among those selected."""
    _, which, count = np.unique(values[among], return_inverse=True, return_counts=True)
    once = np.zeros(len(values), dtype=np.bool_)
    once[among] = count[which.reshape(-1)] == 1
    return once


def _one_a_slot(table: BlockTable, rows: Rows) -> Rows:
    """One row for each slot that the rows name."""
    _, first = np.unique(table.many.slot[rows], return_index=True)
    return np.sort(rows[first])


def _settle(store: Store, adopted: Rows, held: Rows, leased: Rows) -> None:
    """Writes the columns that the store begins with, in an order that may be interrupted
    anywhere."""
    table, many = store.blocks.table, store.blocks.table.many
    # first, because the next lines overwrite what these follow from
    many.pins[leased] = np.maximum(many.pins[leased], 1)
    many.pins[held] = 1
    many.parent[held] = NO_ROW
    many.state[held] = EVICTING
    table.take_over(np.sort(np.concatenate([adopted, held])))
    pins = np.zeros(len(adopted), dtype=np.int32)
    pins[np.isin(adopted, leased)] = 1
    many.pins[adopted] = pins
    uses, ranks = np.unique(many.used[adopted], return_inverse=True)
    was_last = many.finished[adopted] == many.used[adopted]
    # counted anew, so that no number in a row can do harm
    many.used[adopted] = ranks.reshape(-1) + 1
    many.finished[adopted] = np.where(was_last, ranks.reshape(-1) + 1, 0)
    store.blocks.sequence = len(uses)
    many.used[held] = many.finished[held] = 0
    many.expires_ms[held] = 0
    if len(held) or len(leased):
        store.sessions[OLD_SESSIONS] = Session(dict(enumerate([*held.tolist(), *leased.tolist()])))


def _rebuild(store: Store, slabs: int, adopted: Rows, held: Rows, now_ms: int) -> None:
    """Builds everything derived from the columns: trees, indices, slots, usage, eviction order."""
    table, many = store.blocks.table, store.blocks.table.many
    rows = np.sort(np.concatenate([adopted, held]))
    link_all(table, rows)
    by_number = store.tenants.names_left(np.unique(many.tenant[rows]).tolist())
    store.tenants.take_over(by_number)
    for number, of_tenant in sorted(
        _split(rows, many.tenant[rows]), key=lambda item: int(many.used[item[1]].max())
    ):
        # least recently used tenant first: the order in which they may be replaced
        tenant = store.tenants.by_number[number]
        indexed = of_tenant[many.state[of_tenant] == READY]
        tenant.index.put(split_keys(table.keys.words[indexed].tobytes()), indexed.tolist())
        for layout, some in _split(of_tenant, many.layout[of_tenant]):
            store.tenants.charge(tenant, len(some), len(some) * store.layouts[layout].slot_bytes)
            evicting = int((many.state[some] == EVICTING).sum())
            tenant.unindexed_bytes += evicting * store.layouts[layout].slot_bytes
    for layout, some in _split(rows, many.layout[rows]):
        store.layouts[layout].blocks = len(some)
        store.layouts[layout].used = int(many.used[some].max())
        _rebuild_checks(store, store.layouts[layout], some)
    store.slabs.take_over(slabs, _slots_by_slab(store, rows))
    many.held[rows] = 0
    for _, of_tenant in _split(leased := _held_by_old_sessions(store), many.tenant[leased]):
        for _, some in _split(of_tenant, many.layout[of_tenant]):
            store.blocks.hold(some)
    _hold_lacking(store)
    leaves = adopted[(many.first_child[adopted] == NO_ROW) & (many.pins[adopted] == 0)]
    for row in leaves.tolist():
        store.blocks.order.enqueue(row, now_ms)
    for row in adopted[many.expires_ms[adopted] > 0].tolist():
        store.blocks.order.expire_later(row)


def _hold_lacking(store: Store) -> None:
    """Registers a write of the old sessions for each missing shard of a block that they hold: an
    old process may be writing it, so no second writer may get its place."""
    many, old = store.blocks.table.many, store.sessions.get(OLD_SESSIONS)
    rows = _held_by_old_sessions(store)
    rows = rows[many.state[rows] == READY]
    for number, of_layout in _split(rows, many.layout[rows]):
        layout = store.layouts[number]
        lacking = layout.checks[many.check[of_layout]] == ABSENT
        for shard in np.flatnonzero(lacking.any(axis=0)).tolist():
            assert old is not None
            of_shard = of_layout[lacking[:, shard]]
            for _, some in _split(of_shard, many.tenant[of_shard]):
                work = old.writes[len(old.writes)] = Write(layout, (shard,))
                store.add_to_write(old, work, some)


def _held_by_old_sessions(store: Store) -> Rows:
    old = store.sessions.get(OLD_SESSIONS)
    return np.array(list(old.leases.values()) if old else [], dtype=np.int64)


def _rebuild_checks(store: Store, layout: Layout, rows: Rows) -> None:
    """Keeps the rows of checksums of adopted blocks, and gives each held block a row of its own."""
    many = store.blocks.table.many
    ready = many.state[rows] == READY
    check = many.check[rows[ready]].astype(np.int64)
    layout.take_over_checks(check)
    many.check[rows[~ready]] = layout.take_checks(int((~ready).sum()))


def _slots_by_slab(store: Store, rows: Rows) -> dict[int, tuple[int, list[int]]]:
    many = store.blocks.table.many
    slabs = {}
    for slab, some in _split(rows, many.slot[rows] // store.slabs.slab_bytes):
        slot_bytes = store.layouts[int(many.layout[some[0]])].slot_bytes
        slabs[slab] = (slot_bytes, many.slot[some].tolist())
    return slabs
