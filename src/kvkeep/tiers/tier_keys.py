"""The file of the secrets that a shared tier is encrypted with (`encryption`), the same on all hosts:

    log 3d1f...   names and seals what hosts tell each other (`clear_log`); stays for good
    key 88ab...   names and seals blocks
    key c04e...   a second one, while keys are changed: the first writes, all read

Each is 32 random bytes as hexadecimal digits. Empty lines and lines that begin with "# " are
comments. Only the server's user and root may write the file, and only they and its group read it."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvkeep.errors import SettingsError
from kvkeep.wire.secret_files import PRIVATE, key_lines, read_text

log = logging.getLogger(__name__)

ID_BYTES: Final = 8
MOST_KEYS: Final = 2
_SECRET_BYTES: Final = 32
_LINE: Final = re.compile(r"(log|key)[ \t]+([0-9A-Fa-f]+)")
_LOOK_EVERY_S = 1.0
_HINT: Final = "`kvkeep keygen --tier-keys` makes such a file"


@dataclass(frozen=True)
class TierKeys:
    """The secrets of one tier."""

    log: bytes = field(repr=False)
    keys: tuple[bytes, ...] = field(repr=False)

    @property
    def log_id(self) -> str:
        return id_of(self.log)

    def describe(self) -> str:
        """For logs: which keys there are, by their ids."""
        first, *others = map(id_of, self.keys)
        return f"key {first} writes and reads" + "".join(f", {each} reads" for each in others)


@lru_cache(16)
def id_of(secret: bytes) -> str:
    """By which names and frames say which secret they are made with. It tells nothing of it."""
    return blake2b(secret, digest_size=ID_BYTES, person=b"kvkeep.tierkey").hexdigest()


def new_tier_keys() -> str:
    """The text of a new file."""
    return (
        "# Secrets of a shared tier, the same on all hosts. The first key writes, all keys read.\n"
        f"log {secrets.token_hex(_SECRET_BYTES)}\nkey {secrets.token_hex(_SECRET_BYTES)}\n"
    )


def read_tier_keys(path: Path) -> TierKeys:
    """SettingsError says what is wrong with the file, and quotes none of it."""
    try:
        return _parse(path, read_text(path, PRIVATE, ours=True))
    except SettingsError as error:
        raise SettingsError(f"tier_keys: {error.message}", error.hint or _HINT) from error


def _parse(path: Path, text: str) -> TierKeys:
    found: dict[str, list[bytes]] = {"log": [], "key": []}
    for number, line in enumerate(key_lines(text), start=1):
        match = _LINE.fullmatch(line)
        if match is None or len(match[2]) != 2 * _SECRET_BYTES:
            raise SettingsError(
                f"entry {number} of {path} is not log or key and {2 * _SECRET_BYTES} "
                "hexadecimal digits",
                _HINT,
            )
        found[match[1]].append(bytes.fromhex(match[2]))
    logs, keys = found["log"], found["key"]
    if len(logs) != 1:
        raise SettingsError(f"{path} has {len(logs)} entries log, and not one", _HINT)
    if not 1 <= len(keys) <= MOST_KEYS:
        raise SettingsError(
            f"{path} has {len(keys)} entries key, and not one or two",
            "remove the key that no host writes with any more" if keys else _HINT,
        )
    if len({*logs, *keys}) != len(logs) + len(keys):
        raise SettingsError(f"{path} has a secret twice", "make another with openssl rand -hex 32")
    return TierKeys(logs[0], tuple(keys))


class KeyFile:
    """The keys of a file, which may change while they are in use. SettingsError if there are none at
    the beginning; later on, what cannot be used is logged, and the keys stay what they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._keys = read_tier_keys(path)
        self._signature = self._look()
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S

    def keys(self) -> TierKeys:
        """Looks at the file once a second."""
        if time.monotonic() >= self._look_at_s and self._lock.acquire(blocking=False):
            try:
                self._look_at_s = time.monotonic() + _LOOK_EVERY_S
                signature = self._look()
                if signature != self._signature:
                    self._signature = signature
                    self._reload()
            finally:
                self._lock.release()
        return self._keys

    def _look(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid

    def _reload(self) -> None:
        try:
            keys = read_tier_keys(self._path)
            if keys.log != self._keys.log:
                raise SettingsError(
                    f"tier_keys: {self._path} has another entry log", "restart the server to use it"
                )
        except SettingsError as error:
            log.warning("%s; %s; the keys of before are used", error.message, error.hint)
            return
        self._keys = keys
        log.warning("the keys of the shared tier have changed: %s", keys.describe())
