"""How large a pool can be: what its file system, the host's memory and every memory limit have
left.

    file system    │ in use │ index │ pool …                     │
    host, limits   │ in use │ the server itself │ pool …         │

The scarcest of them decides. What lies in a memory file system takes both its space and memory.

Memory limits are those of control groups, from the group of this process up to the top:

    /proc/self/cgroup       0::/system.slice/kvkeep.service       the group of this process, version 2
                            4:memory:/docker/a5c8                 version 1: a tree for memory
    /proc/self/mountinfo    where each tree is mounted, and which group is the top of what is visible

A limit applies to a group and all groups below it, so the limit that ends a process is often not on
its own group: a pod has one around its containers, a slice one around its services. A container
does not see the groups above its own; version 1 tells their lowest limit, version 2 nothing. Memory
in /dev/shm counts for the group of the process that touched it first, also after that process
ended."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from kvkeep.units import KIB, MIB, format_size

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
SMALL_POOL_BYTES: Final = 256 * MIB  # some 2,000 tokens of a model of 8B parameters
_LEAST_AUTO_BYTES: Final = 64 * MIB
# What a server takes beside its pool. Measured: 39 MiB from the check until it has stored 65,000
# blocks.
_SERVER_BYTES: Final = 64 * MIB
# the part of it that is left when the last segment is filled, at least
_FILLING_BYTES: Final = 16 * MIB
# Files beside the segments: the first rows of the index, and the presence file, at most one byte
# for 128 of the pool.
_INDEX_BYTES: Final = MIB
_POOL_BYTES_A_PRESENCE_BYTE: Final = 128
_MOST_PRESENCE_BYTES: Final = 4 * MIB

MOUNTS: Final = Path("/proc/self/mountinfo")
_PROC: Final = Path("/proc/self")
_MOST_BYTES: Final = 1 << 16  # that are read of one of the kernel's files
_MOST_LEVELS: Final = 64


@dataclass(frozen=True)
class Room:
    """The largest pool that fits one bound, with the reason and a remedy."""

    nbytes: int
    free_bytes: int
    reason: str
    remedy: str

    @property
    def advised_bytes(self) -> int:
        """Whole MiB, with a margin for changes and for an index that grows."""
        return self.nbytes * 9 // 10 // MIB * MIB


def pool_room(shm_dir: Path, freed_bytes: int = 0) -> Room:
    """The room for a pool in this directory. `freed_bytes`: what an old pool there will return.
    OSError if there is no such directory."""
    rooms = [_space(shm_dir, freed_bytes)]
    if _takes_memory(shm_dir):
        rooms += _memory(freed_bytes, _SERVER_BYTES)
    return min(rooms, key=lambda room: room.nbytes)


def room_to_fill(shm_dir: Path) -> Room | None:
    """The memory that a pool may still take while it is filled. None if its files take no memory."""
    return (
        min(_memory(0, _FILLING_BYTES), key=lambda room: room.nbytes)
        if _takes_memory(shm_dir)
        else None
    )


def can_stay(shm_dir: Path) -> bool:
    """Whether a filled pool leaves enough of each memory limit for a server to run."""
    return not _takes_memory(shm_dir) or all(
        limit.free_bytes() >= _FILLING_BYTES for limit in memory_limits()
    )


def auto_pool_bytes(shm_dir: Path, freed_bytes: int = 0) -> int:
    """A quarter of what is free, or 64 MiB if that is more and fits; 0 if not even 1 MiB fits.
    OSError if there is no such directory."""
    free_bytes = _space(shm_dir, freed_bytes).free_bytes
    # on a disk, too: nobody expects a pool larger than memory there
    if file_system_of(shm_dir) != "hugetlbfs":
        free_bytes = min(free_bytes, available_bytes(freed_bytes))
    wanted_bytes = max(free_bytes // 4, _LEAST_AUTO_BYTES) // MIB * MIB
    return min(wanted_bytes, pool_room(shm_dir, freed_bytes).advised_bytes)


def available_bytes(freed_bytes: int = 0) -> int:
    """Memory available without swapping: of the host, or of the tightest memory limit."""
    return min(room.free_bytes for room in _memory(freed_bytes, 0))


def _takes_memory(shm_dir: Path) -> bool:
    """Whether files here take memory. Not on a disk, and not in huge pages, which were reserved
    before."""
    return file_system_of(shm_dir) in MEMORY_FILE_SYSTEMS - {"hugetlbfs"} | {""}


def _space(shm_dir: Path, freed_bytes: int) -> Room:
    space = os.statvfs(shm_dir)
    free_bytes = space.f_bavail * space.f_frsize + freed_bytes
    if not space.f_blocks:  # ramfs, or a tmpfs of any size
        free_bytes = 1 << 62
    beside = _INDEX_BYTES + min(free_bytes // _POOL_BYTES_A_PRESENCE_BYTE, _MOST_PRESENCE_BYTES)
    return Room(
        max(0, free_bytes - beside),
        free_bytes,
        f"{shm_dir} has {format_size(free_bytes)} free",
        f"make {shm_dir} larger (in Docker: --shm-size; in Kubernetes: an emptyDir with medium: Memory)",
    )


def _memory(freed_bytes: int, reserve_bytes: int) -> Iterator[Room]:
    """The room of the host, then of each limit. At least a quarter of what is free: where that is
    less than the server itself takes, a small pool makes no difference."""
    host_bytes = _host_bytes() + freed_bytes
    yield Room(
        max(host_bytes - reserve_bytes, host_bytes // 4),
        host_bytes,
        f"the host has {format_size(host_bytes)} of memory free",
        "end what uses memory on this host",
    )
    for limit in memory_limits():
        free_bytes = limit.free_bytes(freed_bytes)
        yield Room(
            max(free_bytes - reserve_bytes, free_bytes // 4),
            free_bytes,
            f"the memory limit of {format_size(limit.limit_bytes)} ({limit.group}) leaves {format_size(free_bytes)}",
            "raise the memory limit (in Docker: --memory; in Kubernetes: resources.limits.memory; "
            "in systemd: MemoryMax=)",
        )


def _host_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return (
            int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * KIB
        )
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MemoryLimit:
    """One limit. `used_bytes` excludes file cache, which the kernel drops before it ends a process;
    `shared_bytes` of it are in memory file systems."""

    group: Path
    limit_bytes: int
    used_bytes: int = 0
    shared_bytes: int = 0

    def free_bytes(self, freed_bytes: int = 0) -> int:
        """What is left when an old pool of `freed_bytes` is removed. It is unknown which groups
        that pool counts for; a group gets back no more than its shared memory."""
        return max(0, self.limit_bytes - self.used_bytes + min(freed_bytes, self.shared_bytes))


def memory_limits(proc: Path = _PROC) -> list[MemoryLimit]:
    """All visible limits. A file that cannot be read is no limit."""
    own = _own_groups(proc / "cgroup")
    limits = []
    for mount in read_mounts(proc / "mountinfo"):
        version = _version(mount)
        for group in _levels(mount, own[version]) if version in own else ():
            limit = _limit_v2(group) if version == 2 else _limit_v1(group)
            if limit is not None:
                limits.append(limit)
    return limits


def _own_groups(path: Path) -> dict[int, str]:
    """The group of this process in the trees that can limit memory, by version."""
    own = {}
    for line in _read(path).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers and group:
            own[2] = group
        elif "memory" in controllers.split(",") and group:
            own[1] = group
    return own


def _version(mount: Mount) -> int:
    """0 for mounts that have nothing to do with memory."""
    if mount.kind == "cgroup2":
        return 2
    return 1 if mount.kind == "cgroup" and "memory" in mount.options else 0


def _levels(mount: Mount, group: str) -> Iterator[Path]:
    """The directories of the group and of those above it. Only the top of the mount if the group is
    not below it: a container may see its own group as the top, but be told the host's name of it."""
    top = Path(mount.point)
    with contextlib.suppress(ValueError):
        below = PurePosixPath(group).relative_to(mount.root)
        if ".." not in below.parts:
            for depth in range(min(len(below.parts), _MOST_LEVELS), 0, -1):
                yield top.joinpath(*below.parts[:depth])
    yield top


