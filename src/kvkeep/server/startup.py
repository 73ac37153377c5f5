"""The start of a server: what the host gives it, and what the last server left.

The last server's blocks are adopted where they can be proven, and removed otherwise. Nothing that
lies there can keep a server from starting: if anything is odd it starts empty and logs why."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvkeep.errors import TierFault
from kvkeep.server.disk import Disk
from kvkeep.server.lower_tier import TierCounts, TierShown
from kvkeep.server.movement import Movement
from kvkeep.server.settings import Settings
from kvkeep.server.shared import Shared
from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.free_memory import (
    MEMORY_FILE_SYSTEMS,
    SMALL_POOL_BYTES,
    file_system_of,
    pool_room,
)
from kvkeep.tiers.memory import Pool
from kvkeep.tiers.mover import MOST_BYTES, PROGRAM, SHARED_PROGRAM, Files, Mover
from kvkeep.tiers.opening import SharedPlace, check_installed
from kvkeep.tiers.summaries import SHOWN_BYTES, Shown
from kvkeep.tiers.tier_address import TierAddress
from kvkeep.tiers.tier_keys import read_tier_keys
from kvkeep.units import GIB, MIB, format_size
from kvkeep.wire.messages import PoolPlace
from kvkeep.wire.pool_files import Watch

log = logging.getLogger(__name__)

_FIRST_MOVER = 10**15  # numbers of movers' lock files, beside those of sessions


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


def open_store(
    pool: Pool, limits: Limits, now_ms: int, on_disk_bytes: int | None = 0
) -> tuple[Store, WarmStart]:
    """A store over the pool's memory, with the blocks that were left in it. `on_disk_bytes` is the
    size of all disks, whose blocks are counted with its own for clients; None if a shared tier may
    have any block, so that clients have to ask."""
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
        adopted = _adopt(pool, limits, now_ms, on_disk_bytes)
        if not isinstance(adopted, str):
            store, adoption = adopted
            warm = WarmStart(adoption, time.perf_counter() - started)
            _log_adoption(pool, warm)
            return store, warm
        why_cold = adopted
        pool.start_over()
    return _store(pool, limits, on_disk_bytes), WarmStart(why_cold=why_cold)


def _store(pool: Pool, limits: Limits, on_disk_bytes: int | None) -> Store:
    presence = None if on_disk_bytes is None else pool.make_presence(on_disk_bytes)
    return Store(pool.pool_bytes, pool.slab_bytes, limits, columns=pool.columns, presence=presence)


def _adopt(
    pool: Pool, limits: Limits, now_ms: int, on_disk_bytes: int | None
) -> tuple[Store, Adoption] | str:
    """The store with what was adopted, or why the pool cannot be adopted."""
    slabs = pool.filled_bytes // pool.slab_bytes
    fewer = pool.slabs if slabs > pool.slabs else None
    try:
        store = _store(pool, limits, on_disk_bytes)
        adoption = adopt(store, slabs, pool.old_sessions() > 0, now_ms, fewer, pool.move)
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
    if pool.is_too_large:
        pool.shrink()
    return store, adoption


def _log_adoption(pool: Pool, warm: WarmStart) -> None:
    adoption = warm.adoption
    log.info(
        "adopted %d blocks, %s, in %.2f s; dropped %d that could not be proven%s; %d are held for "
        "%d old processes",
        adoption.blocks,
        format_size(adoption.nbytes),
        warm.seconds,
        adoption.dropped,
        f" and {adoption.unfit} that the smaller pool has no room for" if adoption.unfit else "",
        adoption.held,
        pool.old_sessions(),
    )


def open_tiers(settings: Settings, pool: Pool, store: Store, epoch: int) -> Movement | None:
    """The tiers that the settings name, with the blocks that the disks have. None without any. A disk
    whose device is at fault is set aside; TierError says which of the settings is wrong, or what a
    shared tier lacks on this host. A shared tier that does not answer is no obstacle: it is tried
    again."""
    disks: list[Disk] = []
    unusable: list[TierShown] = []
    shared: list[Shared] = []
    numbers = itertools.count(_FIRST_MOVER)
    try:
        for tier in settings.tier:
            if tier.is_shared:
                shared.append(_open_shared(settings, tier, pool, epoch, numbers))
                continue
            try:
                disks.append(_open_disk(tier, pool, store, epoch, numbers))
            except TierFault as fault:
                unusable.append(_unusable(tier, fault))
    except BaseException:  # guard: raised again; movers that were started end
        for each in (*disks, *shared):
            each.close()
        raise
    return Movement(store, disks, shared, _wall_ms, unusable) if settings.tier else None


class SharedFiles:
    """What the process of a shared tier gets: its place, and memory in which it shows what the tier
    lacks."""

    def __init__(self, place: SharedPlace) -> None:
        self._place = place
        self._descriptor = os.memfd_create("kvkeep-summaries")
        weakref.finalize(self, os.close, self._descriptor)
        os.truncate(self._descriptor, SHOWN_BYTES)
        self.shown = Shown(self._descriptor)
        self.shown.clear()

    def descriptors(self) -> tuple[int, ...]:
        return (self._descriptor,)

    def description(self) -> bytes:
        return self._place.description()


def _unusable(tier: TierAddress, fault: TierFault) -> TierShown:
    """Logs that a disk is set aside from the start, and describes it for operators."""
    name = str(tier.directory)
    log.error(
        "disk %s is set aside, its blocks are misses until the server restarts: %s; %s",
        name,
        fault.message,
        fault.hint,
    )
    return TierShown(
        tier=name,
        is_shared=False,
        state="set aside",
        problem=fault.message,
        capacity_bytes=0,
        used_bytes=0,
        blocks=0,
        to_write_chains=0,
        promotions=0,
        in_flight_bytes=0,
        read_ms=None,
        write_ms=None,
        read_rate=None,
        write_rate=None,
        evicted_unwritten=0,
        written_bytes_per_hit=None,
        counts=TierCounts(errors=1),
    )


def _start_mover(
    pool: Pool, epoch: int, files: Files, numbers: Iterator[int], program: str
) -> tuple[Mover, Watch]:
    """A process for a tier, and the lock by which the next server knows that it lives."""
    watch = pool.watch(next(numbers))
    place = PoolPlace(str(pool.directory), str(watch.path), pool.segment_bytes, pool.pool_bytes)
    # What is on its way is held in memory, of which a stalled tier must not take much.
    most_bytes = min(MOST_BYTES, pool.pool_bytes // 4)
    return Mover(place, epoch, files, most_bytes=most_bytes, program=program), watch


def _open_disk(
    tier: TierAddress, pool: Pool, store: Store, epoch: int, numbers: Iterator[int]
) -> Disk:
    started = time.perf_counter()
    if (kind := file_system_of(tier.directory)) in MEMORY_FILE_SYSTEMS:
        log.warning(
            "disk %s is in memory (%s): its blocks are lost when the host restarts",
            tier.directory,
            kind,
        )
    files = DiskFiles.open(tier.directory, tier.size_bytes, _slab_bytes(tier.size_bytes))
    try:
        recovered = files.recovered()
        index = DiskIndex(
            files.data_bytes, files.slab_bytes, store.blocks.presence, recovered, _wall_ms()
        )
        mover, watch = _start_mover(pool, epoch, files, numbers, PROGRAM)
    except BaseException:  # guard: raised again; the next server can use the disk
        files.close()
        raise
    log.info(
        "disk %s: %s for blocks, %d blocks found, in %.2f s",
        tier.directory,
        format_size(files.data_bytes),
        index.adoption.blocks,
        time.perf_counter() - started,
    )
    return Disk(str(tier.directory), files, index, mover, watch, _wall_ms)


def _open_shared(
    settings: Settings, tier: TierAddress, pool: Pool, epoch: int, numbers: Iterator[int]
) -> Shared:
    """SettingsError if its keys cannot be used. They are read once more by the tier's process."""
    check_installed(tier, encrypted=settings.tier_keys is not None)
    place, kept = SharedPlace(str(tier)), "shared-tier.json"
    if settings.tier_keys is not None:
        keys = read_tier_keys(settings.tier_keys)
        place = SharedPlace(str(tier), str(settings.tier_keys), keys.log_id)
        kept = f"shared-tier-{keys.log_id}.json"  # another log of clears has other numbers
        log.info("shared tier %s is encrypted: %s", tier, keys.describe())
    files = SharedFiles(place)
    make_mover = partial(_start_mover, pool, epoch, files, numbers, SHARED_PROGRAM)
    path = settings.state_dir / settings.name / kept
    return Shared(str(tier), tier.size_bytes, make_mover, path, files.shown)


def _slab_bytes(size_bytes: int) -> int:
    """Unit in which a disk is divided among block sizes. Does not depend on the pool, which may have
    another size next time."""
    return 64 * MIB if size_bytes >= GIB else MIB


def _wall_ms() -> int:
    return int(time.time() * 1000)
