"""Which blocks of a pool stay when it becomes smaller, and where.

    slab  0    1    2  │  3    4        the pool had 5 slabs and has 3 now
          aaa  a..  bb │  aa   b        blocks of the slabs beyond move to free slots before

Blocks that were used last stay, each with all its ancestors: a block counts as used when its last
descendant was. Blocks within the new size keep their slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.table import NO_ROW, BlockTable

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Slots:
    """Slots by their offset in the pool, with the size of each."""

    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]


@dataclass(frozen=True)
class Kept:
    """The rows that stay. Those of `moved` get the slots `to`."""

    rows: Rows
    moved: Rows
    to: NDArray[np.int64]


def that_fit(
    table: BlockTable,
    rows: Rows,
    nbytes: NDArray[np.int64],
    taken: Slots,
    slab_bytes: int,
    slabs: int,
) -> Kept:
    """The rows, all of whose ancestors are among them, that fit `slabs` slabs; `nbytes` are the
    sizes of their slots. Slots in `taken` are not given to another block."""
    order = _last_used_first(table, rows)
    slots = table.many.slot[rows]

    def is_enough(count: int) -> bool:
        some = order[:count]
        free = _Free(Slots(slots[some], nbytes[some]), taken, slab_bytes, slabs)
        beyond = some[slots[some] >= slabs * slab_bytes]
        return free.has_room(nbytes[beyond])

    least, most = 0, len(order)  # that many are known to fit, and at most so many do
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if is_enough(middle) else (least, middle - 1)
    some = np.sort(order[:least])
    free = _Free(Slots(slots[some], nbytes[some]), taken, slab_bytes, slabs)
    beyond = some[slots[some] >= slabs * slab_bytes]
    to = np.empty(len(beyond), np.int64)
    for size in np.unique(nbytes[beyond]).tolist():
        of_size = nbytes[beyond] == size
        to[of_size] = free.take(size, int(of_size.sum()))
    return Kept(rows[some], rows[beyond], to)


def _last_used_first(table: BlockTable, rows: Rows) -> NDArray[np.int64]:
    """Places in `rows`: the last used first, and ancestors before their descendants. Each round
    doubles how far up a row is heard."""
    many, place = table.many, np.full(len(table.many.state) + 1, len(rows), np.int64)
    place[rows] = np.arange(len(rows))
    parents = many.parent[rows].astype(np.int64)
    above = np.append(np.where(parents == NO_ROW, len(rows), place[parents]), len(rows))
    used = np.append(many.used[rows], np.iinfo(np.int64).max)
    depth = np.append(np.ones(len(rows), np.int64), 0)
    while (above[:-1] != len(rows)).any():
        np.maximum.at(used, above[:-1], used[:-1].copy())
        depth += np.where(above == len(rows), 0, depth[above])
        above = above[above]
    return np.lexsort((depth[:-1], -used[:-1]))


class _Free:
    """Free slots of the first slabs, when some are taken. A slab has slots of one size."""

    def __init__(self, kept: Slots, taken: Slots, slab_bytes: int, slabs: int) -> None:
        offsets = np.concatenate([kept.offsets, taken.offsets])
        sizes = np.concatenate([kept.nbytes, taken.nbytes])
        inside = offsets < slabs * slab_bytes
        self._offsets, first = np.unique(offsets[inside], return_index=True)
        self._slab_bytes = slab_bytes
        self._size_of = np.zeros(slabs, np.int64)  # 0: no slot of the slab is taken
        slab_of = self._offsets // slab_bytes
        self._size_of[slab_of] = sizes[inside][first]
        self._used = np.bincount(slab_of, minlength=slabs)

    def has_room(self, sizes: NDArray[np.int64]) -> bool:
        """Whether there is a slot for each block of these sizes."""
        empty = int((self._size_of == 0).sum())
        for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
            per_slab = self._slab_bytes // int(size)
            of_size = self._size_of == size
            free = int(of_size.sum()) * per_slab - int(self._used[of_size].sum())
            empty -= max(0, -(-(int(count) - free) // per_slab))
        return empty >= 0

    def take(self, size: int, count: int) -> NDArray[np.int64]:
        """That many slots of this size, those of slabs that have it first."""
        per_slab, found = self._slab_bytes // size, [np.empty(0, np.int64)]
        slabs = [*np.flatnonzero(self._size_of == size), *np.flatnonzero(self._size_of == 0)]
        left = count
        for slab in slabs:
            if not left:
                break
            begin = int(slab) * self._slab_bytes
            free = np.setdiff1d(begin + np.arange(per_slab) * size, self._offsets)[:left]
            self._size_of[slab] = size
            found.append(free)
            left -= len(free)
        assert not left
        return np.concatenate(found)
