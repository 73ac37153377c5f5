"""How large a pool can be: what its file system, the host's memory and every memory limit have
left.

    file system    │ in use │ index │ pool …                     │
    host, limits   │ in use │ the server itself │ pool …         │

The scarcest of them decides. What lies in a memory file system takes both its space and memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvkeep.tiers.cgroups import memory_limits
from kvkeep.tiers.mounts import file_system_of
from kvkeep.units import KIB, MIB, format_size

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
SMALL_POOL_BYTES: Final = 256 * MIB  # some 2,000 tokens of a model of 8B parameters
_LEAST_AUTO_BYTES: Final = 64 * MIB
# What a server takes beside its pool. Measured: 39 MiB from the check until it has stored 65,000
# blocks.
_SERVER_BYTES: Final = 64 * MIB
_FILLING_BYTES: Final = (
    16 * MIB
)  # the part of it that is left when the last segment is filled, at least
# Files beside the segments: the first rows of the index, and the presence file, at most one byte
# for 128 of the pool.
_INDEX_BYTES: Final = MIB
_POOL_BYTES_A_PRESENCE_BYTE: Final = 128
_MOST_PRESENCE_BYTES: Final = 4 * MIB


@dataclass(frozen=True)
class Room:
    """The largest pool that fits one bound, with the reason why it is no larger and what helps."""

    nbytes: int
    free_bytes: int
    reason: str
    remedy: str

    @property
    def advised_bytes(self) -> int:
        """Whole MiB that fit even if a little less is free the next time, with space for an index
        that grows."""
        return self.nbytes * 9 // 10 // MIB * MIB


def pool_room(shm_dir: Path, freed_bytes: int = 0) -> Room:
    """The room for a pool in this directory. `freed_bytes` is what an old pool there holds and is
    about to give back.

    OSError if there is no such directory.
    """
    rooms = [_space(shm_dir, freed_bytes)]
    if _takes_memory(shm_dir):
        rooms += _memory(freed_bytes, _SERVER_BYTES)
    return min(rooms, key=lambda room: room.nbytes)


def room_to_fill(shm_dir: Path) -> Room | None:
    """The memory that a pool which has begun to fill may still take. None if its files take no
    memory."""
    return (
        min(_memory(0, _FILLING_BYTES), key=lambda room: room.nbytes)
        if _takes_memory(shm_dir)
        else None
    )


def can_stay(shm_dir: Path) -> bool:
    """Whether a pool that is all there leaves enough of each memory limit for a server to run."""
    return not _takes_memory(shm_dir) or all(
        limit.free_bytes() >= _FILLING_BYTES for limit in memory_limits()
    )


def auto_pool_bytes(shm_dir: Path, freed_bytes: int = 0) -> int:
    """A quarter of what is free, or 64 MiB if that is more and fits. 0 if not even 1 MiB fits.

    OSError if there is no such directory.
    """
    free_bytes = _space(shm_dir, freed_bytes).free_bytes
    if (
        file_system_of(shm_dir) != "hugetlbfs"
    ):  # on a disk, too: nobody expects a pool larger than memory there
        free_bytes = min(free_bytes, available_bytes(freed_bytes))
    wanted_bytes = max(free_bytes // 4, _LEAST_AUTO_BYTES) // MIB * MIB
    return min(wanted_bytes, pool_room(shm_dir, freed_bytes).advised_bytes)


def available_bytes(freed_bytes: int = 0) -> int:
    """Memory that can be had without swapping: of the host, or of a memory limit where that leaves
    less."""
    return min(room.free_bytes for room in _memory(freed_bytes, 0))


def _takes_memory(shm_dir: Path) -> bool:
    """A disk takes none that counts, and huge pages were set aside before: they count nowhere
    else."""
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
    """Of the host, then of each limit. A quarter of what is free is offered in any case: where that
    is less than the server itself takes, a small pool makes no difference."""
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
