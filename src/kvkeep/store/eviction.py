"""Makes room for a tenant that stores, by evicting no more blocks than it needs.

Whose blocks are evicted from a full pool, if with the new blocks the storing tenant

    stays within its own quota      the oldest of borrowers, then of tenants with the default
                                    quota, then its own
    stays within the default quota  the oldest of borrowers, then its own
    exceeds its quota               its own
    has no quota                    the oldest of borrowers (it is one of them)
    exceeds its limit               its own, first of all; what does not fit then is refused

So no tenant can take memory from one that is within its own quota. If no block of the same size can
be evicted, the coldest slab of another size is emptied and changes its size. Failing that, a tenant
within its own quota may empty a nearly empty slab of any tenants: otherwise one small block in each
slab would keep the whole pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.blocks import Blocks
from kvkeep.store.layouts import Layout
from kvkeep.store.table import EVICTING, NO_ROW
from kvkeep.store.tenants import COMMONS, Tenant
from kvkeep.store.tree import latest_below, subtree

# A search compares so many borrowers at a time, in turn. This bounds the work for one block; with
# more borrowers, the oldest block of a sample is old enough.
_BORROWERS_LOOKED_AT = 16
_LOOKS_A_SEARCH = 16  # comparing so many tenants counts as one more search
_OLD_SLABS_LOOKED_AT = 8
_SLABS_LOOKED_AT = 16
# rows that may be scanned for one eviction; bounds how often sizes are compared
_ROWS_PER_EVICTION = 64
_NEARLY_EMPTY = 8  # a slab is nearly empty if less than an eighth of it is used
_SEARCHES_A_MOVE = 64
_NEVER = np.iinfo(np.int64).max


@dataclass
class _Budget:
    """What one request may cost, so that others do not wait for long."""

    searches: int = 96  # for a victim, which is evicted alone or with its chain: two milliseconds
    blocks: int = 512  # evicted, alone or with their chain
    slab_moves: int = 8
    moved_blocks: int = 2048  # evicted to empty slabs; the last slab may exceed it
    scans: int = 2  # of every block there is

    def spent(self) -> bool:
        return min(self.searches, self.blocks, self.slab_moves, self.moved_blocks) <= 0


class Eviction:
    """Finds victims and evicts them."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.evictions = 0
        self.slab_moves = 0
        self._budget = _Budget()
        # slot size -> evictions since other sizes were compared
        self._evicted_since_look: dict[int, int] = {}

    def make_room(self, tenant: Tenant, layout: Layout, wanted: int, now_ms: int) -> int:
        """Makes room for up to `wanted` blocks. Returns for how many there is room now.

        The caller has pinned what must stay: the parent of the new blocks. A request evicts no
        more than its `_Budget` allows; the next one continues."""
        self._budget = _Budget()
        slabs, slot_bytes = self._blocks.slabs, layout.slot_bytes
        self._blocks.order.note_expired(now_ms)
        if self._blocks.has_to_sweep:
            self._blocks.sweep()
        wanted = self._within_limit(tenant, slot_bytes, wanted, now_ms)
        available = slabs.available(slot_bytes)
        while available < wanted and not self._budget.spent():
            self._budget.searches -= 1
            more = (available + 1) * slot_bytes
            row = self._victim(tenant, slot_bytes, more, now_ms)
            if self._blocks.order.behind:
                break
            if row == NO_ROW and self._blocks.order.to_scan:
                self._blocks.order.move(now_ms, self._blocks.a_turn)
                self._budget.searches -= _SEARCHES_A_MOVE
                continue
            compare = row == NO_ROW or self._time_to_compare_sizes(slot_bytes)
            if not (compare and self._empty_a_slab(tenant, slot_bytes, more, row, now_ms)):
                if row == NO_ROW:
                    break
                limit = self._limit(tenant, row, slot_bytes, available, wanted)
                evicted = self._blocks.evict(row, now_ms, limit)
                self._evicted_since_look[slot_bytes] = (
                    self._evicted_since_look.get(slot_bytes, 0) + evicted
                )
                self.evictions += evicted
                self._budget.blocks -= evicted
            available = slabs.available(slot_bytes)
        return min(wanted, available)

    def shrink_to_limit(self, tenant: Tenant, now_ms: int, most: int) -> bool:
        """Takes blocks of a tenant that is over its limit out of use, up to `most` at a time.
        Returns whether it is done.

        Evicts what can be evicted. If the index still has too much, all of it has leased or
        written descendants: then all of it leaves the index at once, and its memory is freed when
        the last lease or write ends."""
        order, before = self._blocks.order, self.evictions
        order.note_expired(now_ms)
        while tenant.is_over_limit:
            left = most - (self.evictions - before)
            if left <= 0:
                return False
            row = order.peek_any(tenant.owner, now_ms)
            assert tenant.limit_bytes is not None
            if row == NO_ROW:
                if order.behind:
                    return False
                if order.is_moving(tenant):
                    order.move(now_ms, most)
                    return False
                if tenant.usage_bytes - tenant.unindexed_bytes > tenant.limit_bytes:
                    self._blocks.clear(tenant)
                    self._blocks.sweep()
                break
            self._evict_excess(row, tenant.usage_bytes - tenant.limit_bytes, now_ms, left)
        return True

    def _within_limit(self, tenant: Tenant, slot_bytes: int, wanted: int, now_ms: int) -> int:
        """Evicts the tenant's own blocks, of any size, until `wanted` more are within its limit.
        Returns how many are: 0 while the tenant is over its limit."""
        limit_bytes = tenant.limit_bytes
        if limit_bytes is None:
            return wanted
        to_shrink = self._blocks.tenants.to_shrink
        if tenant in to_shrink and self.shrink_to_limit(tenant, now_ms, self._blocks.a_turn):
            del to_shrink[tenant]
        if tenant.is_over_limit:
            return 0
        wanted = min(wanted, limit_bytes // slot_bytes)
        while (
            not self._budget.spent()
            and (excess := tenant.usage_bytes + wanted * slot_bytes - limit_bytes) > 0
        ):
            self._budget.searches -= 1
            row = self._blocks.order.peek_any(tenant.owner, now_ms)
            if row == NO_ROW:
                break
            before = self.evictions
            self._evict_excess(row, excess, now_ms, self._budget.blocks)
            self._budget.blocks -= self.evictions - before
        return min(wanted, (limit_bytes - tenant.usage_bytes) // slot_bytes)

    def _evict_excess(self, row: int, excess_bytes: int, now_ms: int, most: int = _NEVER) -> None:
        """Evicts a leaf and, up to that many bytes, the ancestors that would be next in line."""
        nbytes = self._blocks.layouts[self._blocks.table.layout[row]].slot_bytes
        self.evictions += self._blocks.evict(row, now_ms, min(most, -(-excess_bytes // nbytes)))

    def _limit(self, tenant: Tenant, row: int, slot_bytes: int, available: int, wanted: int) -> int:
        """How many blocks of one chain may be evicted before the next search for a victim."""
        loser = self._blocks.tenants.by_number[self._blocks.table.tenant[row]]
        limit = wanted - available
        if loser is not tenant:
            if loser.quota_bytes is not None and loser in self._blocks.tenants.borrowers:
                limit = min(limit, (loser.usage_bytes - loser.quota_bytes) // slot_bytes)
            if tenant.quota_bytes is not None:
                limit = min(
                    limit, (tenant.quota_bytes - tenant.usage_bytes) // slot_bytes - available
                )
        return max(1, limit)

    def _victim(self, tenant: Tenant, slot_bytes: int, more: int, now_ms: int) -> int:
        order, tenants = self._blocks.order, self._blocks.tenants
        if tenant.quota_bytes is None or tenant.entitled_to(more):
            best = order.peek(COMMONS, slot_bytes, now_ms)
            row = self._oldest(
                best,
                tenants.borrowers,
                slot_bytes,
                now_ms,
                lambda other: other.may_lose(slot_bytes),
            )
            if row == NO_ROW and tenant.has_own_right_to(more):
                row = self._oldest(
                    NO_ROW, tenants.on_default, slot_bytes, now_ms, lambda other: True
                )
            if row != NO_ROW:
                return row
        return NO_ROW if tenant.owner == COMMONS else order.peek(tenant.owner, slot_bytes, now_ms)

    def _oldest(
        self,
        best: int,
        tenants: dict[Tenant, None],
        slot_bytes: int,
        now_ms: int,
        gives: Callable[[Tenant], bool],
    ) -> int:
        """The oldest evictable block of the tenants that give, and of `best`."""
        order, rank = self._blocks.order, self._blocks.table.queued
        looked_at = list(islice(tenants, _BORROWERS_LOOKED_AT))
        self._budget.searches -= len(looked_at) // _LOOKS_A_SEARCH
        if len(tenants) > _BORROWERS_LOOKED_AT:
            for tenant in looked_at:  # moves them to the end
                del tenants[tenant]
                tenants[tenant] = None
        for tenant in looked_at:
            if gives(tenant):
                row = order.peek(tenant.owner, slot_bytes, now_ms)
                if row != NO_ROW and (best == NO_ROW or rank[row] < rank[best]):
                    best = row
        return best

    def _time_to_compare_sizes(self, slot_bytes: int) -> bool:
        """Once for every slab's worth of evictions, or less often in a large pool, so that the cost
        of an eviction does not grow with the pool."""
        every = max(
            self._blocks.slabs.per_slab(slot_bytes), len(self._blocks.table) // _ROWS_PER_EVICTION
        )
        due = self._evicted_since_look.get(slot_bytes, 0) + 1 >= every
        if due:
            self._evicted_since_look[slot_bytes] = 0
        return due

    def _empty_a_slab(
        self, tenant: Tenant, slot_bytes: int, more: int, victim: int, now_ms: int
    ) -> bool:
        """Evicts everything in a cold slab of another size, with all descendants, if that is better
        than to evict `victim`: because all of it is colder, because the victim is the tenant's own
        while others borrow memory that it is entitled to, or because there is no victim."""
        blocks, table = self._blocks, self._blocks.table
        sizes = set(blocks.slabs.slabs_of_other_sizes(slot_bytes).values())
        leaves = [
            leaf for size in sizes if (leaf := self._victim(tenant, size, more, now_ms)) != NO_ROW
        ]
        owed = (
            victim != NO_ROW and table.tenant[victim] == tenant.number and tenant.entitled_to(more)
        )
        colder_than = _NEVER if victim == NO_ROW or owed else table.used[victim]
        doomed = None
        if leaves:
            oldest = min(leaves, key=lambda leaf: table.used[leaf])
            doomed = self._old_slab(oldest, tenant, more, colder_than, spare_own=owed)
            if doomed is None and colder_than == _NEVER and self._budget.scans:
                doomed = self._coldest_slab(tenant, slot_bytes, more, spare_own=owed)
        if (
            doomed is None
            and colder_than == _NEVER
            and sizes
            and tenant.has_own_right_to(more)
            and self._budget.scans
        ):
            doomed = self._nearly_empty_slab(tenant, slot_bytes)
        if doomed is None:
            return False
        blocks.evict_all(doomed, now_ms)
        self.evictions += len(doomed)
        self.slab_moves += 1
        self._budget.slab_moves -= 1
        self._budget.moved_blocks -= len(doomed)
        return True

    def _old_slab(
        self, oldest: int, tenant: Tenant, more: int, colder_than: int, spare_own: bool
    ) -> list[int] | None:
        """The blocks to evict, children first, to empty one of the slabs with the oldest leaves.
        None if each of them holds a block that must stay or is not old. This is nearly always
        enough, and looks at few blocks."""
        table, slab_bytes = self._blocks.table, self._blocks.slabs.slab_bytes
        old = min(colder_than, (table.used[oldest] + self._blocks.sequence) // 2 + 1)
        slabs = dict.fromkeys(
            table.slot[leaf] // slab_bytes for leaf in self._blocks.order.next_after(oldest)
        )
        for slab in list(slabs)[:_OLD_SLABS_LOOKED_AT]:
            rows = table.rows_between(slab * slab_bytes, (slab + 1) * slab_bytes)
            if table.many.used[rows].max() < old:
                doomed = self._with_descendants(rows.tolist())
                if self._is_idle(doomed, old, tenant if spare_own else None) and self._may_go(
                    doomed, tenant, more
                ):
                    return doomed
        return None

    def _nearly_empty_slab(self, tenant: Tenant, slot_bytes: int) -> list[int] | None:
        """The same for the emptiest slab, if that evicts hardly any memory and nothing of this
        tenant. Looks at every block."""
        self._budget.scans -= 1
        table, slabs = self._blocks.table, self._blocks.slabs
        rows = table.live_rows()
        slab_of = table.many.slot[rows] // slabs.slab_bytes
        blocks_in = np.bincount(slab_of)
        others = slabs.slabs_of_other_sizes(slot_bytes)
        used_bytes = {slab: int(blocks_in[slab]) * size for slab, size in others.items()}
        for slab in sorted(used_bytes, key=lambda slab: used_bytes[slab])[:_SLABS_LOOKED_AT]:
            if used_bytes[slab] * _NEARLY_EMPTY >= slabs.slab_bytes:
                break
            doomed = self._with_descendants(rows[slab_of == slab].tolist())
            hardly_any = len(doomed) * others[slab] * _NEARLY_EMPTY < slabs.slab_bytes
            if hardly_any and self._is_idle(doomed, _NEVER, tenant):
                return doomed
        return None

    def _is_idle(self, rows: list[int], older_than: int, without: Tenant | None) -> bool:
        """Whether these blocks have no leases and writes, were not used lately, and none is of the
        tenant `without`."""
        many = self._blocks.table.many
        busy = (
            (many.held[rows] > 0) | (many.state[rows] == EVICTING) | (many.used[rows] >= older_than)
        )
        if without is not None:
            busy |= many.tenant[rows] == without.number
        return not busy.any()

    def _coldest_slab(
        self, tenant: Tenant, slot_bytes: int, more: int, spare_own: bool
    ) -> list[int] | None:
        """The same for the coldest slab that can be emptied. Looks at every block."""
        self._budget.scans -= 1
        table, slab_bytes = self._blocks.table, self._blocks.slabs.slab_bytes
        rows = table.live_rows()
        slab_of = table.many.slot[rows] // slab_bytes
        last_used = np.zeros(int(slab_of.max()) + 1, dtype=np.int64)
        np.maximum.at(last_used, slab_of, self._last_use(rows, tenant, more, spare_own))
        hanging_on = self._hanging_on(rows, len(last_used))
        coldest = sorted(
            (
                slab
                for slab in self._blocks.slabs.slabs_of_other_sizes(slot_bytes)
                if last_used[slab] < _NEVER
            ),
            key=lambda slab: (last_used[slab], hanging_on[slab]),
        )
        for slab in coldest[:_SLABS_LOOKED_AT]:
            doomed = self._with_descendants(rows[slab_of == slab].tolist())
            if self._may_go(doomed, tenant, more):
                return doomed
        return None

    def _last_use(
        self, rows: NDArray[np.int64], tenant: Tenant, more: int, spare_own: bool
    ) -> NDArray[np.int64]:
        """When each row or one of its descendants was last used; _NEVER for what must stay."""
        table, many = self._blocks.table, self._blocks.table.many
        takes_from_others = tenant.quota_bytes is None or tenant.entitled_to(more)
        owners = many.tenant[rows]
        protected = np.zeros(int(owners.max()) + 1, dtype=np.bool_)  # by tenant number
        for other in self._blocks.tenants:
            if other.blocks and (
                spare_own
                if other is tenant
                else not (takes_from_others and other.may_lose_to(tenant, 1, more))
            ):
                protected[other.number] = True
        stays = (many.held[rows] > 0) | (many.state[rows] == EVICTING) | protected[owners]
        return latest_below(table, rows, np.where(stays, _NEVER, many.used[rows]))

    def _hanging_on(self, rows: NDArray[np.int64], slabs: int) -> NDArray[np.int64]:
        """For each slab, how many blocks in other slabs are children of its blocks. Of a chain that
        fills several slabs, the slab with its tail is emptied first."""
        many, slab_bytes = self._blocks.table.many, self._blocks.slabs.slab_bytes
        rows = rows[many.parent[rows] != NO_ROW]
        slab_above = many.slot[many.parent[rows]] // slab_bytes
        return np.bincount(slab_above[slab_above != many.slot[rows] // slab_bytes], minlength=slabs)

    def _with_descendants(self, rows: list[int]) -> list[int]:
        """The rows and all descendants, each once, children before their parents."""
        table, seen, found = self._blocks.table, set[int](), list[int]()
        for root in rows:
            if root not in seen:
                below = subtree(table, root, without=seen)
                seen.update(below)
                found.extend(reversed(below))
        return found

    def _may_go(self, rows: list[int], tenant: Tenant, more: int) -> bool:
        """Whether the owners of these blocks may lose them to this tenant. The blocks have no
        leases or writes."""
        table, tenants = self._blocks.table, self._blocks.tenants
        assert not table.many.pins[rows].any()
        losses: dict[int, int] = {}
        for row in rows:
            nbytes = self._blocks.layouts[table.layout[row]].slot_bytes
            losses[table.tenant[row]] = losses.get(table.tenant[row], 0) + nbytes
        own = losses.pop(tenant.number, 0)
        if losses and tenant.quota_bytes is not None and not tenant.entitled_to(more - own):
            return False
        return all(
            tenants.by_number[number].may_lose_to(tenant, nbytes, more - own)
            for number, nbytes in losses.items()
        )
