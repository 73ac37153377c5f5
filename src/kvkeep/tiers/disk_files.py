"""The files of a disk tier, in a directory of its own.

    header         format version and slab size
    data           the blocks, in slots
    log-0, log-1   one is the log (see disk_log.py), the other takes the next image of it
    daemon.lock    names the server that owns the directory

All are allocated at the start; together they never take more than the size that was asked for. A
commit is `write`, `sync_data`, `append`, `sync_log`, in this order: what the log names is on the
disk. The log is compacted into the other file when it is twice as long as its last image.

`read` and `write` may be called by several threads, everything else by one at a time. The server
opens the files and hands them to the process that does the I/O (`inherit`)."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvkeep.errors import DirectoryInUse, PoolError, TierError, TierFault
from kvkeep.kv.checksum import checksum
from kvkeep.store.layouts import SLOT_ALIGN, Layout
from kvkeep.tiers.disk_log import (
    FRAME_ALIGN,
    IMAGE,
    IMAGE_END,
    Frame,
    Recovered,
    frame,
    read_frames,
    replay,
)
from kvkeep.tiers.ownership import LOCK_FILE, Ownership
from kvkeep.units import MIB, format_size

VERSION = 1
_HEADER, _DATA, _LOGS = "header", "data", ("log-0", "log-1")
_MAGIC = b"kvkeepdk"
_FORMAT = struct.Struct("<8sI")  # magic, version
_HEAD = struct.Struct("<8sIIQ")  # the same, 0, slab bytes
_CHECK = struct.Struct("<Q")
_MOST_HEADER_BYTES = 64 * 1024
_LEFT_S, _LOOK_AGAIN_S = 3.0, 0.02
_ASIDE = ".format-"  # and the version: the ending of files of an older format
_LEAST_LOG_BYTES = MIB
_LOG_SHARE = 128  # a log takes one byte of so many
# File systems account for the extents of a file, too: one more for each slot at worst.
_EXTENTS_SHARE, _EXTENTS_BYTES = 4096, 64 * 1024
_LEAST_COMPACTED = 8 * MIB  # a log below twice its image and this is not worth compacting
_FRAME_BYTES = MIB  # of an image
_DEVICE_HINT = "check that the device is mounted, writable and healthy"
# Errors of a path that no device can cause: it leads through a file or a link, or is too long.
_WRONG_PATH = (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)

log = logging.getLogger(__name__)


class File(Protocol):
    """An open file of fixed size. OSError if the disk fails."""

    nbytes: int

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fills the views one after the other. Returns how many bytes there were."""

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Writes all of it."""

    def sync(self) -> None:
        """Returns when everything that was written is durable."""

    def close(self) -> None: ...


class _LogFull(OSError):
    """An image or a record does not fit."""


class DiskFile:
    """A file by its descriptor. With O_DIRECT, reads and writes of buffers that are not aligned go
    through one that is."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        try:
            return self._all(os.preadv, offset, views)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        wanted = sum(view.nbytes for view in views)
        with _aligned(wanted) as buffer:
            found = min(self._all(os.preadv, offset, [buffer]), wanted)
            at = 0
            for view in views:
                part = buffer[at : min(at + view.nbytes, found)]
                view.cast("B")[: len(part)] = part
                at += view.nbytes
                part.release()
        return found

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        try:
            self._all(os.pwritev, offset, views)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        with _aligned(sum(view.nbytes for view in views)) as buffer:
            at = 0
            for view in views:
                buffer[at : at + view.nbytes] = view.cast("B")
                at += view.nbytes
            self._all(os.pwritev, offset, [buffer])

    def sync(self) -> None:
        os.fdatasync(self.descriptor)
        if not os.fstat(self.descriptor).st_nlink:
            raise OSError(errno.ENOENT, "the tier's files were removed")

    def close(self) -> None:
        os.close(self.descriptor)

    def _all(self, move: object, offset: int, views: Sequence[memoryview]) -> int:
        """Repeats a short read or write until it is complete or at the file's end."""
        done, left = 0, [view.cast("B") for view in views if view.nbytes]
        while left:
            count: int = move(self.descriptor, left, offset + done)  # type: ignore[operator]
            if not count:
                break
            done += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if left:
                left[0] = left[0][count:]
        return done


