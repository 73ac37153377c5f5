"""A pool's files are opened first and checked then: owner, mode and kind of what was opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvkeep.errors import UntrustedPool
from kvkeep.wire import pool_files as module
from kvkeep.wire.peers import OVERFLOW_UID
from kvkeep.wire.pool_files import EPOCH_FILE, PoolFiles

STRANGER = os.geteuid() + 4_321


@pytest.fixture(autouse=True)
def _files_are_for_their_owner() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    (directory / EPOCH_FILE).write_text(f"{77:016x}")
    (directory / "segment-00000").write_bytes(b"memory")
    return directory


def belongs_to(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """As if every file were that user's."""
    right = os.fstat
    monkeypatch.setattr(
        module.os, "fstat", lambda fd: os.stat_result([*right(fd)[:4], uid, *right(fd)[5:]])
    )


def test_a_file_of_ours_is_opened(directory: Path) -> None:
    files = PoolFiles(directory)
    files.check()
    descriptor = files.open("segment-00000", os.O_RDWR)
    assert os.read(descriptor, 100) == b"memory" and not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640, 0o400])
def test_others_may_read_but_not_write(directory: Path, mode: int) -> None:
    (directory / "segment-00000").chmod(mode)
    os.close(PoolFiles(directory).open("segment-00000", os.O_RDONLY))


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o602, 0o620])
def test_what_others_may_write_is_not_opened(directory: Path, mode: int) -> None:
    (directory / "segment-00000").chmod(mode)
    with pytest.raises(
        UntrustedPool, match=rf"segment-00000 can be written by other users \(mode {mode:04o}\)"
    ) as told:
        PoolFiles(directory).open("segment-00000", os.O_RDWR)
    assert "chmod go-w" in told.value.hint
    directory.chmod(mode | 0o100)
    with pytest.raises(UntrustedPool, match=r"pool can be written by other users"):
        PoolFiles(directory).check()


def test_what_belongs_to_another_user_is_not_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    belongs_to(monkeypatch, STRANGER)
    for attempt in (
        PoolFiles(directory).check,
        lambda: PoolFiles(directory).open("segment-00000", os.O_RDWR),
    ):
        with pytest.raises(
            UntrustedPool, match=rf"belongs to another user \(uid {STRANGER}\)"
        ) as told:
            attempt()
        assert f"name {STRANGER} in trusted_users" in told.value.hint
    trusting = PoolFiles(directory, (STRANGER,))
    trusting.check()
    os.close(trusting.open("segment-00000", os.O_RDWR))


def test_a_user_who_cannot_be_mapped_is_nobody_we_know(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    belongs_to(monkeypatch, OVERFLOW_UID)
    monkeypatch.setattr(module, "is_trusted", lambda uid, trusted: uid != OVERFLOW_UID)
    with pytest.raises(UntrustedPool) as told:
        PoolFiles(directory, (OVERFLOW_UID,)).check()
    assert "one user namespace" in told.value.hint


def link(path: Path) -> None:
    path.symlink_to(path.with_name("segment-00000"))


@pytest.mark.parametrize(
    ("make", "error"), [(os.mkfifo, UntrustedPool), (os.mkdir, UntrustedPool), (link, OSError)]
)
def test_only_a_plain_file_is_opened(
    directory: Path, make: Callable[[Path], None], error: type[Exception]
) -> None:
    make(directory / "odd")
    with pytest.raises(error):
        PoolFiles(directory).open("odd", os.O_RDONLY)


def test_a_link_to_a_directory_is_none(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(OSError):
        PoolFiles(tmp_path / "link")


def test_what_was_checked_is_what_is_opened(directory: Path, tmp_path: Path) -> None:
    """Somebody who may rename the directory puts another in its place: the names lead to the first
    one still."""
    files = PoolFiles(directory)
    files.check()
    directory.rename(tmp_path / "away")
    directory.mkdir()
    (directory / "segment-00000").write_bytes(b"false")
    descriptor = files.open("segment-00000", os.O_RDWR)
    assert os.read(descriptor, 100) == b"memory"
    assert files.has("segment-00000", descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("content", "epoch"),
    [
        (b"000000000000004d", True),
        (b"", False),
        (b"000000000000004e", False),
        (b"4d", False),
        (b"\xff\xfe\xfd", False),
        (b"000000000000004d\n", False),
        (b"000000000000004d" * 9, False),
    ],
)
def test_the_epoch_tells_whether_the_pool_is_here(
    directory: Path, content: bytes, epoch: bool
) -> None:
    (directory / EPOCH_FILE).write_bytes(content)
    assert PoolFiles(directory).is_of(77) is epoch


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: None])
def test_an_epoch_that_cannot_be_read_is_no_epoch(
    directory: Path, make: Callable[[Path], None]
) -> None:
    (directory / EPOCH_FILE).unlink()
    make(directory / EPOCH_FILE)
    assert not PoolFiles(directory).is_of(77)


@pytest.mark.parametrize("name", ["nothing", "nul\0", "x" * 5000])
def test_a_directory_that_is_not_here_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises((OSError, ValueError)):
        PoolFiles(tmp_path / name)


def test_nothing_stays_open(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (directory / "segment-00000").chmod(0o666)
    files = PoolFiles(directory)
    with contextlib.suppress(UntrustedPool):
        files.open("segment-00000", os.O_RDWR)
    files.close()
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.open(EPOCH_FILE, os.O_RDONLY)
    with contextlib.suppress(UntrustedPool):
        PoolFiles(directory).check()
    assert len(os.listdir("/proc/self/fd")) == before
