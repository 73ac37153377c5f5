"""Blocks coming and going: the few steps in which a block changes state, each leaving everything consistent."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.layouts import Layout, Layouts
from kvkeep.store.order import EvictionOrder
from kvkeep.store.slabs import Slabs
from kvkeep.store.table import EVICTING, NO_ROW, READY, WAITING, WRITING, BlockTable
from kvkeep.store.tenants import Tenant, Tenants
from kvkeep.store.tree import children, link_chain, subtree, unlink_leaf


class Blocks:
    """Table, tree, slots, usage and eviction order, changed together."""

    def __init__(self, tenants: Tenants, layouts: Layouts, slabs: Slabs) -> None:
        self.table = BlockTable()
        self.tenants = tenants
        self.layouts = layouts
        self.slabs = slabs
        self.order = EvictionOrder(self.table, tenants, layouts)
        self.sequence = 0  # counts uses: the only time that the eviction order knows
        self.shards_in: dict[int, int] = {}  # rows with shards missing -> bit mask of the shards that are there

    def next_use(self) -> int:
        self.sequence += 1
        return self.sequence

    def create(
        self, tenant: Tenant, layout: Layout, parent: int, keys: list[bytes], priority: int, expires_ms: int
    ) -> NDArray[np.int64]:
        """Makes a chain of new WRITING blocks under `parent`. The caller has made room for them."""
        table, n = self.table, len(keys)
        rows = table.take(n)
        many = table.many
        many.slot[rows] = self.slabs.take(layout.slot_bytes, n)
        many.check[rows] = layout.take_checks(n)
        many.state[rows] = WRITING
        many.priority[rows] = priority
        many.tenant[rows] = tenant.number
        many.layout[rows] = layout.number
        many.pins[rows] = 0
        many.used[rows] = self.sequence
        many.finished[rows] = 0
        many.expires_ms[rows] = expires_ms
        many.queued[rows] = -1
        link_chain(table, rows, parent)
        row_list = rows.tolist()
        for row, key in zip(row_list, keys, strict=True):
            table.keys[row] = key
        tenant.index.update(zip(keys, row_list, strict=True))
        self.shards_in.update(dict.fromkeys(row_list, 0))
        layout.blocks += n
        self.tenants.charge(tenant, n, n * layout.slot_bytes)
        if expires_ms:
            for row in row_list:
                self.order.expire_later(row)
        return rows

    def shard_arrived(self, row: int, shard: int, layout: Layout) -> None:
        """Notes one shard; the last one makes the block READY as soon as its ancestors are."""
        if self.table.state[row] != WRITING:
            return
        arrived = self.shards_in[row] | 1 << shard
        if arrived != (1 << layout.shards) - 1:
            self.shards_in[row] = arrived
            return
        del self.shards_in[row]
        self.table.state[row] = WAITING
        self._publish(row)

    def touch(self, row: int, sequence: int) -> None:
        """Notes a use of the whole prefix up to `row`: ancestors inherit it when they become leaves."""
        self.table.used[row] = sequence

    def pin(self, row: int) -> None:
        self.table.pins[row] += 1

    def unpin(self, row: int, now_ms: int) -> None:
        """Ends one lease or write on a block; the last one makes it evictable, or sets an evicting block free."""
        table = self.table
        table.pins[row] -= 1
        assert table.pins[row] >= 0
        if table.state[row] == EVICTING:
            self._free_evicting(row)
        elif not table.pins[row]:
            self._became_leaf(row, now_ms)

    def evict(self, row: int, now_ms: int) -> int:
        """Frees an evictable leaf at once. Its parent inherits its last use, and whether its session has finished.

        Exactly one block goes, so that whoever chose it knows what its tenant loses. Returns the parent.
        """
        table = self.table
        used, finished = table.used[row], table.finished[row]
        parent = self._free(row)
        if parent != NO_ROW:
            if used >= table.used[parent]:
                table.used[parent], table.finished[parent] = used, finished
            self.order.enqueue(parent, now_ms)
        return parent

    def drop(self, rows: Iterable[int]) -> int:
        """Takes blocks and all below them out of the index at once, and frees those that nobody reads or writes.

        The others, and what they hang on, are EVICTING until the last lease or write on them ends. Returns how many
        blocks left the index.
        """
        table, dropped = self.table, []
        for root in rows:
            if table.state[root] not in (WRITING, WAITING, READY):
                continue  # went with an ancestor
            for row in subtree(table, root):
                if table.state[row] != EVICTING:
                    del self.tenants.by_number[table.tenant[row]].index[table.keys[row]]
                    table.state[row] = EVICTING
                    self.shards_in.pop(row, None)
                    dropped.append(row)
        for row in reversed(dropped):
            if table.state[row] == EVICTING:
                self._free_evicting(row)
        return len(dropped)

    def _is_empty(self, row: int) -> bool:
        """An evictable block without a single shard."""
        return self.shards_in.get(row) == 0 and self.order.evictable(row)

    def _publish(self, row: int) -> None:
        table, waiting = self.table, [row]
        while waiting:
            row = waiting.pop()
            parent = table.parent[row]
            if table.state[row] == WAITING and (parent == NO_ROW or table.state[parent] == READY):
                table.state[row] = READY
                waiting.extend(children(table, row))

    def _free_evicting(self, row: int) -> None:
        """Frees an EVICTING leaf without pins, then its ancestors as far as that makes them such leaves.

        The first ancestor that stays may now be a leaf itself. Its rank is as of the last look for expired blocks:
        what expires later is still to be noted.
        """
        table = self.table
        while row != NO_ROW and table.state[row] == EVICTING:
            if table.pins[row] or table.first_child[row] != NO_ROW:
                return
            row = self._free(row)
        if row != NO_ROW:
            self._became_leaf(row, self.order.noted_ms)

    def _became_leaf(self, row: int, now_ms: int) -> None:
        """Puts a block in line that somebody let go. One that nothing was ever written to goes at once, and so do
        its ancestors as far as they are like it: they would only be in the way."""
        while row != NO_ROW and self._is_empty(row):
            row = self.evict(row, now_ms)
        if row != NO_ROW:
            self.order.enqueue(row, now_ms)

    def _free(self, row: int) -> int:
        table = self.table
        parent = unlink_leaf(table, row)
        tenant = self.tenants.by_number[table.tenant[row]]
        layout = self.layouts[table.layout[row]]
        if table.state[row] != EVICTING:
            del tenant.index[table.keys[row]]
            self.shards_in.pop(row, None)
        self.slabs.give(table.slot[row])
        layout.give_checks(table.check[row])
        layout.blocks -= 1
        table.give(row)
        self.tenants.charge(tenant, -1, -layout.slot_bytes)
        if not tenant.blocks:
            self.order.forget_owner(tenant.number)
            self.tenants.forget_if_idle(tenant)
        return parent
