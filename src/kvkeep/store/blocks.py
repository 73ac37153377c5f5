"""The steps in which a block changes state. Each leaves everything consistent.

Blocks that are taken out of use cannot be found from that moment on, however many they are. `sweep`
frees their memory, `a_turn` blocks at a time:

    a tree        `drop` removes its root from the index; the blocks below are `unswept`: still in
                  the index, so a lookup that finds one checks its ancestors
    a tenant      `clear` replaces its index by an empty one; the blocks of the old one are swept
    a long chain  is freed from its leaf up; `_to_free` has the block where a turn ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.outcomes import DROPPED
from kvkeep.kv.presence import Presence
from kvkeep.store.departed import Departures
from kvkeep.store.draining import Draining
from kvkeep.store.key_index import KeyIndex
from kvkeep.store.layouts import Layout, Layouts
from kvkeep.store.order import EvictionOrder
from kvkeep.store.seals import fold_checks, seals_of_chain
from kvkeep.store.slabs import Slabs
from kvkeep.store.table import EVICTING, FREE, NO_ROW, READY, WAITING, WRITING, BlockTable, Columns
from kvkeep.store.tenants import Tenant, Tenants
from kvkeep.store.tree import any_above, hold, let_go, link_chain, split_keys, unlink_leaf, way_up

_IN_USE = (WRITING, WAITING, READY)
_KEYS_A_STEP = 16
# most blocks that a request, or a turn after it, takes out of use or frees: one to two milliseconds
BLOCKS_A_TURN = 256


class BlockChanges(Protocol):
    """Who is told which blocks may have become READY, or may have left the index. A block may be
    named when nothing has changed: whoever is told looks at the index."""

    def came(self, tenant: str, layout: Layout, words: NDArray[np.uint64]) -> None:
        """Blocks with these addresses, two words each, have all their shards."""

    def left(self, tenant: str, layout: Layout, words: NDArray[np.uint64]) -> None:
        """Blocks with these addresses are out of use."""


class Blocks:
    """Table, tree, slots, usage and eviction order, changed together."""

    def __init__(
        self,
        tenants: Tenants,
        layouts: Layouts,
        slabs: Slabs,
        columns: Columns | None = None,
        presence: Presence | None = None,
        most_blocks: int = 0,
    ) -> None:
        self.table = BlockTable(columns, most_blocks)
        self.presence = presence or Presence()  # counts all blocks that a lookup could find
        self.tenants = tenants
        self.layouts = layouts
        self.slabs = slabs
        self.draining = Draining(self.table, slabs)
        self.order = EvictionOrder(self.table, tenants, layouts)
        self.sequence = 0  # counts uses; the clock of the eviction order
        # row of an incomplete block -> bit mask of its shards that have arrived
        self.shards_in: dict[int, int] = {}
        self.a_turn = BLOCKS_A_TURN
        self.freed = 0  # blocks, since the start
        self.dropped = 0  # blocks that have left the index by `drop`
        # EVICTING row whose children may be in the index -> the next child to sweep
        self.unswept: dict[int, int] = {}
        self._to_free: list[int] = []  # EVICTING leaves without pins
        self._cleared: deque[tuple[Tenant, KeyIndex]] = deque()
        self._may_free = BLOCKS_A_TURN  # in this turn
        self.departures: Departures | None = None  # not remembered by default
        # Why blocks are evicted now, and for which tenant; None: not to make room.
        self.pressure: tuple[str, str] | None = None
        self.changes: BlockChanges | None = None  # nobody is told by default

    def next_use(self) -> int:
        self.sequence += 1
        return self.sequence

    def create(
        self,
        tenant: Tenant,
        layout: Layout,
        parent: int,
        keys: list[bytes],
        priority: int,
        expires_ms: int,
    ) -> NDArray[np.int64]:
        """Makes a chain of new WRITING blocks under `parent`. The caller has made room for them."""
        table, n = self.table, len(keys)
        rows = table.take(n)
        row_list, many = rows.tolist(), table.many
        slots = np.array(self.slabs.take(layout.slot_bytes, n), dtype=np.int64)
        in_a_row = row_list == list(range(row_list[0], row_list[0] + n))
        at = slice(row_list[0], row_list[0] + n) if in_a_row else rows  # several times as fast
        words = table.keys.put(at, b"".join(keys))
        self.presence.add(words[:, 0])
        above = table.keys[parent] if parent != NO_ROW else b""
        many.seal[at] = seals_of_chain(
            words, above, slots, layout, tenant.word, (priority, expires_ms)
        )
        many.slot[at] = slots
        many.check[at] = layout.take_checks(n)
        many.priority[at] = priority
        many.tenant[at] = tenant.number
        many.layout[at] = layout.number
        many.pins[at] = 0
        many.used[at] = self.sequence
        many.finished[at] = 0
        many.expires_ms[at] = expires_ms
        many.queued[at] = -1
        many.held[at] = 0
        link_chain(table, rows, parent)
        many.state[at] = WRITING  # last: see table.py
        tenant.index.put(keys, row_list)
        self.shards_in.update(dict.fromkeys(row_list, 0))
        if layout.shards > 1:
            self.order.await_shards(row_list)
        layout.blocks += n
        self.tenants.charge(tenant, n, n * layout.slot_bytes)
        assert not tenant.is_over_limit
        if expires_ms:
            for row in row_list:
                self.order.expire_later(row)
        return rows

    def note_checksums(
        self, rows: NDArray[np.int64], shard: int, layout: Layout, checksums: NDArray[np.uint64]
    ) -> None:
        """Stores the checksums of one shard and adds them to the blocks' seals, before a block is
        READY."""
        many = self.table.many
        places, change = many.check[rows], fold_checks(checksums, shard)
        if layout.lacking:  # the shard may have been stored as absent before
            change -= fold_checks(layout.checks[places, shard], shard)
        layout.checks[places, shard] = checksums
        layout.lacking |= bool((checksums == ABSENT).any())
        many.seal[rows] += change

    def shards_arrived(self, rows: NDArray[np.int64], mask: int, layout: Layout) -> None:
        """Notes the shards of a mask of some blocks, after their checksums. A block with all shards
        is READY as soon as its ancestors are."""
        shards_in, complete = self.shards_in, (1 << layout.shards) - 1
        written = rows[self.table.many.state[rows] == WRITING]
        if complete == mask:  # most layouts have one shard
            whole = written
            for row in whole.tolist():
                del shards_in[row]
        else:
            whole = np.array(self._note_shards(written.tolist(), mask, complete), dtype=np.int64)
        if len(whole):
            self._publish_chain(whole)
            self._note_came(whole)
        if layout.shards > 1:
            self.order.await_no_more(row for row in rows.tolist() if row not in shards_in)

    def _note_shards(self, rows: list[int], mask: int, complete: int) -> list[int]:
        """Returns the rows that have all shards now."""
        whole, shards_in = list[int](), self.shards_in
        for row in rows:
            arrived = shards_in[row] | mask
            if arrived == complete:
                del shards_in[row]
                whole.append(row)
            else:
                shards_in[row] = arrived
        return whole

    def touch(self, row: int, sequence: int) -> None:
        """Notes a use of the chain that ends in `row`. Ancestors inherit it when they become
        leaves."""
        self.table.used[row] = sequence

    def hold(self, rows: NDArray[np.int64]) -> None:
        """Counts one more lease or write on each block. All are of one tenant and layout."""
        self._charge_held(int(rows[0]), hold(self.table, rows))

    def let_go(self, rows: NDArray[np.int64]) -> int:
        """Counts one lease or write less. Before `unpin`, which may free the blocks. Returns how many
        blocks are not held any more."""
        blocks = let_go(self.table, rows)
        self._charge_held(int(rows[0]), -blocks)
        return blocks

    def _charge_held(self, row: int, blocks: int) -> None:
        layout = self.layouts[self.table.layout[row]]
        layout.held_blocks += blocks
        self.tenants.hold(
            self.tenants.by_number[self.table.tenant[row]], blocks * layout.slot_bytes
        )

    def pin(self, row: int) -> None:
        self.table.pins[row] += 1

    def unpin(self, row: int, now_ms: int) -> None:
        """Ends one lease or write on a block. After the last one the block is evictable, or freed
        if it is EVICTING."""
        self.table.pins[row] -= 1
        self._unpinned(row, now_ms)

    def pin_many(self, rows: NDArray[np.int64]) -> None:
        self.table.many.pins[rows] += 1

    def unpin_many(self, rows: NDArray[np.int64], now_ms: int) -> None:
        """Ends one write on each block, parents first. Only leaves and EVICTING blocks change."""
        many = self.table.many
        many.pins[rows] -= 1
        look = rows[(many.first_child[rows] == NO_ROW) | (many.state[rows] == EVICTING)]
        for row in reversed(look.tolist()):
            if self.table.state[row] != FREE:  # else it was freed with its last child
                self._unpinned(row, now_ms)

    def evict(self, row: int, now_ms: int, limit: int = 1) -> int:
        """Evicts a leaf, and with it ancestors that would be next in line, `limit` blocks at most.
        Returns how many.

        The first ancestor that stays inherits the last use, and whether its request has finished."""
        chain = self._same_rank_above(row, limit)
        self._evict_chain(chain, now_ms)
        return len(chain)

    def evict_all(self, rows: list[int], now_ms: int) -> None:
        """Evicts blocks without leases and writes, descendants first, whatever their rank."""
        table, chain = self.table, list[int]()
        for row in rows:
            if chain and not (table.parent[chain[-1]] == row and self._is_only_child(chain[-1])):
                self._evict_chain(np.array(chain), now_ms)
                chain = []
            chain.append(row)
        if chain:
            self._evict_chain(np.array(chain), now_ms)

    def _evict_chain(self, chain: NDArray[np.int64], now_ms: int) -> int:
        """Frees a leaf and the ancestors that follow it. Returns the first ancestor that stays,
        which inherits the last use."""
        table, last_used = self.table, int(chain[self.table.many.used[chain].argmax()])
        used, finished = table.used[last_used], table.finished[last_used]
        parent = self._free(chain)
        if parent != NO_ROW:
            if used >= table.used[parent]:
                table.used[parent], table.finished[parent] = used, finished
            if table.state[parent] == EVICTING:
                self._free_evicting(parent)
                return NO_ROW
            self.order.enqueue(parent, now_ms)
        return parent

    def _is_only_child(self, row: int) -> bool:
        return self.table.next_sibling[row] == NO_ROW == self.table.prev_sibling[row]

    def _same_rank_above(self, row: int, limit: int) -> NDArray[np.int64]:
        """The row and the ancestors that would become leaves of the same rank one after the other:
        most often the rest of a conversation, evicted in one step instead of block by block."""
        if limit == 1 or not self._is_only_child(row):
            return np.array([row])
        many, chain = self.table.many, way_up(self.table, row, limit)[::-1]
        above, used = chain[1:], many.used[chain]
        goes = (used[1:] <= used[0]) & (many.pins[above] == 0)
        for siblings in (many.next_sibling, many.prev_sibling):
            goes &= siblings[chain[:-1]] == NO_ROW
        for column in (many.state, many.priority, many.expires_ms):
            goes &= column[above] == column[row]
        stays = len(goes) if goes.all() else int(goes.argmin())
        return chain[: 1 + stays]

    def drop(self, rows: Iterable[int]) -> int:
        """Takes blocks and their descendants out of use at once. Frees those without leases and
        writes, the first ones now and the rest by `sweep`; the others and their ancestors stay
        EVICTING until the last lease or write ends. Returns how many have left the index so far."""
        before = self.dropped
        for row in rows:
            if self.table.state[row] in _IN_USE:
                self.take_out(row)
        self.sweep()
        return self.dropped - before

    def take_out(self, row: int) -> None:
        """Takes a block out of the index. Its descendants are `unswept`."""
        table = self.table
        tenant, key = self.tenants.by_number[table.tenant[row]], table.keys[row]
        if tenant.index.get(key) == row:  # else it left with the whole index
            tenant.index.remove([key])
            tenant.unindexed_bytes += self.layouts[table.layout[row]].slot_bytes
        self._evicting(row)
        self.unswept[row] = table.first_child[row]
        self.dropped += 1

    def is_unswept(self, row: int) -> bool:
        """Whether a block in the index has an ancestor that was taken out of it."""
        return bool(self.unswept) and any_above(self.table, row, EVICTING)

    def clear(self, tenant: Tenant) -> int:
        """Takes all blocks of a tenant out of use at once. Returns how many were in the index.
        `sweep` frees those without leases and writes."""
        index, tenant.index = tenant.index, KeyIndex()
        if index:
            tenant.unindexed_bytes = tenant.usage_bytes
            tenant.cleared += 1
            self._cleared.append((tenant, index))
        return len(index)

    @property
    def has_to_sweep(self) -> bool:
        return bool(self._to_free or self.unswept or self._cleared)

    def begin_turn(self) -> None:
        """Begins a turn: `a_turn` blocks may be freed before the rest is left to `sweep`."""
        self._may_free = self.a_turn

    def sweep(self) -> None:
        """Continues to free what was taken out of use: about `a_turn` blocks."""
        self.begin_turn()
        for _ in range(len(self._to_free)):
            if not self._may_free:
                return
            self._free_evicting(self._to_free.pop())
        looks = self._sweep_trees(self.a_turn)
        while looks and self._cleared:
            looks = self._sweep_index(looks)

    def _sweep_trees(self, looks: int) -> int:
        """Returns how many looks are left."""
        table, unswept = self.table, self.unswept
        while unswept and looks:
            row = next(reversed(unswept))
            child = unswept[row]
            if child != NO_ROW and (table.state[child] == FREE or table.parent[child] != row):
                child = table.first_child[row]  # the next child was evicted
            while child != NO_ROW and looks:
                looks -= 1
                following = table.next_sibling[child]
                if table.state[child] != EVICTING:
                    self.take_out(child)
                child = following
            unswept[row] = child
            if child == NO_ROW:
                del unswept[row]
                looks = max(0, looks - 1)
                self._free_evicting(row)
        return looks

    def _sweep_index(self, looks: int) -> int:
        """Returns how many looks are left."""
        table, (tenant, index) = self.table, self._cleared[0]
        is_known = self.tenants.by_number.get(tenant.number) is tenant
        while looks > 0 and (popped := index.pop_some(min(looks, _KEYS_A_STEP))):
            looks -= len(popped)
            for key, row in popped:
                is_same = is_known and table.tenant[row] == tenant.number and table.keys[row] == key
                if is_same and table.state[row] in _IN_USE and tenant.index.get(key) != row:
                    looks -= self._sweep_line(row, max(1, looks))
        if not index:
            self._cleared.popleft()
            tenant.cleared -= 1
        return max(0, looks)

    def _sweep_line(self, row: int, most: int) -> int:
        """Takes a block of a cleared tenant, its ancestors and one line of its descendants out of
        use, and frees them together: one by one takes ten times as long. Returns how many."""
        state, parent, first_child = self.table.state, self.table.parent, self.table.first_child
        above, leaf, swept = row, row, 0
        while above != NO_ROW and swept < most and state[above] in _IN_USE:
            self._evicting(above)
            above, swept = parent[above], swept + 1
        while swept < most and (child := first_child[leaf]) != NO_ROW and state[child] in _IN_USE:
            self._evicting(child)
            leaf, swept = child, swept + 1
        self._free_evicting(leaf)
        return swept

    def _evicting(self, row: int) -> None:
        self.table.state[row] = EVICTING
        self._no_longer_half(row)
        if self.changes is not None:
            self.changes.left(*self._named(np.array([row])))

    def _note_came(self, rows: NDArray[np.int64]) -> None:
        if self.changes is not None:
            self.changes.came(*self._named(rows))

    def _named(self, rows: NDArray[np.int64]) -> tuple[str, Layout, NDArray[np.uint64]]:
        """Tenant, layout and addresses of blocks that have both in common."""
        table, first = self.table, int(rows[0])
        tenant = self.tenants.by_number[table.tenant[first]]
        return tenant.name, self.layouts[table.layout[first]], table.keys.words[rows]

    def _no_longer_half(self, row: int) -> None:
        if self.shards_in.pop(row, None) is not None:
            self.order.await_no_more([row])

    def _is_empty(self, row: int) -> bool:
        """Whether an evictable block has no shard at all."""
        return self.shards_in.get(row) == 0 and self.order.evictable(row)

    def _publish(self, row: int) -> None:
        """Makes a block with all shards READY, or WAITING for its parent."""
        table, state = self.table, self.table.state
        above = table.parent[row]
        if above != NO_ROW and state[above] != READY:
            state[row] = WAITING
            return
        state[row] = READY
        child = table.first_child[row]
        if child != NO_ROW and (state[child] == WAITING or table.next_sibling[child] != NO_ROW):
            self._publish_below(row)

    def _publish_chain(self, rows: NDArray[np.int64]) -> None:
        """`_publish` for each of these rows; all at once if they are a chain of only children."""
        table, many = self.table, self.table.many
        is_chain = (many.first_child[rows[:-1]] == rows[1:]).all()
        if not is_chain or (many.next_sibling[rows[1:]] != NO_ROW).any():
            for row in rows.tolist():
                self._publish(row)
            return
        above = table.parent[int(rows[0])]
        is_ready = above == NO_ROW or table.state[above] == READY
        many.state[rows[:-1]] = READY if is_ready else WAITING
        self._publish(int(rows[-1]))

    def _publish_below(self, row: int) -> None:
        """Makes the descendants READY that waited for this block."""
        table, rows, ready = self.table, [row], list[int]()
        state, next_sibling = table.state, table.next_sibling
        while rows:
            child = table.first_child[rows.pop()]
            while child != NO_ROW:
                if state[child] == WAITING:
                    state[child] = READY
                    rows.append(child)
                    ready.append(child)
                child = next_sibling[child]
        if ready:
            self._note_came(np.array(ready))

    def _unpinned(self, row: int, now_ms: int) -> None:
        assert self.table.pins[row] >= 0
        if self.table.state[row] == EVICTING:
            self._free_evicting(row)
        elif not self.table.pins[row]:
            self._became_leaf(row, now_ms)

    def _free_evicting(self, row: int) -> None:
        """Frees an EVICTING leaf without pins, and then its ancestors while they are such leaves.

        The first ancestor that stays may be an evictable leaf now. Its rank is computed with the
        time of the last look for expired blocks."""
        table, unswept = self.table, self.unswept
        while row != NO_ROW and table.state[row] == EVICTING:
            if table.pins[row] or table.first_child[row] != NO_ROW or row in unswept:
                return
            if not self._may_free:
                self._to_free.append(row)
                return
            row = self._free(self._line_above(row, self._is_free_to_go))
        if row != NO_ROW:
            self._became_leaf(row, self.order.noted_ms)

    def _became_leaf(self, row: int, now_ms: int) -> None:
        """Queues a block for eviction. A block without any shard is freed at once, with its
        ancestors as far as they have none either."""
        while row != NO_ROW and self._is_empty(row) and self._may_free:
            chain = self._line_above(row, lambda above: self.shards_in.get(above) == 0)
            row = self._evict_chain(chain, now_ms)
        if row != NO_ROW:
            self.order.enqueue(row, now_ms)

    def _line_above(self, row: int, fits: Callable[[int], bool]) -> NDArray[np.int64]:
        """The row and those ancestors that fit, each the only child of the next and without pins,
        as many as this turn may free. Counts them as freed."""
        table, line = self.table, [row]
        while len(line) < self._may_free and self._is_only_child(row):
            row = table.parent[row]
            if row == NO_ROW or table.pins[row] or not fits(row):
                break
            line.append(row)
        self._may_free -= len(line)
        return np.array(line)

    def _is_free_to_go(self, row: int) -> bool:
        return bool(self.table.state[row] == EVICTING) and row not in self.unswept

    def _free(self, chain: NDArray[np.int64]) -> int:
        """Frees a leaf and the ancestors that follow it in `chain`, each the only child of the
        next. Returns the parent of the last."""
        table, leaf, top = self.table, int(chain[0]), int(chain[-1])
        assert table.first_child[leaf] == NO_ROW
        table.first_child[top] = NO_ROW
        parent = unlink_leaf(table, top)
        self._give_back(chain)
        return parent

    def _give_back(self, rows: NDArray[np.int64]) -> None:
        """Removes blocks of one tenant, layout and state from everything but the tree."""
        table, first, count = self.table, int(rows[0]), len(rows)
        tenant = self.tenants.by_number[table.tenant[first]]
        layout = self.layouts[table.layout[first]]
        words = table.keys.words[rows]
        if self.departures is not None:
            self._note_departure(self.departures, rows, words, tenant)
        if table.state[first] == EVICTING:
            tenant.unindexed_bytes -= count * layout.slot_bytes
        else:
            self._unindex(tenant, rows, split_keys(words.tobytes()), layout)
            for row in self.shards_in.keys() & rows.tolist() if self.shards_in else ():
                self._no_longer_half(row)
            if self.changes is not None:
                self.changes.left(tenant.name, layout, words)
        self.presence.remove(words[:, 0])
        self.slabs.give(table.many.slot[rows].tolist())
        layout.give_checks(table.many.check[rows])
        layout.blocks -= count
        if not layout.blocks and layout.number in self.layouts.leaving:
            self.layouts.forget(layout)
        self.freed += count
        table.give(rows)
        self.tenants.charge(tenant, -count, -count * layout.slot_bytes)
        if not tenant.blocks:
            self.order.forget_owner(tenant.number)
            self.tenants.forget_if_idle(tenant)

    def _note_departure(
        self,
        departures: Departures,
        rows: NDArray[np.int64],
        words: NDArray[np.uint64],
        tenant: Tenant,
    ) -> None:
        """Remembers why blocks leave that a lookup could have found, or could find again."""
        first = int(rows[0])
        state, now_ms = self.table.state[first], self.order.noted_ms
        if state == EVICTING:
            departures.table.note(words, DROPPED, tenant.name, now_ms)
        elif state != WRITING and self.pressure is not None:
            reason, by = self.pressure
            expires_ms = self.table.expires_ms[first]
            if reason != "limit" and expires_ms and expires_ms <= now_ms:
                reason = "expired"
            last_use = int(self.table.many.used[rows].max())
            departures.evicted(words, reason, tenant.name, by, last_use, now_ms)

    @staticmethod
    def _unindex(
        tenant: Tenant, rows: NDArray[np.int64], keys: list[bytes], layout: Layout
    ) -> None:
        index = tenant.index
        if not tenant.cleared:
            index.remove(keys)
            return
        for key, row in zip(keys, rows.tolist(), strict=True):
            if index.get(key) == row:
                index.remove([key])
            else:
                tenant.unindexed_bytes -= layout.slot_bytes
