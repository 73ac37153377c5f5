"""The engine blocks that a store reads, until it has read them.

An engine that keeps its blocks still until a store is reported never calls `take_back`. One that may need a block at
any moment takes it back before it writes into it: what was not copied yet is then set aside, in a buffer of our own,
or the store ends before it. Either way no copy reads a block after `take_back` has returned, and that never waits for
a server: at most for the few megabytes that are being copied this moment.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.copy import gather
from kvkeep.kv.runs import BlockRuns

NO_BLOCK = -1  # in a table of block ids: there is nothing here

_BYTES_AT_A_TIME = 16 << 20  # copied with the lock held: some two milliseconds


@dataclass(frozen=True)
class Piece:
    """What one group of an engine's layers holds of a block, and where. Engines with one kind of layer have one piece.

    may_lack   whether a block is of use without it: attention over a window, or a recurrent state, is needed near the
               end of a prefix only
    """

    runs: BlockRuns
    may_lack: bool = False


class Sources:
    """One store's blocks: `block_ids[p, b]` holds piece p of block b. Safe to use from two threads."""

    def __init__(self, pieces: Sequence[Piece], block_ids: NDArray[np.int64]) -> None:
        self._pieces = pieces
        self._ids = block_ids.copy()
        self._left = np.ones(block_ids.shape, dtype=np.bool_)  # not copied yet
        self._aside: dict[tuple[int, int], tuple[NDArray[np.uint8], int]] = {}  # bytes and checksum
        self._bytes_aside = 0
        self._lock = threading.Lock()
        self.stop = block_ids.shape[1]  # blocks from here on are lost
        for row, piece in zip(block_ids, pieces, strict=True):
            if not piece.may_lack and NO_BLOCK in row:  # the engine has no such block, so nothing after it either
                self.stop = min(self.stop, int(np.flatnonzero(row == NO_BLOCK)[0]))

    @property
    def bytes_aside(self) -> int:
        with self._lock:
            return self._bytes_aside

    def take_back(self, block_ids: NDArray[np.int64], allowance: int) -> tuple[int, int]:
        """The engine will write into these blocks. Returns how many of them were still to be copied, and how many bytes
        were set aside for that, `allowance` at most."""
        with self._lock:
            wanted = self._left & (self._ids != NO_BLOCK) & np.isin(self._ids, block_ids)
            wanted[:, self.stop :] = False
            spent = 0
            for number, piece in enumerate(self._pieces):
                positions = np.flatnonzero(wanted[number])
                room = min(len(positions), max(0, allowance - spent) // piece.runs.nbytes)
                try:
                    self._set_aside(number, positions[:room])
                except MemoryError:
                    room = 0
                spent += room * piece.runs.nbytes
                self._ids[number, positions] = NO_BLOCK
                if len(positions) > room and not piece.may_lack:
                    self.stop = min(self.stop, int(positions[room]))
            return int(wanted.sum()), spent

    def skip(self, piece: int, start: int, stop: int, but: NDArray[np.int64]) -> None:
        """Of blocks start..stop-1 only these will be copied: the server has the others."""
        with self._lock:
            self._left[piece, start:stop] = False
            self._left[piece, but] = True
            for number, position in [at for at in self._aside if at[0] == piece and start <= at[1] < stop]:
                if position not in but:
                    self._drop(number, position)

    def give_up(self) -> None:
        """Nothing more is read."""
        with self._lock:
            self.stop = 0

    def copy(
        self, piece: int, positions: NDArray[np.int64], addresses: NDArray[np.uint64], *, verify: bool
    ) -> NDArray[np.uint64] | None:
        """Copies one piece of these blocks to these addresses. Their checksums, 0 if not `verify`, ABSENT for blocks
        without it; None if a block is lost."""
        runs = self._pieces[piece].runs
        checksums = np.full(len(positions), ABSENT, dtype=np.uint64)
        at_a_time = max(1, _BYTES_AT_A_TIME // runs.nbytes)
        for start in range(0, len(positions), at_a_time):
            some = slice(start, start + at_a_time)
            with self._lock:
                if len(positions) and positions[some][-1] >= self.stop:
                    return None
                ids = self._ids[piece, positions[some]]
                there = ids != NO_BLOCK
                sums = gather(runs, ids[there], addresses[some][there], verify=verify)
                checksums[some][there] = 0 if sums is None else sums
                self._left[piece, positions[some]] = False
                saved = {at: self._drop(piece, int(positions[some][at])) for at in np.flatnonzero(~there).tolist()}
            for at, (row, value) in ((at, each) for at, each in saved.items() if each is not None):
                _copy_row(row, int(addresses[some][at]))
                checksums[start + at] = value if verify else 0
        return checksums

    def _drop(self, piece: int, position: int) -> tuple[NDArray[np.uint8], int] | None:
        """What was set aside for this block, which is not kept any longer."""
        saved = self._aside.pop((piece, position), None)
        self._bytes_aside -= saved[0].nbytes if saved else 0
        return saved

    def _set_aside(self, piece: int, positions: NDArray[np.int64]) -> None:
        runs = self._pieces[piece].runs
        rows = np.empty((len(positions), runs.nbytes), dtype=np.uint8)
        sums = gather(runs, self._ids[piece, positions], row_addresses(rows), verify=True)
        assert sums is not None
        for position, row, value in zip(positions.tolist(), rows, sums.tolist(), strict=True):
            self._aside[piece, position] = (row, value)
        self._bytes_aside += rows.nbytes


def row_addresses(buffer: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The address of each row of a C-contiguous array."""
    return np.uint64(buffer.ctypes.data) + np.arange(len(buffer), dtype=np.uint64) * np.uint64(buffer.strides[0])


def _copy_row(row: NDArray[np.uint8], address: int) -> None:
    ctypes.memmove(address, row.ctypes.data, row.nbytes)
