"""What a server has, as it shows it to the engines of its host: a file of counts (`kvkeep.kv.presence`)."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from kvkeep.kv.presence import CELL, LEAST_CELLS, Presence

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


def open_presence(directory: Path, epoch: int) -> Presence | None:
    """As an engine sees it; None if it cannot be had, or is nothing of the kind."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(presence_path(directory, epoch), flags)
        try:
            cells = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype=CELL)
        finally:
            os.close(descriptor)
        return Presence(cells) if len(cells).bit_count() == 1 else None
    return None
