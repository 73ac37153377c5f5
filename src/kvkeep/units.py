"""Sizes and durations as people write them, and back.

    parse_size("1.5GiB")     -> 1610612736        format_size(1610612736) -> "1.5GiB"
    parse_duration("250ms")  -> 0.25              format_duration(0.25)   -> "250ms"

A letter alone, or with `i` or `iB`, counts in powers of 1024, because memory comes so; `kB`, `MB`,
`GB` and `TB` count in powers of 1000, because that is what the letters mean. Parsers raise
`ValueError` with a text that completes the sentence "expected ...", so that each boundary can say
which setting or option was wrong."""

from __future__ import annotations

import re
from decimal import Decimal

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

SIZE_FORMAT = "a size such as 8GiB, 512MiB or a whole number of bytes"
DURATION_FORMAT = "a duration such as 250ms, 10s, 5m or 1h"

_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_UNITS |= dict.fromkeys((_letter, f"{_letter}i", f"{_letter}ib"), 1024**_power)
    _SIZE_UNITS[f"{_letter}b"] = 1000**_power

_DURATION_UNITS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}

# ASCII digits only, and few enough of them that no input can make the arithmetic slow.
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in `text`. A fraction of a unit is cut to whole bytes; a fraction of a byte is
    refused."""
    number, unit = _split(text, SIZE_FORMAT)
    scale = _SIZE_UNITS.get(unit)
    if scale is None or (scale == 1 and number != int(number)):
        raise ValueError(SIZE_FORMAT)
    return int(number * scale)


def format_size(size_bytes: int) -> str:
    """`size_bytes` in the largest binary unit that leaves at least one, with two decimals at
    most."""
    for scale, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= scale:
            return f"{_decimals(size_bytes / scale)}{unit}"
    return f"{size_bytes}B"


def parse_duration(text: str) -> float:
    """Seconds in `text`. The unit is required: a bare number could be read as seconds or as
    milliseconds."""
    number, unit = _split(text, DURATION_FORMAT)
    if unit not in _DURATION_UNITS:
        raise ValueError(DURATION_FORMAT)
    return float(number * _DURATION_UNITS[unit])


def format_duration(seconds: float) -> str:
    """`seconds` in the largest unit that leaves at least one, with two decimals at most."""
    if seconds == 0:
        return "0s"
    for unit, scale in reversed(_DURATION_UNITS.items()):
        if abs(seconds) >= float(scale):
            return f"{_decimals(seconds / float(scale))}{unit}"
    return f"{_decimals(seconds * 1e6)}us"


def _split(text: str, expected: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(expected)
    return Decimal(match[1]), match[2].lower()


def _decimals(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
