"""Memory for the index: named columns that outlive the store that wrote them, wherever they come
from.

The store asks for a column by name and gets an array. The daemon's columns are files beside the
pool, so that the next server finds what the last one knew (`kvkeep.tiers.index_files`); everybody
else's are plain memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Columns(Protocol):
    """Where columns come from."""

    def grow(self, name: str, dtype: DTypeLike, width: int, rows: int) -> NDArray[Any]:
        """The column with at least so many rows: those it had, as they were, then zeros. `width` 0
        is a flat column.

        The memory is there: no later write to it can fail. An array of the column from before is
        the column no longer."""

    def drop(self, name: str) -> None:
        """Forgets the column. Nothing if there is none."""


class PlainColumns:
    """Columns in this process's memory. Who keeps this object when a store is gone can give it to
    the next one."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[Any]] = {}

    def grow(self, name: str, dtype: DTypeLike, width: int, rows: int) -> NDArray[Any]:
        before = self._columns.get(name)
        if before is not None and len(before) >= rows:
            return before
        grown = np.zeros((rows, width) if width else rows, dtype=dtype)
        if before is not None:
            grown[: len(before)] = before
        self._columns[name] = grown
        return grown

    def drop(self, name: str) -> None:
        self._columns.pop(name, None)
