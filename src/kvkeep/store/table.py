"""What is known of every block: one row a block, one column a fact.

A column is a numpy array, which is fast for many rows, and a `memoryview` of the same memory, which
is fast for one row. A block costs 100 bytes here; an object for each would cost ten times that.

The store asks for columns by name (`Columns`). The server's are files beside the pool, which the
next server adopts (`kvkeep.tiers.index_files`, `adopt.py`); all others are plain memory. KEPT columns
are valid after a crash at any point: a row is written completely before its state, and the state is
cleared first. The other columns are derived from them."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvkeep.kv import native
from kvkeep.kv.keys import KEY_BYTES

NO_ROW = -1

# The life of a block: WRITING -> READY -> EVICTING. A block with all shards is WAITING while an
# ancestor is incomplete: the ancestors of a READY block are READY, so the longest hit is found by
# bisection. EVICTING blocks have left the index and keep their slot until the last lease or write
# ends.
FREE, WRITING, WAITING, READY, EVICTING = 0, 1, 2, 3, 4
STATE_NAMES = ("free", "writing", "waiting", "ready", "evicting")

_FIRST_CAPACITY = 4096
_LARGEST_STEP = 1 << 14  # rows that the table grows by at a time: less than a millisecond
_MOST_ROWS = 1 << 28  # that address space is reserved for
WORDS_A_KEY = KEY_BYTES // 8

# `state` comes last: whatever has a state has all other columns.
KEPT: dict[str, type[np.generic]] = {
    "priority": np.uint8,
    "parent": np.int32,
    "tenant": np.int32,
    "layout": np.int32,
    "pins": np.int32,
    "check": np.int32,
    "slot": np.int64,
    "used": np.int64,
    "finished": np.int64,
    "expires_ms": np.int64,
    "seal": np.uint64,
    "state": np.int8,
}
_DERIVED: dict[str, type[np.generic]] = {
    "first_child": np.int32,
    "next_sibling": np.int32,
    "prev_sibling": np.int32,
    "queued": np.int64,
    "queue_owner": np.int32,
    "held": np.int32,
}


class Columns(Protocol):
    """Where columns come from."""

    def grow(
        self, name: str, dtype: DTypeLike, width: int, rows: int, most_rows: int = 0
    ) -> NDArray[Any]:
        """Returns the column with at least `rows` rows: those it had, then zeros. `width` 0 is a
        flat column.

        The memory is there: no later write to it can fail. Up to `most_rows` the column grows in
        place, without copying. An array returned earlier may no longer be the column."""

    def drop(self, name: str) -> None:
        """Forgets the column. Nothing if there is none."""


class PlainColumns:
    """Columns in this process's memory. Given to another store, they are what this one left."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[Any]] = {}
        self._reserved: dict[str, NDArray[Any]] = {}  # pages that are not written cost nothing

    def grow(
        self, name: str, dtype: DTypeLike, width: int, rows: int, most_rows: int = 0
    ) -> NDArray[Any]:
        before = self._columns.get(name)
        if before is not None and len(before) >= rows:
            return before
        reserved = self._reserved.get(name)
        if reserved is None or len(reserved) < rows:
            length = max(rows, most_rows)
            reserved = np.zeros((length, width) if width else length, dtype=dtype)
            if before is not None:
                reserved[: len(before)] = before
            self._reserved[name] = reserved
        self._columns[name] = reserved[:rows]
        return self._columns[name]

    def drop(self, name: str) -> None:
        self._columns.pop(name, None)
        self._reserved.pop(name, None)


class Views:
    """The columns as arrays, for work on many rows. Replaced when the table grows."""

    __slots__ = (*KEPT, *_DERIVED)
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
    seal: NDArray[np.uint64]
    queued: NDArray[np.int64]
    queue_owner: NDArray[np.int32]
    held: NDArray[np.int32]


class KeyColumn:
    """The key of each row, in one array, so that thousands are compared at once."""

    def __init__(self) -> None:
        self.words: NDArray[np.uint64] = np.zeros((0, WORDS_A_KEY), dtype=np.uint64)
        self._bytes = memoryview(b"")

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> bytes:
        return self._bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES].tobytes()

    def put(self, rows: NDArray[np.int64] | slice, keys: bytes) -> NDArray[np.uint64]:
        """Returns the keys as words."""
        words = np.frombuffer(keys, dtype=np.uint64).reshape(-1, WORDS_A_KEY)
        self.words[rows] = words
        return words

    def hold(self, rows: NDArray[np.int64], keys: bytes) -> bool:
        """Whether these rows have exactly these keys, in order."""
        return self.words.take(rows, axis=0).tobytes() == keys

    def lie_in(self, words: NDArray[np.uint64]) -> None:
        self.words, self._bytes = words, words.view(np.uint8).reshape(-1).data


