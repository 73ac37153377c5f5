from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server import host_memory as module
from kvkeep.server.host_memory import file_system_of
from kvkeep.server.settings import Settings
from kvkeep.units import GIB, MIB

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
31 22 0:26 / /huge rw - ext4 /dev/vdb rw
32 22 0:27 / /huge rw shared:2 master:3 - hugetlbfs none rw
33 22 0:28 / /with\\040blank rw - ramfs none rw
a line that nobody understands
"""


@pytest.mark.parametrize(("memory_bytes", "pool_bytes"), [(1 << 60, None), (1 * GIB, 256 * MIB), (10 * MIB, 64 * MIB)])
def test_auto_is_a_quarter_of_the_scarcer_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory_bytes: int, pool_bytes: int | None
) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: memory_bytes)
    monkeypatch.setattr("os.statvfs", lambda path: type("Space", (), {"f_bavail": 2 << 20, "f_frsize": 4096}))
    settings = Settings.load(None, {}, ["--shm-dir", str(tmp_path)])
    assert settings.pool_size == (pool_bytes or 2 * GIB)
    assert settings.sources["pool_size"] == "default (auto)"


def test_auto_needs_a_directory_that_exists(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"shm_dir = .*gone cannot be used"):
        Settings.load(None, {}, ["--shm-dir", str(tmp_path / "gone")])


def test_available_memory_is_some_of_this_host() -> None:
    assert 0 < module.available_bytes() < 1 << 50


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
def test_the_innermost_mount_says_what_a_directory_is_on(tmp_path: Path, directory: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system_of(Path(directory), mounts) == kind


def test_a_host_that_tells_nothing_of_its_mounts(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, tmp_path / "gone") == ""


def test_shared_memory_of_this_host_is_memory() -> None:
    assert file_system_of(Path("/dev/shm")) in module.MEMORY_FILE_SYSTEMS
