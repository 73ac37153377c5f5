"""A directory that several hosts share (NFS, CephFS, Lustre) as a `Tier`.

    v1/<place>/<first two digits of the key>/<key>    a block
    tmp/                                              files that are being written
    sweep/                                            which host sweeps, and what it has counted

A file is written under `tmp` and then linked to its name: it is there as a whole or not at all, and
never replaces another. It is not synchronised: what a crashed file server has lost or cut short does
not pass `CheckedTier`, and is a miss. The time of last use is the file's modification time,
which is renewed every ten minutes.

The directory is made with mode 0700. Files get the mode that the directory has, without execution:
an operator who opens the directory to a group opens the files to it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvkeep.errors import TierError
from kvkeep.tiers.sweeper import SWEEP, Sweeper
from kvkeep.tiers.swept_directory import SweptDirectory
from kvkeep.tiers.tier import Part, Usage
from kvkeep.tiers.tier_address import parse_tier
from kvkeep.units import MIB

TMP, BLOCKS = "tmp", "v1"
_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)+[A-Za-z0-9_-][A-Za-z0-9._-]*/?")
_RENEW_AFTER_S = 600
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_VIEWS_A_CALL = 512  # the kernel takes 1,024


def open_file(address: str) -> FileTier:
    """The tier at file:///path?size=2TiB. TierError says why it cannot be used."""
    where = parse_tier(address)
    tier = FileTier(where.directory, where.size_bytes)
    threading.Thread(target=tier.sweeper.run, name="kvkeep-sweep", daemon=True).start()
    return tier