class BlockTable:
    """Rows are handed out by `take` and come back by `give`; a free row has state FREE and no key.

    Over columns that are not new, the table is of no use before it was adopted. Address space for
    `most_rows` is reserved at once, so that the table grows without copying."""

    __slots__ = (
        "_columns",
        "_derived",
        "_free",
        "_most_rows",
        "_next",
        "keys",
        "many",
        "walker",
        *KEPT,
        *_DERIVED,
    )
    walker: native.ChainWalker | None  # None where the C kernel was not built
    state: memoryview
    priority: memoryview
    parent: memoryview
    first_child: memoryview
    next_sibling: memoryview
    prev_sibling: memoryview
    tenant: memoryview
    layout: memoryview
    pins: memoryview  # leases that end here, plus writes of this block
    check: memoryview  # row in the layout's table of checksums
    slot: memoryview  # byte offset in the pool
    used: memoryview  # sequence number of the last use; a parent inherits its evicted child's
    finished: (
        memoryview  # equal to `used` while nobody has used the block since its session finished
    )
    expires_ms: memoryview  # 0: never
    seal: memoryview  # of all that the block is, from before it is READY: see seals.py
    queued: memoryview  # rank of the block's one live entry in an eviction queue, or -1
    queue_owner: memoryview  # whose queue that entry is in
    # leases and writes that end here, plus children that are held: nothing held can be evicted
    held: memoryview

    def __init__(self, columns: Columns | None = None, most_rows: int = 0) -> None:
        self._columns = columns or PlainColumns()
        self._derived = PlainColumns()
        self._most_rows = min(most_rows, _MOST_ROWS)
        self.keys = KeyColumn()
        self.many = Views()
        self.walker = None
        self._free = array("q")  # the next one last
        self._next = 0
        self._grow(_FIRST_CAPACITY)

    def __len__(self) -> int:
        """The number of rows in use."""
        return self._next - len(self._free)

    def take(self, n: int) -> NDArray[np.int64]:
        """Takes n rows. Their columns hold anything: the caller sets them all, the state last."""
        fresh = max(0, n - len(self._free))
        stop = len(self._free) - (n - fresh)
        # in reverse: what was evicted leaf first comes back in the order of a chain
        rows = np.array(self._free[stop:][::-1], dtype=np.int64)
        del self._free[stop:]
        if not fresh:
            return rows
        if self._next + fresh > len(self.keys):
            self._grow(max(self._next + fresh, len(self.keys) + min(len(self.keys), _LARGEST_STEP)))
        self._next += fresh
        return np.concatenate((rows, np.arange(self._next - fresh, self._next)))

    def give(self, rows: ArrayLike) -> None:
        """Takes rows back. `queued` -1 makes their queue entries stale."""
        at = np.asarray(rows, dtype=np.int64)
        self.many.state[at] = FREE
        self.many.queued[at] = -1
        self._free.frombytes(at.tobytes())

    def take_over(self, live: NDArray[np.int64]) -> None:
        """Marks exactly these rows as used and all others as free."""
        self._next = int(live[-1]) + 1 if len(live) else 0
        free = np.ones(len(self.keys), dtype=np.bool_)
        free[live] = False
        self.many.state[free] = FREE
        self.many.queued[:] = -1
        self._free = array("q", np.flatnonzero(free[: self._next])[::-1].tobytes())

    def live_rows(self, start: int = 0, stop: int = _MOST_ROWS) -> NDArray[np.int64]:
        """The rows in use, of those from `start` to `stop`."""
        return start + np.flatnonzero(self.many.state[start : min(stop, self._next)] != FREE)

    def _grow(self, capacity: int) -> None:
        sizes = (capacity, self._most_rows)
        kept = {
            name: self._columns.grow(name, dtype, 0, *sizes)
            for name, dtype in KEPT.items()
            if name != "state"
        }
        keys = self._columns.grow("keys", np.uint64, WORDS_A_KEY, *sizes)
        kept["state"] = self._columns.grow("state", np.int8, 0, *sizes)
        capacity = min(len(keys), *map(len, kept.values()))
        sizes = (capacity, self._most_rows)
        derived = {
            name: self._derived.grow(name, dtype, 0, *sizes) for name, dtype in _DERIVED.items()
        }
        for name, column in (kept | derived).items():
            setattr(self.many, name, column[:capacity])
            setattr(self, name, column[:capacity].data)
        self.keys.lie_in(keys[:capacity])
        if native.available:
            self.walker = native.ChainWalker(self.many.parent, self.many.held)
