"""Memory for the index: named columns that outlive the store that wrote them.

The store asks for a column by name and gets an array. The server's columns are files beside the
pool, so that the next server finds them (`kvkeep.tiers.index_files`); all others are plain memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


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
