"""Tests for what the kernel says of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.tiers.free_memory import MEMORY_FILE_SYSTEMS
from kvkeep.tiers.mounts import Mount, file_system_of, read_mounts

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
