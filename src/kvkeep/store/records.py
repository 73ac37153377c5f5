"""Tenants and layouts as records of fixed size, in columns beside those of the blocks.

Blocks name their tenant and layout by number; these records say which they are. A tenant's record
needs no check of its own, because the seal of each of its blocks covers its name. A layout's record
has one, and so has the order of tensors that the first worker of each shard declared: without it,
a worker with another order could read what that one stored."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvkeep.kv.checksum import checksum
from kvkeep.store.table import Columns

MOST_SHARDS = 1024
LONGEST_FINGERPRINT_BYTES = 64
_LONGEST_NAME_BYTES = 60
_FIRST_TENANTS = 64

TENANT = np.dtype([("length", "<i4"), ("name", "u1", (_LONGEST_NAME_BYTES,))])
LAYOUT = np.dtype(
    [
        ("check", "<u8"),  # of the five that follow; 0 while there is no layout here
        ("number", "<i8"),
        ("fingerprint_bytes", "<i8"),
        ("fingerprint", "u1", (LONGEST_FINGERPRINT_BYTES,)),
        ("shards", "<i8"),
        ("shard_bytes", "<i8", (MOST_SHARDS,)),
        # A digest in two words and their check, 0 while no worker has registered.
        ("physical", "<u8", (MOST_SHARDS, 3)),
    ]
)
_CHECKED = slice(LAYOUT.fields["number"][1], LAYOUT.fields["physical"][1])  # type: ignore[index]


def word_of(*parts: bytes) -> int:
    """Hashes names of any length to 64 bits."""
    digest = blake2b(digest_size=8, person=b"kvkeep.seal")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little")


class TenantRecords:
    """The names of tenants by number."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._records = columns.grow("tenants", TENANT, 0, _FIRST_TENANTS)

    def put(self, number: int, name: str) -> None:
        """Writes a record, before the tenant's first block. (A name too long for a record is no
        tenant id; its blocks are not adopted.)"""
        if number >= len(self._records):
            self._records = self._columns.grow(
                "tenants", TENANT, 0, max(2 * len(self._records), number + 1)
            )
        encoded = name.encode(errors="surrogatepass")[:_LONGEST_NAME_BYTES]
        self._records[number]["name"][: len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._records[number]["length"] = len(encoded)

    def get(self, number: int) -> str | None:
        """The name in the record, if it is a valid one."""
        if not 0 <= number < len(self._records):
            return None
        length = int(self._records[number]["length"])
        if not 0 < length <= _LONGEST_NAME_BYTES:
            return None
        encoded: bytes = self._records[number]["name"][:length].tobytes()
        try:
            return encoded.decode(errors="surrogatepass")
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class LayoutFound:
    """A layout as its record says."""

    number: int
    fingerprint: bytes
    shard_bytes: tuple[int, ...]
    physical: dict[int, bytes]


class LayoutRecords:
    """The layouts by their place in the column, each with its number."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._records = columns.grow("layouts", LAYOUT, 0, 1)
        self._places: dict[int, int] = {}  # number -> place

    def put(self, number: int, fingerprint: bytes, shard_bytes: tuple[int, ...]) -> None:
        """Writes a record, before the layout's first block."""
        taken = set(self._places.values())
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        if place >= len(self._records):
            self._records = self._columns.grow("layouts", LAYOUT, 0, place + 1)
        record = self._records[place]
        record["check"] = 0
        record["number"] = number
        record["shards"] = len(shard_bytes)
        record["fingerprint_bytes"] = len(fingerprint)
        record["fingerprint"][: len(fingerprint)] = np.frombuffer(fingerprint, np.uint8)
        record["shard_bytes"][: len(shard_bytes)] = shard_bytes
        record["physical"][:] = 0
        record["check"] = self._check(place)
        self._places[number] = place

    def put_physical(self, number: int, shard: int, digest: bytes) -> None:
        """Writes the order of tensors that the first worker of a shard declared, before the worker
        is answered."""
        entry = self._records[self._places[number]]["physical"][shard]
        entry[:2] = np.frombuffer(digest, "<u8")
        entry[2] = word_of(digest, shard.to_bytes(8, "little")) or 1

    def remove(self, number: int) -> None:
        self._records[self._places.pop(number)]["check"] = 0

    def find_all(self) -> list[LayoutFound]:
        """All layouts with valid records. Removes the others."""
        found: dict[int, LayoutFound] = {}
        for place in range(len(self._records)):
            layout = self._read(place)
            if layout is None or layout.number in found:
                self._records[place]["check"] = 0
            else:
                found[layout.number] = layout
                self._places[layout.number] = place
        return list(found.values())

    def _read(self, place: int) -> LayoutFound | None:
        record = self._records[place]
        if not record["check"] or int(record["check"]) != self._check(place):
            return None
        number, length, shards = (
            int(record[name]) for name in ("number", "fingerprint_bytes", "shards")
        )
        if not (
            0 < number < 1 << 31
            and 0 <= length <= LONGEST_FINGERPRINT_BYTES
            and 0 < shards <= MOST_SHARDS
        ):
            return None
        shard_bytes = tuple(record["shard_bytes"][:shards].tolist())
        physical = {}
        for shard in np.flatnonzero(record["physical"][:shards, 2]).tolist():
            digest = record["physical"][shard, :2].tobytes()
            if int(record["physical"][shard, 2]) != (
                word_of(digest, shard.to_bytes(8, "little")) or 1
            ):
                return None
            physical[shard] = digest
        if not all(0 < nbytes < 1 << 48 for nbytes in shard_bytes):
            return None
        return LayoutFound(number, record["fingerprint"][:length].tobytes(), shard_bytes, physical)

    def _check(self, place: int) -> int:
        return checksum(self._records[place : place + 1].view(np.uint8)[_CHECKED]) or 1
