"""Which engine blocks are read by stores under way: a step that is to write into one of them says
so first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class Readers:
    """How many stores read each block. A prompt's end adds or takes away thousands of blocks at a
    time, and a step asks about a few."""

    def __init__(self) -> None:
        self._blocks: dict[int, NDArray[np.int64]] = {}  # of each store, by its number
        self._counts = np.zeros(0, dtype=np.int32)  # by block id

    def add(self, store: int, block_ids: Sequence[int]) -> None:
        """One more store reads these."""
        ids = np.asarray(block_ids, dtype=np.int64)
        most = int(ids.max(initial=-1))
        if most >= len(self._counts):
            more = np.zeros(
                max(most + 1, 2 * len(self._counts)) - len(self._counts), dtype=np.int32
            )
            self._counts = np.concatenate((self._counts, more))
        np.add.at(self._counts, ids, 1)
        self._blocks[store] = ids

    def remove(self, store: int) -> None:
        """It has ended. One that was never added reads nothing."""
        ids = self._blocks.pop(store, None)
        if ids is not None:
            np.subtract.at(self._counts, ids, 1)

    def among(self, block_ids: Iterable[int]) -> list[int]:
        """Those of them that somebody reads, in order, each once."""
        if not self._blocks:
            return []
        ids = np.fromiter(block_ids, dtype=np.int64)
        ids = ids[(ids >= 0) & (ids < len(self._counts))]  # what is no block is read by nobody
        return np.unique(ids[self._counts[ids] > 0]).tolist()  # type: ignore[no-any-return]
