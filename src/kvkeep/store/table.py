"""The facts about every block, one row a block and one column a fact.

A column is an `array.array` (quick to read and write one row at a time) with a numpy view of the same memory beside
it (quick for thousands of rows at once). A million blocks so cost some 100 bytes each here, where an object a block
would cost ten times that.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES

NO_ROW = -1

# The life of a block: WRITING -> READY -> EVICTING. Between the first two a block that has all its shards may be
# WAITING for an ancestor: what is READY is closed under prefixes, which is what makes the longest hit a matter of
# bisection. EVICTING blocks have left the index and keep their slot until the last reader or writer is done with it.
FREE, WRITING, WAITING, READY, EVICTING = 0, 1, 2, 3, 4
STATE_NAMES = ("free", "writing", "waiting", "ready", "evicting")

_FIRST_CAPACITY = 1024
_WORDS_A_KEY = KEY_BYTES // 8
_TYPES: dict[str, tuple[str, type[np.generic]]] = {
    "state": ("b", np.int8),
    "priority": ("B", np.uint8),
    "parent": ("i", np.int32),
    "first_child": ("i", np.int32),
    "next_sibling": ("i", np.int32),
    "prev_sibling": ("i", np.int32),
    "tenant": ("i", np.int32),
    "layout": ("i", np.int32),
    "pins": ("i", np.int32),
    "check": ("i", np.int32),
    "slot": ("q", np.int64),
    "used": ("q", np.int64),
    "finished": ("q", np.int64),
    "expires_ms": ("q", np.int64),
    "queued": ("q", np.int64),
    "queue_owner": ("i", np.int32),
}


class Views:
    """Numpy views of the columns, for work on many rows at once. Made anew whenever the table grows."""

    __slots__ = tuple(_TYPES)
    state: NDArray[np.int8]
    priority: NDArray[np.uint8]
    parent: NDArray[np.int32]
    first_child: NDArray[np.int32]
    next_sibling: NDArray[np.int32]
    prev_sibling: NDArray[np.int32]
    tenant: NDArray[np.int32]
    layout: NDArray[np.int32]
    pins: NDArray[np.int32]
    check: NDArray[np.int32]
    slot: NDArray[np.int64]
    used: NDArray[np.int64]
    finished: NDArray[np.int64]
    expires_ms: NDArray[np.int64]
    queued: NDArray[np.int64]
    queue_owner: NDArray[np.int32]


class KeyColumn:
    """The key of each row, in one array: thousands can be compared in one go."""

    def __init__(self) -> None:
        self.words: NDArray[np.uint64] = np.zeros((0, _WORDS_A_KEY), dtype=np.uint64)
        self._bytes = memoryview(b"")

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> bytes:
        return self._bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES].tobytes()

    def put(self, rows: NDArray[np.int64], keys: bytes) -> None:
        self.words[rows] = np.frombuffer(keys, dtype=np.uint64).reshape(-1, _WORDS_A_KEY)

    def hold(self, rows: NDArray[np.int64], keys: bytes) -> bool:
        """Whether these rows have exactly these keys, in order."""
        return self.words[rows].tobytes() == keys

    def grow(self, capacity: int) -> None:
        words = np.zeros((capacity, _WORDS_A_KEY), dtype=np.uint64)
        words[: len(self.words)] = self.words
        self.words, self._bytes = words, words.view(np.uint8).reshape(-1).data


class BlockTable:
    """Rows are handed out by `take` and come back by `give`; a free row has state FREE and no key."""

    __slots__ = ("_free", "_next", "keys", "many", *_TYPES)
    state: array[int]
    priority: array[int]
    parent: array[int]
    first_child: array[int]
    next_sibling: array[int]
    prev_sibling: array[int]
    tenant: array[int]
    layout: array[int]
    pins: array[int]  # live leases that end here, plus writers at work on this block
    check: array[int]  # row in the layout's table of checksums
    slot: array[int]  # byte offset in the pool
    used: array[int]  # sequence number of the last use; a parent inherits its evicted child's
    finished: array[int]  # equal to `used` while nobody has used the block since its session finished
    expires_ms: array[int]  # 0: never
    queued: array[int]  # rank of the block's one live entry in an eviction queue, or -1
    queue_owner: array[int]  # whose queue that entry is in

    def __init__(self) -> None:
        self.keys = KeyColumn()
        self.many = Views()
        self._free: list[int] = []
        self._next = 0
        for name, (code, _) in _TYPES.items():
            setattr(self, name, array(code))
        self._grow(_FIRST_CAPACITY)

    def __len__(self) -> int:
        """The number of rows in use."""
        return self._next - len(self._free)

    def take(self, n: int) -> NDArray[np.int64]:
        """Takes n rows. Their columns hold anything: the caller sets them all."""
        reused = min(n, len(self._free))
        rows = self._free[len(self._free) - reused :]
        rows.reverse()  # what was evicted leaf first comes back in the order of a chain
        del self._free[len(self._free) - reused :]
        fresh = n - reused
        if self._next + fresh > len(self.keys):
            self._grow(max(2 * len(self.keys), self._next + fresh))
        rows.extend(range(self._next, self._next + fresh))
        self._next += fresh
        return np.array(rows, dtype=np.int64)

    def give(self, rows: list[int]) -> None:
        """Takes rows back. Whatever still points at one (a queue entry) is told apart by `queued` being -1."""
        self.many.state[rows] = FREE
        self.many.queued[rows] = -1
        self._free.extend(rows)

    def rows_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """The rows whose slots lie in that range of the pool."""
        slot = self.many.slot[: self._next]
        return np.flatnonzero((slot >= begin) & (slot < end) & (self.many.state[: self._next] != FREE))

    def live_rows(self) -> NDArray[np.int64]:
        """All rows in use, for scans that are rare enough to look at everything."""
        return np.flatnonzero(self.many.state[: self._next] != FREE)

    def _grow(self, capacity: int) -> None:
        for name, (code, dtype) in _TYPES.items():
            old: array[int] = getattr(self, name)
            setattr(self.many, name, None)  # let go of the buffer before the array behind it is replaced
            new = array(code, bytes(capacity * old.itemsize))
            new[: len(old)] = old
            setattr(self, name, new)
            view: NDArray[Any] = np.frombuffer(new, dtype=dtype)
            setattr(self.many, name, view)
        self.keys.grow(capacity)
