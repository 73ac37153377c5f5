"""The files of a disk tier: one owner, exact sizes, formats, and what a restart finds."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_life import SHAPES, store, verify

from kvkeep.errors import TierError, TierFault
from kvkeep.kv.checksum import checksum
from kvkeep.tiers import disk_files
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.units import GIB, MIB

SIZE, SLAB = 16 * MIB, MIB
SHAPE = SHAPES[0]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tier"
    shutil.rmtree(tmp_path)


def index_of(files: DiskFiles) -> DiskIndex:
    return DiskIndex(files.data_bytes, files.slab_bytes, None, files.recovered())


def fill(directory: Path, blocks: int = 40, size: int = SIZE) -> bytes:
    """Makes a tier with one chain; returns its keys."""
    keys = os.urandom(16 * blocks)
    files = DiskFiles.open(directory, size, SLAB)
    index = index_of(files)
    for at in range(0, len(keys), 16 * 8):
        store(files, index, "a", SHAPE, keys[max(0, at - 16) : at], keys[at : at + 16 * 8])
    files.close()
    return keys


def blocks_found(directory: Path, keys: bytes, size: int = SIZE, slab: int = SLAB) -> int:
    files = DiskFiles.open(directory, size, slab)
    try:
        hit = index_of(files).find("a", SHAPE, keys, 0, 0)
        assert hit is None or all(verify(files, hit, "a", SHAPE, keys))
        return hit.blocks if hit else 0
    finally:
        files.close()


def allocated(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def test_a_restart_finds_what_was_written(directory: Path) -> None:
    keys = fill(directory)
    assert blocks_found(directory, keys) == 40 == blocks_found(directory, keys)


def test_the_directory_is_its_users_alone_and_has_one_owner(directory: Path) -> None:
    directory.mkdir(mode=0o777)
    files = DiskFiles.open(directory, SIZE, SLAB)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in directory.iterdir())
    with pytest.raises(TierError, match="in use by another kvkeep server") as refused:
        DiskFiles.open(directory, SIZE, SLAB)
    assert "--tier" in refused.value.hint
    files.close()
    DiskFiles.open(directory, SIZE, SLAB).close()


def test_the_directory_stays_locked_while_a_process_has_the_descriptors(directory: Path) -> None:
    files = DiskFiles.open(directory, SIZE, SLAB)
    inherited = DiskFiles.inherit(files.description(), [os.dup(fd) for fd in files.descriptors()])
    files.close()
    with pytest.raises(TierError, match="in use"):
        DiskFiles.open(directory, SIZE, SLAB)
    inherited.close()
    DiskFiles.open(directory, SIZE, SLAB).close()


@contextlib.contextmanager
def left_behind(directory: Path, seconds: float) -> Iterator[None]:
    """A server has ended, and a process that has its descriptors lives on for a time."""
    files = DiskFiles.open(directory, SIZE, SLAB)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", str(seconds)], pass_fds=files.descriptors()) as left:
        files.close()
        (directory / "daemon.lock").write_text(f"{ended.pid}\n")
        try:
            yield
        finally:
            left.kill()


def test_a_process_that_ends_after_its_server_is_waited_for(directory: Path) -> None:
    keys = fill(directory)
    with left_behind(directory, 0.5):
        assert blocks_found(directory, keys) == 40


def test_a_process_that_the_device_holds_is_the_devices_fault(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that must be restarted because its disk hangs starts without it."""
    keys = fill(directory)
    monkeypatch.setattr(disk_files, "_LEFT_S", 0.1)
    refused = pytest.raises(TierFault, match="a process of an earlier server still waits")
    with left_behind(directory, 1000), refused:
        DiskFiles.open(directory, SIZE, SLAB)
    assert blocks_found(directory, keys) == 40


