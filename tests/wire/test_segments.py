"""Tests for the pool's memory as a process maps it."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.errors import PoolError
from kvkeep.kv import native
from kvkeep.wire import segments as module
from kvkeep.wire.pool_files import EPOCH_FILE, PoolFiles
from kvkeep.wire.segments import Segments, make_presence, open_presence, presence_path, segment_path

SEGMENT = 8192
EPOCH = 77
POOL = 2 * SEGMENT + 4096  # the last segment is half as long


@pytest.fixture(autouse=True)
def _files_are_for_their_owner() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    """Three segments; each byte tells its place in the pool, modulo 251."""
    (tmp_path / EPOCH_FILE).write_text(f"{EPOCH:016x}")
    content = (np.arange(POOL) % 251).astype(np.uint8).tobytes()
    for number in range(3):
        segment_path(tmp_path, number).write_bytes(
            content[number * SEGMENT : (number + 1) * SEGMENT]
        )
    segments = Segments(PoolFiles(tmp_path), SEGMENT, POOL, EPOCH)
    yield segments
    segments.close()


def offsets(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_addresses_are_where_the_bytes_are(segments: Segments) -> None:
    wanted = offsets(0, 4096, SEGMENT, SEGMENT + 100, 2 * SEGMENT, POOL - 16)
    addresses = segments.addresses(wanted, 16)
    assert addresses.dtype == np.uint64
    for offset, address in zip(wanted.tolist(), addresses.tolist(), strict=True):
        assert ctypes.string_at(address, 16) == segments.view(offset, 16).tobytes()
        assert ctypes.string_at(address, 1)[0] == offset % 251


def test_no_offsets_have_no_addresses(segments: Segments) -> None:
    assert len(segments.addresses(offsets(), 16)) == 0


def test_addresses_stay_the_same(segments: Segments) -> None:
    wanted = offsets(0, SEGMENT)
    assert (segments.addresses(wanted, 1) == segments.addresses(wanted, 1)).all()


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (-1, 1),
        (-SEGMENT, 16),
        (-(2**63), 16),
        (POOL, 1),
        (POOL - 15, 16),
        (2**40, 16),
        (2**63 - 1, 1),
        (2**63 - 16, 16),
        (SEGMENT - 8, 16),
        (0, SEGMENT + 1),
        (0, POOL),
        (0, 2**62),
        (0, 0),
        (0, -1),
        (POOL, 0),
    ],
)
def test_what_is_not_inside_one_segment_is_refused(
    segments: Segments, offset: int, nbytes: int
) -> None:
    with pytest.raises(PoolError, match="not in the pool"):
        segments.addresses(offsets(offset), nbytes)
    with pytest.raises(PoolError, match="not in the pool"):
        segments.view(offset, nbytes)


def test_one_bad_offset_among_good_ones_is_named(segments: Segments) -> None:
    with pytest.raises(PoolError, match=f"offset {POOL} with 16 bytes"):
        segments.addresses(offsets(0, 4096, POOL, 8192), 16)


def test_a_whole_segment_is_inside(segments: Segments) -> None:
    assert len(segments.view(SEGMENT, SEGMENT)) == SEGMENT
    assert len(segments.view(2 * SEGMENT, POOL - 2 * SEGMENT)) == POOL - 2 * SEGMENT


def test_a_view_writes_through_to_every_process(segments: Segments, tmp_path: Path) -> None:
    segments.view(SEGMENT + 10, 4)[:] = (1, 2, 3, 4)
    assert segment_path(tmp_path, 1).read_bytes()[10:14] == bytes((1, 2, 3, 4))
    other = Segments(PoolFiles(tmp_path), SEGMENT, POOL, EPOCH)
    assert other.view(SEGMENT + 10, 4).tolist() == [1, 2, 3, 4]
    other.close()


def test_the_file_of_a_server_that_took_its_place_is_not_mapped(
    segments: Segments, tmp_path: Path
) -> None:
    assert len(segments.view(0, 16)) == 16, "mapped while the pool was ours"
    (tmp_path / EPOCH_FILE).write_text(f"{EPOCH + 1:016x}")
    with pytest.raises(PoolError, match="another server"):
        segments.view(SEGMENT, 16)
    assert len(segments.view(0, 16)) == 16


def test_memory_is_mapped_ahead_as_far_as_the_pool_is_there(
    segments: Segments, tmp_path: Path
) -> None:
    last = segment_path(tmp_path, 2).read_bytes()
    segment_path(tmp_path, 2).unlink()
    assert [segments.populate_next() for _ in range(4)] == [True, True, False, False]
    segment_path(tmp_path, 2).write_bytes(last)
    assert [segments.populate_next() for _ in range(2)] == [True, False]


class Pins:
    """What a GPU's driver would be told: ranges that it took, and gave up again."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.refused = refused
        self.asked: list[tuple[int, int]] = []
        self.freed: list[int] = []

    def pin(self, address: int, nbytes: int) -> bool:
        ctypes.string_at(address, nbytes)  # it is there
        self.asked.append((address, nbytes))
        return len(self.asked) - 1 not in self.refused

    def unpin(self, address: int) -> None:
        ctypes.string_at(address, 1)  # it still is
        self.freed.append(address)

    @property
    def sizes(self) -> list[int]:
        return [nbytes for _, nbytes in self.asked]


