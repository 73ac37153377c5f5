"""The memory tier: the pool in shared memory, made, filled, guarded and removed by the server.

<shm_dir>/kvkeep-<name>/    accessible to its owner only
    daemon.lock             locked by the server that owns the pool, as is the directory (`ownership`)
    epoch                   the server process's epoch: shows a client that this is the server's pool
    segment-00000 …         the memory
    presence-…              counts blocks by key, so that clients need not ask for absent ones
    session-….lock          one for each attached session (`session_locks`)
    index-…                 what the pool holds, for the next server (`index_files`)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import PoolError
from kvkeep.kv.presence import Presence
from kvkeep.store.table import Columns, PlainColumns
from kvkeep.tiers import session_locks
from kvkeep.tiers.free_memory import Room, auto_pool_bytes, can_stay, pool_room, room_to_fill
from kvkeep.tiers.index_files import (
    FileColumns,
    own_header,
    remove_header,
    rewrite_header,
    sizes_left,
    why_not_adopt,
    write_header,
)
from kvkeep.tiers.ownership import LOCK_FILE, Ownership
from kvkeep.tiers.session_locks import OldSessions, SessionLocks
from kvkeep.units import MIB, format_size
from kvkeep.wire.pool_files import EPOCH_FILE, PoolFiles, Watch
from kvkeep.wire.segments import PRESENCE_FILES, Segments, make_presence, segment_path

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of falloc.h
_LARGEST_SLAB_BYTES = 64 * MIB
_SLABS_AT_LEAST = 16


def slab_bytes_for(pool_bytes: int) -> int:
    """The default slab size: 64 MiB, less in a small pool, so that several block sizes fit."""
    return max(MIB, min(_LARGEST_SLAB_BYTES, pool_bytes // _SLABS_AT_LEAST // MIB * MIB))


class PoolLeft(NamedTuple):
    """What a server left: the size of its pool (0 if it cannot be adopted), how much of that is
    filled, and the memory of all its files."""

    pool_bytes: int
    filled_bytes: int
    held_bytes: int


def pool_left(shm_dir: Path, name: str) -> PoolLeft:
    """What the server of this name left. It may still be running."""
    directory = _directory(shm_dir, name)
    filled = held = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):
                nbytes = entry.stat(follow_symlinks=False).st_blocks * 512
                held += nbytes
                filled += nbytes if entry.name.startswith("segment-") else 0
    return PoolLeft(sizes_left(directory)[0], filled, held)


def auto_size(shm_dir: Path, name: str, *, adopt: bool) -> tuple[int, bool]:
    """The automatic size of a pool, and whether it is that of the pool which the last server left.

    With `adopt` it is, if the unfilled rest of that pool fits: a server that was killed by a memory
    limit must not be killed again. Otherwise the old pool will be removed, and its memory counts as
    free. The size is 0 if nothing fits. OSError if there is no such directory."""
    left = pool_left(shm_dir, name)
    missing = left.pool_bytes - left.filled_bytes
    has_room = missing <= pool_room(shm_dir).nbytes if missing > 0 else can_stay(shm_dir)
    if adopt and left.pool_bytes and has_room:
        return left.pool_bytes, True
    return auto_pool_bytes(shm_dir, left.held_bytes), False


def _directory(shm_dir: Path, name: str) -> Path:
    return shm_dir / f"kvkeep-{name}"


class Pool:
    """Owns the pool's directory from construction to `close`. `fill_next` makes segments usable one
    by one.

    With `keep`, the index lies beside the pool, and the pool of an earlier server is kept if it can
    be adopted: then `is_left` is true, and `filled_bytes` are filled. Otherwise, or with `fresh`,
    everything is removed; `why_empty` says why, and so does `not_adopted` if a pool was left.

    A pool that is left may have another size. It grows at once. If more of it is filled than
    `pool_bytes`, it shrinks when its blocks have moved: `move`, then `shrink`.

    With `any_slab` the slab size of a pool that is left is taken.

    PoolError if the pool does not fit. With `may_shrink` it takes the automatic size instead: how
    much memory an old pool returns is known only once it is removed, because processes that have it
    mapped keep it."""

    def __init__(
        self,
        shm_dir: Path,
        name: str,
        pool_bytes: int,
        slab_bytes: int,
        epoch: int,
        *,
        keep: bool = False,
        fresh: bool = False,
        may_shrink: bool = False,
        any_slab: bool = False,
        segment_bytes: int = 256 * MIB,
    ) -> None:
        """`segment_bytes` is rounded down to whole slabs, and up to one."""
        self._most_segment_bytes = segment_bytes
        self.directory = _directory(shm_dir, name)
        self._set_sizes(pool_bytes, slab_bytes)
        self._any_slab, self._is_auto = any_slab, may_shrink
        self._left_bytes = 0  # of the pool that is left
        self._is_spared = False  # what was left stays, though this server does not start
        self.filled_bytes = 0
        self.columns: Columns = PlainColumns()
        self.is_left = False
        self.not_adopted = ""
        self.why_empty = "keep_pool is off" if not keep else "--fresh was given" if fresh else ""
        self._keep = keep
        self._epoch = epoch
        self._old_sessions: OldSessions | None = None
        self._header = -1
        self._ownership = Ownership(self.directory)
        try:
            if keep and not fresh:
                self._find_what_is_left()
                self._check_rest(shm_dir)
                if self.is_left and self._left_bytes < self.pool_bytes:
                    self._rewrite_header()
            if not self.is_left:
                if keep and not fresh:
                    self._check_room_before_removal(shm_dir, name, may_shrink)
                self._remove_all()
                self._check_room(shm_dir, pool_bytes, may_shrink)
                self.segments = self._make_segments()
                self._begin()
        except BaseException as error:
            # guard: after any error, neither our lock nor our directory may stay behind
            self.close(keep=self.is_left or self._is_spared)
            if isinstance(error, OSError):
                raise PoolError(
                    f"cannot make {self.directory}: {error.strerror}", "check --shm-dir"
                ) from error
            raise

    def _set_sizes(self, pool_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.segment_bytes = max(self._most_segment_bytes // slab_bytes, 1) * slab_bytes
        self.pool_bytes = pool_bytes // slab_bytes * slab_bytes

    def _check_rest(self, shm_dir: Path) -> None:
        """Does not adopt a pool whose unfilled rest does not fit: filling it would end the
        server."""
        missing, room = self.pool_bytes - self.filled_bytes, pool_room(shm_dir)
        if self.is_left and missing > max(0, room.nbytes):
            why = f"{format_size(missing)} of it are missing and do not fit: {room.reason}"
            self.not_adopted = self.why_empty = why
            self.is_left = False

    def _check_room_before_removal(self, shm_dir: Path, name: str, may_shrink: bool) -> None:
        """PoolError, with what was left untouched, if a pool of another size cannot fit even when
        that is removed."""
        left = pool_left(shm_dir, name)
        if may_shrink or left.pool_bytes in (0, self.pool_bytes):
            return
        room = pool_room(shm_dir, left.held_bytes)
        self._is_spared = self.pool_bytes > room.nbytes
        if self._is_spared:
            raise self._too_large(self.pool_bytes, room)

    def _check_room(self, shm_dir: Path, asked_bytes: int, may_shrink: bool) -> None:
        """Checks that whole slabs fit. The error names the size that was asked for."""
        room = pool_room(shm_dir)
        if self.pool_bytes <= room.nbytes:
            return
        if may_shrink and (smaller := auto_pool_bytes(shm_dir)):
            self._set_sizes(smaller, min(self.slab_bytes, slab_bytes_for(smaller)))
        else:
            raise self._too_large(asked_bytes, room)

    def _too_large(self, asked_bytes: int, room: Room) -> PoolError:
        asked, fits = format_size(asked_bytes), format_size(room.nbytes)
        problem = f"a pool of {asked} does not fit: {room.reason}, room for {fits}"
        return PoolError(problem, _how_to_fit(room, self.slab_bytes))

    def start_over(self) -> None:
        """Removes everything and begins again in other memory. Processes that have the old memory
        mapped keep it."""
        self._remove_all()
        self.segments = self._make_segments()
        self._begin()

    def _remove_all(self) -> None:
        self._let_go_of_what_was_left()
        self.is_left = False
        self._left_bytes = 0
        self._remove_files()
        if left := sorted(set(os.listdir(self.directory)) - {LOCK_FILE}):
            raise PoolError(
                f"{self.directory / left[0]} cannot be removed",
                "remove it, or choose another --name",
            )

    def _begin(self) -> None:
        self._write_epoch()
        if self._keep:
            self.columns = FileColumns(self.directory)
        self._session_locks = SessionLocks(self.directory, self.columns)
        if self._keep:
            write_header(self.directory, self.pool_bytes, self.slab_bytes, self.segment_bytes)
            self._header = own_header(self.directory)

    @property
    def is_kept(self) -> bool:
        """Whether the next server could adopt the pool as it is now."""
        return isinstance(self.columns, FileColumns) and self.columns.kept and self.is_in_place()

    def leave_nothing(self) -> None:
        """Makes the pool impossible to adopt. Called before the lock of a session is removed whose
        process may still be at work: the next server would take its memory for free."""
        if self.is_in_place():
            remove_header(self.directory)

    def old_sessions(self) -> int:
        """How many processes of the previous server's sessions may still touch their blocks."""
        return self._old_sessions.alive() if self._old_sessions else 0

    @property
    def slabs(self) -> int:
        return self.pool_bytes // self.slab_bytes

    def is_in_place(self) -> bool:
        """Whether directory and lock file are still ours. Somebody may have removed them, and
        another server made them again."""
        return self._ownership.has_lock_file()

    def is_unlocked(self) -> bool:
        """Whether the directory is ours but our lock file is gone: clients would take the server
        for dead."""
        return self._ownership.has_directory() and not self._ownership.has_lock_file()

    def fill_next(self) -> tuple[int, int]:
        """Allocates the next segment, so that no later write to it can fail. May take a while.

        Returns the first slab and the number of slabs that are usable now; (0, 0) when the pool is
        filled."""
        if self.filled_bytes >= self.pool_bytes:
            return 0, 0
        if not self.is_in_place():
            raise PoolError(
                f"the pool's directory {self.directory} was removed", "restart the server"
            )
        nbytes = min(self.segment_bytes, self.pool_bytes - self.filled_bytes)
        room = room_to_fill(self.directory)
        # no call fails beyond a memory limit: the kernel ends the server
        if room is not None and nbytes > room.nbytes:
            raise self._no_more(nbytes, room.reason)
        path = segment_path(self.directory, self.filled_bytes // self.segment_bytes)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._no_more(nbytes, error.strerror or "unknown error") from error
        finally:
            os.close(descriptor)
        # once mapped, it serves the network even if the file is removed
        self.segments.view(self.filled_bytes, 1)
        first = self.filled_bytes // self.slab_bytes
        self.filled_bytes += nbytes
        return first, nbytes // self.slab_bytes

    def _no_more(self, nbytes: int, why: str) -> PoolError:
        return PoolError(
            f"{format_size(nbytes)} more of shared memory could not be had: {why}",
            f"the pool stays at {format_size(self.filled_bytes)}; free memory, or use a smaller --pool-size",
        )

    def make_presence(self, on_disk_bytes: int = 0) -> Presence | None:
        """Makes the counts that tell clients which blocks are absent, for as many blocks as memory
        and disks hold. None if they cannot be made: then clients ask for every block."""
        try:
            return make_presence(self.directory, self._epoch, self.pool_bytes + on_disk_bytes)
        except OSError as error:
            problem = "engines cannot see what is not here, and wait for every answer: %s (make %s larger)"
            log.warning(problem, error, self.directory.parent)
            return None

    def watch(self, number: int) -> Watch:
        """Makes the lock file of a session. OSError if that fails."""
        if not self.is_in_place():
            raise FileNotFoundError(
                errno.ENOENT, "the pool's directory was removed", str(self.directory)
            )
        return self._session_locks.watch(self._epoch, number)

    def close(self, *, keep: bool = False) -> None:
        """Removes the pool, or leaves it to the next server. Processes that have it mapped keep
        their mapping."""
        if not keep and self._ownership.has_directory():  # else it may be another server's by now
            self._let_go_of_what_was_left()
            self._remove_files()
            shutil.rmtree(self.directory, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Releases the pool as the end of this process would, without changing it."""
        self._let_go_of_what_was_left()
        if hasattr(self, "segments"):
            self.segments.files.close()
        self._ownership.close()

    def _find_what_is_left(self) -> None:
        """Adopts segments and columns if they are a valid pool and its index. From then on no
        process of the old server can map them."""
        if not any(name.startswith("segment-") for name in os.listdir(self.directory)):
            self.why_empty = "no server before it has left anything"
            return
        left_bytes, left_slab, _ = sizes_left(self.directory)
        if self._any_slab and 0 < left_slab <= self.pool_bytes:
            self._set_sizes(self.pool_bytes, left_slab)
        try:
            why = why_not_adopt(
                self.directory, self.pool_bytes, self.slab_bytes, self.segment_bytes
            )
            if not why and left_bytes != self.pool_bytes:
                why = self._why_not_resize(left_bytes)
            if not why:
                self._header = own_header(self.directory)
                columns = FileColumns(self.directory)
                why = self._find_session_locks(columns)
            if not why:
                self._write_epoch()
                for path in self.directory.glob(PRESENCE_FILES):
                    path.unlink()
                self._old_sessions = OldSessions(self.directory, self._session_locks.forget)
                self._left_bytes = left_bytes
                self._map_segments_left(left_bytes)
                self.columns = columns
                self.is_left = True
        except (OSError, PoolError) as error:
            why = f"it cannot be read: {error}"
        self.not_adopted = self.why_empty = why

    def _why_not_resize(self, left_bytes: int) -> str:
        """Why a pool of another size that is left is removed; empty if it is resized. An automatic
        size means that the old pool does not fit, and a server needs memory before it can shrink
        one."""
        if not self._is_auto and (left_bytes < self.pool_bytes or can_stay(self.directory)):
            return ""
        sizes = format_size(left_bytes), format_size(self.pool_bytes)
        return f"its pool size is {sizes[0]}, not {sizes[1]}"

    def _find_session_locks(self, columns: FileColumns) -> str:
        """Why the locks do not tell which processes may be at work; empty if they do."""
        if not columns.has(session_locks.COLUMN, session_locks.LEAST_BYTES):
            return "a column of its index is missing or too short"
        self._session_locks = SessionLocks(self.directory, columns)
        missing = self._session_locks.missing()
        return (
            f"{missing} is not the file that it was, and its process may still be at work"
            if missing
            else ""
        )

    def _map_segments_left(self, left_bytes: int) -> None:
        """Maps the segments up to the first incomplete one, and removes the rest. The last one of a
        pool that grows is extended."""
        size = max(self.pool_bytes, left_bytes)
        self.segments = Segments(PoolFiles(self.directory), self.segment_bytes, size, self._epoch)
        beyond = set(self.directory.glob("segment-*"))
        while self.filled_bytes < size:
            nbytes = min(self.segment_bytes, size - self.filled_bytes)
            was = min(nbytes, left_bytes - self.filled_bytes)
            path = segment_path(self.directory, self.filled_bytes // self.segment_bytes)
            if path not in beyond or was <= 0 or not _is_filled(path, was):
                break
            if was < nbytes and not self._extend(path, nbytes):
                break
            self.segments.view(self.filled_bytes, 1)
            self.filled_bytes += nbytes
            beyond.remove(path)
        for path in beyond:
            path.unlink()

    def _extend(self, path: Path, nbytes: int) -> bool:
        """Fills a segment up to a new size. False if there is no memory for that."""
        room = room_to_fill(self.directory)
        if room is not None and nbytes - path.stat().st_blocks * 512 > room.nbytes:
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    @property
    def is_too_large(self) -> bool:
        """Whether the pool that is left has to shrink."""
        return self._left_bytes > self.pool_bytes

    def move(self, offsets: NDArray[np.int64], to: NDArray[np.int64], nbytes: int) -> None:
        """Copies slots of a pool that is about to shrink."""
        for source, target in zip(offsets.tolist(), to.tolist(), strict=True):
            self.segments.view(target, nbytes)[:] = self.segments.view(source, nbytes)

    def shrink(self) -> None:
        """Lets go of all memory beyond `pool_bytes`, whose blocks have moved. The last segment is
        not cut but emptied: a process that has it mapped would be ended by touching what is gone."""
        self._rewrite_header()
        self._left_bytes = self.pool_bytes
        self.segments.close()
        self.segments = self._make_segments()
        self.filled_bytes = min(self.filled_bytes, self.pool_bytes)
        last = -(-self.pool_bytes // self.segment_bytes)
        for path in self.directory.glob("segment-*"):
            if path.name >= segment_path(self.directory, last).name:
                path.unlink()
        if rest := self.pool_bytes % self.segment_bytes:
            _empty(segment_path(self.directory, last - 1), rest)

    def _rewrite_header(self) -> None:
        rewrite_header(self.directory, self.pool_bytes, self.slab_bytes, self.segment_bytes)

    def _let_go_of_what_was_left(self) -> None:
        if hasattr(self, "segments"):
            self.segments.close()
        self.filled_bytes = 0
        if self._old_sessions is not None:
            self._old_sessions.close()
            self._old_sessions = None
        if self._header >= 0:
            os.close(self._header)
            self._header = -1

    def _make_segments(self) -> Segments:
        return Segments(PoolFiles(self.directory), self.segment_bytes, self.pool_bytes, self._epoch)

    def _write_epoch(self) -> None:
        """Replaces the file in one step: a reader finds the old epoch or ours."""
        draft = self.directory / f"{EPOCH_FILE}.new"
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(f"{self._epoch:016x}")
        os.replace(draft, self.directory / EPOCH_FILE)

    def _remove_files(self) -> None:
        """Removes all files but the lock, as far as possible. The header goes first, so that the
        rest cannot be adopted, and the lock last, so that the next owner finds no leftovers."""
        with contextlib.suppress(OSError):
            remove_header(self.directory)
        # somebody else removed the directory: so much the better
        with contextlib.suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                with contextlib.suppress(OSError):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif path.name != LOCK_FILE:
                        path.unlink()


def _empty(path: Path, start: int) -> None:
    """Gives the memory of a file back from `start` on, as far as the file system can."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(descriptor).st_size - start
        if nbytes > 0:
            _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes)
    finally:
        os.close(descriptor)


def _is_filled(path: Path, nbytes: int) -> bool:
    """Whether a segment has that many bytes. Its file may be longer: see `Pool.shrink`."""
    found = path.stat()
    return found.st_size >= nbytes and found.st_blocks * 512 >= nbytes


def _how_to_fit(room: Room, slab_bytes: int) -> str:
    """Advice that can be followed literally."""
    if not (advised := room.advised_bytes):
        return room.remedy
    slab = f" --slab-size {slab_bytes_for(advised) // MIB}MiB" if slab_bytes > advised else ""
    return f"use --pool-size {advised // MIB}MiB{slab}, or {room.remedy}"
