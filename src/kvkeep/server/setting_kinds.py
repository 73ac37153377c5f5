"""The kinds of value that a setting can have: how each is read from text, shown as text, and
described.

Parsers raise `ValueError`; the setting that uses the kind turns it into an error that names itself.
Showing is the inverse of parsing: what `show` returns sets the same value again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.units import (
    DURATION_FORMAT,
    GIB,
    KIB,
    MIB,
    SIZE_FORMAT,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from kvkeep.wire.address import ADDRESS_FORMAT, parse_address, split_host
from kvkeep.wire.peers import USERS_FORMAT, parse_users


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of value. `parse` raises ValueError; `expected` completes "expected ..."."""

    expected: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    show_limit: Callable[[Any], str] = str


def _exact_size(size_bytes: int) -> str:
    """Human where that loses nothing, else a whole number of the largest unit that divides it."""
    text = format_size(size_bytes)
    if parse_size(text) == size_bytes:
        return text
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, ""))
    return next(f"{size_bytes // scale}{unit}" for scale, unit in units if size_bytes % scale == 0)


def _exact_duration(seconds: float) -> str:
    """Human where that loses nothing, else in the smallest unit."""
    text = format_duration(seconds)
    return text if parse_duration(text) == seconds else f"{round(seconds * 1e6)}us"


def _size_or(word: str) -> Kind:
    """A size, or `word`, which is None in the settings."""
    return Kind(
        f'{SIZE_FORMAT}, or "{word}"',
        lambda text: None if text.strip().lower() == word else parse_size(text),
        lambda value: word if value is None else _exact_size(value),
        format_size,
    )


def _one_of(*words: str) -> Kind:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return Kind(f"one of {', '.join(words)}", parse)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise ValueError
    return int(text)


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError
    return word in ("true", "yes", "on", "1")


def _parse_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise ValueError
    return text


def _parse_directory(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # a ~ without a home
        raise ValueError from error
    if not path.is_absolute() or not text.isprintable():
        raise ValueError
    return path


def _parse_file(text: str) -> Path | None:
    return None if text.strip().lower() == "none" else _parse_directory(text)


def _parse_http_address(text: str) -> str:
    split_host(text)
    return text


SIZE = Kind(SIZE_FORMAT, parse_size, _exact_size, format_size)
COUNT = Kind("a whole number", _parse_count)
DURATION = Kind(DURATION_FORMAT, parse_duration, _exact_duration, format_duration)
SWITCH = Kind("true or false", _parse_switch, lambda on: "true" if on else "false")
NAME = Kind("letters, digits, - and _, at most 64", _parse_name)
DIRECTORY = Kind("an absolute path", _parse_directory)
ADDRESS = Kind(ADDRESS_FORMAT, parse_address)
FILE = Kind(
    'an absolute path, or "none"', _parse_file, lambda path: "none" if path is None else str(path)
)
HTTP_ADDRESS = Kind("host:port", _parse_http_address)
USERS = Kind(USERS_FORMAT, parse_users, lambda users: ",".join(map(str, users)) or "none")
AUTO_SIZE = _size_or("auto")
QUOTA = _size_or("none")
LOG_LEVEL = _one_of("debug", "info", "warning", "error")
