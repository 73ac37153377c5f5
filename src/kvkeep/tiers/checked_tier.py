"""A tier whose medium is a service that other hosts use as well: what it returns is verified.

What is written is cut into segments, and each is stored with a frame of 64 bytes before it:

    | head | proof | up to 256 KiB | head | proof | up to 256 KiB | ...

    head   magic, version, kind of proof, number of the segment, bytes of the whole
    proof  that this segment was written under this name: a checksum

A segment stands on its own, so a range is read in one call and verified like the whole. A frame of
another version, or of another kind where names are not secret, is a miss and stays as it is: another
release of kvkeep wrote it. Whatever else is wrong (truncated, changed, moved from another name), and
still is when it is read again, is a miss and is removed, so that the next write repairs it for all
hosts."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvkeep.kv.checksum import checksum
from kvkeep.tiers.tier import Part, Tier, Usage

SEGMENT_BYTES = 256 * 1024
HEAD = struct.Struct("<4sBBHIQ4x")
PROOF_BYTES = 40
FRAME_BYTES = HEAD.size + PROOF_BYTES
VERSION = 1
_MAGIC = b"kvkt"
_LONGER = -2  # what is stored is longer than what was read
_CHECKS = struct.Struct("<QQ")  # of the data; of head, name and the one before


class Verdict(Enum):
    """What a reader may think of a segment."""

    GOOD = "it was written under this name"
    BAD = "it was not"
    UNKNOWN = "it cannot be told here"


class Medium(Tier, Protocol):
    """A service, as it is. What it returns may be anything."""

    def drop(self, names: Sequence[str]) -> None:
        """Removes these, if they are there."""


class Proofs(Protocol):
    """How segments are proved, and under which names the medium has them."""

    kind: int
    is_secret: bool
    other_kind: Verdict  # on a frame of another kind under one of these names

    def names(self, name: str) -> Sequence[str]:
        """The medium's names, the one to write under first. A prefix has prefixes."""

    def seal(self, name: str, head: bytes, data: memoryview) -> tuple[bytes, bytes | memoryview]:
        """The proof, and what is to be stored."""

    def open(self, name: str, head: bytes, proof: bytes, data: memoryview) -> Verdict:
        """Verifies what was stored, and turns it in place into what was written."""


class Checksums:
    """Finds accidents. It does not find forgeries: everybody can compute it."""

    kind = 0
    is_secret = False
    other_kind = Verdict.UNKNOWN

    def names(self, name: str) -> Sequence[str]:
        return [name]

    def seal(self, name: str, head: bytes, data: memoryview) -> tuple[bytes, bytes | memoryview]:
        return self._proof(name, head, data), data

    def open(self, name: str, head: bytes, proof: bytes, data: memoryview) -> Verdict:
        return Verdict.GOOD if self._proof(name, head, data) == proof else Verdict.BAD

    def _proof(self, name: str, head: bytes, data: memoryview) -> bytes:
        of_data = checksum(data)
        of_all = checksum(head + name.encode() + of_data.to_bytes(8, "little"))
        return _CHECKS.pack(of_data, of_all).ljust(PROOF_BYTES, b"\0")


@dataclass
class _Segment:
    """Where one segment is read to. `views` get its data: what the caller wants goes straight to
    the caller if `wanted` is the beginning of one view."""

    number: int
    frame: memoryview
    views: list[memoryview]
    wanted: slice
    is_direct: bool


