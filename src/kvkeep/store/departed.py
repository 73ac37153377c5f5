"""Which blocks have left the store lately, or were refused, and why: for people who ask about a miss.

A table of fixed size, in which newer blocks replace older ones. What happens to many blocks is one
array operation: departures wait in a list until there are several, or somebody asks.

    address ──► bucket of WAYS entries: address, cause, tenant that caused it, time"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.outcomes import EVICTED, OVER_LIMIT

ROOM: Final = "room"
REASONS: Final = ("own", "others", "limit", "slab", "expired")
AGE_EDGES_S: Final = (1, 10, 60, 300, 1_800, 7_200, 28_800, 86_400, 604_800)
ENTRIES: Final = 1 << 18  # 7 MB, of which only what was written is in memory
WAYS: Final = 4
_WAITING = 1024
_RECENT = 256
_SAMPLE_MS, _MOST_SAMPLES = 1_000, 2_048
_MOST_NAMES = 4096  # of tenants that caused something; further ones have no name

Words = NDArray[np.uint64]  # addresses, two words each


class Departed:
    """See the module's docstring. A cause is a number above 0 that the caller chooses."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._mask = np.uint64(entries // WAYS - 1)
        shape = (entries // WAYS, WAYS)
        self._words = np.zeros((*shape, 2), dtype=np.uint64)
        self._when_ms = np.zeros(shape, dtype=np.int64)
        self._causes = np.zeros(shape, dtype=np.uint8)
        self._by = np.zeros(shape, dtype=np.uint16)
        self._names = [""]
        self._numbers = {"": 0}
        self._waiting: list[tuple[Words, int, int, int]] = []
        self._waiting_blocks = 0

    def note(self, words: Words, cause: int, by: str, now_ms: int) -> None:
        """Blocks with these addresses have left because of tenant `by`."""
        number = self._numbers.get(by)
        if number is None:
            number = 0
            if len(self._names) < _MOST_NAMES:
                number = self._numbers[by] = len(self._names)
                self._names.append(by)
        self._waiting.append((words, cause, number, now_ms))
        self._waiting_blocks += len(words)
        if self._waiting_blocks >= _WAITING:
            self._take_in()

    def note_refused(self, words: Words, cause: int, by: str, now_ms: int) -> None:
        """These were not stored. What is known of one already stays: it missed for that reason."""
        is_new = self.find(words)[0] == 0
        if is_new.any():
            self.note(words[is_new], cause, by, now_ms)

    def find(self, words: Words) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
        """For each address: the cause, 0 if none is known; the number of the tenant that caused it
        (`name_of`); and when."""
        self._take_in()
        buckets, ways, is_there = self._place(words)
        causes = np.where(is_there, self._causes[buckets, ways], 0).astype(np.uint8)
        return causes, self._by[buckets, ways], self._when_ms[buckets, ways]

    def name_of(self, number: int) -> str:
        """The tenant of that number; "" if it is not known."""
        return self._names[number]

    def _place(
        self, words: Words
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The bucket of each address; its place there, or that of the oldest entry; whether it is
        there."""
        buckets = (words[:, 0] & self._mask).astype(np.int64)
        same = (self._words[buckets] == words[:, None, :]).all(axis=2)
        same &= self._causes[buckets] > 0
        ways = np.where(same, -1, self._when_ms[buckets]).argmin(axis=1)
        return buckets, ways, same[np.arange(len(words)), ways]

    def _take_in(self) -> None:
        if not self._waiting:
            return
        counts = [len(words) for words, *_ in self._waiting]
        words = np.concatenate([each[0] for each in self._waiting])
        causes, by, when_ms = (
            np.repeat(np.array([each[at] for each in self._waiting], dtype=np.int64), counts)
            for at in (1, 2, 3)
        )
        self._waiting, self._waiting_blocks = [], 0
        left = np.arange(len(words))
        for _ in range(WAYS):  # blocks of one bucket take each other's place: these go once more
            buckets, ways, _ = self._place(words[left])
            self._words[buckets, ways] = words[left]
            self._causes[buckets, ways] = causes[left]
            self._by[buckets, ways] = by[left]
            self._when_ms[buckets, ways] = when_ms[left]
            left = left[~self._place(words[left])[2]]
            if not len(left):
                break


class UseTimes:
    """When the store had come to which number of its count of uses: a bounded number of samples,
    a second apart at first, and further apart the longer the store lives."""

    def __init__(self) -> None:
        self._uses: list[int] = []
        self._times_ms: list[int] = []
        self._next_ms = 0
        self._every_ms = _SAMPLE_MS

    def note(self, use: int, now_ms: int) -> None:
        if self._uses and now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._every_ms
        self._uses.append(use)
        self._times_ms.append(now_ms)
        if len(self._uses) > _MOST_SAMPLES:
            del self._uses[1::2], self._times_ms[1::2]
            self._every_ms *= 2

    def time_of(self, use: int) -> int | None:
        """When that use was, or a little before; None if that was before the first sample."""
        at = bisect_right(self._uses, use) - 1
        return self._times_ms[at] if at >= 0 else None


class Departures:
    """What a store remembers of blocks that left. `counts` are evicted blocks by reason:

    own, others   room for blocks of the same tenant, or of others
    limit         their tenant's limit
    slab          their slab was needed for slots of another size
    expired       their time to live was over, and room was needed
    """

    def __init__(self) -> None:
        self.table = Departed()
        self.uses = UseTimes()
        self.counts = dict.fromkeys(REASONS, 0)
        # Evicted blocks by the time since their last use; the last is beyond all edges.
        self.ages = [0] * (len(AGE_EDGES_S) + 1)
        self.age_sum_s = 0.0
        self.recent_s: deque[float] = deque(maxlen=_RECENT)  # ages of the last evictions

    def evicted(
        self, words: Words, reason: str, loser: str, by: str, last_use: int, now_ms: int
    ) -> None:
        """Blocks of `loser` were evicted because of `by`, in favour of what the reason says."""
        if reason == ROOM:
            reason = "own" if loser == by else "others"
        self.counts[reason] += len(words)
        self.table.note(words, OVER_LIMIT if reason == "limit" else EVICTED, by, now_ms)
        used_ms = self.uses.time_of(last_use)
        if used_ms is not None:
            age_s = max(0, now_ms - used_ms) / 1000
            self.ages[bisect_left(AGE_EDGES_S, age_s)] += len(words)
            self.age_sum_s += age_s * len(words)
            self.recent_s.append(age_s)

    @property
    def age_s(self) -> float | None:
        """The median age of what was evicted lately; None if nothing was."""
        return round(median(self.recent_s), 1) if self.recent_s else None
