"""The pool's shared memory, as a process maps it.

The pool is one long range of bytes, cut into files ("segments") of equal size. A slot never crosses
from one segment into the next. A segment is mapped when it is first needed and stays mapped until
`close`.

    pool offset   0 ............ segment_bytes ............ 2 * segment_bytes ...
    file          segment-00000  segment-00001              segment-00002

Beside the segments lies the presence file: counts by key (`kvkeep.kv.presence`), in which an engine
sees without a request that the server has no block of a key.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import PoolError, UntrustedPool
from kvkeep.kv import native
from kvkeep.kv.presence import CELL, LEAST_CELLS, Presence, cell_of
from kvkeep.wire.pool_files import PoolFiles

PRESENCE_FILES = "presence-*"
_MOST_CELLS = 1 << 20
_POOL_BYTES_A_CELL = 1 << 10
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def segment_name(number: int) -> str:
    return f"segment-{number:05d}"


def segment_path(directory: Path, number: int) -> Path:
    return directory / segment_name(number)


def _populate(address: int, nbytes: int) -> None:
    """Has the kernel map pages now. By ctypes, which releases the GIL meanwhile; `mmap.madvise`
    does not."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "madvise")


class Segments:
    """Maps segments on demand and turns pool offsets into addresses. `files` stay open while
    segments are mapped."""

    def __init__(
        self,
        files: PoolFiles,
        segment_bytes: int,
        pool_bytes: int,
        epoch: int,
        *,
        populate_bytes: int = 8 << 20,  # some milliseconds at a time
        pin_bytes: int = 64 << 20,  # the GPU's driver is blocked meanwhile: 4 ms, as measured
    ) -> None:
        self.files = files
        self._populate_bytes = populate_bytes
        self._pin_bytes = pin_bytes
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._pool_bytes = pool_bytes
        count = -(-pool_bytes // segment_bytes)
        self._maps: list[mmap.mmap | None] = [None] * count
        self._arrays: list[NDArray[np.uint8] | None] = [None] * count
        self._bases = np.zeros(count, dtype=np.uint64)  # 0: not mapped
        self._populated = 0
        self._unpin: Callable[[int], None] | None = None
        self._pinned: list[int] = []
        self.unmapped_by: Callable[[Segments], None] | None = None  # instead of by `close`
        self._mapping = threading.Lock()
        self._presence: PresenceFile | None = None
        self._looked_for_presence = False

    def addresses(self, offsets: NDArray[np.int64], nbytes: int) -> NDArray[np.uint64]:
        """The address in this process of each slot area of `nbytes`. PoolError if one is outside the
        pool."""
        if not len(offsets):
            return np.empty(0, dtype=np.uint64)
        numbers, within = np.divmod(offsets, self._segment_bytes)
        inside = (
            (offsets >= 0)
            & (offsets <= self._pool_bytes - nbytes)
            & (within <= self._segment_bytes - nbytes)
        )
        if nbytes < 1 or not inside.all():
            raise PoolError(
                f"offset {int(offsets[np.argmin(inside)])} with {nbytes} bytes is not in the pool"
            )
        bases = self._bases[numbers]
        if not bases.all():
            for number in np.unique(numbers[bases == 0]).tolist():
                with self._mapping:  # a second mapping would replace the one in use
                    if not self._bases[number]:
                        self._map(number)
            bases = self._bases[numbers]
        return bases + within.view(np.uint64)

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of one area, for reading and writing."""
        self.addresses(np.array([offset], dtype=np.int64), nbytes)
        array = self._arrays[offset // self._segment_bytes]
        assert array is not None
        within = offset % self._segment_bytes
        return array[within : within + nbytes]

    def lacks(self, key: bytes) -> bool:
        """Whether the server surely has no block of this key."""
        if not self._looked_for_presence:
            self._looked_for_presence = True
            self._presence = open_presence(self.files, self._epoch)
        presence = self._presence
        return presence is not None and presence.lacks(key)

    def populate_next(
        self,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], None] | None = None,
    ) -> bool:
        """Maps the next few pages before their first use, which would otherwise take the time.
        False if there is nothing to do for now.

        For an idle thread: on 4 KiB pages this runs at about a gigabyte a second. `pin` is called
        with the address and size of each `pin_bytes` that are mapped; `unpin` is called for those that
        `pin` accepted before they are unmapped."""
        if self._populated >= self._pool_bytes:
            return False
        number, within = divmod(self._populated, self._segment_bytes)
        try:
            self.addresses(np.array([self._populated], dtype=np.int64), 1)
        except PoolError:
            return False  # the server has not made it yet
        mapped = self._maps[number]
        assert mapped is not None
        nbytes = min(self._populate_bytes, len(mapped) - within)
        with contextlib.suppress(OSError):  # a kernel before 5.14: pages are mapped as they come
            _populate(int(self._bases[number]) + within, nbytes)
        self._populated += nbytes
        if pin is not None:
            stop = within + nbytes
            start = (stop - 1) // self._pin_bytes * self._pin_bytes
            address = int(self._bases[number]) + start
            is_last = stop == len(mapped)
            if (is_last or stop % self._pin_bytes == 0) and pin(address, stop - start):
                self._unpin = unpin
                self._pinned.append(address)
        return True

    @property
    def is_populated(self) -> bool:
        return self._populated >= self._pool_bytes

    def close(self) -> None:
        """Unmaps everything, by `unmapped_by` if that is set. No address may be used afterwards; a
        view that is still held keeps its mapping."""
        by = self.unmapped_by or Segments.unmap
        by(self)

    def unmap(self) -> None:
        """Unmaps all segments."""
        if self._unpin is not None:
            for address in self._pinned:
                self._unpin(address)
        self._pinned = []
        self._presence = None
        self._bases[:] = 0
        self._arrays = [None] * len(self._arrays)
        for number, mapped in enumerate(self._maps):
            self._maps[number] = None
            if mapped is not None:
                with contextlib.suppress(BufferError):  # a view is held, and keeps the mapping
                    mapped.close()

    def _map(self, number: int) -> None:
        path = segment_path(self.files.path, number)
        nbytes = min(self._segment_bytes, self._pool_bytes - number * self._segment_bytes)
        try:
            descriptor = self.files.open(path.name, os.O_RDWR)
        except OSError as error:
            raise PoolError(
                f"cannot open {path}: {error.strerror}", "has the server been restarted?"
            ) from error
        try:
            # The next server removes these files and changes the epoch before it makes its own: if
            # the epoch is still ours, so is the file that was opened before.
            if not self.files.is_of(self._epoch):
                raise PoolError(
                    f"{path} belongs to another server by now",
                    "the client connects to it by itself",
                )
            if os.fstat(descriptor).st_size < nbytes:
                raise PoolError(f"{path} is shorter than the server said")
            mapped = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            raise PoolError(
                f"cannot map {path}: {error}", "is there enough address space?"
            ) from error
        finally:
            os.close(descriptor)
        array = np.frombuffer(mapped, dtype=np.uint8)
        self._maps[number] = mapped
        self._arrays[number] = array
        self._bases[number] = array.ctypes.data  # last: other threads read it


# -- the presence file


def presence_path(directory: Path, epoch: int) -> Path:
    """The file of the server with this epoch; those of other servers mean nothing."""
    return directory / f"presence-{epoch:016x}"


def make_presence(directory: Path, epoch: int, pool_bytes: int) -> Presence:
    """Makes the file of a server that holds no blocks. OSError if there is no memory for it."""
    cells = min(_MOST_CELLS, max(LEAST_CELLS, 1 << (pool_bytes // _POOL_BYTES_A_CELL).bit_length()))
    path = presence_path(directory, epoch)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, cells * CELL.itemsize)  # or a count could raise SIGBUS
        return Presence(np.frombuffer(mmap.mmap(descriptor, 0), dtype=CELL))
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


class PresenceFile:
    """The file as an engine reads it. With the native kernel, a file that is truncated reads as
    unknown and raises no SIGBUS."""

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
    """None if the file cannot be opened, or has no valid size."""
    with contextlib.suppress(OSError, ValueError, UntrustedPool):
        descriptor = files.open(presence_path(files.path, epoch).name, os.O_RDONLY)
        try:
            cells = os.fstat(descriptor).st_size / CELL.itemsize
            if cells.is_integer() and int(cells).bit_count() == 1:
                return PresenceFile(descriptor)
        finally:
            os.close(descriptor)
    return None
