"""The faults of a disk, turned on and off from outside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvkeep.testing.faulty_disk import FaultyDisk, FaultyFiles
from kvkeep.units import MIB


def test_it_reads_what_it_wrote_and_fails_as_it_is_told(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    disk.write(3, [memoryview(b"abc"), memoryview(b"def")])
    read = bytearray(6)
    assert disk.read(3, [memoryview(read)]) == 6 and read == b"abcdef"
    (tmp_path / "fail-read").write_text("EIO")
    with pytest.raises(OSError) as failed:
        disk.read(3, [memoryview(read)])
    assert failed.value.errno == errno.EIO
    (tmp_path / "fail-read").unlink()
    assert disk.read(0, [memoryview(read)]) == 6
    disk.append(b"one")
    disk.append(b"two")
    assert (tmp_path / "log").read_bytes() == b"onetwo"
    disk.compact()
    assert (tmp_path / "log").read_bytes() == b""
    assert (tmp_path / "operations").read_text().split() == ["write", *["append"] * 2, "compact"]
    disk.close()


def test_the_files_of_a_server_have_faults_from_a_directory_beside_them(tmp_path: Path) -> None:
    faults = tmp_path / "tier-faults"
    files = FaultyFiles.open(tmp_path / "tier", 16 * MIB, MIB)
    same = FaultyFiles.inherit(
        files.description(), [os.dup(descriptor) for descriptor in files.descriptors()]
    )
    whole, read = b"a" * 8192, memoryview(bytearray(8192))
    same.write(0, [memoryview(whole)])
    assert same.read(0, [read]) == 8192 and read == whole
    faults.mkdir()
    (faults / "garbage-read").touch()
    assert same.read(0, [read]) == 8192 and read[0] != whole[0] and read[1:] == whole[1:]
    (faults / "garbage-read").unlink()
    (faults / "half-read").touch()
    assert same.read(0, [read]) == 4096
    (faults / "half-read").unlink()
    (faults / "half-write").touch()
    same.write(0, [memoryview(b"b" * 8192)])
    assert same.read(0, [read]) == 8192 and read == b"b" * 4096 + b"a" * 4096
    for operation in ("sync_data", "append", "sync_log", "compact"):
        (faults / f"fail-{operation}").write_text("EROFS")
    for fails in (same.sync_data, same.sync_log, same.compact, lambda: same.append(b"record")):
        with pytest.raises(OSError) as failed:
            fails()
        assert failed.value.errno == errno.EROFS
    same.close()
    files.close()
