"""Keys and tokens in files: how they are made, read and kept from others.

    server.key    the server's secret key           the server alone
    server.pub    its public key                    every engine: who has another server's key gets no connection
    NAME.key      an engine's secret key            that engine alone
    NAME.pub      "public-key name", and optionally "tenants=a,b": a line for the server's authorized_keys

Keys are those of CURVE (Curve25519), written in Z85 as ZMQ does: 40 printable characters without blanks and quotes. A
line that begins with "# " is a comment; Z85 has a #, but no blank.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from kvkeep.errors import SettingsError

KEY_CHARS: Final = 40
MAX_FILE_BYTES: Final = 1 << 20
MIN_TOKEN_CHARS: Final = 16
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
PRIVATE: Final = stat.S_IRWXO | stat.S_IWGRP  # what a secret's mode may not have; Kubernetes lets the group read
UNWRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH  # and that of a list which decides who gets in


def new_pair() -> tuple[str, str]:
    """A new public and secret key. Both begin with a letter or digit: neither looks like a path or an option."""
    check_curve()
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if public[0].isalnum() and secret[0].isalnum():
            return public, secret


def check_curve() -> None:
    """SettingsError where the ZMQ library was built without encryption."""
    if not zmq.has("curve"):
        raise SettingsError(
            "this build of the ZMQ library has no CURVE", "install pyzmq from a wheel, or with libsodium"
        )


def is_key(text: str) -> bool:
    """Whether it is a key as ZMQ writes it."""
    if not _KEY.fullmatch(text):
        return False
    try:
        return len(z85.decode(text)) == 32
    except struct.error:  # five characters that stand for more than four bytes hold
        return False


def read_pair(path: Path) -> tuple[str, str]:
    """Public and secret key of a secret-key file. SettingsError names the file if it is none or others can read it."""
    check_curve()
    lines = key_lines(read_text(path, PRIVATE))
    if len(lines) != 1 or not is_key(lines[0]):
        raise SettingsError(f"{path} is no secret-key file", "`kvkeep keygen` makes one; it holds one key and no more")
    return zmq.curve_public(lines[0].encode()).decode(), lines[0]


def read_public(text: str) -> str:
    """The public key that `text` is, or that is in the file it names. What begins with / ~ or . is always a path."""
    if is_key(text) and text[0] not in "/~.":
        return text
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # a ~ without a home
        raise SettingsError(f"{text} names no home directory that is known here", "write the whole path") from None
    lines = key_lines(read_text(path))
    if len(lines) != 1 or not is_key(lines[0].split()[0]):
        raise SettingsError(f"{path} is no public-key file", "copy the server's server.pub, as `kvkeep keygen` made it")
    return lines[0].split()[0]


def read_token(path: Path) -> bytes:
    """The admin API's token. SettingsError, naming the file, if it holds none or others can read it."""
    token = read_text(path, PRIVATE).strip()
    if len(token) < MIN_TOKEN_CHARS or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise SettingsError(
            f"{path} holds no token: expected {MIN_TOKEN_CHARS} printable characters or more, without blanks",
            "`kvkeep keygen --admin-token` makes one",
        )
    return token.encode()


def key_lines(text: str) -> list[str]:
    """Lines that are neither empty nor comments."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and line != "#" and not line.startswith("# ")]


def read_text(path: Path, forbidden: int = 0) -> str:
    """A small text file whose mode has none of the `forbidden` bits. Looked at and read through one descriptor: what
    was checked is what is read. SettingsError names the file and the remedy."""
    try:
        # Not blocking, or a pipe in its place would keep us waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", "see that it is there and ours") from error
    except ValueError:  # a NUL, or text that no file system can have
        raise SettingsError(f"{str(path)!r} is no name of a file", "write the path of a file") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise SettingsError(f"{path} is no file", "name a file that `kvkeep keygen` made")
        if mode & forbidden:
            raise SettingsError(f"{path} is open to others (mode {stat.S_IMODE(mode):04o})", f"chmod 600 {path}")
        data = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError
        return data.decode()
    except ValueError:
        raise SettingsError(
            f"{path} is no text of at most {MAX_FILE_BYTES} bytes", "did you name another file?"
        ) from None


def write_new(path: Path, text: str) -> None:
    """Makes a file that its owner alone can read, whatever the umask. FileExistsError if there is one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
