"""Blocks of a chain in objects of a shared tier: several in one, because small objects are slow.

    window    blocks from a multiple of N, counted from the root, to the next
    parcel    some blocks of one window, in order, under the key of the first

    | magic, version, how many, proofs | N keys | N rows of checksums | blocks without padding |

A window is read along its parcels: the one that has the name of the window's first key, as far as
its keys match; then the one that has the name of the next key; and so on. Parcels are never
replaced: a chain that goes on, or diverges from what is there, begins another one
(docs/decisions/0036).

A parcel proves itself: one checksum is that of its name, of how many blocks it has, and of their
keys; the next, that of the rows and of the first; and the rows are those that were taken where the
blocks were computed. What does not match is a miss and is removed, so that the next write repairs it
for all hosts. A parcel of another version is a miss and stays."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import checksum, checksums_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.tiers.checked_tier import Medium
from kvkeep.tiers.tier import Part
from kvkeep.units import MIB

PARCEL_BYTES = 4 * MIB
MOST_BLOCKS = 128
_HEAD = struct.Struct("<4sHHQQ")
_MAGIC = b"kvkp"
_VERSION = 2
_SUM_BYTES = 8
_TRIES = 2  # what is damaged is removed when it is read

Block = Sequence[memoryview]  # its shards


def blocks_a_parcel(slot_bytes: int) -> int:
    """N."""
    return max(1, min(MOST_BLOCKS, PARCEL_BYTES // slot_bytes))


def place_of(place: str, blocks: int) -> str:
    """Where parcels of up to so many blocks of this place are."""
    return f"{place}/parcels{_VERSION}-{blocks}"


class Parcels:
    """The parcels of one place, with up to `blocks` blocks each. Keys that are given begin with the
    first block of a window, except those of `write`."""

    def __init__(
        self, tier: Medium, place: str, blocks: int, shard_bytes: Sequence[int] = ()
    ) -> None:
        self._tier = tier
        self._place = place_of(place, blocks)
        self._most = blocks
        self._shards = len(shard_bytes)
        self._block_bytes = sum(shard_bytes)

    def leading(self, keys: bytes) -> int:
        """How many leading blocks are there. A hole in an earlier window than the last may be
        overlooked; reading finds it."""
        blocks = len(keys) // KEY_BYTES
        names = [self._name(keys, at) for at in range(0, blocks, self._most)]
        windows = self._tier.leading(names)
        if not windows or self._most == 1:
            return windows
        at = (windows - 1) * self._most
        stop = min(windows * self._most, blocks)
        while at < stop and (matching := self._matching(keys, at)):
            at += matching
        return at

    def read(
        self, keys: bytes, skip: int, blocks: Sequence[Block], sums: NDArray[np.uint64]
    ) -> int:
        """Reads those blocks of one window that follow the first `skip`, and rows of their
        checksums. Returns how many leading ones were read and match their checksums."""
        at, stop = 0, skip + len(blocks)
        while at < stop:
            first = max(at, skip)
            matching, read = self._read(
                keys, at, first, blocks[first - skip :], sums[first - skip :]
            )
            if first + read < at + matching or not matching:
                return max(0, first + read - skip)
            at += matching
        return len(blocks)

    def write(self, keys: bytes, blocks: Sequence[Block], sums: NDArray[np.uint64]) -> int:
        """Writes these blocks of one window, unless they are there. Returns for how many leading
        ones the tier had room."""
        at = tries = 0
        while at < len(blocks):
            if not self._put(keys, at, blocks, sums):
                return at
            # Another host may have been first, with blocks that differ from some key on.
            matching = self._matching(keys, at) if self._most > 1 else 1
            at += matching
            tries = 0 if matching else tries + 1
            if tries == _TRIES:
                break  # what another release wrote has the name
        return len(blocks)

    def _put(self, keys: bytes, at: int, blocks: Sequence[Block], sums: NDArray[np.uint64]) -> bool:
        name, count = self._name(keys, at), len(blocks) - at
        header = bytearray(self._header_bytes)
        mine = keys[at * KEY_BYTES :]
        header[_HEAD.size : _HEAD.size + len(mine)] = mine
        self._rows(header)[:count] = sums[at:]
        _HEAD.pack_into(header, 0, _MAGIC, _VERSION, count, *self._proofs(name, count, header))
        views = [memoryview(header), *(view for block in blocks[at:] for view in block)]
        return self._tier.write([Part(name, views)]) == [True]

    def _matching(self, keys: bytes, at: int) -> int:
        """How many blocks from `at` on are in the parcel that begins there."""
        name, header = self._name(keys, at), bytearray(self._rows_at)
        (found,) = self._tier.read([_in_two_views(name, header)])
        return self._compare(name, header, found, keys, at)[0] if found >= 0 else 0

    def _read(
        self,
        keys: bytes,
        at: int,
        first: int,
        blocks: Sequence[Block],
        sums: NDArray[np.uint64],
    ) -> tuple[int, int]:
        """Reads blocks from `first` on that are in the parcel that begins at `at`. Returns how many
        blocks it has in common with the keys, and how many from `first` on were read and are
        right. All in one round trip: what the parcel has is not known before."""
        name = self._name(keys, at)
        header = bytearray(self._header_bytes)
        views = [view for block in blocks for view in block]
        if first == at:
            (found,) = self._tier.read([Part(name, [memoryview(header), *views])])
            nbytes = found - len(header)
        else:
            offset = len(header) + (first - at) * self._block_bytes
            found, nbytes = self._tier.read(
                [_in_two_views(name, header), Part(name, views, offset)]
            )
        if found < 0:
            return 0, 0
        matching, count = self._compare(name, header, found, keys, at)
        whole = max(0, nbytes) // self._block_bytes
        usable = max(0, min(at + matching - first, whole, len(blocks)))
        sums[:usable] = self._rows(header)[first - at :][:usable]
        differs = (_sums_of(blocks[:usable]) != sums[:usable]).any(axis=1)
        if differs.any() or whole < min(at + count - first, len(blocks)):
            self._tier.drop([name])
        return matching, int(np.argmax(differs)) if differs.any() else usable

    def _compare(
        self, name: str, header: bytearray, found: int, keys: bytes, at: int
    ) -> tuple[int, int]:
        """How many leading keys of a parcel are those from `at` on, and how many it has; none if it
        is of another version, or damaged and removed. `found`: how much of its header was read."""
        magic, version, count, *proofs = _HEAD.unpack_from(header)
        if found >= _HEAD.size and magic == _MAGIC and version != _VERSION:
            return 0, 0
        known = 2 if len(header) > self._rows_at else 1  # without the rows, only the first
        expected = self._proofs(name, count, header)[:known]
        if found < len(header) or magic != _MAGIC or tuple(proofs[:known]) != expected:
            self._tier.drop([name])
            return 0, 0
        most = min(count, self._most, len(keys) // KEY_BYTES - at)
        theirs = np.frombuffer(header, f"V{KEY_BYTES}", most, _HEAD.size)
        differs = theirs != np.frombuffer(keys, f"V{KEY_BYTES}", most, at * KEY_BYTES)
        return (int(np.argmax(differs)) if differs.any() else most), count

    def _proofs(self, name: str, count: int, header: bytearray) -> tuple[int, int]:
        of_keys = checksum(f"{name} {count} ".encode() + header[_HEAD.size : self._rows_at])
        return of_keys, checksum(of_keys.to_bytes(8, "little") + header[self._rows_at :])

    @property
    def _rows_at(self) -> int:
        return _HEAD.size + self._most * KEY_BYTES

    @property
    def _header_bytes(self) -> int:
        return self._rows_at + self._most * self._shards * _SUM_BYTES

    def _rows(self, header: bytearray) -> NDArray[np.uint64]:
        rows = np.frombuffer(header, "<u8", offset=self._rows_at)
        return rows.reshape(self._most, self._shards)

    def _name(self, keys: bytes, at: int) -> str:
        return f"{self._place}/{keys[at * KEY_BYTES :][:KEY_BYTES].hex()}"


def _in_two_views(name: str, header: bytearray) -> Part:
    """An encrypted tier reads all of its first frame at once then."""
    view = memoryview(header)
    return Part(name, [view[: _HEAD.size], view[_HEAD.size :]])


def _sums_of(blocks: Sequence[Block]) -> NDArray[np.uint64]:
    """A row of checksums for each block."""
    if not blocks:
        return np.empty((0, 1), np.uint64)
    return np.stack([checksums_of(shards) for shards in zip(*blocks, strict=True)], axis=1)
