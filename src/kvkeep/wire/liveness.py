"""Is the process still there? The kernel knows: a lock on a file falls when the last process that
holds it is gone.

A session's memory may be reused only when its process said that it is done, or is dead. Time proves
neither: a process that was paused for a minute goes on writing where it was. So each session on
this host holds an exclusive `flock` on a file of its own beside the pool, and the daemon tries to
take it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, process


def own(descriptor: int) -> None:
    """Marks the file as a living process's, until the descriptor is closed. BlockingIOError if it
    is another's."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def is_owned(descriptor: int) -> bool:
    """Whether somebody has marked the file. Only asks: whoever is paused while asking is in
    nobody's way."""
    found = fcntl.fcntl(
        descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    )
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def hold(path: Path, opened_by: Callable[[Path, int], int] = os.open) -> int:
    """Takes the lock and returns the file descriptor that holds it; close it to let go. OSError if
    that fails."""
    descriptor = opened_by(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Watch:
    """The daemon's side of one lock file, which it makes and removes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def is_held(self) -> bool:
        """Whether some process holds the lock."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def leave(self) -> None:
        """Lets go of the file and leaves it there: the next server will want to know whether it is
        held."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Removes the file, if that is what still lies there: anything else in its place is left
        alone."""
        with contextlib.suppress(OSError):
            if os.path.samestat(
                os.stat(self.path, follow_symlinks=False), os.fstat(self._descriptor)
            ):
                self.path.unlink()
        os.close(self._descriptor)