def test_another_process_continues_the_log(directory: Path) -> None:
    files = DiskFiles.open(directory, SIZE, SLAB)
    index, keys = index_of(files), os.urandom(16 * 6)
    for at in range(0, len(keys), 32):  # each process continues where the one before it stopped
        mover = DiskFiles.inherit(files.description(), [os.dup(fd) for fd in files.descriptors()])
        store(mover, index, "a", SHAPE, keys[max(0, at - 16) : at], keys[at : at + 32])
        mover.close()
    files.close()
    assert blocks_found(directory, keys) == 6


def test_a_directory_with_other_files_is_left_alone(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    (directory / "report.txt").write_text("ours")
    with pytest.raises(TierError, match="such as 'report") as refused:
        DiskFiles.open(directory, SIZE, SLAB)
    assert "a directory of its own" in refused.value.hint
    assert [each.name for each in directory.iterdir()] == ["report.txt"]
    assert directory.stat().st_mode & 0o777 == 0o755


def test_a_symbolic_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="symbolic link"):
        DiskFiles.open(directory, SIZE, SLAB)


@pytest.mark.parametrize("size", [8 * MIB, 16 * MIB, 100 * MIB + 12345])
def test_the_files_never_take_more_than_the_size(directory: Path, size: int) -> None:
    files = DiskFiles.open(directory, size, SLAB)
    before = allocated(directory)
    assert 0.6 * size < before <= size
    index = index_of(files)
    for _ in range(60):
        store(files, index, "a", SHAPES[2], b"", os.urandom(16 * 2))
        assert allocated(directory) <= size
    files.compact()
    assert allocated(directory) <= size
    files.close()


def test_a_size_without_room_for_a_log_and_a_slab_is_refused(directory: Path) -> None:
    with pytest.raises(TierError, match="3MiB is too small for its log and one slab of 1MiB"):
        DiskFiles.open(directory, 3 * MIB, SLAB)


def test_a_size_beyond_the_file_system_is_refused_with_both_sizes(directory: Path) -> None:
    with pytest.raises(TierError, match=r"needs .*TiB more, and the file system has .* free"):
        DiskFiles.open(directory, 1_000_000 * GIB, SLAB)
    assert not (directory / "data").exists()
    DiskFiles.open(directory, SIZE, SLAB).close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="No such file or directory"):
        DiskFiles.open(tmp_path / "a" / "b", SIZE, SLAB)


def header(version: int = disk_files.VERSION, slab: int = SLAB, more: bytes = b"") -> bytes:
    head = struct.pack("<8sIIQ", b"kvkeepdk", version, 0, slab) + more
    return head + checksum(head).to_bytes(8, "little")


@pytest.mark.parametrize("more", [b"", b"what only a newer release knows"])
def test_a_newer_format_is_refused_and_left_alone(directory: Path, more: bytes) -> None:
    keys, is_newer = fill(directory), header(disk_files.VERSION + 1, more=more)
    (directory / "header").write_bytes(is_newer)
    with pytest.raises(TierError, match=r"has format 2; this release knows 1") as refused:
        DiskFiles.open(directory, SIZE, SLAB)
    assert "start the newer release" in refused.value.hint
    (directory / "header").write_bytes(header())
    assert blocks_found(directory, keys) == 40


def test_a_newer_format_with_other_files_is_left_alone(directory: Path) -> None:
    fill(directory)
    (directory / "header").write_bytes(header(disk_files.VERSION + 1))
    (directory / "log-1").rename(directory / "index")
    before = sorted(directory.iterdir())
    with pytest.raises(TierError, match="has format 2"):
        DiskFiles.open(directory, SIZE, SLAB)
    assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize("name", ["", "data", "log-1"])