class FileTier:
    """Made by `open_file`, its sweeper also runs, in a thread of its own."""

    best_bytes = MIB

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.directory = directory
        self.sweeper = Sweeper(SweptDirectory(directory), size_bytes)
        try:
            self._make()
        except OSError as error:
            raise TierError(
                f"the directory {directory} cannot be used: {error.strerror}",
                "the directory above it must exist and be writable for the server's user",
            ) from error
        with contextlib.suppress(OSError):
            self.sweeper.look()

    # -- blocks

    def leading(self, names: Sequence[str]) -> int:
        """By bisection: names after a missing one count as missing."""
        low, high = 0, len(names)
        at = 0  # most prefixes are not there at all
        while low < high:
            if self._exists(names[at]):
                low = at + 1
            else:
                high = at
            at = (low + high) // 2
        if not low and names:
            with _tier_errors("looked up"):  # without the directory a miss would be no answer
                os.scandir(self.directory / BLOCKS).close()
        return low

    def read(self, parts: Sequence[Part]) -> list[int]:
        with _tier_errors("read"):
            return [self._read(part) for part in parts]

    def write(self, parts: Sequence[Part]) -> list[bool]:
        with _tier_errors("written"):
            return [self._write(part) for part in parts]

    def delete(self, prefix: str) -> int:
        with _tier_errors("deleted"):
            files, nbytes = self._delete(prefix)
        self.sweeper.add(-files, -nbytes)
        return files

    def drop(self, names: Sequence[str]) -> None:
        """Removes these blocks, if they are there."""
        with _tier_errors("deleted"):
            for name in names:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    nbytes = self._path(name).stat().st_size
                    self._path(name).unlink()
                    self.sweeper.add(-1, -nbytes)

    def usage(self) -> Usage:
        return self.sweeper.usage()

    def close(self) -> None:
        self.sweeper.stop()

    # -- files

    def _make(self) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        found = self.directory.stat()
        if found.st_mode & stat.S_IWOTH:
            raise TierError(
                f"every user may write to {self.directory}: blocks could be forged",
                f"chmod o-w {self.directory}",
            )
        self._directory_mode = stat.S_IMODE(found.st_mode) & 0o770
        self._file_mode = self._directory_mode & 0o660
        for name in (TMP, BLOCKS, SWEEP):
            (self.directory / name).mkdir(mode=self._directory_mode, exist_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise TierError(f"{name!r} is not a name of a block")
        place, _, key = name.rpartition("/")
        version, _, rest = place.partition("/")
        if version != BLOCKS:
            raise TierError(f"{name!r} does not begin with {BLOCKS}/")
        if not key:
            return self.directory / BLOCKS / rest
        return self.directory / BLOCKS / rest / key[:2] / key

    def _exists(self, name: str) -> bool:
        with _tier_errors("looked up"):
            try:
                return stat.S_ISREG(os.stat(self._path(name), follow_symlinks=False).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def _read(self, part: Part) -> int:
        try:
            descriptor = os.open(
                self._path(part.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except (FileNotFoundError, NotADirectoryError):
            return -1
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return -1
            nbytes = _read_all(descriptor, part.offset, part.views)
            with contextlib.suppress(OSError):  # another user's file, or a read-only mount
                _renew(descriptor, found)
            return nbytes
        except FileNotFoundError:
            return -1  # removed meanwhile
        except OSError as error:
            if error.errno != errno.ESTALE:  # the same, on NFS
                raise
            return -1
        finally:
            os.close(descriptor)

    def _write(self, part: Part) -> bool:
        path = self._path(part.name)
        if self._exists(part.name):
            with contextlib.suppress(OSError):
                _renew(path, path.stat())
            return True
        if not self.sweeper.has_room(part.nbytes):
            return False
        temporary = self.directory / TMP / secrets.token_hex(16)
        try:
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._file_mode
            )
            try:
                _write_all(descriptor, part.views)
            finally:
                os.close(descriptor)
            is_new = self._publish(temporary, path)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise
        finally:
            temporary.unlink(missing_ok=True)
        if is_new:
            self.sweeper.add(1, part.nbytes)
        return True

    def _publish(self, temporary: Path, path: Path) -> bool:
        """Gives a complete file its name. False if the name is taken."""
        for _ in range(3):  # its directory may be removed at this moment
            try:
                _link(temporary, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._make_directories(path.parent)
        raise OSError(errno.ENOENT, f"{path.parent} is removed again and again")

    def _make_directories(self, path: Path) -> None:
        if not path.parent.exists():
            self._make_directories(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=self._directory_mode)

    def _delete(self, prefix: str) -> tuple[int, int]:
        """Removes all below a place. Returns how many files, and their bytes."""
        # First out of the way, so that nothing is found while files are removed one by one.
        aside = self.directory / TMP / f"deleted-{secrets.token_hex(16)}"
        try:
            self._path(prefix).rename(aside)
        except (FileNotFoundError, NotADirectoryError):
            return 0, 0
        sizes = [each.stat().st_size for each in aside.rglob("*") if each.is_file()]
        shutil.rmtree(aside, ignore_errors=True)
        return len(sizes), sum(sizes)


def _renew(file: Path | int, found: os.stat_result) -> None:
    """Notes that a file was used, now and then. One that was written again was used as well: its host
    has stored what follows it."""
    if time.time() > found.st_mtime + _RENEW_AFTER_S:
        os.utime(file)


def _link(temporary: Path, path: Path) -> None:
    """Gives a file its name, unless that is taken: FileExistsError."""
    try:
        os.link(temporary, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)  # a file system without hard links


def _read_all(descriptor: int, offset: int, views: Sequence[memoryview]) -> int:
    done = 0
    left = [view.cast("B") for view in views if view.nbytes]
    while left:
        moved = os.preadv(descriptor, left[:_VIEWS_A_CALL], offset + done)
        if not moved:
            break
        done += moved
        left = _after(left, moved)
    return done


def _write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    left = [view.cast("B") for view in views if view.nbytes]
    while left:
        left = _after(left, os.writev(descriptor, left[:_VIEWS_A_CALL]))


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of the views after that many bytes."""
    at = 0
    while at < len(views) and moved >= views[at].nbytes:
        moved -= views[at].nbytes
        at += 1
    rest = views[at:]
    if moved:
        rest[0] = rest[0][moved:]
    return rest


@contextlib.contextmanager
def _tier_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "no number")
        raise TierError(
            f"the shared directory cannot be {what}: {error.strerror} ({name})",
            "check the mount and its file server",
        ) from error
