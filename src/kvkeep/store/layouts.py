"""How big a block is and how it is cut into shards.

An engine opens a layout once; lookups and stores then name it by number. A block takes one slot,
and its shards lie in it side by side, each on a cache-line boundary:

    slot   |<- shard 0 ->|pad|<- shard 1 ->|pad| ... |pad to a whole number of 4 KiB|
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.store.records import LONGEST_FINGERPRINT_BYTES, LayoutRecords, word_of
from kvkeep.store.table import Columns, PlainColumns

_SHARD_ALIGN = 64
SLOT_ALIGN = 4096
_FIRST_CHECKS = 256
_LARGEST_STEP_BYTES = 1 << 20  # that checksums grow by at a time


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@dataclass(eq=False)
class Layout:
    """One way of cutting blocks. `checks` holds the checksums: a row a block, a column a shard."""

    number: int
    fingerprint: bytes
    shard_bytes: tuple[int, ...]
    columns: Columns = field(default_factory=PlainColumns, repr=False)
    pool_bytes: int = 0
    shard_offsets: tuple[int, ...] = field(init=False)
    slot_bytes: int = field(init=False)
    blocks: int = 0
    held_blocks: int = 0  # with leases or writes, and their ancestors
    used: int = 0  # when a block was last used
    sessions: set[int] = field(default_factory=set)
    # shard -> digest of how its tensors lie in memory
    physical: dict[int, bytes] = field(default_factory=dict)
    word: int = field(init=False)  # stands for the layout in seals
    checks: NDArray[np.uint64] = field(init=False)
    # whether some block was stored without one of its shards, which may be stored later
    lacking: bool = False
    _free_checks: array[int] = field(default_factory=lambda: array("q"))  # freed in one go
    _next_check: int = 0

    def __post_init__(self) -> None:
        offsets, at = [], 0
        for nbytes in self.shard_bytes:
            offsets.append(at)
            at += _aligned(nbytes, _SHARD_ALIGN)
        self.shard_offsets = tuple(offsets)
        self.slot_bytes = _aligned(at, SLOT_ALIGN)
        self.word = word_of(self.fingerprint, repr(self.shard_bytes).encode())
        self.checks = self._grow_checks(_FIRST_CHECKS)

    @property
    def shards(self) -> int:
        return len(self.shard_bytes)

    def check_shards(self, shards: Sequence[int]) -> None:
        """RequestError unless these are shards of the layout, in ascending order."""
        for shard in shards:
            if not 0 <= shard < self.shards:
                raise RequestError("bad_shard", f"shard {shard} of {self.shards}", field="shard")
        if any(one >= other for one, other in pairwise(shards)):
            raise RequestError(
                "bad_shard",
                f"shards {list(shards)[:8]} are not in ascending order",
                field="further_shards",
            )

    def agree(self, shards: Sequence[int], physical: bytes) -> list[int]:
        """Records how the first worker of these shards orders their bytes, and refuses workers that
        order them differently: they would read the others' blocks, checksums and all, and mean
        something else. Returns the shards of which this worker was the first."""
        self.check_shards(shards)
        digest = blake2b(physical, digest_size=16).digest()
        for shard in shards:
            if self.physical.get(shard, digest) != digest:
                raise RequestError(
                    "layout_conflict",
                    f"another engine orders the tensors of shard {shard} differently under the same layout",
                    field="physical",
                    hint="put what differs (layer names, dimensions, their order in memory) into BlockShape.cut",
                )
        new = [shard for shard in shards if shard not in self.physical]
        self.physical.update(dict.fromkeys(new, digest))
        return new

    def take_checks(self, n: int) -> NDArray[np.int64]:
        """Rows of `checks` for n new blocks."""
        fresh = max(0, n - len(self._free_checks))
        stop = len(self._free_checks) - (n - fresh)
        taken = np.array(self._free_checks[stop:], dtype=np.int64)
        del self._free_checks[stop:]
        self.checks[taken] = 0  # which adds nothing to a seal
        if not fresh:
            return taken
        if self._next_check + fresh > len(self.checks):
            step = min(len(self.checks), _LARGEST_STEP_BYTES // (8 * self.shards))
            self.checks = self._grow_checks(max(self._next_check + fresh, len(self.checks) + step))
        first, self._next_check = self._next_check, self._next_check + fresh
        self.checks[first : self._next_check] = 0  # an earlier server's may be left there
        return np.concatenate((taken, np.arange(first, self._next_check)))

    def give_checks(self, rows: ArrayLike) -> None:
        self._free_checks.frombytes(np.asarray(rows, dtype=np.int64).tobytes())

    def take_over_checks(self, rows: NDArray[np.int64]) -> None:
        """Marks exactly these rows of `checks` as used, each by one block."""
        self._next_check = int(rows.max()) + 1 if len(rows) else 0
        free = np.ones(self._next_check, dtype=np.bool_)
        free[rows] = False
        self._free_checks = array("q", np.flatnonzero(free)[::-1].tolist())
        self.lacking = bool((self.checks[rows] == ABSENT).any())

    def _grow_checks(self, rows: int) -> NDArray[np.uint64]:
        most = self.pool_bytes // self.slot_bytes
        return self.columns.grow(f"checks-{self.number}", np.uint64, self.shards, rows, most)


class Layouts:
    """The layouts in use. At the limit, a new layout replaces one that no session has open: one
    without blocks, or the least recently used one, whose blocks are then dropped in pieces.
    `leaving` maps replaced layouts to the next row of the table to examine."""

    def __init__(
        self,
        limit: int,
        largest_slot_bytes: int,
        columns: Columns | None = None,
        pool_bytes: int = 0,
    ) -> None:
        self.limit = limit
        self._pool_bytes = pool_bytes
        self.largest_slot_bytes = largest_slot_bytes
        self._columns = columns or PlainColumns()
        self._records = LayoutRecords(self._columns)
        self.leaving: dict[int, int] = {}
        self._by_number: dict[int, Layout] = {}
        self._by_fingerprint: dict[bytes, Layout] = {}
        self._next = 1

    def __getitem__(self, number: int) -> Layout:
        return self._by_number[number]

    def __iter__(self) -> Iterator[Layout]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Layout:
        """The layout, or a RequestError that says how to get one."""
        layout = self._by_number.get(number)
        if layout is None:
            raise RequestError(
                "unknown_layout",
                f"no layout has the number {number}",
                field="layout",
                hint="send OpenLayout first",
            )
        return layout

    def open(self, session: int, fingerprint: bytes, shard_bytes: tuple[int, ...]) -> Layout:
        """Finds or adds the layout, and notes that the session uses it."""
        known = self._by_fingerprint.get(fingerprint)
        if known is not None:
            if known.shard_bytes != shard_bytes:
                raise RequestError(
                    "layout_conflict",
                    f"this layout is known with shards of {list(known.shard_bytes)} bytes, not {list(shard_bytes)}",
                    field="shard_bytes",
                    hint="the fingerprint must change with everything that changes the bytes",
                )
            known.sessions.add(session)
            self.leaving.pop(known.number, None)
            return known
        if len(fingerprint) > LONGEST_FINGERPRINT_BYTES:
            problem = f"a fingerprint of {len(fingerprint)} bytes is longer than {LONGEST_FINGERPRINT_BYTES}"
            raise RequestError("bad_fingerprint", problem, field="fingerprint")
        layout = Layout(self._next, fingerprint, shard_bytes)
        if layout.slot_bytes > self.largest_slot_bytes:
            raise RequestError(
                "block_too_large",
                f"a block of {layout.slot_bytes} bytes does not fit a slab of {self.largest_slot_bytes}",
                field="shard_bytes",
                hint="start the server with a larger --slab-size, or use fewer tokens a block",
            )
        self._make_way()
        # Drops checksums that a layout with a damaged record may have left: rows begin with zeros.
        self._columns.drop(f"checks-{self._next}")
        layout = Layout(self._next, fingerprint, shard_bytes, self._columns, self._pool_bytes)
        self._records.put(layout.number, fingerprint, shard_bytes)
        self._next += 1
        layout.sessions.add(session)
        self._add(layout)
        return layout

    def agree(self, layout: Layout, shards: Sequence[int], physical: bytes) -> None:
        """`Layout.agree`, kept for the next server."""
        for shard in layout.agree(shards, physical):
            self._records.put_physical(layout.number, shard, layout.physical[shard])

    def inherit(self, layout: Layout, physical: dict[int, bytes]) -> None:
        """Records how a tier's blocks of this layout order their bytes, for shards of which no
        worker has declared it yet: a worker that orders them differently is refused."""
        for shard, digest in physical.items():
            if shard not in layout.physical:
                layout.physical[shard] = digest
                self._records.put_physical(layout.number, shard, digest)

    def take_over(self) -> list[Layout]:
        """Adds the layouts that an earlier store left, as far as they can be read. Before any other
        is opened."""
        for found in self._records.find_all():
            smallest = sum(_aligned(nbytes, _SHARD_ALIGN) for nbytes in found.shard_bytes)
            if smallest > self.largest_slot_bytes or found.fingerprint in self._by_fingerprint:
                self._records.remove(found.number)
                continue
            layout = Layout(
                found.number, found.fingerprint, found.shard_bytes, self._columns, self._pool_bytes
            )
            layout.physical = found.physical
            self._add(layout)
            self._next = max(self._next, found.number + 1)
        return list(self)

    def _add(self, layout: Layout) -> None:
        self._by_number[layout.number] = layout
        self._by_fingerprint[layout.fingerprint] = layout

    def opened_by(self, session: int) -> int:
        return sum(session in layout.sessions for layout in self._by_number.values())

    def forget_session(self, session: int) -> None:
        for layout in self._by_number.values():
            layout.sessions.discard(session)

    def _make_way(self) -> None:
        if len(self._by_number) - len(self.leaving) < self.limit or self._forget_one():
            return
        idle = [
            each
            for each in self
            if not (each.sessions or each.held_blocks or each.number in self.leaving)
        ]
        if idle and len(self.leaving) < self.limit:
            self.leaving[min(idle, key=lambda layout: layout.used).number] = 0
            return
        raise RequestError(
            "too_many_layouts",
            f"{self.limit} layouts are in use",
            field="fingerprint",
            hint="raise --max-layouts, or stop engines that run models nobody uses",
        )

    def _forget_one(self) -> bool:
        for layout in self._by_number.values():
            if not layout.blocks and not layout.sessions:
                self.forget(layout)
                return True
        return False

    def forget(self, layout: Layout) -> None:
        """Forgets a layout without blocks and sessions."""
        del self._by_number[layout.number]
        del self._by_fingerprint[layout.fingerprint]
        self.leaving.pop(layout.number, None)
        self._records.remove(layout.number)
        self._columns.drop(f"checks-{layout.number}")
