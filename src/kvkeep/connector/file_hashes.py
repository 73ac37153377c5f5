"""The sha256 of whole files. Each user of a host hashes a file once and remembers it by what stat
says.

    ~/.cache/kvkeep/      0700, of the engine's user
      file-hashes         0600, one line a file: device inode size mtime ctime sha256
      lock                held by the process that hashes a file; others wait, then read its result

Writing to a file changes its ctime, which no program can set, so a changed file is hashed again.
Two limits remain. Timestamps advance in steps: of a millisecond or so on local filesystems, of up
to two seconds on some network filesystems. A hash is therefore remembered only if the file had not
changed for two seconds before it was read. And a network filesystem whose client does not ask the
server for the attributes of a file may show an old ctime for some seconds after another host has
written to it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from io import FileIO
from typing import NamedTuple

from kvkeep.errors import KVKeepError

MAX_REMEMBERED = 8192  # files; the longest remembered go first
LOCK_PATIENCE_S = 600.0  # how long a process that was stopped while it hashes delays others
SETTLED_NS = 2_000_000_000

_HEADER = b"kvkeep file hashes 1\n"
_MAX_BYTES = len(_HEADER) + MAX_REMEMBERED * 200
_LINE = re.compile(rb"((?:[0-9]+ ){5})([0-9a-f]{64})")
_READ_BYTES = 4 << 20
_POLL_S = 0.05

log = logging.getLogger(__name__)


class FileChanged(KVKeepError):
    """A file is not, or not any more, what it was when its digest was asked for."""


class FileIdentity(NamedTuple):
    """What changes when a file's content does."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def line(self) -> bytes:
        return b"%d %d %d %d %d " % self


