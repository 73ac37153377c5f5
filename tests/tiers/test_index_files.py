"""The index as files: found as it was left, refused when it is not ours, given up when memory runs
out."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvkeep.kv.checksum import checksum
from kvkeep.store.store import Store
from kvkeep.tiers import index_files
from kvkeep.tiers.index_files import FileColumns, sizes_left, why_not_adopt, write_header

SIZES = (1 << 20, 1 << 16, 1 << 18)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """An index as a store makes it."""
    write_header(tmp_path, *SIZES)
    Store(SIZES[0], SIZES[1], columns=FileColumns(tmp_path))
    return tmp_path


def test_the_next_one_finds_what_was_written(tmp_path: Path) -> None:
    columns = FileColumns(tmp_path)
    flat = columns.grow("a", np.int32, 0, 3)
    flat[:] = [1, 2, 3]
    wide = columns.grow("b", np.uint64, 2, 2)
    wide[:] = 9
    longer = columns.grow("a", np.int32, 0, 5000)
    longer[-1] = 4
    again = FileColumns(tmp_path)
    assert again.grow("a", np.int32, 0, 1)[[0, 2, 3, -1]].tolist() == [1, 3, 0, 4]
    assert again.grow("b", np.uint64, 2, 2).tolist() == [[9, 9], [9, 9]]
    assert {path.name for path in tmp_path.iterdir()} == {"index-a", "index-b"}
    assert (tmp_path / "index-a").stat().st_mode & 0o777 == 0o600
    again.drop("a")
    again.drop("never there")
    assert not (tmp_path / "index-a").exists()


def test_without_shared_memory_it_goes_on_and_leaves_nothing(
    left: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    columns = FileColumns(left)
    column = columns.grow("slot", np.int64, 0, 4096)
    column[:3] = 7

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    grown = columns.grow("slot", np.int64, 0, 10_000)
    assert len(grown) == 10_000 and grown[:4].tolist() == [7, 7, 7, 0]
    assert not columns.kept and why_not_adopt(left, *SIZES) == "its index has no header"
    assert len(columns.grow("used", np.int64, 0, 10_000)) == 10_000
    assert [record.getMessage() for record in caplog.records] == [
        "no shared memory for the index (No space left on device): the next server will start empty"
    ]


def test_an_index_fits_the_pool_that_it_was_made_for(left: Path) -> None:
    assert why_not_adopt(left, *SIZES) == "" and sizes_left(left) == SIZES
    assert why_not_adopt(left, 2 << 20, *SIZES[1:]) == "", "a pool can be resized"
    assert "its slab size is 64KiB, not 128KiB" in why_not_adopt(left, SIZES[0], 1 << 17, SIZES[2])
    assert "its segment size is 256KiB, not 64KiB" in why_not_adopt(left, *SIZES[:2], 1 << 16)


@pytest.mark.parametrize("at", range(56))
def test_every_byte_of_the_header_counts(left: Path, at: int) -> None:
    path = left / "index-header"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    assert why_not_adopt(left, *SIZES) and sizes_left(left) == (0, 0, 0)


def test_another_format_is_named(left: Path) -> None:
    head = struct.pack("<8sIIQQQQ", b"kvkeepix", 9, 0, 1, *SIZES)
    (left / "index-header").write_bytes(head + checksum(head).to_bytes(8, "little"))
    assert (
        why_not_adopt(left, *SIZES)
        == "its index was written by another release (format 9, here it is 2)"
    )


def test_a_table_that_no_such_pool_can_need_is_refused(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_files, "_ROWS_TO_SPARE", 0)
    assert why_not_adopt(left, *SIZES) == "a column of its index is too long"


def test_no_index_at_all(tmp_path: Path) -> None:
    assert why_not_adopt(tmp_path, *SIZES) == "its index has no header"
    assert sizes_left(tmp_path / "nowhere") == (0, 0, 0)


# -- files that are not what the server before has left


@pytest.fixture
def names(left: Path) -> list[str]:
    FileColumns(left).grow("sessions", np.uint64, 3, 4)
    (left / "segment-00000").write_bytes(b"memory")
    names = ["index-header", "index-state", "index-keys", "index-sessions", "segment-00000"]
    assert why_not_adopt(left, *SIZES) == "" and all((left / name).exists() for name in names)
    return names


def test_a_file_with_another_name_elsewhere_is_not_adopted(
    left: Path, names: list[str], tmp_path: Path
) -> None:
    """Whoever has the other name may have it open: another server, or what somebody copies from."""
    for name in names:
        os.link(left / name, tmp_path / f"another-{name}")
        assert why_not_adopt(left, *SIZES) == f"{name} is no plain file of ours"
        (tmp_path / f"another-{name}").unlink()
    assert why_not_adopt(left, *SIZES) == ""


def test_a_file_of_another_user_is_not_adopted(
    left: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could map it, and its owner could cut it off under the server."""
    right, strangers = os.stat, set[str]()

    def stat(path: Any, **how: Any) -> Any:
        found = right(path, **how)
        if Path(path).name not in strangers:
            return found
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**fields | {"st_uid": found.st_uid + 1})

    monkeypatch.setattr(index_files.os, "stat", stat)
    for name in names:
        strangers.add(name)
        assert why_not_adopt(left, *SIZES) == f"{name} is no plain file of ours"
        strangers.clear()
    assert why_not_adopt(left, *SIZES) == ""


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.with_name("index-header"))]
)
def test_only_plain_files_are_adopted(
    left: Path, names: list[str], make: Callable[[Path], None]
) -> None:
    for name in ("index-odd", "segment-odd"):
        make(left / name)
        assert why_not_adopt(left, *SIZES) == f"{name} is no plain file of ours"
        (left / name).rmdir() if (left / name).is_dir() else (left / name).unlink()
    assert why_not_adopt(left, *SIZES) == ""


def test_an_index_with_a_hole_is_not_adopted(left: Path, names: list[str]) -> None:
    """A hole is filled when somebody writes there, and where no memory is left that is a bus
    error."""
    for name in names:
        path, content = left / name, (left / name).read_bytes()
        path.unlink()
        with open(path, "wb") as file:
            file.truncate(len(content) + (64 << 10))
            file.write(content[:1])
        # segments are looked at one by one
        expected = "" if name.startswith("segment-") else f"{name} has holes"
        assert why_not_adopt(left, *SIZES) == expected
        path.write_bytes(content)
    assert why_not_adopt(left, *SIZES) == ""
