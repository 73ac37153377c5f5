"""Several blocks of a chain in one object of a shared tier, where small objects are slow.

    window    blocks from a multiple of N, counted from the root, to the next
    parcel    some blocks of one window, in order, under the key of the first

    | magic, version, how many | N keys | N rows of checksums | blocks without padding |

A window is read along its parcels: the one that has the name of the window's first key, as far as
its keys match; then the one that has the name of the next key; and so on. Parcels are never
replaced: a chain that goes on, or diverges from what is there, begins another one
(docs/decisions/0036)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.tiers.tier import Part, Tier
from kvkeep.units import MIB

PARCEL_BYTES = 4 * MIB
MOST_BLOCKS = 128
_HEAD = struct.Struct("<4sHH8x")
_MAGIC = b"kvkp"
_VERSION = 1
_SUM_BYTES = 8
_TRIES = 2  # the tier removes what is damaged when it is read

Block = Sequence[memoryview]  # its shards


def blocks_a_parcel(slot_bytes: int, below_bytes: int) -> int:
    """N, on a tier that keeps slots smaller than `below_bytes` in parcels; 1: no parcels."""
    if slot_bytes >= below_bytes:
        return 1
    return max(1, min(MOST_BLOCKS, PARCEL_BYTES // slot_bytes))


class Parcels:
    """The parcels of one place, with up to `blocks` blocks each. Keys that are given begin with the
    first block of a window, except those of `write`."""

    def __init__(
        self, tier: Tier, place: str, blocks: int, shard_bytes: Sequence[int] = ()
    ) -> None:
        self._tier = tier
        self._place = f"{place}/parcels-{blocks}"
        self._most = blocks
        self._shards = len(shard_bytes)
        self._block_bytes = sum(shard_bytes)

    def leading(self, keys: bytes) -> int:
        """How many leading blocks are there. A hole in an earlier window than the last may be
        overlooked; reading finds it."""
        blocks = len(keys) // KEY_BYTES
        names = [self._name(keys, at) for at in range(0, blocks, self._most)]
        windows = self._tier.leading(names)
        if not windows:
            return 0
        at = (windows - 1) * self._most
        stop = min(windows * self._most, blocks)
        while at < stop and (matching := self._matching(keys, at, stop)):
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
            matching = self._matching(keys, at, len(blocks))
            at += matching
            tries = 0 if matching else tries + 1
            if tries == _TRIES:
                break  # what another release wrote has the name: to no avail, as for single blocks
        return len(blocks)

    def _put(self, keys: bytes, at: int, blocks: Sequence[Block], sums: NDArray[np.uint64]) -> bool:
        count = len(blocks) - at
        header = bytearray(self._header_bytes)
        _HEAD.pack_into(header, 0, _MAGIC, _VERSION, count)
        mine = keys[at * KEY_BYTES :]
        header[_HEAD.size : _HEAD.size + len(mine)] = mine
        self._rows(header)[:count] = sums[at:]
        views = [memoryview(header), *(view for block in blocks[at:] for view in block)]
        return self._tier.write([Part(self._name(keys, at), views)]) == [True]

    def _matching(self, keys: bytes, at: int, stop: int) -> int:
        """How many blocks from `at` on are in the parcel that begins there."""
        # With two views the tier reads all of its first frame at once.
        views = [memoryview(bytearray(size)) for size in (_HEAD.size, self._most * KEY_BYTES)]
        (found,) = self._tier.read([Part(self._name(keys, at), views)])
        if found < _HEAD.size + self._most * KEY_BYTES:
            return 0
        return self._compare(b"".join(views), keys, at, stop)

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
            whole = Part(name, [memoryview(header)[: _HEAD.size], memoryview(header)[_HEAD.size :]])
            found, nbytes = self._tier.read([whole, Part(name, views, offset)])
        if found < len(header):
            return 0, 0
        matching = self._compare(header, keys, at, first + len(blocks))
        usable = min(at + matching - first, max(0, nbytes) // self._block_bytes)
        rows = self._rows(header)[first - at :]
        for number in range(usable):
            if [checksum(shard) for shard in blocks[number]] != rows[number].tolist():
                return matching, number
            sums[number] = rows[number]
        return matching, max(0, usable)

    def _compare(self, header: bytes | bytearray, keys: bytes, at: int, stop: int) -> int:
        """How many leading keys of a parcel are those from `at` on. 0 for what is no parcel of this
        version."""
        magic, version, count = _HEAD.unpack_from(header)
        if magic != _MAGIC or version != _VERSION:
            return 0
        most: int = min(count, self._most, stop - at)
        for number in range(most):
            theirs = header[_HEAD.size + number * KEY_BYTES :][:KEY_BYTES]
            if theirs != keys[(at + number) * KEY_BYTES :][:KEY_BYTES]:
                return number
        return most

    @property
    def _header_bytes(self) -> int:
        return _HEAD.size + self._most * (KEY_BYTES + self._shards * _SUM_BYTES)

    def _rows(self, header: bytearray) -> NDArray[np.uint64]:
        rows = np.frombuffer(header, "<u8", offset=_HEAD.size + self._most * KEY_BYTES)
        return rows.reshape(self._most, self._shards)

    def _name(self, keys: bytes, at: int) -> str:
        return f"{self._place}/{keys[at * KEY_BYTES :][:KEY_BYTES].hex()}"
