"""Slabs that are drained: a tenant within its own quota needs them for another block size, but some
of their blocks are being read or written.

What is held is let go in time; if it could be held anew meanwhile, the slab would never be free. So
a drained slab gives out no slots, a lookup leases no block of it and none below one, and no store
extends such a chain. When nothing in it is held, it can be emptied (`emptying.py`). The next request
of the tenant does that. If none comes, the slab is opened again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.slabs import Slabs
from kvkeep.store.table import NO_ROW, BlockTable
from kvkeep.store.tree import way_up

# How long a slab is drained after a request that needed it: longer than leases of network sessions
# last by default.
LASTS_MS = 120_000
_ROWS_A_STEP = 1024


class Draining:
    def __init__(self, table: BlockTable, slabs: Slabs) -> None:
        self._table = table
        self._slabs = slabs
        self._until_ms: dict[int, int] = {}  # slab -> when it is opened again

    def begin(self, chosen: list[int], now_ms: int) -> None:
        """Drains these slabs from now on."""
        for slab in chosen:
            self._slabs.close(slab)
            self._until_ms[slab] = now_ms + LASTS_MS

    def is_active(self, now_ms: int) -> bool:
        """Whether any slab is drained now. Opens those for which the time is over."""
        for slab, until_ms in list(self._until_ms.items()):
            if not self._slabs.is_closed(slab):  # it was emptied
                del self._until_ms[slab]
            elif now_ms >= until_ms:
                del self._until_ms[slab]
                self._slabs.open(slab)
        return bool(self._until_ms)

    def blocks_above(self, row: int, blocks: int) -> int:
        """How many blocks of a chain are above its first one in a drained slab. `blocks`: how many
        blocks the chain has, of which `row` is the last."""
        drained = np.flatnonzero(self._are_drained(way_up(self._table, row, blocks)))
        return int(drained[0]) if len(drained) else blocks

    def reaches(self, row: int) -> bool:
        """Whether the block or one above it is in a drained slab. NO_ROW: no."""
        while row != NO_ROW:
            rows = way_up(self._table, row, _ROWS_A_STEP)
            if self._are_drained(rows).any():
                return True
            row = self._table.parent[int(rows[0])]
        return False

    def _are_drained(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        slabs = self._table.many.slot[rows] // self._slabs.slab_bytes
        return np.isin(slabs, list(self._until_ms))