class FileHashes:
    """The hashes that are remembered in a directory. Threads and processes may share it.

    A directory that another user owns or may write to is not used, since its content decides which
    engines share blocks. Without a usable directory every process hashes for itself.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.hashed_bytes = 0  # by this process
        self._lock = threading.Lock()
        self._remembered: dict[bytes, bytes] = {}  # in the file
        self._own: dict[bytes, bytes] = {}  # by this process, where there is no file
        self._read: FileIdentity | None = None  # the file that `_remembered` comes from
        self._warned = False

    def known(self, identity: FileIdentity) -> str | None:
        """The hash of a file that was hashed before."""
        return self.known_of([identity])[0]

    def known_of(self, identities: Sequence[FileIdentity]) -> list[str | None]:
        """The hashes of those files that were hashed before."""
        with self._lock:
            self._read_again()
            found = [
                self._remembered.get(each.line) or self._own.get(each.line) for each in identities
            ]
        return [None if each is None else each.decode() for each in found]

    def hash(self, path: str, identity: FileIdentity) -> str:
        """The hash of that file. Takes as long as reading it, or as another process needs that
        reads it now. FileChanged if the file has another identity before or after that; OSError if
        it cannot be read."""
        impatient_at = time.monotonic() + LOCK_PATIENCE_S
        while (found := self.known(identity)) is None:
            with self._hashing() as turn:
                if turn == "another's" and time.monotonic() < impatient_at:
                    time.sleep(_POLL_S)
                    continue
                return self.known(identity) or self._hash(path, identity, is_shared=turn == "ours")
        return found

    def _hash(self, path: str, identity: FileIdentity, is_shared: bool) -> str:
        is_settled = time.time_ns() - identity.ctime_ns >= SETTLED_NS
        found = _sha256(path, identity)
        with self._lock:
            self.hashed_bytes += identity.size_bytes
            if is_settled:
                self._remember(identity.line, found.encode(), is_shared)
        return found

    # --- the file ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hashing(self) -> Iterator[str]:
        """Whose turn it is to hash a file on this host: "ours", "another's", or "none" without a
        usable directory."""
        turn, lock = "none", -1
        try:
            with self._opened() as directory:
                lock = _open_in(directory, "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            turn = "ours"
        except BlockingIOError:
            turn = "another's"
        except OSError as error:
            self._warn(error)
        try:
            yield turn
        finally:
            if lock >= 0:
                os.close(lock)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The directory, made if it is not there. OSError unless it is this user's alone."""
        os.makedirs(os.path.dirname(self.directory), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o700)
        directory = os.open(
            self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            _check_owner(os.fstat(directory))
            yield directory
        finally:
            os.close(directory)

    def _read_again(self) -> None:
        """Takes in what other processes have written since."""
        try:
            with self._opened() as directory:
                flags = os.O_RDONLY | os.O_NONBLOCK
                with open(_open_in(directory, "file-hashes", flags), "rb") as file:
                    found = os.fstat(file.fileno())
                    if FileIdentity.of(found) == self._read:
                        return
                    self._remembered, self._read = {}, FileIdentity.of(found)
                    try:
                        _check_owner(found)
                    except PermissionError as error:
                        log.warning(
                            "kvkeep: %s/file-hashes is not used and written anew: %s",
                            self.directory,
                            error.strerror,
                        )
                        return
                    content = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            self._remembered, self._read = {}, None
            return
        except OSError as error:
            self._warn(error)
            return
        self._remembered = _parse(content)

    def _remember(self, line: bytes, sha256: bytes, is_shared: bool) -> None:
        if not is_shared:
            _put(self._own, line, sha256)
            return
        self._read_again()
        _put(self._remembered, line, sha256)
        content = _HEADER + b"".join(b"%s%s\n" % each for each in self._remembered.items())
        try:
            with self._opened() as directory:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                with open(_open_in(directory, "file-hashes.new", flags), "wb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(content)
                os.replace(
                    "file-hashes.new", "file-hashes", src_dir_fd=directory, dst_dir_fd=directory
                )
        except OSError as error:
            _put(self._own, line, sha256)
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "kvkeep: the hashes of checkpoints cannot be kept in %s (%s), so each process of"
                " an engine hashes "
                "its checkpoint at every start. Set XDG_CACHE_HOME to a directory of the engine's"
                " user that no other "
                "user may write to.",
                self.directory,
                error.strerror or error,
            )


@lru_cache(maxsize=16)
def hashes_in(directory: str) -> FileHashes:
    """One object a directory and process."""
    return FileHashes(directory)


def hashes_of_user() -> FileHashes:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # as the specification of that variable says
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return hashes_in(os.path.join(cache, "kvkeep"))


def _open_in(directory: int, name: str, flags: int) -> int:
    """A descriptor of that file, and of no link to another one."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def _check_owner(found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(1, "it belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(1, "other users may write to it")


def _parse(content: bytes) -> dict[bytes, bytes]:
    """What a whole file says; nothing of one that is not whole, which the next write replaces."""
    if len(content) > _MAX_BYTES or not content.startswith(_HEADER) or not content.endswith(b"\n"):
        return {}
    lines = [_LINE.fullmatch(line) for line in content[len(_HEADER) :].split(b"\n")[:-1]]
    return {line[1]: line[2] for line in lines if line is not None}


def _put(remembered: dict[bytes, bytes], line: bytes, sha256: bytes) -> None:
    remembered[line] = sha256
    while len(remembered) > MAX_REMEMBERED:
        del remembered[next(iter(remembered))]


def _sha256(path: str, identity: FileIdentity) -> str:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place is not waited for
    with open(os.open(path, flags), "rb", buffering=0) as file:
        _check_identity(file.fileno(), path, identity)
        found = _sha256_of(file, identity.size_bytes)
        _check_identity(file.fileno(), path, identity)
    return found


def _sha256_of(file: FileIO, size_bytes: int) -> str:
    digest, left = hashlib.sha256(), size_bytes  # a file that keeps growing is not read for ever
    buffer = memoryview(bytearray(min(_READ_BYTES, max(1, size_bytes))))
    while left > 0 and (count := file.readinto(buffer[:left])):
        digest.update(buffer[:count])
        left -= count
    return digest.hexdigest()


def _check_identity(file: int, path: str, identity: FileIdentity) -> None:
    if FileIdentity.of(os.fstat(file)) != identity:
        raise FileChanged(f"{path} has changed since the engine read it")
