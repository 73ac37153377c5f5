"""What engines can see of a server's blocks without asking."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.kv import native
from kvkeep.wire import presence as module
from kvkeep.wire.pool_files import PoolFiles
from kvkeep.wire.presence import make_presence, open_presence, presence_path


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


def test_each_server_has_its_own(tmp_path: Path) -> None:
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
def test_an_engine_sees_every_cell_and_can_change_none(
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
    assert not engine._cells.flags.writeable


def test_nothing_stays_open(tmp_path: Path) -> None:
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
