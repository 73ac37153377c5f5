"""The log of a disk tier: what replay believes, whatever order records and their parts come in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import msgspec
import numpy as np
import pytest

from kvkeep.tiers.disk_log import (
    FRAME_ALIGN,
    IMAGE,
    IMAGE_END,
    ROOT,
    ROW,
    Frame,
    Record,
    Recovered,
    frame,
    read_frames,
    replay,
)

SLAB = 1 << 16
SMALL, LARGE = (4096,), (8192,)


def record(
    number: int,
    slots: tuple[int, ...] = (),
    freed: tuple[int, ...] = (),
    used: tuple[int, ...] = (),
    tenant: str = "a",
    shard_bytes: tuple[int, ...] = SMALL,
    generation: int = 0,
    oldest: int = 0,
) -> bytes:
    rows = np.zeros(len(slots), ROW)
    rows["slot"], rows["parent"] = slots, ROOT
    rows["number"] = rows["used"] = number
    rows["generation"] = generation
    rows["key"][:, 0], rows["key"][:, 1] = number, slots
    return Record(
        number,
        generation,
        oldest,
        tenant,
        fingerprint=repr(shard_bytes).encode(),
        shard_bytes=shard_bytes,
        rows=rows.tobytes(),
        checks=np.full((len(slots), len(shard_bytes)), number, "<u8").tobytes(),
        freed=np.array(freed, "<i8").tobytes(),
        used=np.array(used, "<i8").tobytes(),
    ).encode()


def clear(number: int, tenant: str, generation: int) -> bytes:
    return Record(number, generation, 0, tenant, cleared=True).encode()


def log_of(*frames: tuple[bytes, int], before: int = 0, sequence: int = 1) -> bytearray:
    log = bytearray()
    for records, flags in frames:
        data, before = frame(records, flags, sequence, before)
        log += data
        sequence += 1
    return log


def frames_in(log: bytearray) -> list[Frame]:
    def read(offset: int, nbytes: int) -> memoryview:
        return memoryview(log[offset : offset + nbytes])

    return list(read_frames(read, len(log)))


def replayed(*records: bytes) -> Recovered:
    return replay(frames_in(log_of((b"".join(records), IMAGE | IMAGE_END))), SLAB)


def claims(found: Recovered) -> dict[int, int]:
    """Slot -> number of the record whose row holds it; the checksums must be that row's."""
    for row, layout, check in zip(found.rows, found.layout, found.check, strict=True):
        assert (found.layouts[layout].checks[check] == row["number"]).all()
    return dict(zip(found.rows["slot"].tolist(), found.rows["number"].tolist(), strict=True))


def test_the_newest_claim_of_a_slot_is_believed_in_any_order() -> None:
    records = [record(1, (0, 4096)), record(2, (0,)), record(3, (8192,), freed=(4096,))]
    for seed in range(6):
        Random(seed).shuffle(records)
        assert claims(replayed(*records)) == {0: 2, 8192: 3}


def test_a_slot_freed_and_claimed_in_one_record_is_claimed() -> None:
    assert claims(replayed(record(1, (0,)), record(2, (0,), freed=(0,)))) == {0: 2}


def test_a_freed_slot_without_a_claim_is_no_error() -> None:
    assert claims(replayed(record(5, (), freed=(0, 1 << 50)), record(1, (4096,)))) == {4096: 1}


def test_two_claims_with_one_number_drop_both() -> None:
    found = replayed(record(1, (0, 4096, 0)), record(2, (8192,)))
    assert claims(found) == {4096: 1, 8192: 2} and found.dropped == 1


def test_the_newest_row_of_a_key_is_believed() -> None:
    old = record(1, (0,))
    decoded = msgspec.msgpack.decode(record(2, (4096,))[4:], type=Record)
    rows = np.frombuffer(decoded.rows, ROW).copy()
    rows["key"] = 1, 0
    decoded.rows = rows.tobytes()
    assert claims(replayed(old, decoded.encode())) == {4096: 2}
    decoded.tenant = "b"
    assert claims(replayed(old, decoded.encode())) == {0: 1, 4096: 2}


