"""The log of a disk tier: what is written to it, and how it is read back.

    log    | frame | frame | frame | ...          each begins on a 4 KiB boundary
    frame  head: magic, flags, bytes, sequence, checksum of the frame before, checksum | records
    record length | number, generation, tenant, layout, rows, their checksums, freed slots, uses

A frame is one commit. Its checksum covers the checksum of the frame before it, so replay ends at the
first frame that is torn, lost or left over from an earlier use of the file. A log begins with an
image: frames with all live rows, of which the last is marked.

Records may be appended in any order. Each has the number of its plan, and the index gives a slot to
a new block only after the old one has left it. So of several claims to a slot the one with the
highest number is true, and so of several rows with one key; a freed slot ends the claims with lower
numbers. A claim whose free was lost is harmless: its slot still holds what the row says, or fails
the checksum.

A clear raises the generation. It ends all rows of its tenant with a lower generation, even if their
record is appended after it: a cleared tenant stays cleared."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import checksum
from kvkeep.store.layouts import Layout
from kvkeep.store.records import LONGEST_FINGERPRINT_BYTES, MOST_SHARDS

FRAME_ALIGN = 4096
IMAGE, IMAGE_END = 1, 2  # flags of a frame
_MAGIC = b"kvkl"
# magic, flags, bytes of records, sequence, checksum of the frame before, checksum
_HEAD = struct.Struct("<4sIQQQQ")
_CHECK_AT = _HEAD.size - 8
_LENGTH = struct.Struct("<I")
_ROWS_A_RECORD = 4096  # of an image

ALL_TENANTS = ""  # no tenant has this name
ROOT = -1  # parent of a block without one
ROW = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("seal", "<u8"),
        ("slot", "<i8"),  # byte offset in `data`
        ("parent", "<i8"),  # slot of the parent, or ROOT
        ("expires_ms", "<i8"),
        ("number", "<i8"),  # of the record that claimed the slot
        ("used", "<i8"),  # number of the last record that tells of a use
        ("generation", "<i4"),
        ("priority", "<i4"),
    ]
)
Rows = NDArray[np.void]
Numbers = NDArray[np.int64]


class Record(msgspec.Struct, array_like=True):
    """One change of the index. All rows are of one tenant and one layout."""

    number: int
    generation: int
    oldest: int  # no record that is appended later has a lower generation
    tenant: str = ""
    cleared: bool = False  # rows of this tenant with lower generations are gone
    fingerprint: bytes = b""
    shard_bytes: tuple[int, ...] = ()
    physical: dict[int, bytes] = {}
    rows: bytes = b""
    checks: bytes = b""
    freed: bytes = b""  # slots
    used: bytes = b""  # slots

    def encode(self) -> bytes:
        data = msgspec.msgpack.encode(self)
        return _LENGTH.pack(len(data)) + data


@dataclass(frozen=True)
class Frame:
    """A frame that was read and verified."""

    records: memoryview
    flags: int
    sequence: int
    check: int
    nbytes: int  # in the log


@dataclass
class LayoutFound:
    """A layout, with the checksums of its live rows."""

    fingerprint: bytes
    shard_bytes: tuple[int, ...]
    physical: dict[int, bytes]
    checks: NDArray[np.uint64]


@dataclass
class Recovered:
    """What a log says. `layout` and `tenant` of a row are positions in the lists, `check` is its row
    in the checksums of its layout."""

    rows: Rows = field(default_factory=lambda: np.empty(0, ROW))
    tenant: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    layout: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    check: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    tenants: list[str] = field(default_factory=list)
    layouts: list[LayoutFound] = field(default_factory=list)
    clears: dict[str, int] = field(default_factory=dict)
    number: int = 0  # the highest seen
    generation: int = 0  # the highest seen
    oldest: int = 0
    dropped: int = 0  # rows that contradicted others
    is_cut: bool = False  # a record is none, and what follows it was not read
    most_image_bytes: int = 1 << 62  # that the log has room for

    def image(self) -> Iterator[bytes]:
        """Records that say the same, a few rows each."""
        for name, generation in self.clears.items():
            if generation > self.oldest:
                yield Record(self.number, generation, self.oldest, name, cleared=True).encode()
        yield Record(self.number, self.generation, self.oldest).encode()
        order = np.lexsort((self.layout, self.tenant))
        owners = self.tenant[order] * (len(self.layouts) + 1) + self.layout[order]
        for some in np.split(order, np.flatnonzero(np.diff(owners)) + 1) if len(order) else []:
            name, layout = self.tenants[self.tenant[some[0]]], self.layouts[self.layout[some[0]]]
            for at in range(0, len(some), _ROWS_A_RECORD):
                part = some[at : at + _ROWS_A_RECORD]
                yield Record(
                    self.number,
                    self.generation,
                    self.oldest,
                    name,
                    fingerprint=layout.fingerprint,
                    shard_bytes=layout.shard_bytes,
                    physical=layout.physical,
                    rows=self.rows[part].tobytes(),
                    checks=layout.checks[self.check[part]].tobytes(),
                ).encode()


def frame(records: bytes, flags: int, sequence: int, before: int) -> tuple[bytearray, int]:
    """A frame, padded to whole 4 KiB, and its checksum."""
    nbytes = _HEAD.size + len(records)
    data = bytearray(-(-nbytes // FRAME_ALIGN) * FRAME_ALIGN)
    _HEAD.pack_into(data, 0, _MAGIC, flags, len(records), sequence, before, 0)
    data[_HEAD.size : nbytes] = records
    check = checksum(memoryview(data)[:nbytes])
    struct.pack_into("<Q", data, _CHECK_AT, check)
    return data, check


def read_frames(read: Callable[[int, int], memoryview], log_bytes: int) -> Iterator[Frame]:
    """The frames of a log up to its end. `read(offset, nbytes)` returns writable bytes, fewer at the
    end of the file. Nothing if the log does not begin with a complete image."""
    begun: list[Frame] | None = []  # the frames of the image, until it is complete
    at, before = 0, None
    while at + FRAME_ALIGN <= log_bytes:
        found = _read_frame(read, at, log_bytes - at)
        if found is None or (before is not None and found[:2] != before):
            return
        sequence, _, each = found
        at, before = at + each.nbytes, (sequence + 1, each.check)
        if begun is None:
            yield each
            continue
        if not each.flags & IMAGE:
            return
        begun.append(each)
        if each.flags & IMAGE_END:
            yield from begun
            begun = None


def _read_frame(
    read: Callable[[int, int], memoryview], at: int, room: int
) -> tuple[int, int, Frame] | None:
    """Sequence, checksum of the frame before, and the frame at this place; None if there is none."""
    data = read(at, min(room, 4 * FRAME_ALIGN))
    if len(data) < _HEAD.size:
        return None
    magic, flags, nbytes, sequence, before, check = _HEAD.unpack_from(data)
    nbytes += _HEAD.size
    if magic != _MAGIC or nbytes > room:
        return None
    if len(data) < nbytes:
        data = read(at, nbytes)
        if len(data) < nbytes:
            return None
    struct.pack_into("<Q", data, _CHECK_AT, 0)
    if checksum(data[:nbytes]) != check:
        return None
    padded = -(-nbytes // FRAME_ALIGN) * FRAME_ALIGN
    return sequence, before, Frame(data[_HEAD.size : nbytes], flags, sequence, check, padded)


_decode = msgspec.msgpack.Decoder(Record).decode


def _records(frames: Iterable[Frame], found: Recovered) -> Iterator[Record]:
    """The records, up to the first that is none: its checksum matched, but no release wrote it."""
    for each in frames:
        at = 0
        while at < len(each.records):
            try:
                (nbytes,) = _LENGTH.unpack_from(each.records, at)
                at += _LENGTH.size
                record = _decode(each.records[at : at + nbytes])
            except (struct.error, msgspec.MsgspecError, ValueError):
                found.is_cut = True
                return
            if not _is_sound(record):
                found.is_cut = True
                return
            yield record
            at += nbytes


def _is_sound(record: Record) -> bool:
    rows, shards = len(record.rows) // ROW.itemsize, len(record.shard_bytes)
    return (
        len(record.rows) == rows * ROW.itemsize
        and len(record.checks) == 8 * rows * shards
        and len(record.freed) % 8 == len(record.used) % 8 == 0
        and (not rows or 0 < shards <= MOST_SHARDS)
        and all(0 < nbytes < 1 << 48 for nbytes in record.shard_bytes)
        and all(0 <= shard < shards and len(d) == 16 for shard, d in record.physical.items())
        and len(record.fingerprint) <= LONGEST_FINGERPRINT_BYTES
        and max(record.number, record.generation, record.oldest) < 1 << 62
    )


class _Parts:
    """Arrays of all records, before they are one."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.tenant: list[int] = []
        self.layout: list[int] = []
        self.check: list[Numbers] = []
        self.checks: list[list[NDArray[np.uint64]]] = []  # by layout
        self.freed: list[bytes] = []
        self.freed_by: list[int] = []
        self.used: list[bytes] = []
        self.used_by: list[int] = []


