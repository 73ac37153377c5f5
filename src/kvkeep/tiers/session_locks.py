"""The lock files of a pool's sessions, and a record of them beside the index.

Each engine process holds the lock of its session (`kvkeep.wire.liveness`), whichever server runs.
By these files the next server tells which processes may still be at work in the pool. If somebody
removes or replaces a file, that is lost. So the record names every file and its inode: further
files do no harm; if one is missing, nothing is adopted.

As long as a process of the server before lives, what its sessions had stays as it is. A lock that
no process holds cannot be taken again by one that has slots: the file is removed, and a process
takes its lock before its first slot."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.table import Columns
from kvkeep.wire.pool_files import Watch

COLUMN = "sessions"
_FIRST_ROWS = 64
_ROW_WORDS = 3  # epoch, number, inode; a row without an epoch is free
LEAST_BYTES = 8 * _ROW_WORDS * _FIRST_ROWS  # a record that is shorter has lost something
_NAME = re.compile(r"session-([0-9a-f]{16})-([0-9]{1,18})\.lock")


class SessionLocks:
    """The record, in columns that are new or were left by another server."""

    def __init__(self, directory: Path, columns: Columns) -> None:
        self._directory = directory
        self._columns = columns
        self._grow(_FIRST_ROWS)

    def watch(self, epoch: int, number: int) -> Watch:
        """Makes a lock file and then records it, before the session learns of it. OSError if that
        fails."""
        watch = _NotedWatch(self, self._path(epoch, number))
        free = np.flatnonzero(self._rows[:, 0] == 0)
        if not len(free):
            free = np.array([len(self._rows)])
            self._grow(2 * len(self._rows))
        row = self._rows[free[0]]
        row[1:] = number, os.stat(watch.path, follow_symlinks=False).st_ino
        row[0] = epoch  # last: makes the row valid
        return watch

    def forget(self, path: Path) -> None:
        """Removes a lock file from the record, before the file is removed."""
        if found := _NAME.fullmatch(path.name):
            epoch, number = np.uint64(int(found[1], 16)), np.uint64(int(found[2]))
            self._rows[(self._rows[:, 0] == epoch) & (self._rows[:, 1] == number), 0] = 0

    def missing(self) -> str:
        """The name of a recorded lock file that is missing or replaced; empty if there is none."""
        for at in np.flatnonzero(self._rows[:, 0]).tolist():
            epoch, number, inode = self._rows[at].tolist()
            path = self._path(epoch, number)
            try:
                found = os.stat(path, follow_symlinks=False).st_ino
            except FileNotFoundError:
                return path.name
            if found != inode:
                return path.name
        return ""

    def _path(self, epoch: int, number: int) -> Path:
        return self._directory / f"session-{epoch:016x}-{number}.lock"

    def _grow(self, rows: int) -> None:
        self._rows: NDArray[np.uint64] = self._columns.grow(COLUMN, np.uint64, _ROW_WORDS, rows)


class _NotedWatch(Watch):
    """A watch whose file leaves the record before it is removed."""

    def __init__(self, locks: SessionLocks, path: Path) -> None:
        super().__init__(path)
        self._locks = locks

    def close(self) -> None:
        self._locks.forget(self.path)
        super().close()


class OldSessions:
    """The session locks that processes held when this was made. OSError if one cannot be opened.
    Calls `forget` with each file before it is removed."""

    def __init__(self, directory: Path, forget: Callable[[Path], None] = lambda path: None) -> None:
        self._forget = forget
        self._locks: dict[Path, int] = {}
        for path in sorted(directory.glob("session-*.lock")):
            self._locks[path] = os.open(
                path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        self.alive()

    def alive(self) -> int:
        """How many of the processes still live. Never grows."""
        for path, descriptor in list(self._locks.items()):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._forget(path)
                path.unlink(missing_ok=True)
                os.close(descriptor)
                del self._locks[path]
        return len(self._locks)

    def close(self) -> None:
        """Closes all files, which stay for the next server."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}