OS_PAGE_BYTES = 4096


def pool_of(directory: Path, *lengths: int, populate: int = 1, pin: int = 4) -> Segments:
    """Segments of so many pages: all equal but for the last, which may be shorter. So many pages
    are populated, or pinned, at once."""
    (directory / EPOCH_FILE).write_text(f"{EPOCH:016x}")
    for number, count in enumerate(lengths):
        segment_path(directory, number).write_bytes(bytes(count * OS_PAGE_BYTES))
    return Segments(
        PoolFiles(directory),
        lengths[0] * OS_PAGE_BYTES,
        sum(lengths) * OS_PAGE_BYTES,
        EPOCH,
        populate_bytes=populate * OS_PAGE_BYTES,
        pin_bytes=pin * OS_PAGE_BYTES,
    )


@pytest.mark.parametrize("old_kernel", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize(
    ("lengths", "pins"),
    [
        ([4], [4]),
        ([3], [3]),
        ([9], [4, 4, 1]),
        ([8, 8, 2], [4, 4, 4, 4, 2]),
        ([10, 10, 5], [4, 4, 2, 4, 4, 2, 4, 1]),
    ],
    ids=str,
)
def test_memory_is_pinned_once_part_by_part_and_what_is_left_of_each_segment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    pins: list[int],
    ahead: int,
    old_kernel: bool,
) -> None:
    if old_kernel:
        monkeypatch.setattr(
            module, "_MADV_POPULATE_WRITE", 9999
        )  # as a kernel answers that does not know it
    segments, driver = pool_of(tmp_path, *lengths, populate=ahead), Pins()
    while segments.populate_next(driver.pin, driver.unpin):
        pass
    assert driver.sizes == [count * OS_PAGE_BYTES for count in pins]
    starts = [segment * lengths[0] * OS_PAGE_BYTES for segment in range(len(lengths))]
    bases = segments.addresses(offsets(*starts), 1).tolist()
    covered = sorted(driver.asked)
    for base, count in zip(bases, lengths, strict=True):
        inside = [
            (at, nbytes) for at, nbytes in covered if base <= at < base + count * OS_PAGE_BYTES
        ]
        assert inside[0][0] == base and sum(nbytes for _, nbytes in inside) == count * OS_PAGE_BYTES
        assert all(
            at + nbytes == after for (at, nbytes), (after, _) in itertools.pairwise(inside)
        ), "no gap, no overlap"
    assert driver.freed == []
    segments.close()
    assert sorted(driver.freed) == [address for address, _ in covered]
    segments.close()
    assert len(driver.freed) == len(pins), "each once"


def test_what_could_not_be_pinned_is_not_unpinned(tmp_path: Path) -> None:
    segments, driver = pool_of(tmp_path, 2, 2, pin=1), Pins(refused=(0, 2))
    while segments.populate_next(driver.pin, driver.unpin):
        pass
    segments.close()
    assert driver.freed == [driver.asked[1][0], driver.asked[3][0]]


def test_pinning_goes_on_where_the_server_had_not_got_to(tmp_path: Path) -> None:
    segments, driver = pool_of(tmp_path, 5, 5), Pins()
    segment_path(tmp_path, 1).unlink()
    assert [segments.populate_next(driver.pin, driver.unpin) for _ in range(7)] == [True] * 5 + [
        False
    ] * 2
    segment_path(tmp_path, 1).write_bytes(bytes(5 * OS_PAGE_BYTES))
    while segments.populate_next(driver.pin, driver.unpin):
        pass
    assert driver.sizes == [4 * OS_PAGE_BYTES, OS_PAGE_BYTES] * 2
    segments.close()


def test_a_segment_is_mapped_when_it_is_needed(segments: Segments, tmp_path: Path) -> None:
    segment_path(tmp_path, 2).unlink()
    assert len(segments.view(0, 16)) == 16
    with pytest.raises(PoolError, match=r"segment-00002: No such file") as caught:
        segments.view(2 * SEGMENT, 16)
    assert "restarted" in caught.value.hint


def test_a_segment_shorter_than_was_said_is_refused(segments: Segments, tmp_path: Path) -> None:
    """To map it would be a bus error later."""
    segment_path(tmp_path, 0).write_bytes(bytes(SEGMENT - 1))
    with pytest.raises(PoolError, match="shorter"):
        segments.view(0, 16)


