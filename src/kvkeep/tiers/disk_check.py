"""Checks every block of a disk once: which blocks come next, and what was found.

It does no input or output. The server leaves that to the mover, `kvkeep verify` of a disk that no
server uses does it itself. Blocks are leased while they are read, so that no write gets between.
Those that do not match their checksums are dropped from the index, with their descendants: when all
have been checked, so that bad blocks among the descendants are found, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.table import READY
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.mover import Check

_ROWS_A_WINDOW = 4096  # are sorted by their place on the disk
_MOST_TO_DROP = 256  # bad blocks that wait for the end


@dataclass
class CheckCounts:
    """What was found. A block that cannot be read is not bad, and stays."""

    blocks: int = 0
    nbytes: int = 0
    bad_blocks: int = 0
    unreadable_blocks: int = 0
    bad_by_tenant: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Block:
    tenant: str
    key: bytes
    lease: int


class DiskCheck:
    """A walk over the rows of an index. Blocks that are written meanwhile may be left out."""

    def __init__(self, index: DiskIndex) -> None:
        self.counts = CheckCounts()
        self.total_blocks = len(index.store.blocks.table)
        self._index = index
        self._at = 0  # the next row
        self._window: list[int] = []  # rows, the next one last
        self._checking: list[_Block] = []
        self._to_drop: list[_Block] = []

    def next(self, number: int, most_blocks: int, most_bytes: int) -> Check | None:
        """The next job, of blocks of one layout; None at the end. After `ended`."""
        assert not self._checking
        table, layouts = self._index.store.blocks.table, self._index.store.layouts
        rows: list[int] = []
        while not rows:
            if not self._window and not self._next_window():
                self.drop_bad()
                return None
            while self._window and len(rows) < most_blocks:
                row = self._window[-1]
                if table.state[row] == READY:  # it may have been evicted since
                    layout = layouts[table.layout[row]]
                    if rows and table.layout[rows[0]] != layout.number:
                        break
                    if rows and (len(rows) + 1) * layout.slot_bytes > most_bytes:
                        break
                    rows.append(row)
                self._window.pop()
        layout = layouts[table.layout[rows[0]]]
        for row in rows:
            tenant = self._index.store.tenants.by_number[table.tenant[row]].name
            self._checking.append(_Block(tenant, table.keys[row], self._index.lease(row)))
        return Check(
            number,
            table.many.slot[rows].astype("<i8").tobytes(),
            layout.slot_bytes,
            list(layout.shard_offsets),
            list(layout.shard_bytes),
            layout.checks[table.many.check[rows]].astype("<u8").tobytes(),
        )

    def ended(self, job: Check, good: NDArray[np.bool_], error: str, now_ms: int) -> dict[str, int]:
        """Takes in what was read, and returns the bad blocks by tenant. With an error, blocks that
        are not good could not be read."""
        checked, self._checking = self._checking, []
        bad: Counter[str] = Counter()
        for block, is_good in zip(checked, good.tolist(), strict=True):
            self._index.release(block.lease, now_ms)
            if is_good:
                continue
            if error:
                self.counts.unreadable_blocks += 1
            else:
                bad[block.tenant] += 1
                self._to_drop.append(block)
        if len(self._to_drop) >= _MOST_TO_DROP:
            self.drop_bad()
        self.counts.blocks += len(checked)
        self.counts.nbytes += len(checked) * job.nbytes
        self.counts.bad_blocks += bad.total()
        self.counts.bad_by_tenant = dict(Counter(self.counts.bad_by_tenant) + bad)
        return dict(bad)

    def drop_bad(self) -> None:
        """Takes the bad blocks out of use. Also when the check ends early."""
        self._index.drop((block.tenant, block.key) for block in self._to_drop)
        self._to_drop.clear()

    def _next_window(self) -> bool:
        """Looks for rows in windows of the table, a few of them. False at its end."""
        many = self._index.store.blocks.table.many
        while self._at < len(many.state):
            window = slice(self._at, self._at + _ROWS_A_WINDOW)
            rows = self._at + np.flatnonzero(many.state[window] == READY)
            self._at += _ROWS_A_WINDOW
            if len(rows):
                order = np.lexsort((many.slot[rows], many.layout[rows]))
                self._window = rows[order][::-1].tolist()
                return True
        return False
