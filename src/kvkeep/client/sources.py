"""The engine blocks that a store reads, until it has read them.

An engine that keeps its blocks still until a store is reported never calls `take_back`. One that
may need a block at any moment takes it back before it writes into it: what was not copied yet is
then set aside, in a buffer of our own, or the store ends before it. Either way no copy reads a
block after `take_back` has returned, and that never waits for a server: at most for the few
megabytes that are being copied this moment. On a GPU "before" and "after" are places in its queues
of work (`kvkeep.gpu.copier`), and nobody waits at all."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.copier import Copier, EvacuatedBlock, HostCopier, StoreCopy
from kvkeep.client.threads import Threads
from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.runs import BlockRuns

NO_BLOCK = -1  # in a table of block ids: there is nothing here
_MOST_BYTES_ASIDE = 64 << 20  # for blocks that the engine takes back before they are copied
_MOST_BYTES_AT_ONCE = 16 << 20  # of those, in one step: some four milliseconds


@dataclass(frozen=True)
class Piece:
    """What one group of an engine's layers holds of a block, and where. Engines with one kind of
    layer have one piece.

    may_lack   whether a block is of use without it: attention over a window, or a recurrent state, is needed near the
               end of a prefix only
    """

    runs: BlockRuns
    may_lack: bool = False


def physical_fingerprint(pieces: Sequence[Piece]) -> bytes:
    """Equal where blocks can be exchanged, whichever way each piece lies in memory."""
    fingerprints = [bytes.fromhex(piece.runs.fingerprint) for piece in pieces]
    return (
        fingerprints[0]
        if len(pieces) == 1
        else hashlib.blake2b(b"".join(fingerprints), digest_size=16).digest()
    )


def check_sizes(pieces: Sequence[Piece], expected: Sequence[int]) -> None:
    """RequestError unless each of these pieces has so many bytes a block."""
    given = [piece.runs.nbytes for piece in pieces]
    if given != list(expected):
        have, wanted = (" + ".join(map(str, each)) for each in (given, expected))
        problem = f"the tensors have {have} bytes a block, the block shape says {wanted}"
        hint = "shard_bytes of the BlockShape must be what each KV rank's tensors really hold"
        raise RequestError("bad_shards", problem, field="layers", hint=hint)


class Copy:
    """Blocks that were read, and may still be on their way."""

    def __init__(self, reading: StoreCopy, count: int, copied: list[NDArray[np.int64]]) -> None:
        self._reading = reading
        self._count = count
        self._copied = copied

    def checksums(self) -> NDArray[np.uint64]:
        """When all have arrived: their checksums, 0 without verification, ABSENT for those that
        there were none of."""
        checksums = np.full(self._count, ABSENT, dtype=np.uint64)
        sums = self._reading.sums()
        if self._copied:
            checksums[np.concatenate(self._copied)] = sums
        return checksums

    def close(self) -> None:
        """Waits until all have arrived."""
        self._reading.close()


class Sources:
    """One store's blocks: `block_ids[p, b]` holds piece p of block b. Made in the engine's thread,
    when the blocks are computed or that is under way; `ready` is the copier's mark of that moment.
    Safe to use from two threads."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        block_ids: NDArray[np.int64],
        copier: Copier | None = None,
        threads: Threads = threading,
        ready: Any = None,
    ) -> None:
        self._pieces = pieces
        self._copier = copier or HostCopier([piece.runs for piece in pieces])
        self._ready: Any = self._copier.mark() if ready is None else ready
        self._ids = block_ids.copy()
        self._left = np.ones(block_ids.shape, dtype=np.bool_)  # not copied yet
        self._aside: dict[tuple[int, int], EvacuatedBlock] = {}
        self._bytes_aside = 0
        self._reading: tuple[StoreCopy, int, NDArray[np.int64]] | None = (
            None  # one that reads without the lock
        )
        self._lock = threads.Lock()
        self.stop = block_ids.shape[1]  # blocks from here on are lost
        lacks_some = bool(block_ids.size) and block_ids.min() < 0
        for row, piece in zip(block_ids, pieces, strict=True):
            # The engine has no such block, so nothing after it either.
            if lacks_some and not piece.may_lack and NO_BLOCK in row:
                self.stop = min(self.stop, int(np.flatnonzero(row == NO_BLOCK)[0]))

    @property
    def bytes_aside(self) -> int:
        with self._lock:
            return self._bytes_aside

    def take_back(self, block_ids: NDArray[np.int64], allowance: int) -> tuple[int, int]:
        """The engine will write into these blocks. Returns how many of them were still to be
        copied, and how many bytes were set aside for that, `allowance` at most."""
        with self._lock:
            if self._reading is not None:
                _, piece, positions = self._reading
                if np.isin(self._ids[piece, positions], block_ids).any():
                    self._halt()
            wanted = self._left & (self._ids != NO_BLOCK) & np.isin(self._ids, block_ids)
            wanted[:, self.stop :] = False
            spent = 0
            for number, kind in enumerate(self._pieces):
                positions = np.flatnonzero(wanted[number])
                room = min(len(positions), max(0, allowance - spent) // kind.runs.nbytes)
                try:
                    self._set_aside(number, positions[:room])
                except MemoryError:
                    room = 0
                spent += room * kind.runs.nbytes
                self._ids[number, positions] = NO_BLOCK
                if len(positions) > room and not kind.may_lack:
                    self.stop = min(self.stop, int(positions[room]))
            return int(wanted.sum()), spent

    def skip(self, piece: int, start: int, stop: int, but: NDArray[np.int64]) -> None:
        """Of blocks start..stop-1 only these will be copied: the server has the others."""
        with self._lock:
            self._left[piece, start:stop] = False
            self._left[piece, but] = True
            for number, position in [
                at for at in self._aside if at[0] == piece and start <= at[1] < stop
            ]:
                if position not in but:
                    self._take(number, position).free()

    def give_up(self) -> None:
        """Nothing more is read."""
        with self._lock:
            self.stop = 0
            self._halt()

    def close(self) -> None:
        """Nothing more is read, and what was set aside goes."""
        with self._lock:
            self.stop = 0
            self._halt()
            for number, position in list(self._aside):
                self._take(number, position).free()

    def copy(
        self,
        piece: int,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        verify: bool,
    ) -> Copy | None:
        """Copies one piece of these blocks to these addresses; ends when all of them are read. None
        if a block is lost."""
        reading = self._copier.begin_store(piece, verify=verify, ready=self._ready)
        copied: list[NDArray[np.int64]] = []
        to_put: list[EvacuatedBlock] = []  # taken from what was set aside
        try:
            first = self._read(piece, positions, addresses, reading)
            copied.append(np.arange(first))
            for start in range(first, len(positions), reading.at_a_time):
                some = slice(start, start + reading.at_a_time)
                reading.make_room()
                with self._lock:
                    lost = bool(positions[some][-1] >= self.stop)
                    if not lost:
                        ids = self._ids[piece, positions[some]]
                        there = ids != NO_BLOCK
                        reading.gather(ids[there], addresses[some][there])
                        self._left[piece, positions[some]] = False
                        saved = {
                            at: self._take(piece, int(positions[some][at]))
                            for at in np.flatnonzero(~there).tolist()
                            if (piece, int(positions[some][at])) in self._aside
                        }
                if lost:
                    # waits for the GPU, which nobody who takes blocks back may have to do
                    reading.close()
                    return None
                to_put += saved.values()
                reading.deliver()
                for at, each in saved.items():
                    to_put.remove(each)  # the reading frees it
                    reading.put(each, int(addresses[some][at]))
                copied += [
                    start + np.flatnonzero(there),
                    start + np.array(list(saved), dtype=np.int64),
                ]
            reading.end()
        except BaseException:
            # guard: raised again; nobody may have memory that a copy still goes to
            try:
                reading.close()
            finally:
                for each in to_put:
                    each.free()
            raise
        return Copy(reading, len(positions), copied)

    def _read(
        self,
        piece: int,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        reading: StoreCopy,
    ) -> int:
        """So many of them, by a reading that asks nobody before each few. Not if some are lost or
        were set aside."""
        with self._lock:
            ids = self._ids[piece, positions]
            if not len(positions) or positions[-1] >= self.stop or (ids == NO_BLOCK).any():
                return 0
            self._left[piece, positions] = False
            self._reading = reading, piece, positions
        count = 0
        try:
            count = reading.read(ids, addresses)
        finally:
            with self._lock:
                self._reading = None
                self._left[piece, positions[count:]] = True
        return count

    def _halt(self) -> None:
        """With the lock held: what is not read by now is not read without it."""
        if self._reading is not None:
            reading, piece, positions = self._reading
            self._left[piece, positions[reading.halt() :]] = True

    def _take(self, piece: int, position: int) -> EvacuatedBlock:
        """What was set aside for this block, which is not kept here any longer."""
        saved = self._aside.pop((piece, position))
        self._bytes_aside -= saved.nbytes
        return saved

    def _set_aside(self, piece: int, positions: NDArray[np.int64]) -> None:
        for position, saved in zip(
            positions.tolist(),
            self._copier.evacuate(piece, self._ids[piece, positions]),
            strict=True,
        ):
            self._aside[piece, position] = saved
            self._bytes_aside += saved.nbytes


def take_back(all_sources: Collection[Sources], block_ids: Sequence[int]) -> int:
    """The engine will write into these blocks. Returns how many of them were still to be copied."""
    ids, taken = np.asarray(block_ids, dtype=np.int64), 0
    allowance = min(
        _MOST_BYTES_AT_ONCE, _MOST_BYTES_ASIDE - sum(sources.bytes_aside for sources in all_sources)
    )
    for sources in all_sources:
        count, nbytes = sources.take_back(ids, allowance)
        taken += count
        allowance -= nbytes
    return taken
