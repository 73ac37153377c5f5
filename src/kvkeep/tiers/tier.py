"""A tier beyond memory: bytes by name. `kvkeep.testing.check_tier` holds every tier to it.

A name is `<place>/<key>`: the place says whose bytes they are and what they mean (tenant,
generation, layout), the key which ones. All calls block, may come from several threads at once, and
raise TierError if the tier fails; nothing is half done then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Part:
    """Bytes to read or write. A read may begin at an `offset` in what was written."""

    name: str
    views: Sequence[memoryview]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)


@dataclass(frozen=True)
class Usage:
    """What a tier holds, and the most that it can hold; 0: unknown."""

    blocks: int
    used_bytes: int
    capacity_bytes: int


class Tier(Protocol):
    best_bytes: int  # the size of a write that it moves fastest

    def leading(self, names: Sequence[str]) -> int:
        """How many leading names are there."""

    def read(self, parts: Sequence[Part]) -> list[int]:
        """Fills each part's views. Returns how many bytes each got, fewer than its views have if
        what was written ends before; -1: not there. Never bytes that were not written under that
        name."""

    def write(self, parts: Sequence[Part]) -> list[bool]:
        """Keeps each part under its name. False: no room. What is there already stays as it is, also
        if two hosts write at once: a name stands for its bytes."""

    def delete(self, prefix: str) -> int:
        """Removes everything whose name begins with this prefix, which ends with a slash. Returns
        how many were there. None of it comes back."""

    def usage(self) -> Usage:
        """At once, even while other calls wait for the medium."""

    def close(self) -> None: ...
