"""Empties a slab, so that blocks of another size can use its memory. A slab has thousands of blocks,
and more hang below them, so this may take several turns:

    choose    one of the slabs with the oldest leaves; failing that the coldest one, failing that one
              that is nearly empty. Reads the table in pieces
    close     the slab gives out no more slots
    foresee   nothing is evicted if a block of the slab must stay, or one of the first blocks below
    evict     leaves first. Each piece asks again whether its blocks may go
    drain     if nothing could be emptied, and the tenant's own quota promises it room: the coldest
              slabs wait until nothing in them is held (`draining.py`)

If a block must stay after all, the slab is opened again and the next one is tried. What was evicted
by then is gone: blocks that were their owners' to lose, and that nobody has used since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.blocks import Blocks
from kvkeep.store.table import EVICTING, FREE, NO_ROW
from kvkeep.store.tenants import Tenant
from kvkeep.store.tree import way_up, with_descendants

# The work of a turn is counted in evicted blocks, each of which takes three microseconds.
_A_CHAIN = 12  # what it costs to evict a chain, however short
_ROWS_A_SCAN = 1 << 15
_ROWS_A_BLOCK = 1 << 8  # of the table, read at once
_LOOKS_A_BLOCK = 8  # at single rows or tenants
_FORESEEN = 2048  # blocks of a slab and below it
_SLABS_LOOKED_AT = 16
_NEARLY_EMPTY = 8  # a slab is nearly empty if less than an eighth of it is used
NEVER = np.iinfo(np.int64).max

Rows = NDArray[np.int64]
Turns = Generator[None, None, bool]  # a turn ends with each yield; returns whether a slab is empty


@dataclass(frozen=True)
class _Rules:
    """Which blocks may go: those without leases and writes that were last used before
    `older_than`. None of the tenant `spares`. `of_any`: others lose theirs whatever their quota."""

    older_than: int
    spares: Tenant | None
    of_any: bool = False


class Emptying:
    """Empties one slab for a tenant that stores blocks of `slot_bytes`: one of `old_slabs`, if all
    its blocks were last used before `older_than`; `by_force`, failing that, any other."""

    def __init__(
        self,
        blocks: Blocks,
        tenant: Tenant,
        slot_bytes: int,
        old_slabs: list[int],
        older_than: int,
        by_force: bool,
        spare_own: bool,
    ) -> None:
        self._blocks = blocks
        self.tenant = tenant
        self._slot_bytes = slot_bytes
        self._spares = tenant if spare_own else None
        self._now_ms = 0
        self.left = 0  # of the work of this turn
        self._evicted = 0
        self.is_done = False
        self.has_emptied = False
        self._turns = self._choose(old_slabs, older_than, by_force)
        tenant.storing += 1

    def turn(self, now_ms: int, most: int) -> int:
        """Continues for one turn. Returns how many blocks it evicted, `most` at most."""
        self._now_ms, self.left, before = now_ms, most, self._evicted
        try:
            next(self._turns)
        except StopIteration as end:
            self.has_emptied = end.value
            self.end()
        return self._evicted - before

    def end(self) -> None:
        """Leaves the slab as it is, open."""
        self._turns.close()
        self.is_done = True
        self.tenant.storing -= 1
        self._blocks.tenants.forget_if_idle(self.tenant)

    # -- which slab --------------------------------------------------------------------------------

    def _choose(self, old_slabs: list[int], older_than: int, by_force: bool) -> Turns:
        begun = self._blocks.sequence + 1  # what is used from now on stays
        rules = _Rules(min(older_than, begun), self._spares)
        for slab in old_slabs:
            if (yield from self._empty(slab, rules)):
                return True
        if by_force and old_slabs:
            for slab in (yield from self._coldest()):
                if (yield from self._empty(slab, _Rules(begun, self._spares))):
                    return True
        if by_force and self.tenant.has_own_right_to(self._wanted_bytes):
            for slab in (yield from self._nearly_empty()):
                if (yield from self._empty(slab, _Rules(begun, self.tenant, of_any=True))):
                    return True
            coldest = yield from self._by_last_use(held_ones=True)
            self._blocks.draining.begin(coldest[: self._slabs_promised], self._now_ms)
        return False

    def _coldest(self) -> Generator[None, None, list[int]]:
        """The coldest slabs of other sizes without blocks that must stay, the coldest first; among
        those last used at the same time, the one with the fewest blocks below."""
        many = self._blocks.table.many
        coldest = (yield from self._by_last_use(held_ones=False))[:_SLABS_LOOKED_AT]
        found: dict[int, list[Rows]] = {slab: [] for slab in coldest}

        def collect(rows: Rows, slabs: Rows) -> None:
            for slab, parts in found.items():
                parts.append(rows[slabs == slab])

        yield from self._scan(collect)
        ranks = dict[int, tuple[int, int]]()
        for slab, parts in found.items():
            doomed = self._foresee(np.concatenate(parts))
            ranks[slab] = int(many.used[doomed].max(initial=0)), len(doomed)
            if self.left <= 0:
                yield
        return sorted(ranks, key=lambda slab: ranks[slab])

    def _by_last_use(self, *, held_ones: bool) -> Generator[None, None, list[int]]:
        """The slabs of other sizes whose blocks their owners may lose, the coldest first.
        `held_ones`: also those with blocks that are being read or written."""
        many, others = self._blocks.table.many, self._slabs_of_other_sizes()
        protected = yield from self._protected()
        last_used = np.zeros(max(others, default=0) + 1, dtype=np.int64)

        def note_uses(rows: Rows, slabs: Rows) -> None:
            rows, slabs = rows[slabs < len(last_used)], slabs[slabs < len(last_used)]
            stays = protected[np.minimum(many.tenant[rows], len(protected) - 1)]
            if not held_ones:
                stays = stays | (many.held[rows] > 0) | (many.state[rows] == EVICTING)
            np.maximum.at(last_used, slabs, np.where(stays, NEVER, many.used[rows]))

        yield from self._scan(note_uses)
        # while this looked, slabs were emptied, or were taken for blocks of this size
        others = self._slabs_of_other_sizes()
        coldest = [slab for slab in others if slab < len(last_used) and last_used[slab] < NEVER]
        return sorted(coldest, key=lambda slab: last_used[slab])

    def _protected(self) -> Generator[None, None, NDArray[np.bool_]]:
        """By number, whether a tenant may lose nothing. The last entry is that of newer ones."""
        tenants, more = self._blocks.tenants, self._wanted_bytes
        takes = self.tenant.quota_bytes is None or self.tenant.entitled_to(more)
        protected = np.ones(tenants.numbers + 1, dtype=np.bool_)
        for number in range(len(protected) - 1):
            other = tenants.by_number.get(number)
            if other is self.tenant:
                protected[number] = self._spares is not None
            elif other is not None and takes:
                protected[number] = not other.may_lose_to(self.tenant, 1, more)
            if number % _LOOKS_A_BLOCK == 0 and self._spend(1):
                yield
        return protected

    def _nearly_empty(self) -> Generator[None, None, list[int]]:
        """The nearly empty slabs of other sizes, the emptiest first."""
        others, slab_bytes = self._slabs_of_other_sizes(), self._blocks.slabs.slab_bytes
        blocks_in = np.zeros(max(others, default=0) + 1, dtype=np.int64)

        def count(rows: Rows, slabs: Rows) -> None:
            np.add.at(blocks_in, slabs[slabs < len(blocks_in)], 1)

        yield from self._scan(count)
        used_bytes = {slab: int(blocks_in[slab]) * size for slab, size in others.items()}
        emptiest = sorted(used_bytes, key=lambda slab: used_bytes[slab])[:_SLABS_LOOKED_AT]
        return [slab for slab in emptiest if used_bytes[slab] * _NEARLY_EMPTY < slab_bytes]

    # -- emptying it -------------------------------------------------------------------------------

    def _empty(self, slab: int, rules: _Rules) -> Turns:
        slabs, slot_bytes = self._blocks.slabs, self._blocks.slabs.size_of(slab)
        if slot_bytes in (None, self._slot_bytes):
            return False  # it was emptied meanwhile
        assert slot_bytes is not None
        most = (slabs.slab_bytes - 1) // (_NEARLY_EMPTY * slot_bytes) if rules.of_any else NEVER
        found: list[Rows] = []

        def collect(rows: Rows, slabs: Rows) -> bool:
            found.append(rows[slabs == slab])
            return self._is_busy(found[-1], rules)

        has_closed = slabs.close(slab)
        try:
            yield from self._scan(collect)
            inside = np.concatenate(found)
            foreseen = self._foresee(inside)
            if self._is_busy(foreseen, rules) or len(foreseen) > most:
                return False
            if not self._may_go(foreseen, rules):
                return False
            most += self._evicted
            own_first = np.argsort(self._blocks.table.many.tenant[inside] != self.tenant.number)
            for row in inside[own_first].tolist():
                if not (yield from self._evict_tree(row, slab, rules, most)):
                    return False
            return True
        finally:
            if has_closed:
                slabs.open(slab)

    def _evict_tree(self, row: int, slab: int, rules: _Rules, most: int) -> Turns:
        """Evicts a block of the slab and all below it. Returns whether it is gone. `most`: what all
        evictions together may come to."""
        table, at, key = self._blocks.table, row, self._blocks.table.keys[row]
        slab_bytes = self._blocks.slabs.slab_bytes
        while table.state[row] != FREE and table.slot[row] // slab_bytes == slab:
            if self.left <= 0:
                yield
                continue
            if table.state[at] == FREE or table.keys[at] != key:
                at = row  # the block below was evicted since the last turn
            looks = 0
            while looks < _FORESEEN and (child := table.first_child[at]) != NO_ROW:
                at, looks = child, looks + 1
            self._spend(looks // _LOOKS_A_BLOCK)
            if table.first_child[at] == NO_ROW:
                chain = self._line_above(at, row)
                after = self._evicted + len(chain)
                if self._is_busy(chain, rules) or not self._may_go(chain, rules) or after > most:
                    return False
                at = int(chain[-1]) if chain[-1] == row else table.parent[int(chain[-1])]
                self._blocks.evict_all(chain.tolist(), self._now_ms)
                self._evicted = after
                self._spend(_A_CHAIN + len(chain))
            key = table.keys[at]
        return True

    def _line_above(self, leaf: int, top: int) -> Rows:
        """The leaf and its ancestors up to `top`, as many as this turn may evict, each the only
        child of the next."""
        many = self._blocks.table.many
        line = way_up(self._blocks.table, leaf, max(1, self.left))[::-1]
        below = line[:-1]
        ends = (many.next_sibling[below] != NO_ROW) | (many.prev_sibling[below] != NO_ROW)
        ends = np.flatnonzero(ends | (below == top))
        return line[: ends[0] + 1] if len(ends) else line

    def _foresee(self, rows: Rows) -> Rows:
        """The rows, and the first ones below them."""
        if len(rows) < _FORESEEN:
            found = with_descendants(self._blocks.table, rows.tolist(), _FORESEEN)
            rows = np.array(found, dtype=np.int64)
        self._spend(min(len(rows), _FORESEEN) // _LOOKS_A_BLOCK)
        return rows

    def _is_busy(self, rows: Rows, rules: _Rules) -> bool:
        """Whether one of these blocks must stay, whatever the quotas."""
        many = self._blocks.table.many
        busy = (many.held[rows] > 0) | (many.pins[rows] > 0) | (many.state[rows] == EVICTING)
        busy |= many.used[rows] >= rules.older_than
        if rules.spares is not None:
            busy |= many.tenant[rows] == rules.spares.number
        return bool(busy.any())

    def _may_go(self, rows: Rows, rules: _Rules) -> bool:
        """Whether the owners of these blocks may lose them to the tenant."""
        if rules.of_any or not len(rows):
            return True
        table, tenants, more = self._blocks.table, self._blocks.tenants, self._wanted_bytes
        slot_bytes = self._blocks.layouts[table.layout[int(rows[0])]].slot_bytes  # that of all
        losses = Counter(table.many.tenant[rows].tolist())
        more -= losses.pop(self.tenant.number, 0) * slot_bytes
        if losses and self.tenant.quota_bytes is not None and not self.tenant.entitled_to(more):
            return False
        return all(
            tenants.by_number[number].may_lose_to(self.tenant, blocks * slot_bytes, more)
            for number, blocks in islice(losses.items(), _FORESEEN)
        )

    # -- the work of a turn ------------------------------------------------------------------------

    def _scan(self, look: Callable[[Rows, Rows], bool | None]) -> Generator[None, None, None]:
        """Shows `look` all rows in use and their slabs, in pieces, until it returns True."""
        table, slab_bytes = self._blocks.table, self._blocks.slabs.slab_bytes
        for start in range(0, len(table.many.state), _ROWS_A_SCAN):
            rows = table.live_rows(start, start + _ROWS_A_SCAN)
            if look(rows, table.many.slot[rows] // slab_bytes):
                return
            if self._spend(len(rows) // _ROWS_A_BLOCK):
                yield

    def _spend(self, blocks: int) -> bool:
        """Whether the turn ends."""
        self.left -= blocks
        return self.left <= 0

    def _slabs_of_other_sizes(self) -> dict[int, int]:
        return self._blocks.slabs.slabs_of_other_sizes(self._slot_bytes)

    @property
    def _slabs_promised(self) -> int:
        """How many slabs the rest of the tenant's own quota fills."""
        left_bytes = (self.tenant.quota_bytes or 0) - self.tenant.usage_bytes
        return max(0, -(-left_bytes // self._blocks.slabs.slab_bytes))

    @property
    def _wanted_bytes(self) -> int:
        """What the tenant would use in addition, with one block more than there is room for."""
        return (self._blocks.slabs.available(self._slot_bytes) + 1) * self._slot_bytes