def test_closing_unmaps(segments: Segments, tmp_path: Path) -> None:
    segments.view(0, 16)
    before = mapped_segments()
    segments.close()
    assert mapped_segments() == before - 1
    segment_path(tmp_path, 0).unlink()
    with pytest.raises(PoolError, match="cannot open"):
        segments.addresses(offsets(0), 16)  # not where it was


def test_a_view_that_is_still_held_outlives_closing(segments: Segments) -> None:
    view = segments.view(100, 16)
    segments.close()
    assert view[0] == 100


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("/segment-")


def heads(keys: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(keys, dtype=np.uint64)[::2]


def test_what_was_added_is_not_lacking_until_the_last_of_it_is_removed(tmp_path: Path) -> None:
    server = make_presence(tmp_path, 7, 1 << 30)
    engine = open_presence(PoolFiles(tmp_path), 7)
    assert engine is not None
    first, second, other = os.urandom(16), os.urandom(16), os.urandom(16)
    assert engine.lacks(first)
    server.add(heads(first + second + first))
    assert [engine.lacks(key) for key in (first, second, other)] == [False, False, True]
    server.remove(heads(first + second))
    assert [engine.lacks(key) for key in (first, second, other)] == [False, True, True]
    server.remove(heads(first))
    assert engine.lacks(first)


@pytest.mark.parametrize(
    ("pool_bytes", "cells"), [(1 << 16, 1 << 12), (100 << 20, 1 << 17), (1 << 40, 1 << 20)]
)
def test_it_is_as_large_as_its_pool_makes_it(tmp_path: Path, pool_bytes: int, cells: int) -> None:
    make_presence(tmp_path, 7, pool_bytes)
    file = presence_path(tmp_path, 7).stat()
    assert (file.st_size, file.st_mode & 0o777) == (cells * 4, 0o600)
    assert file.st_blocks * 512 >= file.st_size, "all its memory is there: counting cannot fail"
    assert [path.name for path in tmp_path.iterdir()] == ["presence-0000000000000007"]


def test_each_server_has_its_own_presence_file(tmp_path: Path) -> None:
    key = os.urandom(16)
    make_presence(tmp_path, 7, 1 << 20).add(heads(key))
    make_presence(tmp_path, 8, 1 << 20)
    old, new = open_presence(PoolFiles(tmp_path), 7), open_presence(PoolFiles(tmp_path), 8)
    assert old is not None and new is not None
    assert not old.lacks(key) and new.lacks(key)
    assert open_presence(PoolFiles(tmp_path), 9) is None, (
        "what another server has left says nothing"
    )


@pytest.mark.parametrize("content", [b"", b"\0" * 3, b"\0" * 12, None, "pipe"])
def test_what_is_nothing_of_the_kind_is_not_used(
    tmp_path: Path, content: bytes | str | None
) -> None:
    if content == "pipe":
        os.mkfifo(presence_path(tmp_path, 7))
    elif isinstance(content, bytes):
        presence_path(tmp_path, 7).write_bytes(content)
    assert open_presence(PoolFiles(tmp_path), 7) is None


@pytest.mark.skipif(not native.available, reason="only the C kernel survives it")
@pytest.mark.parametrize("left", [0, 4096, 6000])
def test_a_file_that_is_cut_off_says_nothing(tmp_path: Path, left: int) -> None:
    """It is no bus error either."""
    make_presence(tmp_path, 7, 1 << 20)
    engine = open_presence(PoolFiles(tmp_path), 7)
    key = ((1 << 12) - 1).to_bytes(8, sys.byteorder) + bytes(8)
    assert engine is not None and engine.lacks(key)
    os.truncate(presence_path(tmp_path, 7), left)
    assert not engine.lacks(key), "only the server can tell"


@pytest.mark.parametrize("kernel", [True, False])
def test_an_engine_sees_every_cell(
    tmp_path: Path, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.native, "available", kernel and module.native.available)
    server = make_presence(tmp_path, 7, 1 << 16)
    keys = [cell.to_bytes(8, sys.byteorder) + bytes(8) for cell in range(1 << 12)]
    server.add(heads(b"".join(keys[::3])))
    engine = open_presence(PoolFiles(tmp_path), 7)
    assert engine is not None and [engine.lacks(key) for key in keys] == [
        at % 3 > 0 for at in range(len(keys))
    ]


def test_opening_presence_leaves_no_descriptor(tmp_path: Path) -> None:
    make_presence(tmp_path, 7, 1 << 20)
    presence_path(tmp_path, 8).write_bytes(b"no such thing")
    presence_path(tmp_path, 8).chmod(0o600)
    files, before = PoolFiles(tmp_path), len(os.listdir("/proc/self/fd"))
    assert open_presence(files, 7) is not None and open_presence(files, 8) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    make_presence(tmp_path, 7, 1 << 20)
    presence_path(tmp_path, 7).chmod(0o666)
    assert open_presence(PoolFiles(tmp_path), 7) is None


def test_without_memory_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        make_presence(tmp_path, 7, 1 << 20)
    assert list(tmp_path.iterdir()) == []
