"""A disk whose device is at fault when the server starts: the server serves without it. What is a
mistake in the settings stays a refusal."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError

import pytest
from tests.server.test_movement import BLOCKS, World

from kvkeep.errors import TierError, TierFault, Unavailable
from kvkeep.kv.checksum import checksum
from kvkeep.testing.clock import eventually
from kvkeep.tiers import disk_files
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.units import MIB

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts file systems")


@contextlib.contextmanager
def mounted(at: Path, *arguments: str) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this host mounts nothing: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def serves_without(disk: Path, problem: str, *others: Path) -> None:
    """A server with this disk starts, shows the problem, and stores and finds blocks."""
    world = World(disk, *others)
    try:
        world.put(1)
        assert world.get(1) == BLOCKS
        (shown,) = [tier for tier in world.tiers() if tier["tier"] == str(disk)]
        assert shown["state"] == "set aside" and problem in shown["problem"]
        assert shown["counts"]["errors"] == 1 and shown["capacity_bytes"] == 0
        assert f"disk {disk} is set aside" in world.server.log()
        with urllib.request.urlopen(f"http://{world.server.http}/metrics") as answer:
            assert f'kvkeep_tier_set_aside{{tier="{disk}"}} 1.0' in answer.read().decode()
        if others:
            assert eventually(
                lambda: sum(tier["counts"]["written_blocks"] for tier in world.tiers()) == BLOCKS
            )
    finally:
        world.close()


def test_a_missing_mount_is_set_aside_and_other_disks_serve(tmp_path: Path) -> None:
    serves_without(tmp_path / "gone" / "disk", "No such file or directory", tmp_path / "other")


def test_a_disk_that_is_in_memory_is_said() -> None:
    with TemporaryDirectory(dir="/dev/shm") as memory:
        world = World(Path(memory) / "disk", size="16MiB")
        try:
            assert "is in memory (tmpfs): its blocks are lost" in world.server.log()
        finally:
            world.close()


def test_a_disk_whose_last_process_hangs_is_set_aside(tmp_path: Path) -> None:
    files = DiskFiles.open(tmp_path / "disk", 64 * MIB, MIB)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "1000"], pass_fds=files.descriptors()) as left:
        files.close()
        (tmp_path / "disk" / "daemon.lock").write_text(f"{ended.pid}\n")
        try:
            serves_without(tmp_path / "disk", "a process of an earlier server still waits")
        finally:
            left.kill()


@needs_root
def test_a_full_device_is_set_aside(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as small:
        serves_without(small / "disk", "does not fit")


@needs_root
def test_a_read_only_device_is_set_aside_and_serves_after_it_is_mended(tmp_path: Path) -> None:
    place = tmp_path / "device"
    place.mkdir()
    world = World(place / "disk")
    try:
        world.put(1)
        assert eventually(lambda: world.written(BLOCKS))
        world.server.stop()
        shutil.rmtree(world.server.pool, ignore_errors=True)
        with mounted(place, "--bind", str(place)):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
            serves_without(place / "disk", "Read-only file system")
        world.server.start()
        assert eventually(lambda: world.get(1) == BLOCKS)
    finally:
        world.close()


def test_a_clear_says_that_a_disk_is_set_aside(tmp_path: Path) -> None:
    """Its blocks could come back, whether memory knows the tenant or not."""
    world = World(tmp_path / "gone" / "disk")
    try:
        for _ in range(2):
            with pytest.raises(HTTPError) as refused:
                world.admin("DELETE", "/v1/tenants/default/blocks")
            assert refused.value.code == 504
            assert "set aside" in refused.value.read().decode()
            world.put(1)
    finally:
        world.close()


# -- what is the device's fault, and what is not


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV])
@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_an_error_of_the_device_is_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_files.os, call, fail)
    with pytest.raises(TierFault, match=os.strerror(number)):
        DiskFiles.open(tmp_path / "disk", 16 * MIB, MIB)
    monkeypatch.undo()
    DiskFiles.open(tmp_path / "disk", 16 * MIB, MIB).close()  # the lock was given back


def test_a_log_that_cannot_be_read_is_a_fault_and_the_blocks_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskFiles.open(tmp_path / "disk", 16 * MIB, MIB).close()
    before = (tmp_path / "disk" / "log-1").read_bytes()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_files.os, "preadv", fail)
    with pytest.raises(TierFault, match="Input/output error"):
        DiskFiles.open(tmp_path / "disk", 16 * MIB, MIB)
    assert (tmp_path / "disk" / "log-1").read_bytes() == before


def change_format(disk: Path, version: int) -> None:
    """The header of the files there says so."""
    magic, _, *rest = struct.unpack("<8sIIQ", (disk / "header").read_bytes()[:-8])
    head = struct.pack("<8sIIQ", magic, version, *rest)
    (disk / "header").write_bytes(head + checksum(head).to_bytes(8, "little"))


def test_a_server_sets_an_older_format_aside_and_uses_the_disk(tmp_path: Path) -> None:
    world = World(tmp_path / "disk")
    try:
        world.put(1)
        assert eventually(lambda: world.written(BLOCKS))
        world.server.stop()
        change_format(tmp_path / "disk", disk_files.VERSION - 1)
        world.restart()
        assert "starts empty, since it had the older format 0: its files are set aside" in (
            world.server.log()
        )
        assert (world.tier()["state"], world.tier()["blocks"]) == ("ok", 0)
        assert world.get(1) == 0
        world.put(2)
        assert eventually(lambda: world.written(BLOCKS))
        world.restart()
        assert eventually(lambda: world.get(2) == BLOCKS) and world.get(1) == 0
        assert "older format" not in world.server.log()
    finally:
        world.close()


def test_a_server_refuses_a_newer_format_and_its_blocks_stay(tmp_path: Path) -> None:
    world = World(tmp_path / "disk")
    try:
        world.put(1)
        assert eventually(lambda: world.written(BLOCKS))
        world.server.stop()
        shutil.rmtree(world.server.pool, ignore_errors=True)
        change_format(tmp_path / "disk", disk_files.VERSION + 1)
        with pytest.raises(Unavailable, match="has format 2; this release knows 1") as refused:
            World(tmp_path / "disk")
        assert "start the newer release" in str(refused.value)
        change_format(tmp_path / "disk", disk_files.VERSION)
        world.restart()
        assert eventually(lambda: world.get(1) == BLOCKS)
    finally:
        world.close()


def symbolic_link(disk: Path) -> None:
    disk.with_name("elsewhere").mkdir()
    disk.symlink_to("elsewhere")


def file_in_its_place(disk: Path) -> None:
    disk.write_text("")


MISTAKES = {symbolic_link: "symbolic link", file_in_its_place: "exists"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_at_the_start(tmp_path: Path, mistake) -> None:  # type: ignore[no-untyped-def]
    mistake(tmp_path / "disk")
    with pytest.raises(TierError) as refused:
        DiskFiles.open(tmp_path / "disk", 16 * MIB, MIB)
    assert not isinstance(refused.value, TierFault) and MISTAKES[mistake] in str(refused.value)
    with pytest.raises(Unavailable, match=MISTAKES[mistake]):
        World(tmp_path / "disk")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another user")
def test_a_directory_of_another_user_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    os.chown(tmp_path / "disk", 12345, 12345)
    with pytest.raises(Unavailable, match="belongs to another user"):
        World(tmp_path / "disk")
