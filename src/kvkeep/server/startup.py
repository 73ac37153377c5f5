"""The start of a server: what the host gives it, and what the last server left.

The last server's blocks are adopted where they can be proven, and removed otherwise. Nothing that
lies there can keep a server from starting: if anything is odd it starts empty and logs why."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
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
    """Raises the limit of open files: each connection is one, each session on this host another."""
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def warn_of_disk(shm_dir: Path) -> None:
    """Warns if the pool would not be in memory."""
    kind = file_system_of(shm_dir)
    if kind and kind not in MEMORY_FILE_SYSTEMS:
        log.warning(
            "shm_dir = %s is on %s, which is not a memory file system: blocks would go to disk; "
            "use /dev/shm or a tmpfs",
            shm_dir,
            kind,
        )


def warn_of_small_pool(pool: Pool) -> None:
    """Warns if `auto` gave a small pool, with the remedy."""
    if pool.pool_bytes >= SMALL_POOL_BYTES:
        return
    size = format_size(pool.pool_bytes)
    if pool.is_left:
        log.warning(
            "pool_size = auto took only %s, the size of the pool that the last server left; "
            "start the server once with --fresh if there is more memory by now",
            size,
        )
        return
    room = pool_room(pool.directory)
    log.warning(
        "pool_size = auto came to only %s: %s; %s, then start the server with --fresh",
        size,
        room.reason,
        room.remedy,
    )


@dataclass(frozen=True)
class WarmStart:
    """What was adopted and how long it took; or why the server starts empty, `why_cold`."""

    adoption: Adoption = field(default_factory=Adoption)
    seconds: float = 0.0
    why_cold: str = ""


def open_store(pool: Pool, limits: Limits, now_ms: int) -> tuple[Store, WarmStart]:
    """A store over the pool's memory, with the blocks that were left in it."""
    if pool.not_adopted:
        log.warning(
            "not reusing the old pool in %s, the server starts empty: %s. It is removed "
            "(pool_size = auto takes the size of the old pool, if the rest of it fits)",
            pool.directory,
            pool.not_adopted,
        )
    why_cold = pool.why_empty
    if pool.is_left:
        started = time.perf_counter()
        adopted = _adopt(pool, limits, now_ms)
        if not isinstance(adopted, str):
            store, adoption = adopted
            warm = WarmStart(adoption, time.perf_counter() - started)
            _log_adoption(pool, warm)
            return store, warm
        why_cold = adopted
        pool.start_over()
    return _store(pool, limits), WarmStart(why_cold=why_cold)


def _store(pool: Pool, limits: Limits) -> Store:
    presence = pool.make_presence()
    return Store(pool.pool_bytes, pool.slab_bytes, limits, columns=pool.columns, presence=presence)


def _adopt(pool: Pool, limits: Limits, now_ms: int) -> tuple[Store, Adoption] | str:
    """The store with what was adopted, or why the pool cannot be adopted."""
    slabs = pool.filled_bytes // pool.slab_bytes
    try:
        store = _store(pool, limits)
        adoption = adopt(store, slabs, pool.old_sessions() > 0, now_ms)
    except Exception:  # guard: a server that starts empty is better than none
        log.exception(
            "the old pool in %s cannot be adopted, the server starts empty", pool.directory
        )
        return "adopting the old pool failed inside the server; the log has the traceback"
    if adoption.contradiction:
        why = "processes of the old server live, and its index does not say which memory is theirs"
        log.warning(
            "not reusing the old pool in %s, the server starts empty: %s", pool.directory, why
        )
        return why
    return store, adoption


def _log_adoption(pool: Pool, warm: WarmStart) -> None:
    adoption = warm.adoption
    log.info(
        "adopted %d blocks, %s, in %.2f s; dropped %d that could not be proven; %d are held for "
        "%d old processes",
        adoption.blocks,
        format_size(adoption.nbytes),
        warm.seconds,
        adoption.dropped,
        adoption.held,
        pool.old_sessions(),
    )