def _limit_v2(group: Path) -> MemoryLimit | None:
    """memory.high counts too: beyond it the kernel slows the group down until it uses less, which a
    pool never does."""
    limits = [_number(group / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    return _with_usage(group, min(known), _number(group / "memory.current"), _statistics(group), "")


def _limit_v1(group: Path) -> MemoryLimit | None:
    statistics = _statistics(group)
    # The lowest limit of this group and all above it, hidden ones included.
    limits = [_number(group / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    return _with_usage(
        group, min(known), _number(group / "memory.usage_in_bytes"), statistics, "total_"
    )


def _with_usage(
    group: Path, limit: int, used: int | None, statistics: dict[str, int], prefix: str
) -> MemoryLimit:
    cached, shared = (
        sum(statistics.get(prefix + name, 0) for name in names)
        for names in (("active_file", "inactive_file"), ("shmem",))
    )
    return MemoryLimit(group, limit, max((used or 0) - cached, 0), shared)


def _statistics(group: Path) -> dict[str, int]:
    pairs = (line.split(" ") for line in _read(group / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


def _number(path: Path) -> int | None:
    """None for "max", and for what is no number."""
    text = _read(path).strip()
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _read(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return ""


class Mount(NamedTuple):
    """One mount: directory `root` of a file system with these options appears at `point`."""

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def read_mounts(mounts: Path = MOUNTS) -> list[Mount]:
    """All mounts in order. Empty if the list cannot be read; skips malformed lines."""
    found = []
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            mounted, _, system = line.partition(" - ")
            if len(fields := mounted.split(" ")) >= 5 and system:
                kind, _, rest = system.partition(" ")
                options = tuple(rest.split(" ")[-1].split(","))
                found.append(Mount(_plain(fields[3]), _plain(fields[4]), kind, options))
    return found


def file_system_of(directory: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system that holds `directory`, such as tmpfs; empty if unknown."""
    found, longest = "", -1
    place = os.path.realpath(directory)
    for mount in read_mounts(mounts):
        # A later mount at the same point hides an earlier one.
        is_above = place == mount.point or place.startswith(mount.point.rstrip("/") + "/")
        if is_above and len(mount.point) >= longest:
            found, longest = mount.kind, len(mount.point)
    return found


def _plain(path: str) -> str:
    """Decodes blanks and backslashes, which the kernel writes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