class CheckedTier:
    """Owns the medium, and closes it."""

    def __init__(self, medium: Medium, proofs: Proofs | None = None) -> None:
        self.medium = medium
        self.best_bytes = medium.best_bytes
        self._proofs: Proofs = proofs or Checksums()

    @property
    def bare(self) -> Medium:
        """For values that prove themselves: without frames, unless they are encrypted."""
        return self if self._proofs.is_secret else self.medium

    def leading(self, names: Sequence[str]) -> int:
        if not names:
            return 0
        versions = list(zip(*(self._proofs.names(name) for name in names), strict=True))
        found, stopped = 0, 0  # stopped: so many versions in turn had nothing at this place
        turn = 0
        while found < len(names) and stopped < len(versions):
            more = self.medium.leading(versions[turn % len(versions)][found:])
            found += more
            stopped = 0 if more and len(versions) > 1 else stopped + 1
            turn += 1
        return found

    def read(self, parts: Sequence[Part]) -> list[int]:
        """After -1, a part's views may hold anything."""
        result = [-1] * len(parts)
        tries = [list(self._proofs.names(part.name)) for part in parts]
        for version in range(max(map(len, tries), default=0)):
            left = [
                number
                for number, found in enumerate(result)
                if found < 0 and version < len(tries[number])
            ]
            if not left:
                break
            stored = [tries[number][version] for number in left]
            found = self._read_stored([parts[number] for number in left], stored)
            for number, nbytes in zip(left, found, strict=True):
                result[number] = nbytes
        return result

    def write(self, parts: Sequence[Part]) -> list[bool]:
        return self.medium.write([self._sealed(part) for part in parts])

    def delete(self, prefix: str) -> int:
        return sum(self.medium.delete(each) for each in self._proofs.names(prefix))

    def drop(self, names: Sequence[str]) -> None:
        """Removes these, if they are there, in whatever version."""
        self.medium.drop([each for name in names for each in self._proofs.names(name)])

    def usage(self) -> Usage:
        return self.medium.usage()

    def close(self) -> None:
        self.medium.close()

    def _sealed(self, part: Part) -> Part:
        name = self._proofs.names(part.name)[0]
        views: list[memoryview] = []
        total = part.nbytes
        for number, data in enumerate(_segments(part.views)):
            head = HEAD.pack(_MAGIC, VERSION, self._proofs.kind, 0, number, total)
            proof, stored = self._proofs.seal(name, head, data)
            views += [memoryview(head + proof), memoryview(stored)]
        return Part(name, views)

    def _read_stored(self, parts: Sequence[Part], names: Sequence[str]) -> list[int]:
        result = self._read_planned(parts, names, [_plan(part) for part in parts])
        longer = [number for number, nbytes in enumerate(result) if nbytes == _LONGER]
        if longer:
            some = [parts[number] for number in longer]
            stored = [names[number] for number in longer]
            planned = [_plan(part, is_longer=True) for part in some]
            found = self._read_planned(some, stored, planned)
            for number, nbytes in zip(longer, found, strict=True):
                result[number] = nbytes
        return result

    def _read_planned(
        self, parts: Sequence[Part], names: Sequence[str], planned: Sequence[list[_Segment]]
    ) -> list[int]:
        """What is bad is read again: only the way from the service may have spoilt it."""
        result: list[int] = [-1] * len(parts)
        left: Sequence[int] = range(len(parts))
        for _ in range(2):
            some = [(parts[number], names[number], planned[number]) for number in left]
            bad: list[int] = []
            for number, (verdict, nbytes) in zip(left, self._read_once(some), strict=True):
                result[number] = nbytes if verdict is Verdict.GOOD else -1
                if verdict is Verdict.BAD:
                    bad.append(number)
            left = bad
            if not bad:
                return result
        self.medium.drop([names[number] for number in left])
        return result

    def _read_once(
        self, asked: Sequence[tuple[Part, str, list[_Segment]]]
    ) -> Iterator[tuple[Verdict, int]]:
        """What to think of each, and bytes for the caller."""
        found = self.medium.read(
            [
                Part(
                    name,
                    [view for each in plan for view in (each.frame, *each.views)],
                    plan[0].number * (FRAME_BYTES + SEGMENT_BYTES),
                )
                for _, name, plan in asked
            ]
        )
        for (part, name, plan), nbytes in zip(asked, found, strict=True):
            if nbytes > 0:
                yield self._take(part, name, plan, nbytes)
            elif nbytes == 0 and part.offset < SEGMENT_BYTES:
                yield Verdict.BAD, 0  # of what is there, the beginning is missing
            else:
                yield Verdict.GOOD, nbytes

    def _take(
        self, part: Part, name: str, plan: Sequence[_Segment], nbytes: int
    ) -> tuple[Verdict, int]:
        """Verifies the segments that `nbytes` bytes fill. Bytes for the caller."""
        total = 0
        for segment in plan:
            head, proof = bytes(segment.frame[: HEAD.size]), bytes(segment.frame[HEAD.size :])
            if nbytes < FRAME_BYTES:
                return Verdict.BAD, 0
            magic, version, kind, _, number, total = HEAD.unpack(head)
            if magic != _MAGIC:
                return Verdict.BAD, 0
            if version != VERSION:
                return Verdict.UNKNOWN, 0
            if kind != self._proofs.kind:
                return self._proofs.other_kind, 0
            length = min(SEGMENT_BYTES, total - number * SEGMENT_BYTES)
            room = sum(view.nbytes for view in segment.views)
            if number == segment.number and nbytes == FRAME_BYTES + room < FRAME_BYTES + length:
                return Verdict.GOOD, _LONGER
            if number != segment.number or length < 0 or nbytes < FRAME_BYTES + length:
                return Verdict.BAD, 0
            verdict = self._open(segment, name, head, proof, length, part)
            if verdict is not Verdict.GOOD:
                return verdict, 0
            nbytes -= FRAME_BYTES + length
            if length < SEGMENT_BYTES:
                break
            if total == (number + 1) * SEGMENT_BYTES:
                break
        return Verdict.GOOD, max(0, min(part.nbytes, total - part.offset))

    def _open(
        self, segment: _Segment, name: str, head: bytes, proof: bytes, length: int, part: Part
    ) -> Verdict:
        first = segment.views[0]
        if length <= first.nbytes and segment.is_direct:
            return self._proofs.open(name, head, proof, first[:length])
        data = first if len(segment.views) == 1 else memoryview(bytearray(b"".join(segment.views)))
        verdict = self._proofs.open(name, head, proof, data[:length])
        if verdict is Verdict.GOOD:
            wanted = data[: min(length, segment.wanted.stop)][segment.wanted.start :]
            _copy(wanted, part.views, max(0, segment.number * SEGMENT_BYTES - part.offset))
        return verdict


