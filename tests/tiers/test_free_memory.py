"""Tests for the size of a pool, from what the file system, the host and the memory limits have
left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvkeep.tiers import free_memory as module
from kvkeep.tiers.cgroups import MemoryLimit
from kvkeep.tiers.free_memory import (
    auto_pool_bytes,
    available_bytes,
    can_stay,
    pool_room,
    room_to_fill,
)
from kvkeep.units import GIB, KIB, MIB

GROUP = Path("/sys/fs/cgroup/a.slice")
SHM = Path("/dev/shm")
Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(space, memory, limits…)`: bytes that are free in the file system and in memory, and
    limits."""

    def make(
        space: int,
        memory: int = 1 << 40,
        *limits: MemoryLimit,
        kind: str = "tmpfs",
        blocks: int = 1,
    ) -> None:
        found = SimpleNamespace(f_bavail=space // KIB, f_frsize=KIB, f_blocks=blocks)
        monkeypatch.setattr("os.statvfs", lambda path: found)
        monkeypatch.setattr(module, "_host_bytes", lambda: memory)
        monkeypatch.setattr(module, "memory_limits", lambda: list(limits))
        monkeypatch.setattr(module, "file_system_of", lambda path: kind)

    return make


def limit(limit_bytes: int, used: int = 0, shared: int = 0) -> MemoryLimit:
    return MemoryLimit(GROUP, limit_bytes, used, shared)


# -- auto


def test_auto_is_a_quarter_of_the_scarcest(host: Host) -> None:
    host(8 * GIB)
    assert auto_pool_bytes(SHM) == 2 * GIB
    host(8 * GIB, 4 * GIB)
    assert auto_pool_bytes(SHM) == GIB
    host(8 * GIB, 4 * GIB, limit(3 * GIB, used=GIB), limit(64 * GIB))
    assert auto_pool_bytes(SHM) == 512 * MIB
    host(8 * GIB, 4 * GIB, limit(1 << 62))
    assert auto_pool_bytes(SHM) == GIB, "a limit beyond the host's memory is none"


def test_auto_fits_the_shared_memory_that_docker_gives(host: Host) -> None:
    host(64 * MIB)
    assert auto_pool_bytes(SHM) == 56 * MIB < pool_room(SHM).nbytes < 64 * MIB


def test_auto_leaves_memory_for_the_server_itself(host: Host) -> None:
    host(GIB, GIB, limit(150 * MIB, used=30 * MIB))
    assert auto_pool_bytes(SHM) == 50 * MIB and pool_room(SHM).nbytes == 56 * MIB
    host(GIB, GIB, limit(60 * MIB, used=30 * MIB))
    assert auto_pool_bytes(SHM) == 6 * MIB, "small rather than not at all"
    host(GIB, GIB, limit(30 * MIB, used=29 * MIB))
    assert auto_pool_bytes(SHM) == 0


@pytest.mark.parametrize("free_mib", [*range(1, 200, 7), 333, 1000, 5000, 100_000])
@pytest.mark.parametrize("scarce", ["space", "memory", "limit"])
def test_auto_never_takes_more_than_there_is(host: Host, free_mib: int, scarce: str) -> None:
    free, plenty = free_mib * MIB, 1 << 40
    limits = [limit(free + GIB, used=GIB)] if scarce == "limit" else []
    host(free if scarce == "space" else plenty, free if scarce == "memory" else plenty, *limits)
    size = auto_pool_bytes(SHM)
    assert size <= free and size <= pool_room(SHM).nbytes and size % MIB == 0
    assert size >= min(free // 4 // MIB * MIB, 64 * MIB) * 8 // 10 // MIB * MIB
    if scarce != "space" and free > 100 * MIB:
        assert size <= free - 64 * MIB, "what the server itself takes is not promised"


def test_an_old_pool_that_goes_counts_as_free(host: Host) -> None:
    host(GIB, GIB, limit(700 * MIB, used=600 * MIB, shared=512 * MIB))
    assert auto_pool_bytes(SHM) == 32 * MIB
    assert auto_pool_bytes(SHM, 512 * MIB) == 153 * MIB


def test_a_disk_is_filled_no_more_than_memory(host: Host) -> None:
    host(1 << 40, 8 * GIB, limit(4 * GIB), kind="ext4")
    assert auto_pool_bytes(SHM) == GIB
    assert pool_room(SHM).nbytes > 512 * GIB, "but a size that was asked for may be larger"
    assert room_to_fill(SHM) is None and can_stay(SHM)


def test_a_hugetlbfs_takes_nothing_from_free_memory(host: Host) -> None:
    host(32 * GIB, GIB, limit(GIB), kind="hugetlbfs")
    assert auto_pool_bytes(SHM) == 8 * GIB and room_to_fill(SHM) is None


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_a_file_system_without_a_size_has_that_of_memory(host: Host, kind: str) -> None:
    host(0, 8 * GIB, kind=kind, blocks=0)
    assert auto_pool_bytes(SHM) == 2 * GIB


# -- why, and what helps


def test_the_scarcest_is_named_with_a_remedy(host: Host) -> None:
    host(64 * MIB)
    room = pool_room(SHM)
    assert room.reason == "/dev/shm has 64MiB free" and "--shm-size" in room.remedy
    host(GIB, 128 * MIB)
    assert pool_room(SHM).reason == "the host has 128MiB of memory free"
    host(GIB, GIB, limit(700 * MIB, used=300 * MIB))
    room = pool_room(SHM)
    assert room.reason == "the memory limit of 700MiB (/sys/fs/cgroup/a.slice) leaves 400MiB"
    assert "--memory" in room.remedy and "MemoryMax=" in room.remedy


# -- while it is filled, and when it is


def test_filling_may_use_most_of_what_was_reserved(host: Host) -> None:
    host(GIB, GIB, limit(300 * MIB, used=30 * MIB))
    room = room_to_fill(SHM)
    assert room is not None and pool_room(SHM).nbytes < room.nbytes == 254 * MIB


def test_a_pool_may_stay_if_a_server_can_run_beside_it(host: Host) -> None:
    host(0, 0, limit(300 * MIB, used=280 * MIB))
    assert can_stay(SHM), "a full host is no reason: the memory is there already"
    host(0, 0, limit(300 * MIB, used=290 * MIB))
    assert not can_stay(SHM)


# -- this host


def test_available_memory_is_some_of_this_host() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_free_memory_is_read_without_the_kernels_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 1 kB\n")
    assert module._host_bytes() > 0


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        auto_pool_bytes(tmp_path / "gone")


def test_room_of_this_host_is_less_than_its_shared_memory() -> None:
    space = os.statvfs(SHM)
    assert 0 < pool_room(SHM).nbytes < space.f_blocks * space.f_frsize
