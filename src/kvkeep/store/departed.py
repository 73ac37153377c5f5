"""Which blocks have left the store lately, or were refused, and why: for people who ask about a miss.

A table of fixed size, in which newer departures replace older ones. What happens to many blocks is
one array operation: departures wait in a list until there are some, or somebody asks.

    address ──► bucket of WAYS entries, the newest first: second word of the address; cause, tenant
                that caused it and time in one word"""

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
ENTRIES: Final = 1 << 18  # 4 MB, of which only what was written is in memory
WAYS: Final = 4
_RECENT = 256
_SAMPLE_MS, _MOST_SAMPLES = 1_000, 2_048
_MOST_NAMES = 4096  # of tenants that caused something; further ones have no name

_WAITING = 64  # 20 microseconds
_CAUSE_SHIFT, _TENANT_SHIFT = 56, 40
_TENANTS = (1 << _CAUSE_SHIFT - _TENANT_SHIFT) - 1
_TIMES = (1 << _TENANT_SHIFT) - 1

Words = NDArray[np.uint64]  # addresses, two words each


class Departed:
    """See the module's docstring. A cause is a number above 0 that the caller chooses."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._mask = np.uint64(entries // WAYS - 1)
        self._entries = np.zeros((entries // WAYS, WAYS, 2), dtype=np.uint64)
        self._names = [""]
        self._numbers = {"": 0}
        self._waiting: list[tuple[Words, int]] = []
        self._waiting_blocks = 0

    def note(self, words: Words, cause: int, by: str, now_ms: int) -> None:
        """Blocks with these addresses have left because of tenant `by`."""
        number = self._numbers.get(by)
        if number is None:
            number = 0
            if len(self._names) < _MOST_NAMES:
                number = self._numbers[by] = len(self._names)
                self._names.append(by)
        what = cause << _CAUSE_SHIFT | number << _TENANT_SHIFT | now_ms & _TIMES
        self._waiting.append((words, what))
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
        entries = self._entries.take(self._buckets(words), axis=0)
        is_same = entries[:, :, 0] == words[:, 1:]
        newest = entries[np.arange(len(words)), is_same.argmax(axis=1), 1]
        found = np.where(is_same.any(axis=1), newest, 0).astype(np.int64)
        causes = (found >> _CAUSE_SHIFT).astype(np.uint8)
        return causes, (found >> _TENANT_SHIFT & _TENANTS).astype(np.uint16), found & _TIMES

    def name_of(self, number: int) -> str:
        """The tenant of that number; "" if it is not known."""
        return self._names[number]

    def _take_in(self) -> None:
        if not self._waiting:
            return
        words = np.concatenate([each for each, _ in self._waiting])
        counts = [len(each) for each, _ in self._waiting]
        whats = np.array([what for _, what in self._waiting], dtype=np.uint64).repeat(counts)
        self._waiting, self._waiting_blocks = [], 0
        self._put(words, whats)

    def _put(self, words: Words, whats: NDArray[np.uint64]) -> None:
        buckets = self._buckets(words)
        if len(set(buckets.tolist())) < len(words):  # those of one bucket go one after the other
            half = len(words) // 2
            self._put(words[:half], whats[:half])
            self._put(words[half:], whats[half:])
            return
        entries = np.empty((len(words), WAYS, 2), dtype=np.uint64)
        entries[:, 0, 0], entries[:, 0, 1] = words[:, 1], whats
        entries[:, 1:] = self._entries.take(buckets, axis=0)[:, :-1]
        self._entries[buckets] = entries

    def _buckets(self, words: Words) -> NDArray[np.int64]:
        return (words[:, 0] & self._mask).astype(np.int64)


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
