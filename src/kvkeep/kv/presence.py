"""Counts a server's blocks by key, so that a client need not ask for blocks that are not stored.

    key ──► cell ──► how many blocks of the server have a key in this cell

A count of 0 means that the server has no such block. Nothing relies on it: a wrong count makes a
request ask in vain, or compute what it could have loaded."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

CELL = np.dtype(np.uint32)
LEAST_CELLS = 1 << 12
_ONE = np.uint32(1)  # counting with another type takes ten times as long


def cell_of(key: bytes, mask: int) -> int:
    """The cell of a key, among mask + 1 cells."""
    return int.from_bytes(key[:8], sys.byteorder) & mask


class Presence:
    """The counts. The number of cells is a power of two."""

    def __init__(self, cells: NDArray[np.uint32] | None = None) -> None:
        self._cells = np.zeros(LEAST_CELLS, dtype=CELL) if cells is None else cells
        self._mask = len(self._cells) - 1

    def add(self, heads: NDArray[np.uint64]) -> None:
        """Counts blocks whose keys begin with these words."""
        np.add.at(self._cells, self._at(heads), _ONE)

    def remove(self, heads: NDArray[np.uint64]) -> None:
        """Counts them no longer."""
        if len(heads) == 1:  # ten times as fast
            self._cells[int(heads[0]) & self._mask] -= _ONE
            return
        np.subtract.at(self._cells, self._at(heads), _ONE)

    def lacks(self, key: bytes) -> bool:
        """Whether the server has no block of this key."""
        return not self._cells[cell_of(key, self._mask)]

    def holds_exactly(self, heads: NDArray[np.uint64]) -> bool:
        """Whether exactly these blocks are counted."""
        return bool((np.bincount(self._at(heads), minlength=len(self._cells)) == self._cells).all())

    def _at(self, heads: NDArray[np.uint64]) -> NDArray[np.int64]:
        return heads.view(np.int64) & np.int64(self._mask)
