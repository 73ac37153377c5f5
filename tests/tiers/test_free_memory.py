"""Tests for the size of a pool: file systems, the host's memory, and memory limits in files laid out
as each kind of host and container has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvkeep.tiers import free_memory as module
from kvkeep.tiers.free_memory import (
    MEMORY_FILE_SYSTEMS,
    MemoryLimit,
    Mount,
    auto_pool_bytes,
    available_bytes,
    can_stay,
    file_system_of,
    memory_limits,
    pool_room,
    read_mounts,
    room_to_fill,
)
from kvkeep.units import GIB, KIB, MIB

GROUP = Path("/sys/fs/cgroup/a.slice")
SHM = Path("/dev/shm")
Host = Callable[..., None]
Proc = Callable[..., Path]


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
        said = f"MemTotal: 1 kB\nMemAvailable: {memory // KIB} kB\n"
        monkeypatch.setattr(module, "Path", lambda path: SimpleNamespace(read_text=lambda: said))
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
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "MemTotal: 1 kB\n")
    assert available_bytes() > 0


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        auto_pool_bytes(tmp_path / "gone")


def test_room_of_this_host_is_less_than_its_shared_memory() -> None:
    space = os.statvfs(SHM)
    assert 0 < pool_room(SHM).nbytes < space.f_blocks * space.f_frsize


# -- memory limits

NO_LIMIT = "9223372036854771712"  # as version 1 writes it


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """Makes /proc/self: `groups` are the lines of cgroup, each mount is (root, point below
    tmp_path, kind, options)."""

    def make(groups: str, *mounts: tuple[str, str, str, str]) -> Path:
        directory = tmp_path / "proc"
        directory.mkdir()
        (directory / "cgroup").write_text(groups)
        lines = [
            f"{number} 1 0:{number} {root} {tmp_path / point} rw,relatime shared:9 - {kind} {kind} {options}\n"
            for number, (root, point, kind, options) in enumerate(mounts, 20)
        ]
        (directory / "mountinfo").write_text(
            "1 0 254:0 / / rw - ext4 /dev/vda rw\n" + "".join(lines)
        )
        return directory

    return make


def group_v2(
    directory: Path, limit: str, used: int = 0, cached: int = 0, shared: int = 0, high: str = "max"
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(limit + "\n")
    (directory / "memory.high").write_text(high + "\n")
    (directory / "memory.current").write_text(f"{used}\n")
    statistics = f"anon 1\nfile {cached + shared}\nshmem {shared}\ninactive_file {cached // 2}\n"
    (directory / "memory.stat").write_text(statistics + f"active_file {cached - cached // 2}\n")


def group_v1(
    directory: Path,
    limit: str,
    used: int = 0,
    cached: int = 0,
    shared: int = 0,
    above: str = NO_LIMIT,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(limit + "\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(
        "cache 0\nshmem 0\ninactive_file 0\nactive_file 0\n"  # of this group without those below it
        f"hierarchical_memory_limit {above}\ntotal_shmem {shared}\n"
        f"total_inactive_file {cached // 2}\ntotal_active_file {cached - cached // 2}\n"
    )


def lowest(limits: list[MemoryLimit]) -> int:
    """The least that any of them leaves."""
    return min(limit.free_bytes() for limit in limits)


def test_a_service_of_systemd_has_the_limits_of_all_its_slices(tmp_path: Path, proc: Proc) -> None:
    top = tmp_path / "cgroup"
    top.mkdir()  # the root group has no memory.max
    group_v2(top / "a.slice", str(2 * GIB), used=1536 * MIB)
    group_v2(top / "a.slice" / "b.slice", "max", used=1536 * MIB)
    group_v2(top / "a.slice" / "b.slice" / "kvkeep.service", str(GIB), used=100 * MIB)
    where = proc("0::/a.slice/b.slice/kvkeep.service\n", ("/", "cgroup", "cgroup2", "rw"))
    limits = memory_limits(where)
    assert [(limit.group.name, limit.limit_bytes) for limit in limits] == [
        ("kvkeep.service", GIB),
        ("a.slice", 2 * GIB),
    ]
    assert lowest(limits) == 512 * MIB, "the slice has less left than the service"


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path, proc: Proc) -> None:
    group_v2(tmp_path / "cgroup", str(700 * MIB), used=50 * MIB)
    limits = memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "ro")))
    assert limits == [MemoryLimit(tmp_path / "cgroup", 700 * MIB, 50 * MIB)]


def test_a_group_inside_a_container_has_the_containers_limit(tmp_path: Path, proc: Proc) -> None:
    group_v2(tmp_path / "cgroup", str(700 * MIB))
    group_v2(tmp_path / "cgroup" / "init", "max")
    limits = memory_limits(proc("0::/init\n", ("/", "cgroup", "cgroup2", "ro")))
    assert [limit.group for limit in limits] == [tmp_path / "cgroup"]


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/kubepods/pod1/a5c8", "/kubepods/pod1/a5c8"),
        ("/kubepods/pod1/other", "/kubepods/pod1/a5c8"),  # it was moved, and the mount was not
        ("/../other", "/"),  # a group outside of the namespace
        ("/", "/../.."),  # a mount from outside of the namespace
    ],
)
def test_a_mount_whose_top_is_another_group(
    tmp_path: Path, proc: Proc, group: str, root: str
) -> None:
    group_v2(tmp_path / "cgroup", str(700 * MIB))
    assert (
        lowest(memory_limits(proc(f"0::{group}\n", (root, "cgroup", "cgroup2", "ro")))) == 700 * MIB
    )


def test_the_limit_at_which_the_kernel_slows_a_group_down_counts(
    tmp_path: Path, proc: Proc
) -> None:
    group_v2(tmp_path / "cgroup", str(GIB), high=str(600 * MIB))
    assert lowest(memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw")))) == 600 * MIB


def test_file_cache_is_not_in_use(tmp_path: Path, proc: Proc) -> None:
    group_v2(tmp_path / "cgroup", str(GIB), used=900 * MIB, cached=600 * MIB)
    assert lowest(memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw")))) == 724 * MIB


@pytest.mark.parametrize("limit", ["max", "", "many", "-1", "1e9", "9" * 30, "\x00", "१००"])
def test_what_is_no_number_is_no_limit(tmp_path: Path, proc: Proc, limit: str) -> None:
    group_v2(tmp_path / "cgroup", limit)
    assert memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw"))) == []


def test_version_1_has_a_tree_for_memory(tmp_path: Path, proc: Proc) -> None:
    group_v1(tmp_path / "memory", NO_LIMIT, used=9 * GIB)
    group_v1(tmp_path / "memory" / "docker", str(4 * GIB), used=GIB)
    group_v1(
        tmp_path / "memory" / "docker" / "a5c8", str(700 * MIB), used=300 * MIB, cached=100 * MIB
    )
    group_v1(tmp_path / "cpu" / "docker" / "a5c8", "1")  # not where memory is limited
    where = proc(
        "5:cpu,cpuacct:/docker/a5c8\n4:memory:/docker/a5c8\n1:name=systemd:/\n",
        ("/", "cpu", "cgroup", "rw,cpu,cpuacct"),
        ("/", "memory", "cgroup", "rw,memory"),
    )
    assert [limit.free_bytes() for limit in memory_limits(where)] == [
        500 * MIB,
        3 * GIB,
        int(NO_LIMIT) - 9 * GIB,
    ]


def test_version_1_tells_a_container_of_the_limit_of_its_pod(tmp_path: Path, proc: Proc) -> None:
    group_v1(tmp_path / "memory", NO_LIMIT, used=100 * MIB, above=str(600 * MIB))
    where = proc(
        "4:memory:/kubepods/pod1/a5c8\n", ("/kubepods/pod1/a5c8", "memory", "cgroup", "ro,memory")
    )
    assert lowest(memory_limits(where)) == 500 * MIB


def test_a_hybrid_host_limits_memory_by_version_1(tmp_path: Path, proc: Proc) -> None:
    group_v1(tmp_path / "memory" / "user", str(GIB))
    (tmp_path / "unified" / "user").mkdir(parents=True)  # without the memory controller
    where = proc(
        "4:memory:/user\n0::/user\n",
        ("/", "memory", "cgroup", "rw,memory"),
        ("/", "unified", "cgroup2", "rw"),
    )
    assert [limit.limit_bytes for limit in memory_limits(where)] == [GIB]


def test_a_host_without_control_groups_has_no_limits(tmp_path: Path, proc: Proc) -> None:
    assert memory_limits(tmp_path / "nowhere") == []
    assert memory_limits(proc("", ("/", "cgroup", "cgroup2", "rw"))) == []


def test_nonsense_is_no_limit(tmp_path: Path, proc: Proc) -> None:
    (tmp_path / "cgroup" / "memory.max").mkdir(parents=True)
    (tmp_path / "cgroup" / "memory.stat").write_bytes(b"\xff\xfe active_file\nshmem many\n\n x y z")
    groups = "0::\n\n:::\n0\nx:memory:relative\n4:memory:/with\x00zero\n0::/a/b\n"
    assert (
        memory_limits(
            proc(groups, ("/", "cgroup", "cgroup2", "rw"), ("/", "cgroup", "cgroup", "rw,memory"))
        )
        == []
    )


def test_a_limit_counts_though_nothing_says_what_is_used(tmp_path: Path, proc: Proc) -> None:
    group_v2(tmp_path / "cgroup", str(GIB), used=1)
    (tmp_path / "cgroup" / "memory.current").unlink()
    (tmp_path / "cgroup" / "memory.stat").unlink()
    assert lowest(memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw")))) == GIB


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_limit_that_may_not_be_read_is_left_out(tmp_path: Path, proc: Proc) -> None:
    group_v2(tmp_path / "cgroup", str(GIB))
    (tmp_path / "cgroup" / "memory.max").chmod(0)
    assert memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw"))) == []


def test_an_old_pool_gives_back_what_the_group_can_have_of_it(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path, 700 * MIB, used_bytes=600 * MIB, shared_bytes=512 * MIB)
    assert limit.free_bytes() == 100 * MIB
    assert limit.free_bytes(256 * MIB) == 356 * MIB
    assert limit.free_bytes(GIB) == 612 * MIB, "the rest counts for other groups"


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path, 100 * MIB, used_bytes=150 * MIB, shared_bytes=150 * MIB)
    assert limit.free_bytes() == 0
    assert limit.free_bytes(60 * MIB) == 10 * MIB, "what is beyond it has to come back first"


# -- mounts

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
31 22 0:26 / /huge rw - ext4 /dev/vdb rw
32 22 0:27 / /huge rw shared:2 master:3 - hugetlbfs none rw
33 22 0:28 / /with\\040blank rw - ramfs none rw
34 22 0:29 /docker/a5c8 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory
a line that nobody understands
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/", "ext4"),
        ("/dev", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/deeper/still", "tmpfs"),
        ("/dev/shmother", "ext4"),
        ("/huge/x", "hugetlbfs"),
        ("/with blank/x", "ramfs"),
    ],
)
def test_the_innermost_mount_says_what_a_directory_is_on(
    mounts: Path, directory: str, kind: str
) -> None:
    assert file_system_of(Path(directory), mounts) == kind


def test_a_mount_is_read_with_its_root_and_the_options_of_its_file_system(mounts: Path) -> None:
    assert read_mounts(mounts)[-1] == Mount(
        "/docker/a5c8", "/sys/fs/cgroup/memory", "cgroup", ("rw", "memory")
    )
    assert len(read_mounts(mounts)) == 6, "a line of another form is left out"


def test_a_host_that_tells_nothing_of_its_mounts(tmp_path: Path) -> None:
    assert (
        file_system_of(tmp_path, tmp_path / "gone") == "" and read_mounts(tmp_path / "gone") == []
    )


def test_shared_memory_of_this_host_is_memory() -> None:
    assert file_system_of(Path("/dev/shm")) in MEMORY_FILE_SYSTEMS
