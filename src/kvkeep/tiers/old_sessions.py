"""Processes that were at work in the pool under the server before this one, and may still be.

Each holds the lock of its session (`kvkeep.wire.pool_files`), whoever serves meanwhile. As long as
one is held, what those sessions had when their server ended stays as it is. A lock that nobody
holds can never be taken again by a process that has slots: the file is removed, and a lock comes
before the first slot."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class OldSessions:
    """The locks that were held when this was made. OSError if one cannot be looked at. `forget` is
    told of each file before it is removed."""

    def __init__(self, directory: Path, forget: Callable[[Path], None] = lambda path: None) -> None:
        self._forget = forget
        self._locks: dict[Path, int] = {}
        for path in sorted(directory.glob("session-*.lock")):
            self._locks[path] = os.open(
                path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        self.alive()

    def alive(self) -> int:
        """How many of them still live. It never grows."""
        for path, descriptor in list(self._locks.items()):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._forget(path)
                path.unlink(missing_ok=True)
                os.close(descriptor)
                del self._locks[path]
        return len(self._locks)

    def close(self) -> None:
        """Lets go of all of them. Their files stay, for the next server."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}
