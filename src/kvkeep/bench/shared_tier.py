"""How fast a shared tier writes and reads blocks, against the client library alone.

The real process of the tier, as a server has it: jobs of 8 MiB, in and out of a pool. The floor is
measured in turns with it, by another process (shared_floor.py). Blocks are new in each round, and
removed after it."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.errors import KVKeepError
from kvkeep.kv.checksum import checksum
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.shared import tenant_digest
from kvkeep.server.startup import SharedFiles
from kvkeep.testing.process import JsonProcess, wait_for
from kvkeep.tiers.memory import Pool
from kvkeep.tiers.mover import JOB_BYTES, SHARED_PROGRAM, Fetch, Find, Mover, Share, SyncClears
from kvkeep.tiers.opening import SharedPlace, open_tier
from kvkeep.tiers.parcels import blocks_a_parcel
from kvkeep.tiers.tier_address import TierAddress
from kvkeep.units import MIB, format_size
from kvkeep.wire.messages import PoolPlace

_POOL_BYTES = 64 * MIB
_SLAB_BYTES = 16 * MIB
_EPOCH = 1
_STALLED_S = 60.0
_FOUND_BLOCKS = 512
_FINDS = 50
_FLOOR = "kvkeep.bench.shared_floor"


def rows(
    address: TierAddress, block_bytes: Sequence[int], total_bytes: int, rounds: int
) -> tuple[list[dict[str, Any]], float]:
    """A row for each size and direction; and the median milliseconds of a lookup of 512 blocks."""
    own_place = f"v1/bench-{secrets.token_hex(8)}/"
    place = f"{own_place}0/blocks"
    found: list[dict[str, Any]] = []
    with ExitStack() as ends:
        tier = ends.enter_context(closing(open_tier(address)))
        ends.callback(tier.delete, own_place)
        floor = JsonProcess("the client library", ("-m", _FLOOR, str(address), f"{place}-floor"))
        ends.callback(floor.end)

        def leave_nothing() -> None:
            floor.send({"direction": "end"})
            floor.receive(_STALLED_S)

        ends.callback(leave_nothing)

        def plain(direction: str, total_bytes: int) -> float:
            floor.send({"direction": direction, "nbytes": nbytes, "total": total_bytes})
            return float(floor.receive(_STALLED_S)["gbps"])

        for nbytes in block_bytes:
            with _UnderTest(address, place, nbytes) as tested:
                took: dict[tuple[str, str], list[float]] = {}
                for turn in range(1, rounds + 1):
                    say(f"blocks of {format_size(nbytes)}, {turn} of {rounds}")
                    tier.delete(own_place)  # of the round before
                    for direction in ("write", "read"):
                        for name, move in (("own", tested.move), ("floor", plain)):
                            gbps = move(direction, total_bytes)
                            took.setdefault((direction, name), []).append(gbps)
                find_ms = tested.find_ms()
            for direction in ("write", "read"):
                own, least = (statistics.median(took[direction, name]) for name in ("own", "floor"))
                found.append(
                    {
                        "tier": str(address),
                        "direction": direction,
                        "block_bytes": nbytes,
                        "gbps": round(own, 3),
                        "floor_gbps": round(least, 3),
                        "fraction_of_floor": round(own / least, 3),
                    }
                )
    return found, find_ms


@contextmanager
def own_salt(address: TierAddress) -> Iterator[str]:
    """A salt that no run has had. What servers have stored with it leaves a shared tier at the end
    of the block, when they must have stopped."""
    salt = secrets.token_hex(8)
    try:
        yield salt
    finally:
        if address.is_shared:
            with closing(open_tier(address)) as tier:
                tier.delete(f"v1/{tenant_digest(tenant_of(salt))}/")


class _UnderTest:
    """A pool and the process of a shared tier, for blocks of one size."""

    def __init__(self, address: TierAddress, place: str, block_bytes: int) -> None:
        self._address = address
        self._place = place
        self._nbytes = block_bytes
        self._parcel_blocks = blocks_a_parcel(block_bytes)
        self._ends = ExitStack()
        self._keys: list[bytes] = []  # of each job of the last write
        self._numbers = 0

    def __enter__(self) -> _UnderTest:
        with ExitStack() as ends:
            name = f"bench-{os.getpid()}"
            pool = Pool(Path("/dev/shm"), name, _POOL_BYTES, _SLAB_BYTES, _EPOCH)
            ends.callback(pool.close)
            while pool.filled_bytes < pool.pool_bytes:
                pool.fill_next()
            self._slots = np.arange(
                0, pool.pool_bytes - self._nbytes + 1, self._nbytes, dtype="<i8"
            )
            noise = np.random.default_rng(1)
            sums = []
            for offset in self._slots[: len(self._slots) // 2].tolist():
                slot = pool.segments.view(offset, self._nbytes)
                slot[:] = np.frombuffer(noise.bytes(self._nbytes), dtype=np.uint8)
                sums.append(checksum(slot))
            self._checksums = np.array(sums, "<u8")
            watch = pool.watch(1)
            ends.callback(watch.close)
            where = PoolPlace(
                str(pool.directory), str(watch.path), pool.segment_bytes, pool.pool_bytes
            )
            files = SharedFiles(SharedPlace(str(self._address)))
            self._mover = Mover(where, _EPOCH, files, program=SHARED_PROGRAM)
            ends.callback(self._mover.close)
            host = self._place.split("/")[1]  # blocks are shared by known hosts only
            self._run(iter([SyncClears(self._next(), 0, [], host, 0)]))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def move(self, direction: str, total_bytes: int) -> float:
        """Writes new blocks, or reads those that were written last. GB/s."""
        jobs = -(-total_bytes // JOB_BYTES)
        if direction == "write":
            blocks = JOB_BYTES // self._nbytes
            self._keys = [secrets.token_bytes(blocks * KEY_BYTES) for _ in range(jobs)]
        make = self._share if direction == "write" else self._fetch
        started = time.perf_counter()
        self._run(make(job) for job in range(jobs))
        return jobs * JOB_BYTES / (time.perf_counter() - started) / 1e9

    def find_ms(self) -> float:
        """Of one lookup after the other."""
        keys = b"".join(self._keys)[: _FOUND_BLOCKS * KEY_BYTES]
        took = []
        for _ in range(_FINDS):
            started = time.perf_counter()
            self._run(iter([Find(self._next(), self._place, keys, b"", self._parcel_blocks)]))
            took.append(time.perf_counter() - started)
        return statistics.median(took) * 1e3

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _half(self, job: int) -> slice:
        blocks = JOB_BYTES // self._nbytes
        first = job % (len(self._slots) // 2 // blocks) * blocks
        return slice(first, first + blocks)

    def _share(self, job: int) -> Share:
        some = self._half(job)
        return Share(
            self._next(),
            self._slots[some].tobytes(),
            self._place,
            self._keys[job],
            self._nbytes,
            [0],
            [self._nbytes],
            self._checksums[some].tobytes(),
            0,
            self._parcel_blocks,
        )

    def _fetch(self, job: int) -> Fetch:
        some = self._half(job)
        slots = self._slots[len(self._slots) // 2 :][some].tobytes()
        nbytes = self._nbytes
        return Fetch(
            self._next(),
            slots,
            self._place,
            self._keys[job],
            nbytes,
            [0],
            [nbytes],
            b"",
            self._parcel_blocks,
        )

    def _run(self, jobs: Iterator[Share | Fetch | Find | SyncClears]) -> None:
        """Keeps the process busy until all jobs are done."""
        mover, next_job = self._mover, next(jobs, None)
        while next_job or mover.jobs:
            while next_job and mover.can_write and mover.can_read:
                assert mover.send(next_job)
                next_job = next(jobs, None)
            wait_for(mover, 1000, writable=mover.wants_write)
            for result in mover.results():
                if result.error or not all(result.good):
                    raise KVKeepError(
                        f"the tier failed: {result.error or 'it did not take or have all blocks'}",
                        "is it large enough?",
                    )
            if mover.problem or mover.oldest_s > _STALLED_S:
                raise KVKeepError(f"the tier stalled: {mover.problem or 'no answer'}")