@contextlib.contextmanager
def _aligned(nbytes: int) -> Iterator[memoryview]:
    """A buffer that O_DIRECT accepts, of whole 4 KiB."""
    with mmap.mmap(-1, max(1, -(-nbytes // SLOT_ALIGN)) * SLOT_ALIGN) as memory:
        view = memoryview(memory)
        try:
            yield view
        finally:
            view.release()


class DiskFiles:
    """See the module's docstring."""

    def __init__(self, data: File, logs: tuple[File, File], slab_bytes: int) -> None:
        """Over open files. `is_new` if they hold no log: `begin` writes one."""
        self.slab_bytes = slab_bytes
        self.data_bytes = data.nbytes // slab_bytes * slab_bytes
        self._data, self._logs = data, logs
        self._ownership: Ownership | None = None
        self._inherited: tuple[int, ...] = ()
        self._current = 0
        self._end = self._image_bytes = self._sequence = self._check = 0
        self._recovered: Recovered | None = None
        self._broken = ""  # why nothing can be appended
        self._is_cut = False  # replay would not reach what is appended
        self.is_new = not self._find_log()

    @classmethod
    def open(cls, directory: Path, size: int, slab_bytes: int) -> DiskFiles:
        """Makes or opens the files of a tier of this size, and owns the directory until `close`.
        TierError says why that is impossible, TierFault that it is the device's fault."""
        _check_is_ours(directory)
        return cls._owned(directory, lambda: _open(directory, size, slab_bytes))

    @classmethod
    def open_existing(cls, directory: Path) -> DiskFiles:
        """Opens the files that are in the directory, changes nothing, and owns the directory until
        `close`. TierError says why that is impossible."""
        if not os.path.lexists(directory / _HEADER):
            raise TierError(
                f"there is no disk tier in {directory}", "name the directory that --tier names"
            )
        return cls._owned(directory, lambda: _open_as_it_is(directory))

    @classmethod
    def _owned(cls, directory: Path, open_files: Callable[[], DiskFiles]) -> DiskFiles:
        try:
            ownership = _own(directory)
        except PoolError as error:
            kind = TierFault if _is_fault(error.__cause__, directory) else TierError
            raise kind(
                f"cannot use {directory} as a disk tier: {error.message}",
                _DEVICE_HINT
                if kind is TierFault
                else "give --tier a directory that is this server's alone",
            ) from error
        try:
            files = open_files()
        except OSError as error:
            ownership.close()
            raise TierFault(
                f"cannot use {directory} as a disk tier: {error.strerror}", _DEVICE_HINT
            ) from error
        except TierError:
            ownership.close()
            raise
        files._ownership = ownership
        return files

    # -- for the process that does the I/O ---------------------------------------------------------

    def descriptors(self) -> tuple[int, ...]:
        """What `inherit` needs, in the child or here. The last ones hold the lock on the
        directory."""
        files = (self._data, *self._logs)
        opened = tuple(file.descriptor for file in files if isinstance(file, DiskFile))
        return opened + (self._ownership.descriptors if self._ownership else ())

    def description(self) -> bytes:
        return msgspec.json.encode({"slab_bytes": self.slab_bytes})

    @classmethod
    def inherit(cls, description: bytes, descriptors: Sequence[int]) -> DiskFiles:
        """The same files in another process. Finds the end of the log by reading it."""
        data, first, second, *locks = descriptors
        logs = (DiskFile(first), DiskFile(second))
        files = cls(DiskFile(data), logs, msgspec.json.decode(description)["slab_bytes"])
        files._inherited = tuple(locks)
        files._recovered = None
        if files.is_new:
            raise OSError(errno.EIO, "the log cannot be read")
        return files

    def recovered(self) -> Recovered:
        """What the log said when it was opened. Once."""
        found, self._recovered = self._recovered or Recovered(), None
        found.most_image_bytes = self._logs[0].nbytes // 2
        return found

    def close(self) -> None:
        for file in (self._data, *self._logs):
            file.close()
        for descriptor in self._inherited:
            os.close(descriptor)
        if self._ownership is not None:
            self._ownership.close()

    # -- blocks ------------------------------------------------------------------------------------

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        return self._data.read(offset, views)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        if offset + sum(view.nbytes for view in views) > self.data_bytes:
            raise OSError(errno.EFBIG, "a write beyond the end of the data")
        self._data.write(offset, views)

    def sync_data(self) -> None:
        self._data.sync()

    # -- the log -----------------------------------------------------------------------------------

    def append(self, records: bytes) -> None:
        """Adds records of the index to the log. `sync_log` makes them durable."""
        if not records:
            return
        if self._broken:
            raise OSError(errno.EIO, f"the log must be opened again: {self._broken}")
        nbytes = len(records) + FRAME_ALIGN
        is_long = self._end > 2 * self._image_bytes + _LEAST_COMPACTED
        if self._is_cut or is_long or not self._has_room(nbytes):
            self.compact()
        if not self._has_room(nbytes):
            raise _LogFull(errno.ENOSPC, "the log is full")
        self._append(records, 0)

    def sync_log(self) -> None:
        self._logs[self._current].sync()

    def compact(self) -> None:
        """Writes an image of the log to the other file, which then is the log."""
        recovered = replay(self._frames(self._current), self.slab_bytes)
        self._write_image(recovered)

    def begin(self) -> None:
        """Makes an empty log. What was in the files is forgotten."""
        # a new checksum to begin with, so that no old frame follows the new one
        self._check, self._current = secrets.randbits(64), 1
        self._write_image(Recovered())
        self._recovered, self.is_new = None, False

    def resize(self, data_bytes: int, log_bytes: int) -> int:
        """Prepares for files of other sizes: a log that fits, of the blocks that fit. Returns how
        many do not."""
        found = replay(self._frames(self._current), self.slab_bytes)
        sizes = [Layout(0, b"", each.shard_bytes).slot_bytes for each in found.layouts]
        ends = found.rows["slot"] + [sizes[layout] for layout in found.layout.tolist()]
        fit = ends <= data_bytes
        found.rows, found.tenant = found.rows[fit], found.tenant[fit]
        found.layout, found.check = found.layout[fit], found.check[fit]
        self._write_image(found, log_bytes)
        self._recovered = found
        return int((~fit).sum())

    def _write_image(self, recovered: Recovered, log_bytes: int = 1 << 62) -> None:
        """Into the other log. All or nothing: until the image is complete, the log is as it was."""
        before = self._current, self._end, self._sequence, self._check
        self._current, self._end = 1 - self._current, 0
        log_bytes = min(log_bytes, self._logs[self._current].nbytes)
        try:
            waiting = bytearray()
            for record in recovered.image():
                if waiting and len(waiting) + len(record) > _FRAME_BYTES:
                    self._append(bytes(waiting), IMAGE, log_bytes)
                    waiting.clear()
                waiting += record
            self._append(bytes(waiting), IMAGE | IMAGE_END, log_bytes)
            self.sync_log()
        except OSError as error:
            self._current, self._end, self._sequence, self._check = before
            if not isinstance(error, _LogFull):
                # The image may be complete on the disk. If the old log grew on, the next server
                # could take the image for the newer one.
                self._broken = str(error)
            raise
        self._image_bytes, self._is_cut = self._end, False

    def _append(self, records: bytes, flags: int, log_bytes: int = 1 << 62) -> None:
        data, check = frame(records, flags, self._sequence + 1, self._check)
        if self._end + len(data) > log_bytes:
            raise _LogFull(errno.ENOSPC, "the log is full")
        self._logs[self._current].write(self._end, [memoryview(data)])
        self._end += len(data)
        self._sequence, self._check = self._sequence + 1, check

    def _has_room(self, nbytes: int) -> bool:
        padded = -(-nbytes // FRAME_ALIGN) * FRAME_ALIGN
        return self._end + padded <= self._logs[self._current].nbytes

    def _find_log(self) -> bool:
        """Chooses the log with the newer image, and replays it. False if there is none."""
        firsts = {number: next(self._frames(number), None) for number in (0, 1)}
        begun = {first.sequence: number for number, first in firsts.items() if first}
        if not begun:
            return False
        self._current = begun[max(begun)]
        self._recovered = replay(self._noted(self._frames(self._current)), self.slab_bytes)
        self._is_cut = self._recovered.is_cut
        return True

    def _noted(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        """Passes the frames on, and notes where the log and its image end."""
        for each in frames:
            self._end += each.nbytes
            self._sequence, self._check = each.sequence, each.check
            if each.flags & IMAGE:
                self._image_bytes = self._end
            yield each

    def _frames(self, number: int) -> Iterator[Frame]:
        file = self._logs[number]

        def read(offset: int, nbytes: int) -> memoryview:
            buffer = memoryview(bytearray(nbytes))
            return buffer[: file.read(offset, [buffer])]

        return read_frames(read, file.nbytes)


# -- the directory ---------------------------------------------------------------------------------


def _own(directory: Path) -> Ownership:
    """The process that does the I/O ends with its server, unless the device does not answer: waits
    a moment for that of an earlier server. TierFault if it stays."""
    until_s = time.monotonic() + _LEFT_S
    while True:
        try:
            return Ownership(directory)
        except DirectoryInUse as error:
            if not error.is_left:
                raise
            if time.monotonic() >= until_s:
                raise TierFault(
                    f"cannot use {directory} as a disk tier: a process of an earlier server still "
                    "waits for the device",
                    "check the device and the kernel's log, and restart the server when that "
                    "process has ended",
                ) from error
        time.sleep(_LOOK_AGAIN_S)


def _is_fault(error: BaseException | None, directory: Path) -> bool:
    """Whether it is the device's fault that the directory cannot be owned. One that is not there and
    cannot be made may be below a mount point whose device is missing."""
    if not isinstance(error, OSError) or error.errno in _WRONG_PATH:
        return False
    return not isinstance(error, PermissionError) or not os.path.lexists(directory)


def sizes_for(size: int, slab_bytes: int) -> tuple[int, int]:
    """Bytes of the data and of each log, for a tier of `size` bytes."""
    log_bytes = max(_LEAST_LOG_BYTES, size // _LOG_SHARE // FRAME_ALIGN * FRAME_ALIGN)
    left = size - 2 * log_bytes - size // _EXTENTS_SHARE - _EXTENTS_BYTES
    if left < slab_bytes:
        least = format_size(slab_bytes + 4 * _LEAST_LOG_BYTES)
        raise TierError(
            f"a disk tier of {format_size(size)} is too small for its log and one slab of "
            f"{format_size(slab_bytes)}",
            f"use a size of {least} or more",
        )
    return left // slab_bytes * slab_bytes, log_bytes


def _check_is_ours(directory: Path) -> None:
    """TierError if the directory holds what no tier has made, such as /tmp or the root of a device:
    the directory of a tier is closed to other users."""
    try:
        found = sorted(os.listdir(directory))
    except OSError:
        return  # it does not exist yet, or opening it says what is wrong
    if found and LOCK_FILE not in found and _HEADER not in found:
        raise TierError(
            f"cannot use {directory} as a disk tier: it holds other files, such as {found[0]!r}",
            f"give --tier a directory of its own, {directory / 'kvkeep'}, say",
        )


def _open(directory: Path, size: int, slab_bytes: int) -> DiskFiles:
    data_bytes, log_bytes = sizes_for(size, slab_bytes)
    wanted = {_DATA: data_bytes, _LOGS[0]: log_bytes, _LOGS[1]: log_bytes}
    why = _why_not_reuse(directory, slab_bytes)
    if not why:
        files = _open_files(directory, slab_bytes)
        try:
            if not files.is_new:
                files = _fit(files, directory, wanted)
                files.sync_log()  # what was read may not have been durable yet
                return files
            files.close()
            why = "its log cannot be read"
        except _LogFull:
            why = "the rows of its blocks do not fit a log of the new size"
    if any((directory / name).exists() for name in wanted):
        log.warning("the disk tier %s starts empty: %s", directory, why)
    for name in (_HEADER, *wanted):
        (directory / name).unlink(missing_ok=True)
    _allocate(directory, wanted)
    files = _open_files(directory, slab_bytes)
    files.begin()
    _write_header(directory, slab_bytes)
    return files


def _open_as_it_is(directory: Path) -> DiskFiles:
    """TierError if a server would not continue these files."""
    head = (directory / _HEADER).read_bytes()[: _HEAD.size].ljust(_HEAD.size, b"\0")
    slab_bytes = _HEAD.unpack(head)[3]
    why = _why_not_reuse(directory, slab_bytes, may_rename=False)
    files = None if why else _open_files(directory, slab_bytes)
    if files is not None and not files.is_new:
        return files
    if files is not None:
        files.close()
    raise TierError(
        f"the disk tier {directory} cannot be read: {why or 'its log cannot be read'}",
        "a server would set its files aside, or start it empty",
    )


def _fit(files: DiskFiles, directory: Path, wanted: dict[str, int]) -> DiskFiles:
    """Gives existing files other sizes, and keeps the blocks that fit."""
    found = {name: (directory / name).stat().st_size for name in wanted}
    if found == wanted:
        return files
    try:
        lost = files.resize(wanted[_DATA], wanted[_LOGS[0]])
        for name, nbytes in wanted.items():
            if nbytes < found[name]:
                os.truncate(directory / name, nbytes)
        _allocate(directory, wanted)
    except (OSError, TierError):
        files.close()
        raise
    log.warning(
        "the disk tier %s has another size now (%s of blocks, before: %s): %d blocks do not fit",
        directory,
        format_size(wanted[_DATA]),
        format_size(found[_DATA]),
        lost,
    )
    files.close()
    return _open_files(directory, files.slab_bytes)


def _why_not_reuse(directory: Path, slab_bytes: int, *, may_rename: bool = True) -> str:
    """Why the directory holds no tier that can be continued; empty if it does. TierError if a newer
    release made it. Files of an older format are set aside if that is allowed."""
    if why := _why_not_ours(directory, _HEADER):
        return why
    # The version is looked at first: another format may have other files and a longer header. All
    # begin it with magic and version, and end it with a checksum of what comes before.
    with (directory / _HEADER).open("rb") as file:
        data = file.read(_MOST_HEADER_BYTES)
    head, check = data[: -_CHECK.size], data[-_CHECK.size :]
    if len(head) < _FORMAT.size or check != _CHECK.pack(checksum(head)):
        return "its header is damaged"
    magic, version = _FORMAT.unpack_from(head)
    if magic != _MAGIC:
        return "its header is damaged"
    if version > VERSION:
        raise TierError(
            f"the disk tier {directory} has format {version}; this release knows {VERSION}",
            "start the newer release, name another directory, or remove this one and its blocks",
        )
    if version < VERSION:
        if may_rename:
            _set_aside(directory, version)
        return f"it had format {version}"
    for name in (_DATA, *_LOGS):
        if why := _why_not_ours(directory, name):
            return why
    if len(head) != _HEAD.size:
        return "its header is damaged"
    found_slab_bytes = _HEAD.unpack(head)[3]
    if found_slab_bytes != slab_bytes:
        was, now = format_size(found_slab_bytes), format_size(slab_bytes)
        return f"its slab size is {was}, not {now}"
    return ""


def _why_not_ours(directory: Path, name: str) -> str:
    """Why a file cannot be that of a tier; empty if it can."""
    try:
        found = os.stat(directory / name, follow_symlinks=False)
    except FileNotFoundError:
        return f"it has no {name}"
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink != 1:
        return f"its {name} is no plain file of this user"
    return ""


def _set_aside(directory: Path, version: int) -> None:
    """Renames the files of an older format, the header last: if that is interrupted, the next
    server goes on."""
    for name in (_DATA, *_LOGS, _HEADER):
        with contextlib.suppress(FileNotFoundError):
            os.replace(directory / name, directory / f"{name}{_ASIDE}{version}")
    log.warning(
        "the disk tier %s starts empty, since it had the older format %d: its files are set aside "
        "as *.format-%d; remove them to free their space",
        directory,
        version,
        version,
    )


def _write_header(directory: Path, slab_bytes: int) -> None:
    """Last, when everything else is there."""
    head = _HEAD.pack(_MAGIC, VERSION, 0, slab_bytes)
    draft = directory / f"{_HEADER}.new"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, head + _CHECK.pack(checksum(head)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(draft, directory / _HEADER)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _allocate(directory: Path, wanted: dict[str, int]) -> None:
    """Extends the files to these sizes, or raises TierError without having changed them. Files that
    were set aside go if there is no room for both: the disk was given to the tier."""
    allocated = sum(
        (directory / name).stat().st_blocks * 512 for name in wanted if (directory / name).exists()
    )
    needed, free = sum(wanted.values()) - allocated, _free_bytes(directory)
    older = [path for name in (_HEADER, *wanted) for path in directory.glob(f"{name}{_ASIDE}*")]
    if needed > free and older:
        for path in older:
            path.unlink()
        log.warning(
            "the disk tier %s has no room beside its files of an older format: they are removed",
            directory,
        )
        free = _free_bytes(directory)
    if needed > free:
        raise TierFault(
            f"a disk tier of {format_size(sum(wanted.values()))} does not fit {directory}: it needs "
            f"{format_size(needed)} more, and the file system has {format_size(free)} free",
            "make room, use a smaller size or another device, and check that it is mounted",
        )
    for name, nbytes in wanted.items():
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory / name, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def _open_files(directory: Path, slab_bytes: int) -> DiskFiles:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    data = _open_direct(directory / _DATA, flags)
    first, second = (DiskFile(os.open(directory / name, flags)) for name in _LOGS)
    return DiskFiles(data, (first, second), slab_bytes)


def _open_direct(path: Path, flags: int) -> DiskFile:
    """With O_DIRECT if the file system has it: a tier must not push others out of the page
    cache."""
    try:
        return DiskFile(os.open(path, flags | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    log.warning("the file system of %s has no O_DIRECT: the tier goes through its cache", path)
    return DiskFile(os.open(path, flags))
