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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from kvkeep.store.blocks import Blocks
from kvkeep.store.departed import ROOM
from kvkeep.store.emptying import NEVER, Emptying
from kvkeep.store.layouts import Layout
from kvkeep.store.table import NO_ROW
from kvkeep.store.tenants import COMMONS, Tenant

# A search compares so many borrowers at a time, in turn. This bounds the work for one block; with
# more borrowers, the oldest block of a sample is old enough.
_BORROWERS_LOOKED_AT = 16
_LOOKS_A_SEARCH = 16  # comparing so many tenants counts as one more search
_OLD_SLABS_LOOKED_AT = 8
# rows that may be scanned for one eviction; bounds how often sizes are compared
_ROWS_PER_EVICTION = 64
_SEARCHES_A_MOVE = 64
_SEARCHES_A_PIECE, _BLOCKS_A_PIECE = 4, 64  # a quarter of a millisecond


@dataclass
class _Budget:
    """What one request may cost, so that others do not wait for long."""

    searches: int = 96  # for a victim, which is evicted alone or with its chain: two milliseconds
    blocks: int = 512  # evicted, alone or with their chain
    emptying: int = 0  # of slabs, in evicted blocks: two turns of it

    def spent(self) -> bool:
        return min(self.searches, self.blocks) <= 0


class Eviction:
    """Finds victims and evicts them."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.evictions = 0
        self.slab_moves = 0
        self._budget = _Budget()
        self._emptying: Emptying | None = None
        # slot size -> evictions since other sizes were compared
        self._evicted_since_look: dict[int, int] = {}

    def make_room(self, tenant: Tenant, layout: Layout, wanted: int, now_ms: int) -> int:
        """Makes room for up to `wanted` blocks. Returns for how many there is room now.

        The caller has pinned what must stay: the parent of the new blocks. A request evicts no
        more than its `_Budget` allows; the next one continues."""
        self._budget = _Budget(emptying=2 * self._blocks.a_turn)
        with self._pressure(ROOM, tenant):
            return self._make_room(tenant, layout, wanted, now_ms)

    def make_some_room(self, tenant: Tenant, layout: Layout, wanted: int, now_ms: int) -> bool:
        """A small piece of `make_room`. Whether it evicted anything."""
        before, available = self.evictions, self._blocks.slabs.available(layout.slot_bytes)
        self._budget = _Budget(searches=_SEARCHES_A_PIECE)
        with self._pressure(ROOM, tenant):
            self._make_room(tenant, layout, min(wanted, available + _BLOCKS_A_PIECE), now_ms)
        return self.evictions > before

    def _make_room(self, tenant: Tenant, layout: Layout, wanted: int, now_ms: int) -> int:
        slabs, slot_bytes = self._blocks.slabs, layout.slot_bytes
        self._blocks.order.note_expired(now_ms)
        if self._blocks.has_to_sweep:
            self._blocks.sweep()
        self._blocks.draining.is_active(now_ms)  # opens slabs
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
        # a slab that is being emptied for another size may have closed one of this size
        return min(wanted, slabs.available(slot_bytes))

    @contextmanager
    def _pressure(self, reason: str, tenant: Tenant) -> Iterator[None]:
        """Blocks that are evicted meanwhile leave for this reason."""
        before, self._blocks.pressure = self._blocks.pressure, (reason, tenant.name)
        try:
            yield
        finally:
            self._blocks.pressure = before

    def shrink_to_limit(self, tenant: Tenant, now_ms: int, most: int) -> bool:
        """Takes blocks of a tenant that is over its limit out of use, up to `most` at a time.
        Returns whether it is done.

        Evicts what can be evicted. If the index still has too much, all of it has leased or
        written descendants: then all of it leaves the index at once, and its memory is freed when
        the last lease or write ends."""
        with self._pressure("limit", tenant):
            return self._shrink_to_limit(tenant, now_ms, most)

    def _shrink_to_limit(self, tenant: Tenant, now_ms: int, most: int) -> bool:
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

    @property
    def is_emptying(self) -> bool:
        """Whether a slab is being emptied for another size."""
        return self._emptying is not None

    def continue_to_empty(self, now_ms: int) -> None:
        """Continues to empty a slab, for one turn, unless another one has become free."""
        if self._emptying is not None and self._blocks.slabs.unused_slabs:
            self._emptying.end()
            self._emptying = None
        elif self._emptying is not None:
            self._empty_for_a_turn(self._emptying, now_ms)

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
            with self._pressure("limit", tenant):
                self._evict_excess(row, excess, now_ms, self._budget.blocks)
            self._budget.blocks -= self.evictions - before
        return min(wanted, (limit_bytes - tenant.usage_bytes) // slot_bytes)

    def _evict_excess(self, row: int, excess_bytes: int, now_ms: int, most: int = NEVER) -> None:
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
        """Continues to empty a slab, or begins to empty a cold one of another size, if that is
        better than to evict `victim`: because all of it is colder, because the victim is the
        tenant's own while others borrow memory that it is entitled to, or because there is no
        victim. Returns whether anything was evicted, perhaps the victim."""
        if self._emptying is None:
            self._begin_to_empty(tenant, slot_bytes, more, victim, now_ms)
        before = self.evictions
        while self._emptying is not None and self._budget.emptying > 0:
            self._budget.emptying -= self._empty_for_a_turn(self._emptying, now_ms)
        return self.evictions > before

    def _begin_to_empty(
        self, tenant: Tenant, slot_bytes: int, more: int, victim: int, now_ms: int
    ) -> None:
        table, slabs = self._blocks.table, self._blocks.slabs
        sizes = [size for size in slabs.sizes() if size != slot_bytes]
        leaves = [
            leaf for size in sizes if (leaf := self._victim(tenant, size, more, now_ms)) != NO_ROW
        ]
        owed = (
            victim != NO_ROW and table.tenant[victim] == tenant.number and tenant.entitled_to(more)
        )
        by_force = victim == NO_ROW or owed
        if not leaves and not (by_force and sizes and tenant.has_own_right_to(more)):
            return
        old_slabs, older_than = dict[int, None](), NEVER if by_force else table.used[victim]
        if leaves:
            oldest = min(leaves, key=lambda leaf: table.used[leaf])
            older_than = min(older_than, (table.used[oldest] + self._blocks.sequence) // 2 + 1)
            old_slabs = dict.fromkeys(
                table.slot[leaf] // slabs.slab_bytes
                for leaf in self._blocks.order.next_after(oldest)
            )
        self._emptying = Emptying(
            self._blocks,
            tenant,
            slot_bytes,
            list(old_slabs)[:_OLD_SLABS_LOOKED_AT],
            older_than,
            by_force=by_force,
            spare_own=owed,
        )

    def _empty_for_a_turn(self, emptying: Emptying, now_ms: int) -> int:
        """Returns how much work it was, in evicted blocks."""
        with self._pressure("slab", emptying.tenant):
            self.evictions += emptying.turn(now_ms, self._blocks.a_turn)
        if emptying.is_done:
            self.slab_moves += emptying.has_emptied
            self._emptying = None
        return max(1, self._blocks.a_turn - emptying.left)
