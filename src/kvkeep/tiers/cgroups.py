"""Memory limits of control groups: all that apply to this process, from its own group up to the
top.

    /proc/self/cgroup       0::/system.slice/kvkeep.service          the group of this process, in version 2
                            4:memory:/docker/a5c8                    the same in version 1: a tree for memory
    /proc/self/mountinfo    where each tree is mounted, and which group is the top of what can be seen there

A limit holds for a group and all groups below it, so the one that ends a process is often not on
its own group: a pod has one around its containers, a slice one around its services. In a container
the groups above its own are hidden; of those, version 1 tells the lowest limit, and version 2
nothing.

Memory in /dev/shm counts for the group of the process that touched it first, and stays counted
after that process ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvkeep.tiers.mounts import Mount, read_mounts

_PROC: Final = Path("/proc/self")
_MOST_BYTES: Final = 1 << 16  # that are read of a file of the kernel's
_MOST_LEVELS: Final = 64


@dataclass(frozen=True)
class MemoryLimit:
    """One limit. `used_bytes` is without file cache, which the kernel gives up before it ends a
    process; `shared_bytes` of it are in memory file systems."""

    group: Path
    limit_bytes: int
    used_bytes: int = 0
    shared_bytes: int = 0

    def free_bytes(self, freed_bytes: int = 0) -> int:
        """What is left of it when an old pool of so many bytes is gone. Nothing tells which groups
        that pool counts for; with less shared memory than that, a group has no more to get back."""
        return max(0, self.limit_bytes - self.used_bytes + min(freed_bytes, self.shared_bytes))


def memory_limits(proc: Path = _PROC) -> list[MemoryLimit]:
    """All limits that can be seen. What cannot be read is no limit."""
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
    """The group and those above it, as directories. Only the mount's top if the group does not lie
    below it, as in a container that sees its own group as the top and is told the host's name for
    it."""
    top = Path(mount.point)
    with contextlib.suppress(ValueError):
        below = PurePosixPath(group).relative_to(mount.root)
        if ".." not in below.parts:
            for depth in range(min(len(below.parts), _MOST_LEVELS), 0, -1):
                yield top.joinpath(*below.parts[:depth])
    yield top


def _limit_v2(group: Path) -> MemoryLimit | None:
    """memory.high counts as well: beyond it the kernel slows a group down until it has less, which
    a pool never has."""
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
