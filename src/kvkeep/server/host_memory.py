"""What the host has for a server: memory for a pool, and whether a directory is any; open files."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
from pathlib import Path
from typing import Final

from kvkeep.errors import SettingsError
from kvkeep.units import KIB, MIB

log = logging.getLogger(__name__)

MIN_AUTO_POOL_BYTES: Final = 64 * MIB
MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def auto_pool_bytes(shm_dir: Path) -> int:
    """A quarter of what is free: in the file system of `shm_dir` or in memory, whichever has less."""
    try:
        space = os.statvfs(shm_dir)
    except OSError as error:
        raise SettingsError(
            f"shm_dir = {shm_dir} cannot be used: {error.strerror}", "choose a --shm-dir that exists, such as /dev/shm"
        ) from error
    free_bytes = min(space.f_bavail * space.f_frsize, available_bytes())
    return max(MIN_AUTO_POOL_BYTES, free_bytes // 4 // MIB * MIB)


def available_bytes() -> int:
    """What can be had without swapping, or the rest of the container's limit where that is less."""
    available = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = [int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * KIB]
    with contextlib.suppress(OSError, ValueError):  # no control group, or its limit reads "max"
        group = Path("/sys/fs/cgroup")
        available.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(available)


def file_system_of(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds `directory`, such as tmpfs or ext4. Empty where nobody can tell."""
    found, longest = "", -1
    with contextlib.suppress(OSError):
        place = os.path.realpath(directory)
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            mounted, _, kind = line.partition(" - ")
            if len(fields := mounted.split(" ")) < 5 or not kind:
                continue
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
            # Of two on one point the later one hides the earlier.
            if len(point) >= longest and (place == point or place.startswith(point.rstrip("/") + "/")):
                found, longest = kind.split(" ")[0], len(point)
    return found


def allow_many_files() -> None:
    """As many open files as the system lets us have: each connection is one, each session on this host another."""
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def warn_of_disk(shm_dir: Path) -> None:
    """Says so if a pool there would not be in memory."""
    kind = file_system_of(shm_dir)
    if kind and kind not in MEMORY_FILE_SYSTEMS:
        log.warning(
            "shm_dir = %s is on %s, which is no memory file system: blocks would go to disk; use /dev/shm or a tmpfs",
            shm_dir,
            kind,
        )
