"""Ownership of a pool's directory: one process at a time, by locks of the kernel.

Two things are locked: the directory itself, whose lock survives if somebody removes the files in it
(and which systemd-tmpfiles respects), and `daemon.lock` in it, which names the owner and shows
clients that their server lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from kvkeep.errors import DirectoryInUse, PoolError
from kvkeep.wire.pool_files import own

LOCK_FILE = "daemon.lock"


class Ownership:
    """Makes the directory and owns it until `close`. PoolError names the owner, or the obstacle."""

    def __init__(self, directory: Path) -> None:
        self._path = directory
        self._directory = self._lock = -1
        try:
            self._directory = _open_directory(directory)
            self._take()
        except BlockingIOError:
            owner = self._owner()
            self.close()
            raise DirectoryInUse(
                f"{directory} is in use by another kvkeep server (process {owner})",
                "stop that server, or give this one a --name, an --address and an --http-address "
                "of its own",
                is_left=_has_ended(owner),
            ) from None
        except OSError as error:
            self.close()
            hint = "check --shm-dir"
            if isinstance(error, PermissionError) and os.path.lexists(directory):
                hint = "it is another user's: choose another --name"
            raise PoolError(f"cannot make {directory}: {error.strerror}", hint) from error
        except PoolError:
            self.close()
            raise

    def has_directory(self) -> bool:
        """Whether the directory at the path is the one that we own."""
        return self._directory >= 0 and _is_same(self._path, self._directory)

    def has_lock_file(self) -> bool:
        """Whether our lock file is in it, too."""
        return self.has_directory() and _is_same(self._path / LOCK_FILE, self._lock)

    @property
    def descriptors(self) -> tuple[int, int]:
        """A process that has them keeps the directory locked."""
        return self._lock, self._directory

    def close(self) -> None:
        """Releases the directory without changing it."""
        for descriptor in (self._lock, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._directory = self._lock = -1

    def _take(self) -> None:
        """BlockingIOError if another process owns it, or its owner removed it meanwhile."""
        status = os.fstat(self._directory)
        if status.st_uid != os.getuid():
            raise PoolError(f"{self._path} belongs to another user", "choose another --name")
        fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not self.has_directory():
            raise BlockingIOError
        os.fchmod(self._directory, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(LOCK_FILE, flags, 0o600, dir_fd=self._directory)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own(self._lock)
        if not self.has_lock_file():
            raise BlockingIOError
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _owner(self) -> str:
        """The process id of the owner, if it can be read."""
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(LOCK_FILE, flags, dir_fd=self._directory)
            try:
                return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            finally:
                os.close(descriptor)
        return "unknown"


def _has_ended(owner: str) -> bool:
    """Whether the process has. Those that it gave `descriptors` to may live on."""
    if not owner.isdigit():
        return False
    try:
        status = Path(f"/proc/{owner}/stat").read_text()
    except OSError:
        return not os.path.lexists(f"/proc/{owner}")
    return status.rpartition(")")[2].split()[0] in "ZX"  # dead, and not reaped by its parent


def _open_directory(directory: Path) -> int:
    """Opens the directory, and makes it if need be. Does not follow a symbolic link: anyone may put
    one into shared memory, and the directory behind it would be emptied."""
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise PoolError(
                f"{directory} is a symbolic link", "remove it, or choose another --name"
            ) from None
        raise


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return not stat.S_ISLNK(found.st_mode) and os.path.samestat(found, os.fstat(descriptor))
