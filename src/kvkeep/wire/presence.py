"""Which blocks a server may have, in memory that it shares with the engines of its host: who asks for what nobody has
stored need not wait to hear so.

    key ──► cell ──► how many blocks of the server have a key that falls into this cell

Where that is 0 the server has no such block; where not, only the server can tell. Nothing relies on it: a wrong count
makes a request wait for an answer, or compute what it could have loaded.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PRESENCE_FILES = "presence-*"
_CELL = np.dtype(np.uint32)  # no pool has more blocks than that
_ONE = np.uint32(1)  # of the cells' own type, or counting takes ten times as long
_LEAST_CELLS, _MOST_CELLS = 1 << 12, 1 << 20
_POOL_BYTES_A_CELL = 1 << 10


def presence_path(directory: Path, epoch: int) -> Path:
    """Each server has its own: one that is left by another server says nothing."""
    return directory / f"presence-{epoch:016x}"


class Presence:
    """The server counts with `add` and `remove`, engines ask `lacks`."""

    def __init__(self, cells: NDArray[np.uint32] | None = None) -> None:
        self._cells = np.zeros(_LEAST_CELLS, dtype=_CELL) if cells is None else cells
        self._mask = len(self._cells) - 1

    @classmethod
    def make(cls, directory: Path, epoch: int, pool_bytes: int) -> Presence:
        """Of a server that has nothing yet. OSError if there is no memory for it."""
        cells = min(_MOST_CELLS, max(_LEAST_CELLS, 1 << (pool_bytes // _POOL_BYTES_A_CELL).bit_length()))
        path = presence_path(directory, epoch)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, cells * _CELL.itemsize)  # or counting could end the server
            return cls(np.frombuffer(mmap.mmap(descriptor, 0), dtype=_CELL))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, directory: Path, epoch: int) -> Presence | None:
        """As an engine sees it; None if it cannot be had, or is nothing of the kind."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(presence_path(directory, epoch), flags)
            try:
                cells = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype=_CELL)
            finally:
                os.close(descriptor)
            return cls(cells) if len(cells).bit_count() == 1 else None
        return None

    def add(self, heads: NDArray[np.uint64]) -> None:
        """Blocks have come whose keys begin with these words."""
        np.add.at(self._cells, self._at(heads), _ONE)

    def remove(self, heads: NDArray[np.uint64]) -> None:
        """They are gone."""
        np.subtract.at(self._cells, self._at(heads), _ONE)

    def count(self, heads: NDArray[np.uint64]) -> None:
        """These are all that there are."""
        self._cells[:] = 0
        self.add(heads)

    def lacks(self, key: bytes) -> bool:
        """Whether the server has no block of this key."""
        return not self._cells[int.from_bytes(key[:8], sys.byteorder) & self._mask]

    def holds_exactly(self, heads: NDArray[np.uint64]) -> bool:
        """Whether these are all that are counted."""
        return bool((np.bincount(self._at(heads), minlength=len(self._cells)) == self._cells).all())

    def _at(self, heads: NDArray[np.uint64]) -> NDArray[np.int64]:
        return heads.view(np.int64) & np.int64(self._mask)