def _segments(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of these views, a segment each; one empty segment if there are none."""
    pieces: list[memoryview] = []
    room = SEGMENT_BYTES
    for view in views:
        data, at = view.cast("B"), 0
        while at < data.nbytes:
            pieces.append(data[at : at + room])
            at += pieces[-1].nbytes
            room -= pieces[-1].nbytes
            if not room:
                yield _joined(pieces)
                pieces, room = [], SEGMENT_BYTES
    if pieces or not any(view.nbytes for view in views):
        yield _joined(pieces)


def _joined(pieces: Sequence[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _plan(part: Part, is_longer: bool = False) -> list[_Segment]:
    """The segments that have these bytes. They are read whole, because they are verified whole. Only
    what may be all of a short block is read as if it were, unless it is known to be longer: room
    for a whole segment costs more than such a block."""
    first = part.offset // SEGMENT_BYTES
    end = part.offset + part.nbytes
    last = max(first, -(-end // SEGMENT_BYTES) - 1)
    frames = memoryview(bytearray((last - first + 1) * FRAME_BYTES))
    plan: list[_Segment] = []
    has_spare = is_longer or part.offset > 0 or part.nbytes > SEGMENT_BYTES
    for number in range(first, last + 1):
        start = number * SEGMENT_BYTES
        wanted = slice(max(0, part.offset - start), min(SEGMENT_BYTES, end - start))
        frame = frames[(number - first) * FRAME_BYTES :][:FRAME_BYTES]
        direct = _direct(part, start, wanted)
        if direct is None:
            views = [memoryview(bytearray(SEGMENT_BYTES))]
        elif has_spare:
            views = [direct, memoryview(bytearray(SEGMENT_BYTES - wanted.stop))]
        else:
            views = [direct]
        plan.append(_Segment(number, frame, views, wanted, direct is not None))
    return plan


def _direct(part: Part, start: int, wanted: slice) -> memoryview | None:
    """The caller's memory for the beginning of a segment, if one view has it."""
    at = start - part.offset
    if wanted.start == 0 and wanted.stop > 0:
        for view in part.views:
            if at < view.nbytes:
                direct = view.cast("B")[at : at + wanted.stop]
                return direct if direct.nbytes == wanted.stop else None
            at -= view.nbytes
    return None


def _copy(data: memoryview, views: Sequence[memoryview], at: int) -> None:
    """Copies to this place of the views."""
    for view in views:
        if at < view.nbytes and data.nbytes:
            target = view.cast("B")[at : at + data.nbytes]
            target[:] = data[: target.nbytes]
            data = data[target.nbytes :]
        at = max(0, at - view.nbytes)
