"""The index beside the pool: columns as files in the memory file system, for the next server.

    index-header      sizes of the pool that the columns belong to, with a checksum; locked by its server
    index-state …     one file a column; its length says how many rows there are
    index-sessions    the locks of sessions (`session_locks`)

A file is extended before its rows are used, so that no later write fails, and never shortened. One
thread writes everything in place: the next server finds what the process had stored when it was
killed. If shared memory runs out, the header is removed and the index continues in plain memory:
the server serves, and leaves nothing."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvkeep.kv.checksum import checksum
from kvkeep.store.layouts import SLOT_ALIGN
from kvkeep.store.records import LAYOUT, TENANT, word_of
from kvkeep.store.table import KEPT, WORDS_A_KEY, PlainColumns
from kvkeep.units import format_size

PREFIX = "index-"
_HEADER_FILE = PREFIX + "header"
_VERSION = 2
_MAGIC = b"kvkeepix"
# magic, version, 0, form, pool bytes, slab bytes, segment bytes
_HEADER = struct.Struct("<8sIIQQQQ")
_CHECK = struct.Struct("<Q")
# Changes with every column, in case the version was not raised.
_FORM = word_of(
    repr([(name, np.dtype(kind).str) for name, kind in KEPT.items()]).encode(),
    repr((TENANT, LAYOUT)).encode(),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value

_ROWS_TO_SPARE = 1 << 20

log = logging.getLogger(__name__)


class FileColumns:
    """Columns in one directory; see `kvkeep.store.table.Columns`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._columns: dict[str, NDArray[Any]] = {}
        self._mapped: dict[str, NDArray[Any]] = {}  # the columns with room to grow
        self._plain = PlainColumns()
        self.kept = True  # whether the next server will find them

    def grow(
        self, name: str, dtype: DTypeLike, width: int, rows: int, most_rows: int = 0
    ) -> NDArray[Any]:
        column = self._columns.get(name)
        if column is None or len(column) < rows:
            column = self._longer(name, np.dtype(dtype), width, rows, most_rows)
            self._columns[name] = column
        return column

    def has(self, name: str, nbytes: int) -> bool:
        """Whether such a column was left, with at least `nbytes` bytes."""
        return _size(self._directory / (PREFIX + name)) >= nbytes

    def drop(self, name: str) -> None:
        self._columns.pop(name, None)
        self._mapped.pop(name, None)
        self._plain.drop(name)
        (self._directory / (PREFIX + name)).unlink(missing_ok=True)

    def _longer(
        self, name: str, dtype: np.dtype[Any], width: int, rows: int, most_rows: int
    ) -> NDArray[Any]:
        if self.kept:
            try:
                return self._map(name, dtype, width, rows, most_rows)
            except OSError as error:
                self.kept = False
                remove_header(self._directory)
                log.warning(
                    "no shared memory for the index (%s): the next server will start empty",
                    error.strerror,
                )
        longer, before = (
            self._plain.grow(name, dtype, width, rows, most_rows),
            self._columns.get(name),
        )
        if before is not None:
            longer[: len(before)] = before
        return longer

    def _map(
        self, name: str, dtype: np.dtype[Any], width: int, rows: int, most_rows: int
    ) -> NDArray[Any]:
        row_bytes = dtype.itemsize * (width or 1)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._directory / (PREFIX + name), flags, 0o600)
        try:
            found = os.fstat(descriptor).st_size // row_bytes
            if found < rows:
                os.posix_fallocate(descriptor, found * row_bytes, (rows - found) * row_bytes)
            rows, mapped = max(found, rows), self._mapped.get(name)
            if mapped is None or len(mapped) < rows:
                flat = np.frombuffer(
                    _map_ahead(descriptor, max(rows, most_rows) * row_bytes), dtype
                )
                mapped = self._mapped[name] = flat.reshape(-1, width) if width else flat
        finally:
            os.close(descriptor)
        return mapped[:rows]


