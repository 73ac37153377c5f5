"""Making room: which blocks make way for a tenant that stores, and never more of them than it needs.

Who gives way, in a full pool:

    the tenant stays within its quota         the oldest among those that borrow, then the tenant's own
    the tenant has a quota and exceeds it     its own
    the tenant has no quota                   the oldest among those that borrow (it is one of them)

so that nobody's flood takes memory from a tenant that is within its quota. If no block of the same size can go, the
coldest slab of another size is emptied and changes its size.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from kvkeep.store.blocks import Blocks
from kvkeep.store.layouts import Layout
from kvkeep.store.table import FREE, NO_ROW
from kvkeep.store.tenants import COMMONS, Tenant
from kvkeep.store.tree import subtree

# With more borrowers than this, the oldest is looked for among so many at a time, in turn: a bound on the work for
# one block, and with that many tenants the oldest of a sample is old enough.
_BORROWERS_LOOKED_AT = 64
_SLABS_LOOKED_AT = 4


class Room:
    """Finds victims and evicts them."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.evictions = 0
        self.slab_moves = 0
        self._evicted_since_look: dict[int, int] = {}  # slot size -> evictions since other sizes were compared

    def make(self, tenant: Tenant, layout: Layout, wanted: int, now_ms: int) -> int:
        """Makes room for up to `wanted` blocks; returns for how many there is room now.

        Blocks that must stay (the chain that the new blocks hang on) are pinned by the caller.
        """
        slabs, slot_bytes = self._blocks.slabs, layout.slot_bytes
        self._blocks.order.note_expired(now_ms)
        available = slabs.available(slot_bytes)
        while available < wanted:
            more = (available + 1) * slot_bytes
            row = self._victim(tenant, slot_bytes, more, now_ms)
            if row != NO_ROW and not self._time_to_compare_sizes(slot_bytes):
                self._blocks.evict(row, now_ms)
                self.evictions += 1
            else:
                colder_than = self._blocks.sequence + 1 if row == NO_ROW else self._blocks.table.used[row]
                if not self._empty_a_slab(tenant, slot_bytes, more, colder_than, now_ms):
                    if row == NO_ROW:
                        break
                    self._blocks.evict(row, now_ms)
                    self.evictions += 1
            available = slabs.available(slot_bytes)
        return min(wanted, available)

    def _victim(self, tenant: Tenant, slot_bytes: int, more: int, now_ms: int) -> int:
        order = self._blocks.order
        if tenant.quota_bytes is None or tenant.entitled_to(more):
            row = self._oldest_borrowed(slot_bytes, now_ms)
            if row != NO_ROW:
                return row
        return NO_ROW if tenant.owner == COMMONS else order.peek(tenant.owner, slot_bytes, now_ms)

    def _oldest_borrowed(self, slot_bytes: int, now_ms: int) -> int:
        order, rank = self._blocks.order, self._blocks.table.queued
        best = order.peek(COMMONS, slot_bytes, now_ms)
        borrowers = self._blocks.tenants.borrowers
        looked_at = list(islice(borrowers, _BORROWERS_LOOKED_AT))
        if len(borrowers) > _BORROWERS_LOOKED_AT:
            for borrower in looked_at:  # to the end of the line
                del borrowers[borrower]
                borrowers[borrower] = None
        for borrower in looked_at:
            if borrower.may_lose(slot_bytes):
                row = order.peek(borrower.owner, slot_bytes, now_ms)
                if row != NO_ROW and (best == NO_ROW or rank[row] < rank[best]):
                    best = row
        return best

    def _time_to_compare_sizes(self, slot_bytes: int) -> bool:
        """Once for every slab's worth of evictions: the look at all other slabs is too dear for every block."""
        count = self._evicted_since_look.get(slot_bytes, 0) + 1
        due = count >= self._blocks.slabs.per_slab(slot_bytes)
        self._evicted_since_look[slot_bytes] = 0 if due else count
        return due and bool(self._blocks.slabs.slabs_of_other_sizes(slot_bytes))

    def _empty_a_slab(self, tenant: Tenant, slot_bytes: int, more: int, colder_than: int, now_ms: int) -> bool:
        """Evicts everything in the coldest slab of another size, if all of it was last used before `colder_than`."""
        blocks = self._blocks
        others = blocks.slabs.slabs_of_other_sizes(slot_bytes)
        if not others:
            return False
        many, rows = blocks.table.many, blocks.table.live_rows()
        slab_of = many.slot[rows] // blocks.slabs.slab_bytes
        last_used = np.zeros(int(slab_of.max()) + 1, dtype=np.int64)
        np.maximum.at(last_used, slab_of, many.used[rows])
        coldest = sorted(others, key=lambda slab: int(last_used[slab]))[:_SLABS_LOOKED_AT]
        for slab in coldest:
            if last_used[slab] >= colder_than:
                return False
            doomed = self._with_descendants(rows[slab_of == slab].tolist())
            if self._may_go(doomed, tenant, more):
                for row in doomed:
                    if blocks.table.state[row] != FREE:  # else it went along with its last child
                        blocks.evict(row, now_ms)
                self.evictions += len(doomed)
                self.slab_moves += 1
                return True
        return False

    def _with_descendants(self, rows: list[int]) -> list[int]:
        """The rows and all below them, each once, children before their parents."""
        table, seen, found = self._blocks.table, set[int](), list[int]()
        for root in rows:
            if root not in seen:
                below = subtree(table, root, without=seen)
                seen.update(below)
                found.extend(reversed(below))
        return found

    def _may_go(self, rows: list[int], tenant: Tenant, more: int) -> bool:
        """Whether nobody reads or writes these blocks and their owners may lose them to this tenant."""
        table, tenants = self._blocks.table, self._blocks.tenants
        if table.many.pins[rows].any():
            return False
        losses: dict[int, int] = {}
        for row in rows:
            nbytes = self._blocks.layouts[table.layout[row]].slot_bytes
            losses[table.tenant[row]] = losses.get(table.tenant[row], 0) + nbytes
        own = losses.pop(tenant.number, 0)
        if losses and tenant.quota_bytes is not None and not tenant.entitled_to(more - own):
            return False
        return all(tenants.by_number[number].may_lose(nbytes) for number, nbytes in losses.items())
