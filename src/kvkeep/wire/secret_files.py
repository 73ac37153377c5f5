"""Secrets and lists in files: reading and writing them, and checking who else may."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from kvkeep.errors import SettingsError

MAX_FILE_BYTES: Final = 1 << 20
MIN_TOKEN_CHARS: Final = 16
# Bits that the mode of a secret may not have (Kubernetes lets the group read), and those that the
# mode of a list of authorized peers may not have.
PRIVATE: Final = stat.S_IRWXO | stat.S_IWGRP
UNWRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


def at_home(text: str) -> Path:
    """The path, with ~ expanded. SettingsError if there is no such home directory."""
    try:
        return Path(text).expanduser()
    except (RuntimeError, ValueError):  # no home directory, or no valid user name
        raise SettingsError(
            f"{text!r} names an unknown home directory", "write the whole path"
        ) from None


def read_token(path: Path, *, ours: bool = False) -> bytes:
    """The admin API's token. SettingsError, naming the file, if it holds none or others can read
    it."""
    token = read_text(path, PRIVATE, ours=ours).strip()
    if len(token) < MIN_TOKEN_CHARS or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise SettingsError(
            f"{path} holds no token: expected at least {MIN_TOKEN_CHARS} printable characters "
            "without blanks",
            "`kvkeep keygen --admin-token` makes one",
        )
    return token.encode()


def key_lines(text: str) -> list[str]:
    """Lines that are neither empty nor comments."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and line != "#" and not line.startswith("# ")]


def check_owner(path: Path, status: os.stat_result) -> None:
    """SettingsError if the file belongs neither to us nor to root: its owner could change it at any
    time."""
    if status.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"{path} belongs to another user (uid {status.st_uid})",
            f"chown it to uid {os.geteuid()} or to root",
        )


def check_directory(path: Path, status: os.stat_result) -> None:
    """SettingsError if a user other than us and root may put files into a directory. On a read-only
    file system none may, whatever the mode: Kubernetes mounts Secrets so, with mode 1777."""
    check_owner(path, status)
    if status.st_mode & UNWRITABLE and not os.statvfs(path).f_flag & os.ST_RDONLY:
        mode = stat.S_IMODE(status.st_mode)
        raise SettingsError(
            f"other users can write to the directory {path} (mode {mode:04o})",
            f"chmod 700 {path}",
        )


def read_text(path: Path, forbidden: int = 0, *, ours: bool = False) -> str:
    """A small text file whose mode has none of the `forbidden` bits and which, with `ours`, belongs
    to us or root. Checked and read through one descriptor. SettingsError names the file and the
    remedy."""
    try:
        # Not blocking: the path may name a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        hint = f"chown {os.geteuid()} {path}, and its directory if only another user may open that"
        raise SettingsError(f"{path} cannot be read: {error.strerror}", hint) from error
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}", "check that the file exists"
        ) from error
    except ValueError:  # a NUL, or text that no file system accepts
        raise SettingsError(f"{str(path)!r} is not a path", "write the path of a file") from None
    try:
        status = os.fstat(descriptor)
        mode = status.st_mode
        if not stat.S_ISREG(mode):
            raise SettingsError(
                f"{path} is not a plain file", "name a file that `kvkeep keygen` made"
            )
        if mode & forbidden:
            raise SettingsError(
                f"{path} is open to other users (mode {stat.S_IMODE(mode):04o})",
                f"chmod 600 {path}",
            )
        if ours:
            check_owner(path, status)
        data = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError
        return data.decode()
    except ValueError:
        raise SettingsError(
            f"{path} is not a text of at most {MAX_FILE_BYTES} bytes",
            "check the name of the file",
        ) from None


def write_new(path: Path, text: str) -> None:
    """Makes a file that only its owner can read, whatever the umask. FileExistsError if it
    exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
