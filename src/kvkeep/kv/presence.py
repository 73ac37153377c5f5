"""Which blocks a server may have: so that who asks for what nobody has stored need not wait to hear
so.

    key ──► cell ──► how many blocks of the server have a key that falls into this cell

Where that is 0 the server has no such block; where not, only the server can tell. Nothing relies on
it: a wrong count makes a request wait for an answer, or compute what it could have loaded."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

CELL = np.dtype(np.uint32)  # no pool has more blocks than that
LEAST_CELLS = 1 << 12
_ONE = np.uint32(1)  # of the cells' own type, or counting takes ten times as long


def cell_of(key: bytes, mask: int) -> int:
    """Where a block of this key is counted, among mask + 1 cells."""
    return int.from_bytes(key[:8], sys.byteorder) & mask


class Presence:
    """The server counts with `add` and `remove`. The number of cells is a power of two."""

    def __init__(self, cells: NDArray[np.uint32] | None = None) -> None:
        self._cells = np.zeros(LEAST_CELLS, dtype=CELL) if cells is None else cells
        self._mask = len(self._cells) - 1

    def add(self, heads: NDArray[np.uint64]) -> None:
        """Blocks have come whose keys begin with these words."""
        np.add.at(self._cells, self._at(heads), _ONE)

    def remove(self, heads: NDArray[np.uint64]) -> None:
        """They are gone."""
        if len(heads) == 1:  # ten times as fast
            self._cells[int(heads[0]) & self._mask] -= _ONE
            return
        np.subtract.at(self._cells, self._at(heads), _ONE)

    def count(self, heads: NDArray[np.uint64]) -> None:
        """These are all that there are."""
        self._cells[:] = 0
        self.add(heads)

    def lacks(self, key: bytes) -> bool:
        """Whether the server has no block of this key."""
        return not self._cells[cell_of(key, self._mask)]

    def holds_exactly(self, heads: NDArray[np.uint64]) -> bool:
        """Whether these are all that are counted."""
        return bool((np.bincount(self._at(heads), minlength=len(self._cells)) == self._cells).all())

    def _at(self, heads: NDArray[np.uint64]) -> NDArray[np.int64]:
        return heads.view(np.int64) & np.int64(self._mask)