def replay(frames: Iterable[Frame], slab_bytes: int) -> Recovered:
    """The live rows of a log."""
    found, parts = Recovered(), _Parts()
    tenants: dict[str, int] = {}
    layouts: dict[tuple[bytes, tuple[int, ...]], int] = {}
    filled: list[int] = []  # rows of checksums, by layout
    for record in _records(frames, found):
        found.number = max(found.number, record.number)
        found.generation = max(found.generation, record.generation)
        found.oldest = max(found.oldest, record.oldest)
        if record.cleared:
            found.clears[record.tenant] = max(record.generation, found.clears.get(record.tenant, 0))
        if record.freed:
            parts.freed.append(record.freed)
            parts.freed_by.append(record.number)
        if record.used:
            parts.used.append(record.used)
            parts.used_by.append(record.number)
        if not record.rows:
            continue
        shape = (record.fingerprint, record.shard_bytes)
        layout = layouts.setdefault(shape, len(layouts))
        if layout == len(filled):
            filled.append(0)
            parts.checks.append([])
            found.layouts.append(LayoutFound(*shape, {}, np.empty((0, len(shape[1])), np.uint64)))
        found.layouts[layout].physical |= record.physical
        rows = np.frombuffer(record.rows, ROW)
        parts.rows.append(rows)
        parts.tenant.append(tenants.setdefault(record.tenant, len(tenants)))
        parts.layout.append(layout)
        checks = np.frombuffer(record.checks, "<u8").reshape(len(rows), len(shape[1]))
        parts.checks[layout].append(checks)
        parts.check.append(np.arange(filled[layout], filled[layout] + len(rows)))
        filled[layout] += len(rows)
    found.tenants = list(tenants)
    if parts.rows:
        _join(found, parts)
        _resolve(found, parts, slab_bytes)
    return found


