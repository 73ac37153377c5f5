"""The memory tier: the pool in shared memory, made, filled, guarded and removed by the daemon.

<shm_dir>/kvkeep-<name>/          owner only
    daemon.lock                   held by the daemon that owns the pool
    epoch                         this server process's epoch, so that a client can tell the pool is really here
    segment-00000 …               the memory
    session-….lock                one for each attached session
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

from kvkeep.errors import PoolError
from kvkeep.units import MIB, format_size
from kvkeep.wire.liveness import Watch
from kvkeep.wire.segments import EPOCH_FILE, Segments, segment_path

_SEGMENT_BYTES = 256 * MIB
_LARGEST_SLAB_BYTES = 64 * MIB
_SLABS_AT_LEAST = 16
_LOCK_FILE = "daemon.lock"


def slab_bytes_for(pool_bytes: int) -> int:
    """The default slab size: 64 MiB, less in a small pool so that several block sizes still find room in it."""
    return max(MIB, min(_LARGEST_SLAB_BYTES, pool_bytes // _SLABS_AT_LEAST // MIB * MIB))


class Pool:
    """Owns the pool's directory from construction to `close`. Segments become usable one by one by `fill_next`."""

    def __init__(self, shm_dir: Path, name: str, pool_bytes: int, slab_bytes: int, epoch: int) -> None:
        self.directory = shm_dir / f"kvkeep-{name}"
        self.slab_bytes = slab_bytes
        self.segment_bytes = max(_SEGMENT_BYTES // slab_bytes, 1) * slab_bytes
        self.pool_bytes = pool_bytes // slab_bytes * slab_bytes
        self.filled_bytes = 0
        self._lock = _own(self.directory)
        try:
            self._remove_files()
            if left := sorted(set(os.listdir(self.directory)) - {_LOCK_FILE}):
                raise PoolError(f"{self.directory / left[0]} cannot be removed", "remove it, or choose another --name")
            _check_space(shm_dir, self.pool_bytes, pool_bytes)
            path = self.directory / EPOCH_FILE
            path.touch(mode=0o600)
            path.write_text(f"{epoch:016x}")
        except BaseException as error:  # guard: whatever it is, no directory and no lock may stay behind
            self.close()
            if isinstance(error, OSError):
                raise PoolError(f"cannot make {self.directory}: {error.strerror}", "check --shm-dir") from error
            raise
        self.segments = Segments(self.directory, self.segment_bytes, self.pool_bytes, epoch)

    @property
    def slabs(self) -> int:
        return self.pool_bytes // self.slab_bytes

    def is_in_place(self) -> bool:
        """Whether the directory is still ours: somebody may have removed it, and another server made it anew."""
        return self._lock_found() == os.fstat(self._lock).st_ino if self._lock >= 0 else False

    def fill_next(self) -> tuple[int, int]:
        """Allocates the next segment's memory, so that no later write to it can fail. May take a while.

        Returns the first slab and the number of slabs that may be used now; (0, 0) when all are there.
        """
        if self.filled_bytes >= self.pool_bytes:
            return 0, 0
        if not self.is_in_place():
            raise PoolError(f"the pool's directory {self.directory} was removed", "restart the server")
        nbytes = min(self.segment_bytes, self.pool_bytes - self.filled_bytes)
        path = segment_path(self.directory, self.filled_bytes // self.segment_bytes)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise PoolError(
                f"{format_size(nbytes)} more of shared memory could not be had: {error.strerror}",
                f"the pool stays at {format_size(self.filled_bytes)}; free memory, or use a smaller --pool-size",
            ) from error
        finally:
            os.close(descriptor)
        self.segments.view(self.filled_bytes, 1)  # mapped now, it serves the network even if the file goes
        first = self.filled_bytes // self.slab_bytes
        self.filled_bytes += nbytes
        return first, nbytes // self.slab_bytes

    def watch(self, number: int) -> Watch:
        """A new lock file for a session. OSError if there is no place for it."""
        if not self.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "the pool's directory was removed", str(self.directory))
        return Watch(self.directory / f"session-{number}.lock")

    def close(self) -> None:
        """Removes the pool. Processes that have it mapped keep their mapping until they let go of it."""
        if self._lock < 0:
            return
        if hasattr(self, "segments"):
            self.segments.close()
        if self._lock_found() in (None, os.fstat(self._lock).st_ino):  # or it is another server's by now
            self._remove_files()
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _remove_files(self) -> None:
        """All but the lock, which goes last: whoever can take it must find no leftovers that are still going.

        As far as it goes: what cannot be removed stays, and does not keep the rest.
        """
        with contextlib.suppress(FileNotFoundError):  # somebody else removed the directory: so much the better
            for path in self.directory.iterdir():
                with contextlib.suppress(OSError):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif path.name != _LOCK_FILE:
                        path.unlink()

    def _lock_found(self) -> int | None:
        """The inode of the lock file that lies in the directory now. None if there is none."""
        try:
            found = os.stat(self.directory / _LOCK_FILE, follow_symlinks=False)
        except OSError:
            return None
        return found.st_ino if stat.S_ISREG(found.st_mode) else None


def _own(directory: Path) -> int:
    """Makes the directory and takes its lock, or says who has it."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.is_symlink():  # anyone may put one into shared memory, and what it points at would be emptied
            raise PoolError(f"{directory} is a symbolic link", "remove it, or choose another --name")
        status = directory.stat()
        if status.st_uid != os.getuid():
            raise PoolError(f"{directory} belongs to another user", "choose another --name")
        directory.chmod(0o700)
        path = directory / _LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PoolError(f"cannot make {directory}: {error.strerror}", "check --shm-dir") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            raise BlockingIOError  # the previous owner removed it while we opened it
    except (BlockingIOError, FileNotFoundError):
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise PoolError(
            f"the pool {directory} is in use by another kvkeep server (process {owner})",
            "stop that server, or give this one a --name, an --address and an --http-address of its own",
        ) from None
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _check_space(shm_dir: Path, pool_bytes: int, asked_bytes: int) -> None:
    """Whole slabs have to fit; who asked for a little more reads the size that was asked for."""
    space = os.statvfs(shm_dir)
    free_bytes = space.f_bavail * space.f_frsize
    if pool_bytes > free_bytes:
        raise PoolError(
            f"a pool of {format_size(asked_bytes)} does not fit {shm_dir}, which has {format_size(free_bytes)} free",
            f"use --pool-size {max(free_bytes * 9 // 10 // MIB, 1)}MiB, or make {shm_dir} larger "
            "(in a container: --shm-size)",
        )