def _map_ahead(descriptor: int, nbytes: int) -> memoryview:
    """Maps a file with room to grow: what lies beyond its end must not be touched. Python's `mmap`
    refuses that, and mapping a long file anew makes the kernel look up each of its pages again."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapped = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, nbytes).atexit = False
    return memoryview(mapped)


def write_header(directory: Path, pool_bytes: int, slab_bytes: int, segment_bytes: int) -> None:
    """Writes the header for a pool of these sizes."""
    head = _HEADER.pack(_MAGIC, _VERSION, 0, _FORM, pool_bytes, slab_bytes, segment_bytes)
    descriptor = os.open(
        directory / _HEADER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
    )
    try:
        os.write(descriptor, head + _CHECK.pack(checksum(head)))
    finally:
        os.close(descriptor)


def rewrite_header(directory: Path, pool_bytes: int, slab_bytes: int, segment_bytes: int) -> None:
    """Changes the sizes of a header that is ours, in place and with one write: whoever has it
    locked keeps the lock."""
    head = _HEADER.pack(_MAGIC, _VERSION, 0, _FORM, pool_bytes, slab_bytes, segment_bytes)
    descriptor = os.open(directory / _HEADER_FILE, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, head + _CHECK.pack(checksum(head)), 0)
    finally:
        os.close(descriptor)


def own_header(directory: Path) -> int:
    """Locks the header until the descriptor is closed. The lock stays with the columns even if they
    are moved, so no two servers write into them. BlockingIOError if another server has it."""
    descriptor = os.open(directory / _HEADER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_header(directory: Path) -> None:
    """Makes the index impossible to adopt."""
    (directory / _HEADER_FILE).unlink(missing_ok=True)


def why_not_adopt(directory: Path, pool_bytes: int, slab_bytes: int, segment_bytes: int) -> str:
    """Why the files in this directory are no index for such a pool, or one of another size; empty if
    they are one. OSError if they cannot be examined."""
    for name in os.listdir(directory):
        if name.startswith((PREFIX, "segment-")):
            found = os.stat(directory / name, follow_symlinks=False)
            if (
                not stat.S_ISREG(found.st_mode)
                or found.st_uid != os.getuid()
                or found.st_nlink != 1
            ):
                return f"{name} is no plain file of ours"
            if name.startswith(PREFIX) and found.st_blocks * 512 < found.st_size:
                # reading a hole allocates memory, and ends the process if there is none
                return f"{name} has holes"
    try:
        left = _read_header(directory)
    except ValueError as error:
        return str(error)
    wanted_sizes = (slab_bytes, segment_bytes)
    for name, was, wanted in zip(("slab", "segment"), left[1:], wanted_sizes, strict=True):
        if was != wanted:
            return f"its {name} size is {format_size(was)}, not {format_size(wanted)}"
    row_bytes = {name: np.dtype(kind).itemsize for name, kind in KEPT.items()} | {
        "keys": 8 * WORDS_A_KEY
    }
    lengths = {
        name: _size(directory / (PREFIX + name)) // nbytes for name, nbytes in row_bytes.items()
    }
    if not 0 < lengths["state"] <= min(lengths.values()):  # it is the last to grow
        return "a column of its index is missing or too short"
    if lengths["state"] > max(pool_bytes, left[0]) // SLOT_ALIGN + _ROWS_TO_SPARE:
        return "a column of its index is too long"
    return ""


def sizes_left(directory: Path) -> tuple[int, int, int]:
    """Pool, slab and segment bytes of the index in this directory; zeros if there is none."""
    try:
        return _read_header(directory) or (0, 0, 0)
    except (OSError, ValueError):
        return (0, 0, 0)


def _read_header(directory: Path) -> tuple[int, int, int]:
    """Pool, slab and segment bytes. ValueError says what is wrong with the header."""
    path = directory / _HEADER_FILE
    if _size(path) != _HEADER.size + _CHECK.size:
        raise ValueError(
            "its index has no header"
            if _size(path) < 0
            else "its index has a header of another length"
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, _HEADER.size + _CHECK.size, 0)
    finally:
        os.close(descriptor)
    magic, version, _, form, pool_bytes, slab_bytes, segment_bytes = _HEADER.unpack(
        data[: _HEADER.size]
    )
    if magic != _MAGIC:
        raise ValueError("its index has a header that is not ours")
    if _CHECK.unpack(data[_HEADER.size :]) != (checksum(data[: _HEADER.size]),):
        raise ValueError("its index has a damaged header")
    if (version, form) != (_VERSION, _FORM):
        raise ValueError(
            f"its index was written by another release (format {version}, here it is {_VERSION})"
        )
    return pool_bytes, slab_bytes, segment_bytes


def _size(path: Path) -> int:
    """-1 if there is no such file."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return -1
