"""Tests for memory limits, in files laid out as each kind of host and container has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.tiers.cgroups import MemoryLimit, memory_limits
from kvkeep.units import GIB, MIB

NO_LIMIT = "9223372036854771712"  # as version 1 writes it


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., Path]:
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


# -- version 2


def test_a_service_of_systemd_has_the_limits_of_all_its_slices(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
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


def test_a_container_sees_its_own_group_as_the_top(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    group_v2(tmp_path / "cgroup", str(700 * MIB), used=50 * MIB)
    limits = memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "ro")))
    assert limits == [MemoryLimit(tmp_path / "cgroup", 700 * MIB, 50 * MIB)]


def test_a_group_inside_a_container_has_the_containers_limit(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
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
    tmp_path: Path, proc: Callable[..., Path], group: str, root: str
) -> None:
    group_v2(tmp_path / "cgroup", str(700 * MIB))
    assert (
        lowest(memory_limits(proc(f"0::{group}\n", (root, "cgroup", "cgroup2", "ro")))) == 700 * MIB
    )


def test_the_limit_at_which_the_kernel_slows_a_group_down_counts(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    group_v2(tmp_path / "cgroup", str(GIB), high=str(600 * MIB))
    assert lowest(memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw")))) == 600 * MIB


def test_file_cache_is_not_in_use(tmp_path: Path, proc: Callable[..., Path]) -> None:
    group_v2(tmp_path / "cgroup", str(GIB), used=900 * MIB, cached=600 * MIB)
    assert lowest(memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw")))) == 724 * MIB


@pytest.mark.parametrize("limit", ["max", "", "many", "-1", "1e9", "9" * 30, "\x00", "१००"])
def test_what_is_no_number_is_no_limit(
    tmp_path: Path, proc: Callable[..., Path], limit: str
) -> None:
    group_v2(tmp_path / "cgroup", limit)
    assert memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw"))) == []


# -- version 1


def test_version_1_has_a_tree_for_memory(tmp_path: Path, proc: Callable[..., Path]) -> None:
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


def test_version_1_tells_a_container_of_the_limit_of_its_pod(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    group_v1(tmp_path / "memory", NO_LIMIT, used=100 * MIB, above=str(600 * MIB))
    where = proc(
        "4:memory:/kubepods/pod1/a5c8\n", ("/kubepods/pod1/a5c8", "memory", "cgroup", "ro,memory")
    )
    assert lowest(memory_limits(where)) == 500 * MIB


def test_a_hybrid_host_limits_memory_by_version_1(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    group_v1(tmp_path / "memory" / "user", str(GIB))
    (tmp_path / "unified" / "user").mkdir(parents=True)  # without the memory controller
    where = proc(
        "4:memory:/user\n0::/user\n",
        ("/", "memory", "cgroup", "rw,memory"),
        ("/", "unified", "cgroup2", "rw"),
    )
    assert [limit.limit_bytes for limit in memory_limits(where)] == [GIB]


# -- what cannot be read


def test_a_host_without_control_groups_has_no_limits(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    assert memory_limits(tmp_path / "nowhere") == []
    assert memory_limits(proc("", ("/", "cgroup", "cgroup2", "rw"))) == []


def test_nonsense_is_no_limit(tmp_path: Path, proc: Callable[..., Path]) -> None:
    (tmp_path / "cgroup" / "memory.max").mkdir(parents=True)
    (tmp_path / "cgroup" / "memory.stat").write_bytes(b"\xff\xfe active_file\nshmem many\n\n x y z")
    groups = "0::\n\n:::\n0\nx:memory:relative\n4:memory:/with\x00zero\n0::/a/b\n"
    assert (
        memory_limits(
            proc(groups, ("/", "cgroup", "cgroup2", "rw"), ("/", "cgroup", "cgroup", "rw,memory"))
        )
        == []
    )


def test_a_limit_counts_though_nothing_says_what_is_used(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    group_v2(tmp_path / "cgroup", str(GIB), used=1)
    (tmp_path / "cgroup" / "memory.current").unlink()
    (tmp_path / "cgroup" / "memory.stat").unlink()
    assert lowest(memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw")))) == GIB


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_limit_that_may_not_be_read_is_left_out(
    tmp_path: Path, proc: Callable[..., Path]
) -> None:
    group_v2(tmp_path / "cgroup", str(GIB))
    (tmp_path / "cgroup" / "memory.max").chmod(0)
    assert memory_limits(proc("0::/\n", ("/", "cgroup", "cgroup2", "rw"))) == []


# -- an old pool


def test_an_old_pool_gives_back_what_the_group_can_have_of_it(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path, 700 * MIB, used_bytes=600 * MIB, shared_bytes=512 * MIB)
    assert limit.free_bytes() == 100 * MIB
    assert limit.free_bytes(256 * MIB) == 356 * MIB
    assert limit.free_bytes(GIB) == 612 * MIB, "the rest counts for other groups"


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path, 100 * MIB, used_bytes=150 * MIB, shared_bytes=150 * MIB)
    assert limit.free_bytes() == 0
    assert limit.free_bytes(60 * MIB) == 10 * MIB, "what is beyond it has to come back first"
