"""What the host gives a server: open files, and memory for a pool that may be less than it
seems."""

from __future__ import annotations

import contextlib
import logging
import resource
from pathlib import Path

from kvkeep.tiers.free_memory import (
    MEMORY_FILE_SYSTEMS,
    SMALL_POOL_BYTES,
    file_system_of,
    pool_room,
)
from kvkeep.tiers.memory import Pool
from kvkeep.units import format_size

log = logging.getLogger(__name__)


def allow_many_files() -> None:
    """As many open files as the system lets us have: each connection is one, each session on this
    host another."""
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


def warn_of_small_pool(pool: Pool) -> None:
    """Says so if `auto` came to little, and what would give it more."""
    if pool.pool_bytes >= SMALL_POOL_BYTES:
        return
    if pool.is_left:
        log.warning(
            "pool_size = auto took only %s, the size of the pool that the last server left; "
            "start the server once with --fresh if there is more memory by now",
            format_size(pool.pool_bytes),
        )
        return
    room = pool_room(pool.directory)
    log.warning(
        "pool_size = auto came to only %s: %s; %s, then start the server with --fresh",
        format_size(pool.pool_bytes),
        room.reason,
        room.remedy,
    )