def _join(found: Recovered, parts: _Parts) -> None:
    lengths = [len(rows) for rows in parts.rows]
    found.rows = np.concatenate(parts.rows)
    found.tenant = np.repeat(np.array(parts.tenant), lengths)
    found.layout = np.repeat(np.array(parts.layout), lengths)
    found.check = np.concatenate(parts.check)
    for layout, checks in zip(found.layouts, parts.checks, strict=True):
        layout.checks = np.concatenate(checks)


def _resolve(found: Recovered, parts: _Parts, slab_bytes: int) -> None:
    """Keeps the live rows: the newest claim of each slot, unless it was freed or cleared."""
    slot, number = found.rows["slot"], found.rows["number"]
    order = np.lexsort((number, slot))
    last = np.append(np.diff(slot[order]) != 0, True)
    newest = order[last]  # by slot
    # two claims with the same number contradict each other
    twice = np.append(False, (np.diff(slot[order]) == 0) & (np.diff(number[order]) == 0))[last]
    live = ~twice
    found.dropped = int(twice.sum())
    slots = slot[newest]
    freed = _newest(slots, parts.freed, parts.freed_by)
    live &= freed <= number[newest]
    if found.clears:
        all_cleared = found.clears.get(ALL_TENANTS, 0)
        cleared = np.array([max(all_cleared, found.clears.get(t, 0)) for t in found.tenants])
        live &= found.rows["generation"][newest] >= cleared[found.tenant[newest]]
    # A slab has slots of one size. Where claims differ, the newest has the present one.
    sizes = np.array([Layout(0, b"", each.shard_bytes).slot_bytes for each in found.layouts])
    size, slab = sizes[found.layout[newest]], slots // slab_bytes
    by_slab = np.lexsort((number[newest], slab))
    _, where, which = np.unique(slab[by_slab][::-1], return_index=True, return_inverse=True)
    present = size[by_slab][::-1][where]
    same = np.empty(len(newest), np.bool_)
    same[by_slab] = (size[by_slab][::-1] == present[which.reshape(-1)])[::-1]
    live &= same
    live[live] = _newest_of_each_key(found, newest[live])
    found.rows["used"][newest] = np.maximum(
        found.rows["used"][newest], _newest(slots, parts.used, parts.used_by)
    )
    kept = newest[live]
    found.rows, found.tenant = found.rows[kept], found.tenant[kept]
    found.layout, found.check = found.layout[kept], found.check[kept]


def _newest_of_each_key(found: Recovered, rows: Numbers) -> NDArray[np.bool_]:
    """Which rows are the newest of their tenant and key. A block that was evicted and stored again
    may be named twice, if the record with its freed slot was lost."""
    keys, tenant = found.rows["key"][rows], found.tenant[rows]
    order = np.lexsort((found.rows["number"][rows], keys[:, 0], keys[:, 1], tenant))
    changes = (np.diff(tenant[order]) != 0) | (np.diff(keys[order], axis=0) != 0).any(axis=1)
    last = np.empty(len(rows), np.bool_)
    last[order] = np.append(changes, True)[: len(rows)]
    return last


def _newest(slots: Numbers, named: list[bytes], numbers: list[int]) -> Numbers:
    """For each of the slots, in ascending order, the highest number of a record that names it."""
    highest = np.full(len(slots), -1, np.int64)
    if named:
        at = np.frombuffer(b"".join(named), "<i8")
        by = np.repeat(np.array(numbers), [len(each) // 8 for each in named])
        place = np.searchsorted(slots, at)
        known = place < len(slots)
        known[known] = slots[place[known]] == at[known]
        np.maximum.at(highest, place[known], by[known])
    return highest
