"""A benchmark's figures as people read them: each with its unit.

In JSON the unit is in the name, for programs: from `own_ping_us` and 118.4 comes `118.4 µs`. A name
that ends in what it counts (`prompt_tokens`) needs nothing more."""

from __future__ import annotations

import re
from typing import Any, Final

from kvkeep.units import format_size

_SIZE, _SHARE, _COUNT = "B", "%", ""
_COUNTED: Final = (
    "bars|bits|blocks|groups|layers|prompts|repeats|requests|rounds|samples|threads|tokens|trials"
    "|turns"
)
# The first that fits the end of a name. `{0}` is what was found in the parentheses.
_UNITS: Final = tuple(
    (re.compile(f"(?:.*_)?(?:{ending})"), unit)
    for ending, unit in (
        ("gbps|gb_per_s", " GB/s"),
        ("us_per_mib", " µs/MiB"),
        ("us_per_block", " µs/block"),
        ("bytes_per_block", " B/block"),
        ("([a-z]+)_per_s(?:_10k)?", " {0}/s"),
        ("us", " µs"),
        ("ms(?:_with|_without)?", " ms"),
        ("s|seconds", " s"),
        ("bytes|bytes_asked", _SIZE),
        ("ratio|ratio_to_ping|tls_to_none|growth|speedup", "×"),
        ("fraction|fraction_of_floor|cost|share|same_answers|told_apart(?:_.*)?", _SHARE),
        ("hit_rate|infinite|belady", _SHARE),
        ("writes_per_reference", _COUNT),
        ("resident|hit_again|dropped", " blocks"),
        ("failed", " requests"),
        (_COUNTED, _COUNT),
    )
)


def unit_of(name: str) -> str | None:
    """What stands behind a figure of this name; empty if the name itself says what is counted, None
    if nobody knows."""
    for ending, unit in _UNITS:
        if found := ending.fullmatch(name):
            return unit.format(*found.groups())
    return None


def with_unit(name: str, value: Any, outer: str = "") -> str:
    """A value for people. In a mapping whose own name has a unit, `outer`, that is the unit of all
    its values."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(with_unit(name, each, outer) for each in value) or "none"
    if not isinstance(value, int | float):
        return str(value)
    unit = unit_of(outer) or unit_of(name) or _COUNT
    if unit == _SIZE and isinstance(value, int):
        return format_size(value)
    if unit == _SHARE:
        return f"{value * 100:.5g}%"
    digits = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")
    return digits + unit
