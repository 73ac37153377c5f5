"""Why the store lacked the blocks of a lookup: as it was when the lookup was answered.

A lookup that missed is only noted, in its session: an engine waits for the answer. What left the
store, and when, is looked up when the engine reports the request (explain.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.outcomes import (
    BEING_WRITTEN,
    EVICTED,
    NEVER_STORED,
    NOT_KNOWN,
    OVER_LIMIT,
    REFUSED,
    TOO_LATE,
    WITHHELD,
    runs_of,
)
from kvkeep.server.sessions import ASKED, HIT_BLOCKS, Missed
from kvkeep.store.store import Store
from kvkeep.store.table import NO_ROW
from kvkeep.store.tree import key_at, known_blocks

MOST_RUNS: Final = 64  # of one lookup; what follows them is not known


@dataclass(frozen=True, slots=True)
class Eviction:
    """When blocks were evicted, in milliseconds before the lookup, and for which tenant most of
    them: "" if that is not known."""

    newest_ms: int
    oldest_ms: int
    by: str


@dataclass(frozen=True, slots=True)
class Lacked:
    """The blocks from `first` on that a lookup did not find. `runs`: a cause, and how many blocks
    in a row have it."""

    first: int
    runs: list[tuple[int, int]]
    eviction: Eviction | None

    def spread(self, start: int, count: int) -> NDArray[np.uint8]:
        """The causes of `count` blocks from `start` on; NOT_KNOWN where this lookup says none."""
        found = np.full(count, NOT_KNOWN, dtype=np.uint8)
        at = self.first - start
        for cause, blocks in self.runs:
            found[max(0, at) : max(0, at + blocks)] = cause
            at += blocks
        return found


class Attribution:
    """For one store, which remembers departures."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._departures = store.remember_departures()

    def known(self, tenant: str, keys: bytes, hit_blocks: int) -> int:
        """How many blocks after the first `hit_blocks` are in the index, and not ready."""
        if not self._store.blocks.shards_in:  # then all are: asked while an engine waits
            return 0
        owner = self._store.tenants.get(tenant)
        if owner is None or owner.index.get(key_at(keys, hit_blocks)) == NO_ROW:
            return 0
        return known_blocks(owner.index, keys) - hit_blocks

    def of(self, missed: Missed, first: int, keys: bytes) -> Lacked:
        """Why blocks of that lookup were lacking. The engine says again which blocks it asked for:
        `keys` are addresses of those from `first` on."""
        if missed[HIT_BLOCKS] < 0:
            return Lacked(0, [(REFUSED, missed[ASKED])], None)
        return self._look(missed, first, keys)

    def _look(self, missed: Missed, start: int, keys: bytes) -> Lacked:
        """|0 … hit_blocks|… + withheld|… + coming|… + known: being written|… gone, or never stored|

        What left after the lookup was not there then either, or it would have been found."""
        _, asked, hit, known, withheld, coming, now_ms = missed
        first, late = max(hit, start), hit + withheld
        words = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
        words = words[first - start : max(0, asked - start)]
        found, by, when_ms = self._departures.table.find(words)
        causes = np.where((found > 0) & (when_ms <= now_ms), found, NEVER_STORED).astype(np.uint8)
        at = np.arange(first, first + len(causes))
        causes[at < hit + known] = BEING_WRITTEN
        causes[(at >= late) & (at < late + coming)] = TOO_LATE
        causes[at < late] = WITHHELD
        eviction = None
        evicted = np.flatnonzero((causes == EVICTED) | (causes == OVER_LIMIT))
        if len(evicted):
            ago_ms = now_ms - when_ms[evicted]
            most = int(np.bincount(by[evicted]).argmax())
            name = self._departures.table.name_of(most)
            eviction = Eviction(int(ago_ms.min()), int(ago_ms.max()), name)
        return Lacked(first, runs_of(causes)[:MOST_RUNS], eviction)
