"""The files of a disk tier, with faults that a test turns on and off from outside while a mover uses
them. Each fault is a file in a directory:

    fail-OP     the name of an error, such as EIO: the operation raises that error
    stall-OP    a FIFO: the operation blocks until the FIFO is opened for writing
    slow-OP     seconds by which the operation takes longer
    half-OP     (read, write) only the first half of the bytes is moved; a write says nothing of it
    garbage-OP  (read) one byte that is read differs
    operations  a line for each operation that has ended, its name, and "stall" for each that waits

OP is read, write, sync_data, append, sync_log or compact."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_log import Recovered


class Faults:
    """The faults of one directory. Nothing is opened before a fault is looked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def meet(self, operation: str) -> None:
        """Waits or raises, as the directory says."""
        stall, slow, fail = (
            self.directory / f"{kind}-{operation}" for kind in ("stall", "slow", "fail")
        )
        if stall.exists():
            self.note("stall")
            stall.read_bytes()
        if slow.exists():
            time.sleep(float(slow.read_text()))
        if fail.exists():
            number = getattr(errno, fail.read_text())
            raise OSError(number, os.strerror(number))

    def moved(self, operation: str, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """The views that this operation really moves."""
        return _half(views) if (self.directory / f"half-{operation}").exists() else views

    def spoil(self, views: Sequence[memoryview]) -> None:
        """Changes the first byte of what was read: others may be beyond the end of a block."""
        if (self.directory / "garbage-read").exists():
            views[0][0] ^= 1

    def note(self, operation: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.directory / "operations", flags, 0o600)
        try:
            os.write(descriptor, f"{operation}\n".encode())
        finally:
            os.close(descriptor)


class FaultyDisk:
    """Two plain files in a directory, data and log, for a mover alone. The faults are there, too."""

    def __init__(self, directory: Path, descriptors: tuple[int, ...] = ()) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._faults = Faults(directory)
        (directory / "operations").touch(0o600)
        self._data, self._log = descriptors or (
            os.open(directory / "data", flags, 0o600),
            os.open(directory / "log", flags | os.O_APPEND, 0o600),
        )

    @classmethod
    def inherit(cls, description: bytes, descriptors: tuple[int, ...]) -> FaultyDisk:
        return cls(Path(os.fsdecode(description)), descriptors)

    def description(self) -> bytes:
        return os.fsencode(self._faults.directory)

    def descriptors(self) -> tuple[int, ...]:
        return self._data, self._log

    def read(self, offset: int, views: list[memoryview]) -> int:
        self._faults.meet("read")
        return os.preadv(self._data, views, offset)

    def write(self, offset: int, views: list[memoryview]) -> None:
        self._faults.meet("write")
        os.pwritev(self._data, views, offset)
        self._faults.note("write")

    def sync_data(self) -> None:
        self._faults.meet("sync_data")
        self._faults.note("sync_data")

    def append(self, records: bytes) -> None:
        self._faults.meet("append")
        os.write(self._log, records)
        self._faults.note("append")

    def sync_log(self) -> None:
        self._faults.meet("sync_log")
        self._faults.note("sync_log")

    def compact(self) -> None:
        self._faults.meet("compact")
        os.ftruncate(self._log, 0)
        self._faults.note("compact")

    def close(self) -> None:
        for descriptor in self.descriptors():
            os.close(descriptor)


class FaultyFiles:
    """The files of a whole server's disk. The faults are in the directory beside it whose name ends
    in `-faults`, which need not exist."""

    def __init__(self, files: DiskFiles, faults: Faults) -> None:
        self.slab_bytes = files.slab_bytes
        self.data_bytes = files.data_bytes
        self._files = files
        self._faults = faults

    @classmethod
    def open(cls, directory: Path, size: int, slab_bytes: int) -> FaultyFiles:
        faults = Faults(directory.with_name(f"{directory.name}-faults"))
        return cls(DiskFiles.open(directory, size, slab_bytes), faults)

    @classmethod
    def inherit(cls, description: bytes, descriptors: Sequence[int]) -> FaultyFiles:
        directory, files = msgspec.json.decode(description)
        return cls(DiskFiles.inherit(files.encode(), descriptors), Faults(Path(directory)))

    def description(self) -> bytes:
        return msgspec.json.encode(
            [str(self._faults.directory), self._files.description().decode()]
        )

    def descriptors(self) -> tuple[int, ...]:
        return self._files.descriptors()

    def recovered(self) -> Recovered:
        return self._files.recovered()

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        self._faults.meet("read")
        nbytes = self._files.read(offset, self._faults.moved("read", views))
        self._faults.spoil(views)
        return nbytes

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        self._faults.meet("write")
        self._files.write(offset, self._faults.moved("write", views))

    def sync_data(self) -> None:
        self._faults.meet("sync_data")
        self._files.sync_data()

    def append(self, records: bytes) -> None:
        self._faults.meet("append")
        self._files.append(records)

    def sync_log(self) -> None:
        self._faults.meet("sync_log")
        self._files.sync_log()

    def compact(self) -> None:
        self._faults.meet("compact")
        self._files.compact()

    def close(self) -> None:
        self._files.close()


def _half(views: Sequence[memoryview]) -> list[memoryview]:
    """The first half of their bytes, in whole 4 KiB, as O_DIRECT moves them."""
    left = sum(view.nbytes for view in views) // 2 // 4096 * 4096
    found = []
    for view in views:
        found.append(view[: min(left, view.nbytes)])
        left -= found[-1].nbytes
    return [view for view in found if view.nbytes]