def test_a_slab_has_the_slot_size_of_its_newest_claim() -> None:
    old = record(1, (0, 4096, 12288, SLAB)), record(2, (16384,))
    found = replayed(*old, record(3, (8192,), shard_bytes=LARGE))
    assert claims(found) == {8192: 3, SLAB: 1}


def test_a_clear_ends_older_generations_only() -> None:
    found = replayed(
        record(1, (0,)),
        record(2, (4096,), tenant="b"),
        clear(3, "a", generation=1),
        record(4, (8192,), generation=1),
        record(5, (12288,), generation=0),
    )
    assert claims(found) == {4096: 2, 8192: 4}
    assert (found.number, found.generation) == (5, 1)
    assert claims(replayed(record(1, (0,)), record(2, (4096,), tenant="b"), clear(3, "", 1))) == {}


def test_uses_are_noted_with_the_row() -> None:
    found = replayed(record(1, (0, 4096)), record(7, (), used=(4096, 999)))
    assert found.rows["used"].tolist() == [1, 7]


def test_an_image_says_the_same() -> None:
    records = [record(n, (4096 * n,), tenant="ab"[n % 2]) for n in range(1, 9)]
    records += [record(9, (2 * SLAB,), shard_bytes=(100, 200)), clear(10, "c", 4)]
    found = replayed(*records)
    again = replayed(*found.image())
    assert claims(again) == claims(found) and len(claims(found)) == 9
    names = [[each.tenants[t] for t in each.tenant] for each in (found, again)]
    assert names[0] == names[1]
    assert again.clears == {"c": 4} and (again.number, again.generation) == (10, 4)
    later = replayed(*found.image(), record(11, oldest=4))
    assert not replayed(*later.image()).clears, "which nothing older can follow"


def test_replay_ends_at_a_frame_that_is_torn_lost_or_old() -> None:
    frames = [(record(n, (4096 * n,)), 0) for n in range(2, 6)]
    image = (record(1, (4096,)), IMAGE | IMAGE_END)
    log = log_of(image, *frames)
    assert len(frames_in(log)) == 5
    for at in range(len(log) // FRAME_ALIGN):
        torn = log.copy()
        torn[at * FRAME_ALIGN + 40] ^= 1
        assert len(frames_in(torn)) == at
        lost = log.copy()
        lost[at * FRAME_ALIGN : (at + 1) * FRAME_ALIGN] = bytes(FRAME_ALIGN)
        assert len(frames_in(lost)) == at
    other = log_of(image, frames[0], (record(9, (0,)), 0))
    assert len(frames_in(other + log[len(other) :])) == 3, "a frame of an earlier end of the log"


def test_padding_may_be_anything() -> None:
    log = log_of((record(1, (0,)), IMAGE | IMAGE_END), (record(2, (4096,)), 0))
    log[FRAME_ALIGN - 10 : FRAME_ALIGN] = os.urandom(10)
    assert len(frames_in(log)) == 2


def test_a_log_without_a_complete_image_is_none() -> None:
    part, end = (record(1, (0,)), IMAGE), (record(2, (4096,)), IMAGE | IMAGE_END)
    assert len(frames_in(log_of(part, end))) == 2
    assert frames_in(log_of(part, part)) == [] == frames_in(log_of(part, (record(2), 0)))
    assert frames_in(log_of((record(1), 0), end)) == [] == frames_in(bytearray(1 << 16))
    assert frames_in(bytearray(10)) == []


def malformed() -> Iterator[bytes]:
    yield b"\x00"
    yield (1 << 31).to_bytes(4, "little")
    yield b"\x01\x00\x00\x00\xc0"
    good = msgspec.msgpack.decode(record(2, (4096,))[4:])
    for field, value in enumerate(
        [1 << 63, -1, 0.5, 7, "yes", b"f" * 65, [-1], {5: b""}, b"row", b"check", b"1", b"2"]
    ):
        bad = msgspec.msgpack.encode([*good[:field], value, *good[field + 1 :]])
        if field != 1:  # a generation below zero clears nothing
            yield len(bad).to_bytes(4, "little") + bad


@pytest.mark.parametrize("bad", list(malformed()))
def test_a_record_that_is_none_ends_the_replay(bad: bytes) -> None:
    found = replayed(record(1, (0,)), bad, record(3, (8192,)))
    assert claims(found) == {0: 1} and found.is_cut
