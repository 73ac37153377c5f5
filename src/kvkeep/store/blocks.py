"""Blocks coming and going: the few steps in which a block changes state, each leaving everything consistent."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.presence import Presence
from kvkeep.store.columns import Columns
from kvkeep.store.layouts import Layout, Layouts
from kvkeep.store.order import EvictionOrder
from kvkeep.store.seals import fold_checks, seals_of_chain
from kvkeep.store.slabs import Slabs
from kvkeep.store.table import EVICTING, FREE, NO_ROW, READY, WAITING, WRITING, BlockTable
from kvkeep.store.tenants import Tenant, Tenants
from kvkeep.store.tree import link_chain, split_keys, subtree, unlink_leaf


class Blocks:
    """Table, tree, slots, usage and eviction order, changed together."""

    def __init__(
        self,
        tenants: Tenants,
        layouts: Layouts,
        slabs: Slabs,
        columns: Columns | None = None,
        presence: Presence | None = None,
    ) -> None:
        self.table = BlockTable(columns)
        self.presence = presence or Presence()  # of all that a lookup could find, and some more
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
        """Makes a chain of new WRITING blocks under `parent`. The caller has made room for them, within the limit."""
        table, n = self.table, len(keys)
        rows = table.take(n)
        row_list, many = rows.tolist(), table.many
        slots = np.array(self.slabs.take(layout.slot_bytes, n), dtype=np.int64)
        in_a_row = row_list == list(range(row_list[0], row_list[0] + n))
        at = slice(row_list[0], row_list[0] + n) if in_a_row else rows  # several times as fast
        words = table.keys.put(at, b"".join(keys))
        self.presence.add(words[:, 0])
        above = table.keys[parent] if parent != NO_ROW else b""
        many.seal[at] = seals_of_chain(words, above, slots, layout, tenant.word, (priority, expires_ms))
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
        link_chain(table, rows, parent)
        many.state[at] = WRITING  # last: see table.py
        tenant.index.update(zip(keys, row_list, strict=True))
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

    def note_checksums(self, rows: list[int], shard: int, layout: Layout, checksums: NDArray[np.uint64]) -> None:
        """Notes the checksums of one shard of some blocks, and adds them to their seals: before a block is READY."""
        many, at = self.table.many, np.array(rows)
        places, change = many.check[at], fold_checks(checksums, shard)
        if layout.lacking:  # it may have been noted before as not there
            change -= fold_checks(layout.checks[places, shard], shard)
        layout.checks[places, shard] = checksums
        layout.lacking |= bool((checksums == ABSENT).any())
        many.seal[at] += change

    def shard_arrived(self, rows: list[int], shard: int, layout: Layout) -> None:
        """Notes one shard of some blocks, whose checksums are noted already; with its last shard a block is READY as
        soon as its ancestors are."""
        many, at, shards_in = self.table.many, np.array(rows), self.shards_in
        complete, bit = (1 << layout.shards) - 1, 1 << shard
        whole: list[int] = []
        written: list[int] = at[many.state[at] == WRITING].tolist()
        if complete == bit:  # most often: there are no others to come
            whole, written = written, []
            for row in whole:
                del shards_in[row]
        for row in written:
            arrived = shards_in[row] | bit
            if arrived == complete:
                del shards_in[row]
                whole.append(row)
            else:
                shards_in[row] = arrived
        if not self._publish_chain(whole):
            for row in whole:
                self._publish(row)
        if layout.shards > 1:
            self.order.await_no_more(row for row in rows if row not in shards_in)

    def touch(self, row: int, sequence: int) -> None:
        """Notes a use of the whole prefix up to `row`: ancestors inherit it when they become leaves."""
        self.table.used[row] = sequence

    def pin(self, row: int) -> None:
        self.table.pins[row] += 1

    def unpin(self, row: int, now_ms: int) -> None:
        """Ends one lease or write on a block; the last one makes it evictable, or sets an evicting block free."""
        self.table.pins[row] -= 1
        self._unpinned(row, now_ms)

    def pin_many(self, rows: list[int]) -> None:
        self.table.many.pins[np.array(rows, dtype=np.int64)] += 1

    def unpin_many(self, rows: list[int], now_ms: int) -> None:
        """Ends one write on each of these blocks, parents first. Only leaves and evicting ones need a closer look."""
        many, at = self.table.many, np.array(rows)
        many.pins[at] -= 1
        look = at[(many.first_child[at] == NO_ROW) | (many.state[at] == EVICTING)]
        for row in reversed(look.tolist()):
            if self.table.state[row] != FREE:  # else it went with its last child
                self._unpinned(row, now_ms)

    def evict(self, row: int, now_ms: int, limit: int = 1) -> int:
        """Frees an evictable leaf, and up to `limit` blocks in all as far as its ancestors are next in line anyway.

        The first that stays inherits the last use, and whether the session has finished. Returns how many were freed.
        """
        chain = self._same_rank_above(row, limit)
        self._evict_chain(chain, now_ms)
        return len(chain)

    def evict_all(self, rows: list[int], now_ms: int) -> None:
        """Frees blocks that nobody reads or writes, each after all that hang on it, whatever their rank."""
        table, chain = self.table, list[int]()
        for row in rows:
            if chain and not (table.parent[chain[-1]] == row and self._is_only_child(chain[-1])):
                self._evict_chain(chain, now_ms)
                chain = []
            chain.append(row)
        if chain:
            self._evict_chain(chain, now_ms)

    def _evict_chain(self, chain: list[int], now_ms: int) -> int:
        """Frees a leaf and the ancestors that follow it. Returns the first that stays: it inherits the last use."""
        table = self.table
        used, finished = table.used[chain[0]], table.finished[chain[0]]
        for row in chain:
            if table.used[row] > used:
                used, finished = table.used[row], table.finished[row]
        parent = self._free(chain)
        if parent != NO_ROW:
            if used >= table.used[parent]:
                table.used[parent], table.finished[parent] = used, finished
            self.order.enqueue(parent, now_ms)
        return parent

    def _is_only_child(self, row: int) -> bool:
        return self.table.next_sibling[row] == NO_ROW == self.table.prev_sibling[row]

    def _same_rank_above(self, row: int, limit: int) -> list[int]:
        """The row and ancestors that become leaves of the same rank one after the other: most often the rest of a
        conversation, which so goes in one step instead of a turn through the queue for each block."""
        table, chain = self.table, [row]
        all_used, all_states, pins, parent = table.used, table.state, table.pins, table.parent
        next_sibling, prev_sibling = table.next_sibling, table.prev_sibling
        priorities, all_expire_ms = table.priority, table.expires_ms
        used, state, priority, expires_ms = all_used[row], all_states[row], priorities[row], all_expire_ms[row]
        while len(chain) < limit and next_sibling[row] == NO_ROW == prev_sibling[row]:
            row = parent[row]
            if (
                row == NO_ROW
                or all_used[row] > used
                or pins[row]
                or all_states[row] != state
                or priorities[row] != priority
                or all_expire_ms[row] != expires_ms
            ):
                break
            chain.append(row)
        return chain

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
                    self._no_longer_half(row)
                    dropped.append(row)
        for row in reversed(dropped):
            if table.state[row] == EVICTING:
                self._free_evicting(row)
        return len(dropped)

    def withdraw(self, tenant: Tenant, keep_bytes: int, now_ms: int, most: int) -> int:
        """Takes blocks that somebody reads or writes out of the index, leaves first and least recently used first,
        until the tenant's blocks in the index take no more than `keep_bytes`; `most` at a time. Returns how many left.

        The tenant has no evictable block. What leaves is EVICTING: freed when the last lease or write on it ends.
        """
        table, many, order = self.table, self.table.many, self.order
        rows = np.fromiter(tenant.index.values(), dtype=np.int64, count=len(tenant.index))
        sizes = {number: self.layouts[number].slot_bytes for number in np.unique(many.layout[rows]).tolist()}
        indexed_bytes = sum(sizes[number] * int((many.layout[rows] == number).sum()) for number in sizes)
        parents, counts = np.unique(many.parent[rows], return_counts=True)
        children = dict(zip(parents.tolist(), counts.tolist(), strict=True))  # those in the index
        leaves = [(order.rank(row, now_ms), row) for row in rows[~np.isin(rows, parents)].tolist()]
        heapify(leaves)
        withdrawn = 0
        while indexed_bytes > keep_bytes and withdrawn < most:
            _, row = heappop(leaves)
            del tenant.index[table.keys[row]]
            table.state[row] = EVICTING
            self._no_longer_half(row)
            indexed_bytes -= sizes[table.layout[row]]
            withdrawn += 1
            parent = table.parent[row]
            if parent == NO_ROW:
                continue
            if table.used[row] >= table.used[parent]:
                table.used[parent], table.finished[parent] = table.used[row], table.finished[row]
            children[parent] -= 1
            if not children[parent]:
                heappush(leaves, (order.rank(parent, now_ms), parent))
        return withdrawn

    def drop_coldest(self, column: NDArray[np.int32], numbers: Iterable[int]) -> None:
        """Frees all blocks of the tenant or layout (as `column` of the table says), among those with these numbers,
        that was used least recently, leaving out any of whose blocks somebody reads or writes. Looks at every block
        there is, and may free that many: once for each layout or tenant that is one too many."""
        rows, many = self.table.live_rows(), self.table.many
        owners, of_owner = np.unique(column[rows], return_inverse=True)
        last_used = np.zeros(len(owners), dtype=np.int64)
        np.maximum.at(last_used, of_owner, many.used[rows])
        held = np.bincount(of_owner[many.pins[rows] > 0], minlength=len(owners)) > 0
        may_go = np.flatnonzero(~held & np.isin(owners, list(numbers)))
        if len(may_go):
            rows = rows[of_owner == may_go[np.argmin(last_used[may_go])]]
            groups = many.tenant[rows].astype(np.int64) << 32 | many.layout[rows]
            rows = rows[np.argsort(groups, kind="stable")]
            for group in np.split(rows, np.flatnonzero(np.diff(np.sort(groups))) + 1):
                self._give_back(group.tolist())  # whole trees: nothing that stays hangs on them

    def _no_longer_half(self, row: int) -> None:
        if self.shards_in.pop(row, None) is not None:
            self.order.await_no_more([row])

    def _is_empty(self, row: int) -> bool:
        """An evictable block without a single shard."""
        return self.shards_in.get(row) == 0 and self.order.evictable(row)

    def _publish(self, row: int) -> None:
        """A block has all its shards."""
        table, state = self.table, self.table.state
        above = table.parent[row]
        if above != NO_ROW and state[above] != READY:
            state[row] = WAITING
            return
        state[row] = READY
        child = table.first_child[row]
        if child != NO_ROW and (state[child] == WAITING or table.next_sibling[child] != NO_ROW):
            self._publish_below(row)

    def _publish_chain(self, rows: list[int]) -> bool:
        """The same for many at once, if each is the only child of the one before it: all of them are READY with the
        first, parents first, or wait with it. False: they are not, and nothing has changed."""
        table, many, at = self.table, self.table.many, np.array(rows, dtype=np.int64)
        if (many.first_child[at[:-1]] != at[1:]).any() or (many.next_sibling[at[1:]] != NO_ROW).any():
            return False
        if len(rows) > 1:
            above = table.parent[rows[0]]
            many.state[at[:-1]] = READY if above == NO_ROW or table.state[above] == READY else WAITING
        if rows:
            self._publish(rows[-1])
        return True

    def _publish_below(self, row: int) -> None:
        """Makes those READY that waited for this block, and for each other."""
        table, rows = self.table, [row]
        state, next_sibling = table.state, table.next_sibling
        while rows:
            child = table.first_child[rows.pop()]
            while child != NO_ROW:
                if state[child] == WAITING:
                    state[child] = READY
                    rows.append(child)
                child = next_sibling[child]

    def _unpinned(self, row: int, now_ms: int) -> None:
        assert self.table.pins[row] >= 0
        if self.table.state[row] == EVICTING:
            self._free_evicting(row)
        elif not self.table.pins[row]:
            self._became_leaf(row, now_ms)

    def _free_evicting(self, row: int) -> None:
        """Frees an EVICTING leaf without pins, then its ancestors as far as that makes them such leaves.

        The first ancestor that stays may now be a leaf itself. Its rank is as of the last look for expired blocks:
        what expires later is still to be noted.
        """
        table = self.table
        while row != NO_ROW and table.state[row] == EVICTING:
            if table.pins[row] or table.first_child[row] != NO_ROW:
                return
            chain = [row]
            while self._is_only_child(row):
                row = table.parent[row]
                if row == NO_ROW or table.pins[row] or table.state[row] != EVICTING:
                    break
                chain.append(row)
            row = self._free(chain)
        if row != NO_ROW:
            self._became_leaf(row, self.order.noted_ms)

    def _became_leaf(self, row: int, now_ms: int) -> None:
        """Puts a block in line that somebody let go. One that nothing was ever written to goes at once, and so do
        its ancestors as far as they are like it: they would only be in the way."""
        table, shards_in = self.table, self.shards_in
        while row != NO_ROW and self._is_empty(row):
            chain = [row]
            while self._is_only_child(row):
                row = table.parent[row]
                if row == NO_ROW or table.pins[row] or shards_in.get(row) != 0:
                    break
                chain.append(row)
            row = self._evict_chain(chain, now_ms)
        if row != NO_ROW:
            self.order.enqueue(row, now_ms)

    def _free(self, chain: list[int]) -> int:
        """Frees a leaf and the ancestors that follow it in `chain`, each the only child of the next. Returns the
        parent of the last one."""
        table, leaf, top = self.table, chain[0], chain[-1]
        assert table.first_child[leaf] == NO_ROW
        table.first_child[top] = NO_ROW
        parent = unlink_leaf(table, top)
        self._give_back(chain)
        return parent

    def _give_back(self, rows: list[int]) -> None:
        """Takes blocks of one tenant, layout and state out of everything but the tree."""
        table, first, at = self.table, rows[0], np.array(rows)
        tenant = self.tenants.by_number[table.tenant[first]]
        layout = self.layouts[table.layout[first]]
        if table.state[first] != EVICTING:
            index = tenant.index
            for key in split_keys(table.keys.words[at].tobytes()):
                del index[key]
            for row in self.shards_in.keys() & rows:
                self._no_longer_half(row)
        self.presence.remove(table.keys.words[at, 0])
        self.slabs.give(table.many.slot[at].tolist())
        layout.give_checks(table.many.check[at].tolist())
        layout.blocks -= len(rows)
        table.give(rows)
        self.tenants.charge(tenant, -len(rows), -len(rows) * layout.slot_bytes)
        if not tenant.blocks:
            self.order.forget_owner(tenant.number)
            self.tenants.forget_if_idle(tenant)
