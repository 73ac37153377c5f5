"""The mover of a shared tier: a niced process that alone talks to it (`mover`).

    socket ──► Find        ──► 2 threads ──┐
               Fetch       ──► 4 threads ──┤
               Share       ──► 2 threads ──┼──► Result
               SyncClears  ──► 1 thread  ──┤
               summaries       1 thread  ──┘

Clients of shared tiers block and cannot be cancelled; this process can be killed. Each kind of job
has threads of its own, so that writes that hang hold up no lookup. A job is cut into windows, which
several threads move at once. Blocks count as written when other hosts can read that they are
(`Summaries`).

Several blocks are in one object (`parcels`). Padding between shards, which may hold other bytes,
never leaves the host. Every shard is compared with its checksum on the way up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import TierError
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.clear_log import ALL, Entry, Hosts, SharedLog
from kvkeep.tiers.mover import (
    MOST_CLEARS,
    Cancel,
    Fetch,
    Find,
    Order,
    Result,
    SetRate,
    Share,
    Start,
    SyncClears,
    frame_of,
)
from kvkeep.tiers.mover_process import MappedPool, Pace, describe, run
from kvkeep.tiers.opening import open_place
from kvkeep.tiers.parcels import Parcels
from kvkeep.tiers.summaries import Shown, Summaries, words_of

THREADS: Final[dict[type, int]] = {Find: 2, Fetch: 4, Share: 2, SyncClears: 1}
_SUMMARIES_S: Final = 1.0
_HOST_WITHIN_S: Final = 5.0


@dataclass(eq=False)
class _Moving:
    """A job under way. `left`: how many of its pieces have not been moved."""

    job: Find | Fetch | Share | SyncClears
    good: NDArray[np.uint8]
    checksums: NDArray[np.uint64]
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    left: int = 0
    found: int = 0
    clears: list[Entry] = field(default_factory=list)
    after: int = 0  # the number before the first of them
    lacking: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    usage: tuple[int, int, int] = (0, 0, 0)
    error: str = ""
    began_s: float = 0.0


class SharedProcess:
    """Moves blocks between the pool and a shared tier, and sends a Result for each job."""

    def __init__(
        self, pool: MappedPool, tier: CheckedTier, shown: Shown, connected: socket.socket
    ) -> None:
        self._shown = shown
        self._summaries: Summaries | None = None
        self._knows_host = threading.Event()
        self._pool = pool
        self._tier = tier
        self._log = SharedLog(tier)
        self._hosts: Hosts | None = None  # once this host is in their list
        self._host_names: list[str] = []  # of all, when the list was read last
        self._socket = connected
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._came = {kind: threading.Condition(self._lock) for kind in THREADS}
        self._queues: dict[type, deque[tuple[_Moving, slice]]] = {kind: deque() for kind in THREADS}
        self._pace = Pace()

    def start(self) -> None:
        """Starts the threads."""
        for kind, count in THREADS.items():
            for _ in range(count):
                threading.Thread(target=self._move_all, args=(kind,), daemon=True).start()

    def take(self, order: Order) -> None:
        """Begins a job, or changes how jobs are done."""
        if isinstance(order, SetRate):
            self._pace.set_rate(order.bytes_per_s)
        elif isinstance(order, Cancel):
            self._cancel(order.number)
        elif isinstance(order, Find | Fetch | Share | SyncClears):
            self._begin(order)

    def _begin(self, job: Find | Fetch | Share | SyncClears) -> None:
        blocks = len(job.slots) // 8 if isinstance(job, Fetch | Share) else 0
        shards = len(job.shard_bytes) if isinstance(job, Fetch | Share) else 0
        moving = _Moving(job, np.zeros(blocks, np.uint8), np.zeros((blocks, shards), np.uint64))
        pieces = [slice(0, 0)]
        if isinstance(job, Fetch | Share):
            moving.slots = np.frombuffer(job.slots, "<i8")
            if isinstance(job, Share):
                moving.checksums[:] = np.frombuffer(job.checksums, "<u8").reshape(-1, shards)
            pieces = _windows(job, blocks)
        with self._lock:
            self._queues[type(job)].extend((moving, piece) for piece in pieces)
            moving.left = len(pieces)
            self._came[type(job)].notify(len(pieces))

    def _cancel(self, number: int) -> None:
        """Fails the job unless one of its pieces has begun."""
        cancelled = set()
        with self._lock:
            for kind, queue in self._queues.items():
                found = {moving for moving, _ in queue if moving.job.number == number}
                found = {moving for moving in found if not moving.began_s}
                self._queues[kind] = deque(each for each in queue if each[0] not in found)
                cancelled |= found
        for moving in cancelled:
            moving.error = "cancelled"
            self._answer(moving)

    def _move_all(self, kind: type) -> None:
        while True:
            with self._lock:
                while not self._queues[kind]:
                    self._came[kind].wait()
                moving, piece = self._queues[kind].popleft()
                moving.began_s = moving.began_s or time.monotonic()
            try:
                self._move(moving, piece)
            except Exception as error:
                # guard: whatever happened to this piece, the mover goes on with the others
                moving.error = moving.error or describe(error)
            with self._lock:
                moving.left -= 1
                is_last = not moving.left
            if is_last:
                self._publish(moving)
                self._answer(moving)

    def _move(self, moving: _Moving, piece: slice) -> None:
        job = moving.job
        if isinstance(job, Find):
            moving.found = self._find(job)
            if moving.found and self._summaries is not None:
                keys = job.keys[: moving.found * KEY_BYTES]
                self._summaries.found(words_of(job.place, keys))
            return
        if isinstance(job, SyncClears):
            self._sync(moving, job)
            return
        self._pace.wait((piece.stop - piece.start) * job.nbytes)
        self._pool.segments.addresses(moving.slots[piece], job.nbytes)  # checks them
        places = list(zip(job.shard_offsets, job.shard_bytes, strict=True))
        blocks = [
            [slot[offset : offset + nbytes] for offset, nbytes in places]
            for slot in self._pool.views(moving.slots[piece], job.nbytes)
        ]
        parcels = Parcels(self._tier.bare, job.place, job.parcel_blocks, job.shard_bytes)
        keys = job.keys[piece.start * KEY_BYTES : piece.stop * KEY_BYTES]
        rows = moving.checksums[piece]
        if isinstance(job, Share):
            good = parcels.write(keys, blocks, rows)
        else:
            before = job.before if piece.start == 0 else b""  # other pieces begin with a window
            good = parcels.read(before + keys, len(before) // KEY_BYTES, blocks, rows)
        moving.good[piece.start : piece.start + good] = 1

    def _find(self, job: Find) -> int:
        parcels = Parcels(self._tier.bare, job.place, job.parcel_blocks)
        return max(0, parcels.leading(job.before + job.keys) - len(job.before) // KEY_BYTES)

    def _publish(self, moving: _Moving) -> None:
        """Tells other hosts which blocks were written."""
        job = moving.job
        if not isinstance(job, Share) or moving.error:
            return
        try:
            if not self._knows_host.wait(_HOST_WITHIN_S) or self._summaries is None:
                raise TierError("the name of this host is not known yet")
            self._summaries.wrote(words_of(job.place, job.keys))
            self._summaries.publish()
        except Exception as error:
            # guard: whatever happened to this job, the mover goes on with the others
            moving.error = describe(error)

    def _summarize(self, host: str, hosts: Hosts) -> None:
        """Publishes, and reads what others have published, each second. While that fails, blocks are
        asked for."""
        while True:
            with contextlib.suppress(TierError):
                if self._summaries is None:
                    self._summaries = Summaries(self._tier, host, self._shown)
                    self._knows_host.set()
                self._summaries.publish()
                self._host_names = hosts.names()
                self._summaries.read(self._host_names)
            time.sleep(_SUMMARIES_S)

    def _sync(self, moving: _Moving, job: SyncClears) -> None:
        hosts = self._hosts or self._join(job)
        known = self._log.sync(job.clears, 0)
        is_same = self._log.digest(job.after) == job.digest
        moving.after = job.after if is_same else 0
        moving.clears = known[moving.after :]
        moving.hosts = self._host_names
        hosts.confirm(job.carried_out if is_same else 0)
        if job.awaited and is_same:
            moving.lacking = hosts.lacking(job.awaited)
        usage = self._tier.usage()
        moving.usage = usage.blocks, usage.used_bytes, usage.capacity_bytes
        if job.clears:
            threading.Thread(target=self._delete, args=(job.clears,), daemon=True).start()

    def _join(self, job: SyncClears) -> Hosts:
        """Enters the list of hosts before it reads the log: a clear that it does not read waits for
        it."""
        hosts = Hosts(self._tier, job.host, self._log.mark)
        self._host_names = hosts.join(job.hosts)
        self._log.begin()
        self._hosts = hosts
        threading.Thread(target=self._summarize, args=(job.host, hosts), daemon=True).start()
        return hosts

    def _delete(self, clears: list[Entry]) -> None:
        """Removes what was cleared, as far as it is known where that is. It is out of use already:
        if this fails, it stays until it is evicted."""
        for tenant in (each.name for each in clears if each.name != ALL):
            for generation in self._log.generations(tenant)[:-1]:
                with contextlib.suppress(TierError):
                    self._tier.delete(f"v1/{tenant}/{generation}/")

    def _answer(self, moving: _Moving) -> None:
        seconds = time.monotonic() - moving.began_s if moving.began_s else 0.0
        fetched = moving.checksums.tobytes() if isinstance(moving.job, Fetch) else b""
        good = moving.good.tobytes()
        result = Result(
            moving.job.number,
            moving.error,
            good,
            seconds,
            moving.found,
            fetched,
            moving.clears[:MOST_CLEARS],
            moving.lacking,
            moving.usage,
            moving.after,
            moving.hosts,
        )
        with self._sending:
            self._socket.sendall(frame_of(result))


def _windows(job: Fetch | Share, blocks: int) -> list[slice]:
    """The blocks of each window (`parcels`), which are moved together."""
    most = job.parcel_blocks
    before = job.first % most if isinstance(job, Share) else len(job.before) // KEY_BYTES
    return [slice(max(0, at), min(at + most, blocks)) for at in range(-before, blocks, most)]


def _make(start: Start, connected: socket.socket) -> SharedProcess:
    tier = open_place(start.description)
    shown = Shown(start.descriptors[0])
    return SharedProcess(MappedPool(start.pool, start.epoch), tier, shown, connected)


if __name__ == "__main__":
    run(_make)
