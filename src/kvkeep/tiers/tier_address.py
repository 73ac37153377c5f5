"""Addresses of tiers, such as disk:///var/lib/kvkeep?size=200GiB or file:///srv/kv?size=2TiB.

A scheme is a row of SCHEMES: which options its addresses have, what has to be installed, and for a
shared tier the function that opens it (`opening.open_tier`). Credentials are never part of an address:
it is shown in logs. No error quotes what may be a password."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvkeep.units import (
    DURATION_FORMAT,
    MIB,
    SIZE_FORMAT,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

TIER_FORMAT = (
    "disk:///path?size=200GiB, file:///path?size=2TiB, valkey://host:6379/0, "
    "s3://bucket/prefix?endpoint=..., mooncake://master:50051, several with commas between, or none"
)
LEAST_BYTES = 16 * MIB
LEAST_AGE_S = 600.0
_CREDENTIALS: Final = re.compile(r"@|passw|secret|token", re.IGNORECASE)


@dataclass(frozen=True)
class Scheme:
    """One kind of tier.

    opener     module:function that opens a shared tier by its address; "" for a disk
    host       whether a host (or bucket) stands between the second and the third slash
    needs_size, may_size   whether `size` must be given, or may
    options    further options, each of which may be given once
    extra      what `pip install 'kvkeep[extra]'` brings, and the modules that it must bring
    libraries  of the system, by the names of Debian's packages
    """

    opener: str = ""
    host: bool = False
    needs_size: bool = False
    may_size: bool = False
    options: frozenset[str] = frozenset()
    extra: str = ""
    modules: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)


SCHEMES: Final[dict[str, Scheme]] = {
    "disk": Scheme(needs_size=True),
    "file": Scheme("kvkeep.tiers.file_tier:open_file", needs_size=True),
    "s3": Scheme(
        "kvkeep.tiers.s3:open_s3",
        host=True,
        may_size=True,
        options=frozenset({"endpoint", "region", "max_age", "timeout", "ca"}),
        extra="s3",
        modules=("obstore",),
    ),
    **dict.fromkeys(
        ("valkey", "valkeys", "redis", "rediss"),
        Scheme(
            "kvkeep.tiers.valkey:open_valkey",
            host=True,
            options=frozenset({"timeout", "ca", "cluster"}),
            extra="valkey",
            modules=("valkey",),
        ),
    ),
    "mooncake": Scheme(
        "kvkeep.tiers.mooncake:open_mooncake",
        host=True,
        options=frozenset({"metadata", "metrics", "timeout"}),
        extra="mooncake",
        modules=("mooncake",),
        libraries={
            "libibverbs1": "libibverbs.so.1",
            "libnl-3-200": "libnl-3.so.200",
            "libnl-route-3-200": "libnl-route-3.so.200",
            "libnuma1": "libnuma.so.1",
            "libcurl4": "libcurl.so.4",
        },
    ),
}


@dataclass(frozen=True)
class TierAddress:
    """Where one tier is, and how much it may hold; 0: as much as its service allows."""

    directory: Path  # of a disk or a shared directory; what follows the host, else
    size_bytes: int
    scheme: str = "disk"
    host: str = ""
    options: tuple[tuple[str, str], ...] = field(default=())

    def __str__(self) -> str:
        options = dict(self.options)
        if self.size_bytes:
            size = format_size(self.size_bytes)
            is_exact = parse_size(size) == self.size_bytes
            options = {"size": size if is_exact else str(self.size_bytes)} | options
        query = f"?{urlencode(options)}" if options else ""
        path = "" if self.directory == Path("/") else quote(str(self.directory))
        return f"{self.scheme}://{self.host}{path}{query}"

    @property
    def is_shared(self) -> bool:
        """Whether several hosts use the tier together."""
        return bool(SCHEMES[self.scheme].opener)

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)


def parse_tiers(text: str) -> tuple[TierAddress, ...]:
    """The tiers of a text such as TIER_FORMAT. ValueError says what is wrong."""
    if text.strip().lower() in ("", "none"):
        return ()
    tiers = tuple(parse_tier(part.strip()) for part in text.split(","))
    local = [tier for tier in tiers if not SCHEMES[tier.scheme].host]
    directories = [os.path.normpath(tier.directory) for tier in local]  # /a/../b is /b
    if len(set(directories)) != len(directories):
        raise ValueError("two tiers have the same directory")
    if sum(tier.is_shared for tier in tiers) > 1:
        raise ValueError("a server has one shared tier at most, and any number of disks")
    return tiers


def has_credentials(text: str) -> bool:
    """Whether this part of an address may have a password in it."""
    return bool(_CREDENTIALS.search(unquote(text)))


def quote_tiers(text: str) -> str:
    """This text for an error, without what may be a password."""
    return "(not shown: it may have a password in it)" if has_credentials(text) else f'"{text}"'


def show_tiers(tiers: tuple[TierAddress, ...]) -> str:
    return ",".join(map(str, tiers)) or "none"


def parse_tier(text: str) -> TierAddress:
    """One tier. ValueError says what is wrong."""
    url = urlsplit(text)
    if url.scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"an address does not begin with one of {known}")
    scheme = SCHEMES[url.scheme]
    if has_credentials(url.netloc) or has_credentials(url.query):
        raise ValueError(
            f"an address of {url.scheme}:// has no user or password: credentials come from the "
            "environment or from files"
        )
    path = Path(unquote(url.path) or "/")
    if not str(path).isprintable() or not url.netloc.isprintable():
        raise ValueError("the path has characters that cannot be printed")
    if scheme.host and not url.netloc:
        raise ValueError(f"an address names no host: two slashes and a name follow {url.scheme}:")
    if not scheme.host and (url.netloc or not path.is_absolute() or path == Path("/")):
        raise ValueError(f"an address has no absolute path: three slashes follow {url.scheme}:")
    options = _options(url.scheme, url.query)
    size = options.pop("size", "")
    _check_age(options.get("max_age", "1d"))
    return TierAddress(
        path, _size(size) if size else 0, url.scheme, url.netloc, tuple(sorted(options.items()))
    )


def _options(name: str, query: str) -> dict[str, str]:
    scheme, address = SCHEMES[name], f"an address of {name}://"
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    allowed = scheme.options | ({"size"} if scheme.needs_size or scheme.may_size else set())
    if scheme.needs_size and not scheme.options and [name for name, _ in pairs] != ["size"]:
        raise ValueError(f"{address} needs exactly one option, size, such as ?size=200GiB")
    if scheme.needs_size and "size" not in options:
        raise ValueError(f"{address} needs the option size, such as ?size=200GiB")
    if len(options) != len(pairs):
        raise ValueError(f"{address} has an option twice")
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"{address} has no option {option}; there are {', '.join(sorted(allowed))}"
            )
    return options


def _check_age(text: str) -> None:
    try:
        age_s = parse_duration(text)
    except ValueError:
        raise ValueError(f"max_age={text} is not {DURATION_FORMAT}") from None
    if age_s < LEAST_AGE_S:
        raise ValueError(f"max_age={text} is less than {format_duration(LEAST_AGE_S)}")


def _size(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError:
        raise ValueError(f"size={text} is not {SIZE_FORMAT}") from None
    if size_bytes < LEAST_BYTES:
        raise ValueError(f"size={text} is less than {format_size(LEAST_BYTES)}")
    return size_bytes