def test_an_older_format_is_set_aside_with_a_word(
    directory: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Also if a server was killed when it had renamed some of the files."""
    keys = fill(directory)
    (directory / "header").write_bytes(header(0))
    if name:
        (directory / name).rename(directory / f"{name}.format-0")
    assert blocks_found(directory, keys) == 0
    assert "had the older format 0: its files are set aside as *.format-0" in caplog.text
    for each in ("header", "data", "log-0", "log-1"):
        assert (directory / f"{each}.format-0").stat().st_size > 0
    assert blocks_found(directory, fill(directory)) == 40


def test_an_older_format_goes_where_there_is_no_room_for_both(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, space = fill(directory), os.statvfs
    (directory / "header").write_bytes(header(0))

    def small(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=1, f_bavail=SIZE + MIB - allocated(directory))

    monkeypatch.setattr(disk_files.os, "statvfs", small)
    assert blocks_found(directory, keys) == 0
    monkeypatch.setattr(disk_files.os, "statvfs", space)
    assert "no room beside its files of an older format: they are removed" in caplog.text
    assert not list(directory.glob("*.format-*")) and allocated(directory) <= SIZE
    assert blocks_found(directory, fill(directory)) == 40


@pytest.mark.parametrize("name", ["header", "data", "log-0", "log-1"])
def test_a_missing_file_starts_over_with_a_word(
    directory: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(directory)
    (directory / name).unlink()
    assert blocks_found(directory, keys) == 0
    assert f"starts empty: it has no {name}" in caplog.text
    assert blocks_found(directory, fill(directory)) == 40


def test_a_link_to_a_file_of_others_is_replaced(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(directory)
    (tmp_path / "theirs").write_bytes(b"precious")
    (directory / "data").unlink()
    (directory / "data").symlink_to(tmp_path / "theirs")
    assert blocks_found(directory, keys) == 0
    assert (tmp_path / "theirs").read_bytes() == b"precious"
    assert "its data is no plain file of this user" in caplog.text


def test_another_slab_size_starts_over_with_a_word(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(directory)
    assert blocks_found(directory, keys, slab=2 * MIB) == 0
    assert "its slab size is 1MiB, not 2MiB" in caplog.text


def test_a_larger_size_keeps_everything(directory: Path) -> None:
    keys = fill(directory)
    assert blocks_found(directory, keys, size=3 * SIZE) == 40
    assert SIZE < allocated(directory) <= 3 * SIZE


def test_a_smaller_size_keeps_what_fits(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = fill(directory, 1200, 10 * MIB)  # of one slot of 4 KiB each: five slabs
    assert blocks_found(directory, keys, 10 * MIB) == 1200
    left = blocks_found(directory, keys, 6 * MIB)
    data_bytes, _ = disk_files.sizes_for(6 * MIB, SLAB)
    assert left == data_bytes // SHAPE.slot_bytes
    assert f"{1200 - left} blocks do not fit" in caplog.text
    assert allocated(directory) <= 6 * MIB
    assert blocks_found(directory, keys, 6 * MIB) == left
    assert blocks_found(directory, keys, 10 * MIB) == left


def test_the_log_is_compacted_before_it_is_full(directory: Path) -> None:
    files = DiskFiles.open(directory, SIZE, SLAB)
    index, keys = index_of(files), os.urandom(16 * 2)
    store(files, index, "a", SHAPE, b"", keys)
    for _ in range(3 * MIB // 4096):  # a frame each: three logs
        other = os.urandom(16)
        store(files, index, "b", SHAPE, b"", other)
        index.clear("b")
    files.close()
    assert blocks_found(directory, keys) == 2


def test_a_record_larger_than_the_log_is_refused_and_the_log_stays(directory: Path) -> None:
    keys = fill(directory)
    files = DiskFiles.open(directory, SIZE, SLAB)
    with pytest.raises(OSError, match="the log is full"):
        files.append(bytes(2 * MIB))
    files.append(b"")
    files.close()
    assert blocks_found(directory, keys) == 40


def test_a_write_beyond_the_data_is_refused(directory: Path) -> None:
    files = DiskFiles.open(directory, SIZE, SLAB)
    with pytest.raises(OSError) as refused:
        files.write(files.data_bytes - 4096, [memoryview(bytes(8192))])
    assert refused.value.errno == errno.EFBIG
    files.close()


def test_buffers_need_not_be_aligned(directory: Path) -> None:
    files = DiskFiles.open(directory, SIZE, SLAB)
    aligned = mmap.mmap(-1, 8192)
    aligned[:] = os.urandom(8192)
    files.write(4096, [memoryview(aligned)[:4096], memoryview(aligned)[4096:]])
    parts = [memoryview(bytearray(100)), memoryview(bytearray(8092))]
    assert files.read(4096, parts) == 8192
    assert b"".join(parts) == aligned[:]
    files.write(0, parts)
    again = memoryview(bytearray(8192))
    assert files.read(0, [again]) == 8192 and again == aligned[:]
    end = memoryview(bytearray(8192))
    assert files.read(files.data_bytes - 4096, [end]) == 4096
    files.close()


def test_without_o_direct_it_falls_back_with_a_word(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = os.open

    def refusing(path: str, flags: int, *args: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return opened(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refusing)
    keys = fill(directory)
    assert caplog.text.count("has no O_DIRECT") == 1
    assert blocks_found(directory, keys) == 40


_WRITER = """
import os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from disk_life import SHAPES, store
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
files = DiskFiles.open(Path(sys.argv[1]), 16 << 20, 1 << 20)
index = DiskIndex(files.data_bytes, files.slab_bytes, None, files.recovered())
while True:
    keys = os.urandom(16 * 8)
    if store(files, index, "a", SHAPES[0], b"", keys):
        print(keys.hex(), flush=True)
"""


def test_what_a_killed_process_had_acknowledged_is_there(directory: Path) -> None:
    acknowledged: list[bytes] = []
    for blocks in (50, 3, 20):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(directory), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            acknowledged += [bytes.fromhex(writer.stdout.readline()) for _ in range(blocks)]
            writer.kill()
            acknowledged += [bytes.fromhex(line) for line in writer.stdout if len(line) == 257]
        files = DiskFiles.open(directory, SIZE, SLAB)
        index = index_of(files)
        for keys in acknowledged[-300:]:  # the tier has room for 400 of them
            hit = index.find("a", SHAPE, keys, 0, 0)
            assert hit is not None and all(verify(files, hit, "a", SHAPE, keys))
            assert hit.blocks == 8
        files.close()


@pytest.mark.parametrize("name", ["data", "log-0"])
def test_nothing_is_acknowledged_once_the_files_were_removed(directory: Path, name: str) -> None:
    files = DiskFiles.open(directory, SIZE, SLAB)
    index = index_of(files)
    (directory / name).unlink()
    with pytest.raises(OSError, match="the tier's files were removed"):
        store(files, index, "a", SHAPE, b"", os.urandom(16))
    files.close()


def test_a_log_that_failed_while_it_was_compacted_must_be_opened_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(directory)
    files = DiskFiles.open(directory, SIZE, SLAB)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", lambda _: os.fsync(1 << 20))
        with pytest.raises(OSError, match="Bad file descriptor"):
            files.compact()
    with pytest.raises(OSError, match=r"must be opened again: .*Bad file descriptor"):
        files.append(b"x")
    again = DiskFiles.inherit(files.description(), [os.dup(fd) for fd in files.descriptors()])
    again.compact()
    again.close()
    files.close()
    assert blocks_found(directory, keys) == 40


def test_a_size_whose_log_is_too_short_starts_over_with_a_word(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(directory, 400)
    monkeypatch.setattr(disk_files, "_LEAST_LOG_BYTES", 16 * 1024)
    monkeypatch.setattr(disk_files, "_LOG_SHARE", 1 << 20)
    assert blocks_found(directory, keys) == 0
    assert "starts empty: the rows of its blocks do not fit a log of the new size" in caplog.text
