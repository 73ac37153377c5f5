"""The files of a server's pool, as an engine opens them, and the locks that prove that a process
lives.

The directory is opened once, and every file by its name within that descriptor. Owner and mode are
read from the opened file itself, so no other file can take its place after the check. A pool that
belongs to another user, or that others may write, is refused: its owner could read what engines
store, replace what they load, or truncate the memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Collection
from pathlib import Path

from kvkeep.errors import UntrustedPool
from kvkeep.wire.peers import is_trusted, remedy

EPOCH_FILE = "epoch"
_EPOCH_BYTES = 64  # more than an epoch has


class PoolFiles:
    """A pool's directory, open until `close`. OSError or ValueError if there is no such directory;
    a symbolic link is not followed. Only `check` checks its owner, since a directory that is not
    the server's pool need not be trusted."""

    def __init__(self, directory: Path, trusted_users: Collection[int] = ()) -> None:
        self.path = directory
        self._trusted = trusted_users
        self._directory = -1
        self._directory = os.open(
            directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._directory = self._directory, -1
        if descriptor >= 0:
            os.close(descriptor)

    def epoch(self) -> str:
        """The epoch in the file. OSError if it cannot be read; ValueError if it is not text."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(EPOCH_FILE, flags, dir_fd=self._directory)
        try:
            return os.read(descriptor, _EPOCH_BYTES).decode()
        finally:
            os.close(descriptor)

    def is_of(self, epoch: int) -> bool:
        """Whether this is the pool of that epoch: another host may have a directory of the same
        name."""
        try:
            return self.epoch() == f"{epoch:016x}"
        except (OSError, ValueError):
            return False

    def check(self) -> None:
        """UntrustedPool unless a trusted user owns the directory and no other may write it."""
        self._check("", self._directory)

    def open(self, name: str | Path, flags: int) -> int:
        """A descriptor of a plain file in the directory. OSError if it cannot be opened,
        UntrustedPool unless a trusted user owns it and no other may write it."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._directory)
        try:
            self._check(name, descriptor)
        except UntrustedPool:
            os.close(descriptor)
            raise
        return descriptor

    def has(self, name: str, descriptor: int) -> bool:
        """Whether the file of that name is the opened one. OSError if there is no such file."""
        found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(descriptor))

    def _check(self, name: str | Path, descriptor: int) -> None:
        found, path = os.fstat(descriptor), self.path / name
        if not is_trusted(found.st_uid, self._trusted):
            raise UntrustedPool(
                f"{path} belongs to another user (uid {found.st_uid})", remedy(found.st_uid)
            )
        # With an access control list, the group's bits are its mask.
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise UntrustedPool(
                f"{path} can be written by other users (mode {mode:04o})", f"chmod go-w {path}"
            )
        if name and not stat.S_ISREG(found.st_mode):
            raise UntrustedPool(f"{path} is not a plain file", "remove it and restart the server")


# -- locks
#
# A session's memory may be reused only when its process said that it is done, or is dead. Time
# proves neither: a process that was paused for a minute goes on writing where it was. So each
# session on this host holds an exclusive `flock` on a file of its own beside the pool, which the
# kernel releases when the process ends, and the daemon tries to take it.

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, process


def own(descriptor: int) -> None:
    """Marks the file as a living process's, until the descriptor is closed. BlockingIOError if
    another process has marked it."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def is_owned(descriptor: int) -> bool:
    """Whether a process has marked the file. Takes no lock: a caller that is paused here blocks no
    other process."""
    wanted = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted)
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def hold(path: Path, opened_by: Callable[[Path, int], int] = os.open) -> int:
    """Takes the lock and returns the file descriptor that holds it; closing it releases the lock.
    OSError if the lock is taken."""
    descriptor = opened_by(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Watch:
    """The daemon's side of one session's lock file, which it makes and removes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def is_held(self) -> bool:
        """Whether a process holds the lock."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def leave(self) -> None:
        """Closes the file and leaves it there, for the next server to check."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Removes the file, unless another file has taken its place."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path, follow_symlinks=False)
            if os.path.samestat(found, os.fstat(self._descriptor)):
                self.path.unlink()
        os.close(self._descriptor)
