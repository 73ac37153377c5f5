"""What a server has, as it shows it to the engines of its host: a file of counts
(`kvkeep.kv.presence`)."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from kvkeep.errors import UntrustedPool
from kvkeep.kv import native
from kvkeep.kv.presence import CELL, LEAST_CELLS, Presence, cell_of
from kvkeep.wire.pool_files import PoolFiles

PRESENCE_FILES = "presence-*"
_MOST_CELLS = 1 << 20
_POOL_BYTES_A_CELL = 1 << 10


def presence_path(directory: Path, epoch: int) -> Path:
    """Each server has its own: one that is left by another server says nothing."""
    return directory / f"presence-{epoch:016x}"


def make_presence(directory: Path, epoch: int, pool_bytes: int) -> Presence:
    """Of a server that has nothing yet. OSError if there is no memory for it."""
    cells = min(_MOST_CELLS, max(LEAST_CELLS, 1 << (pool_bytes // _POOL_BYTES_A_CELL).bit_length()))
    path = presence_path(directory, epoch)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, cells * CELL.itemsize)  # or counting could end the server
        return Presence(np.frombuffer(mmap.mmap(descriptor, 0), dtype=CELL))
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


class PresenceFile:
    """As an engine sees it. A file that somebody cuts off says nothing, and is no bus error where
    there is a kernel."""

    def __init__(self, descriptor: int) -> None:
        self._cells = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype=CELL)
        self._first, self._mask = self._cells.ctypes.data, len(self._cells) - 1

    def lacks(self, key: bytes) -> bool:
        """Whether the server has no block of this key."""
        cell = cell_of(key, self._mask)
        if not native.available:
            return not self._cells[cell]
        return native.peek(self._first + cell * CELL.itemsize) == 0


def open_presence(files: PoolFiles, epoch: int) -> PresenceFile | None:
    """None if it cannot be had, or is nothing of the kind."""
    with contextlib.suppress(OSError, ValueError, UntrustedPool):
        descriptor = files.open(presence_path(files.path, epoch).name, os.O_RDONLY)
        try:
            cells = os.fstat(descriptor).st_size / CELL.itemsize
            return (
                PresenceFile(descriptor)
                if cells.is_integer() and int(cells).bit_count() == 1
                else None
            )
        finally:
            os.close(descriptor)
    return None
