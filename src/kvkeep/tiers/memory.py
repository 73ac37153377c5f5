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
import errno
import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from kvkeep.errors import PoolError
from kvkeep.kv.presence import Presence
from kvkeep.store.table import Columns, PlainColumns
from kvkeep.tiers import session_locks
from kvkeep.tiers.free_memory import Room, auto_pool_bytes, can_stay, pool_room, room_to_fill
from kvkeep.tiers.index_files import (
    FileColumns,
    own_header,
    remove_header,
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

_SEGMENT_BYTES = 256 * MIB
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
    ) -> None:
        self.directory = _directory(shm_dir, name)
        self._set_sizes(pool_bytes, slab_bytes)
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
            if not self.is_left:
                self._remove_all()
                self._check_room(shm_dir, pool_bytes, may_shrink)
                self.segments = self._make_segments()
                self._begin()
        except BaseException as error:
            # guard: after any error, neither our lock nor our directory may stay behind
            self.close(keep=self.is_left)
            if isinstance(error, OSError):
                raise PoolError(
                    f"cannot make {self.directory}: {error.strerror}", "check --shm-dir"
                ) from error
            raise

    def _set_sizes(self, pool_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.segment_bytes = max(_SEGMENT_BYTES // slab_bytes, 1) * slab_bytes
        self.pool_bytes = pool_bytes // slab_bytes * slab_bytes

    def _check_rest(self, shm_dir: Path) -> None:
        """Does not adopt a pool whose unfilled rest does not fit: filling it would end the
        server."""
        missing, room = self.pool_bytes - self.filled_bytes, pool_room(shm_dir)
        if self.is_left and missing > room.nbytes:
            why = f"{format_size(missing)} of it are missing and do not fit: {room.reason}"
            self.not_adopted = self.why_empty = why
            self.is_left = False

    def _check_room(self, shm_dir: Path, asked_bytes: int, may_shrink: bool) -> None:
        """Checks that whole slabs fit. The error names the size that was asked for."""
        room = pool_room(shm_dir)
        if self.pool_bytes <= room.nbytes:
            return
        if may_shrink and (smaller := auto_pool_bytes(shm_dir)):
            self._set_sizes(smaller, min(self.slab_bytes, slab_bytes_for(smaller)))
        else:
            asked, fits = format_size(asked_bytes), format_size(room.nbytes)
            problem = f"a pool of {asked} does not fit: {room.reason}, room for {fits}"
            raise PoolError(problem, _how_to_fit(room, self.slab_bytes))

    def start_over(self) -> None:
        """Removes everything and begins again in other memory. Processes that have the old memory
        mapped keep it."""
        self._remove_all()
        self._begin()

    def _remove_all(self) -> None:
        self._let_go_of_what_was_left()
        self.is_left = False
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

    def make_presence(self) -> Presence | None:
        """Makes the counts that tell clients which blocks are absent. None if they cannot be made:
        then clients ask for every block."""
        try:
            return make_presence(self.directory, self._epoch, self.pool_bytes)
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
        try:
            why = why_not_adopt(
                self.directory, self.pool_bytes, self.slab_bytes, self.segment_bytes
            )
            if not why:
                self._header = own_header(self.directory)
                columns = FileColumns(self.directory)
                why = self._find_session_locks(columns)
            if not why:
                self._write_epoch()
                for path in self.directory.glob(PRESENCE_FILES):
                    path.unlink()
                self._old_sessions = OldSessions(self.directory, self._session_locks.forget)
                self.segments = self._make_segments()
                self._map_segments_left()
                self.columns = columns
                self.is_left = True
        except (OSError, PoolError) as error:
            why = f"it cannot be read: {error}"
        self.not_adopted = self.why_empty = why

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

    def _map_segments_left(self) -> None:
        """Maps the segments up to the first incomplete one, and removes the rest."""
        beyond = set(self.directory.glob("segment-*"))
        while self.filled_bytes < self.pool_bytes:
            nbytes = min(self.segment_bytes, self.pool_bytes - self.filled_bytes)
            path = segment_path(self.directory, self.filled_bytes // self.segment_bytes)
            if (
                path not in beyond
                or path.stat().st_size != nbytes
                or path.stat().st_blocks * 512 < nbytes
            ):
                break
            self.segments.view(self.filled_bytes, 1)
            self.filled_bytes += nbytes
            beyond.remove(path)
        for path in beyond:
            path.unlink()

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


def _how_to_fit(room: Room, slab_bytes: int) -> str:
    """Advice that can be followed literally."""
    if not (advised := room.advised_bytes):
        return room.remedy
    slab = f" --slab-size {slab_bytes_for(advised) // MIB}MiB" if slab_bytes > advised else ""
    return f"use --pool-size {advised // MIB}MiB{slab}, or {room.remedy}"
