"""The files of a server's pool, opened so that what is checked is what is used.

The directory is opened once, and every file by its name within that descriptor. Owner and mode are
read from the opened file itself: nobody can put another one in its place after the check. A pool of
another user, or one that others may write, is the work of somebody who would read what engines
store, replace what they load, or cut the memory off."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from kvkeep.errors import UntrustedPool
from kvkeep.wire.peers import is_trusted, remedy

EPOCH_FILE = "epoch"
_EPOCH_BYTES = 64  # more than it has: a longer one is none


class PoolFiles:
    """A pool's directory, open until `close`. OSError or ValueError if there is none of this very
    name: a symbolic link is not followed. It is checked by `check` alone, since one that is not the
    server's pool need not be trusted."""

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
        """As the file has it. OSError if it cannot be read; ValueError if it is no text."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(EPOCH_FILE, flags, dir_fd=self._directory)
        try:
            return os.read(descriptor, _EPOCH_BYTES).decode()
        finally:
            os.close(descriptor)

    def is_of(self, epoch: int) -> bool:
        """Whether the pool of that epoch is really here: another host may have a directory of the
        same name."""
        try:
            return self.epoch() == f"{epoch:016x}"
        except (OSError, ValueError):
            return False

    def check(self) -> None:
        """UntrustedPool if the directory is not a trusted user's alone."""
        self._check("", self._directory)

    def open(self, name: str | Path, flags: int) -> int:
        """A descriptor of a plain file in the directory. OSError if it cannot be opened,
        UntrustedPool if it is not a trusted user's alone."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._directory)
        try:
            self._check(name, descriptor)
        except UntrustedPool:
            os.close(descriptor)
            raise
        return descriptor

    def has(self, name: str, descriptor: int) -> bool:
        """Whether the file of that name is the opened one. OSError if there is none."""
        found = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(descriptor))

    def _check(self, name: str | Path, descriptor: int) -> None:
        found, path = os.fstat(descriptor), self.path / name
        if not is_trusted(found.st_uid, self._trusted):
            raise UntrustedPool(
                f"{path} belongs to another user (uid {found.st_uid})", remedy(found.st_uid)
            )
        if found.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        ):  # with an access list, the group's bits are its mask
            mode = stat.S_IMODE(found.st_mode)
            raise UntrustedPool(
                f"{path} can be written by other users (mode {mode:04o})", f"chmod go-w {path}"
            )
        if name and not stat.S_ISREG(found.st_mode):
            raise UntrustedPool(f"{path} is not a plain file", "remove it and restart the server")
