"""How fast a disk tier writes and reads blocks, against `fio` on the same file; and what it does to
lookups and hits (tier_lookup.py, tier_hits.py).

The real mover, files and index, without a server: jobs of 8 MiB, each committed. The tier lies in a
directory of its own below the given one and is removed at the end. Its file is filled first, because
the first write to an allocated part of a file costs more than later ones.

The floor is measured in turns with the tier. It moves blocks of the same size at random places of
the same file, with as many threads, as niced as the mover, and syncs after each 8 MiB that a thread
wrote."""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench import shared_tier, tier_floor
from kvkeep.bench.progress import say
from kvkeep.bench.tier_hits import engine_kind, hit_times
from kvkeep.bench.tier_lookup import LEAST_POOL_BYTES, PROBED_BLOCK_BYTES, lookup_times
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.layouts import SLOT_ALIGN, Layout
from kvkeep.testing.process import wait_for
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.memory import Pool
from kvkeep.tiers.mover import JOB_BYTES, Mover, Read, Result, Write
from kvkeep.tiers.tier_address import TierAddress, parse_tiers, quote_tiers
from kvkeep.units import GIB, KIB, MIB, format_size
from kvkeep.wire.messages import PoolPlace

_SHM = Path("/dev/shm")
_POOL_BYTES = 256 * MIB
_SLAB_BYTES = 16 * MIB
_EPOCH = 1
_TENANT = "bench"
_STALLED_S = 60.0
LOOKUPS = 2000
_PACE = 0.6  # of its bench rate, at which a tier moves blocks beside the lookups; half is promised
_RECOVERED_BLOCKS = 100_000
_RECOVERED_A_CHAIN = 500  # at most BLOCKS_PER_STORE

OPTIONS = {
    "total_bytes": "How much is written, and read, in a round; at most a quarter of the tier, and "
    "as much in all rounds together if the tier is shared.",
}


def run(
    tier: str = "disk:///var/tmp?size=2GiB",
    block_bytes: tuple[int, ...] = (64 * KIB, MIB),
    total_bytes: int = GIB // 2,
    rounds: int = 5,
    hits: bool = True,
    hit_tokens: tuple[int, ...] = (2000, 8000),
    hit_repeats: int = 3,
) -> dict[str, Any]:
    """Hits in an engine; blocks of each size written and read, in turns with the floor; lookups
    meanwhile; and how long the index of a disk's full log takes to recover."""
    address = _address(tier)
    for nbytes in block_bytes:
        if nbytes % SLOT_ALIGN or not SLOT_ALIGN <= nbytes <= JOB_BYTES:
            raise SettingsError(
                f"--block-bytes {nbytes} is no multiple of {SLOT_ALIGN}, or above "
                f"{format_size(JOB_BYTES)}",
                "use 64KiB or 1MiB, say",
            )
    if address.size_bytes:  # or it would be evicted before it is read
        most_bytes = address.size_bytes // 4
        if address.is_shared:  # what is removed after a round counts until the next sweep
            most_bytes = max(JOB_BYTES, most_bytes // (rounds * len(block_bytes)))
        total_bytes = min(total_bytes, most_bytes)
    if address.is_shared:
        return _run_shared(address, block_bytes, total_bytes, rounds, hits, hit_tokens, hit_repeats)
    measure, floor = tier_floor.threads, "own threads"
    if tier_floor.has_fio():
        measure, floor = tier_floor.fio, "fio"
    result: dict[str, Any] = {"floor": floor, "engine": engine_kind() if hits else ""}
    found: list[Any] = []
    if result["engine"]:
        with _directory(address.directory) as directory:
            own = replace(address, directory=directory / "tier")
            result["engine"], found = hit_times(own, hit_tokens, hit_repeats)
    rows: list[dict[str, Any]] = []
    for nbytes in block_bytes:
        with _TierUnderTest(address, nbytes) as tested:
            rows += _rows(tested, measure, total_bytes, rounds)
    with _directory(address.directory) as directory:
        own = replace(address, directory=directory)
        lookup = _lookup(own, rows)
    say(f"recovering {_RECOVERED_BLOCKS:,} blocks")
    with _directory(address.directory) as directory:
        recovery = _recovery(directory, address.size_bytes)
    rows = [{"tier": str(address), **row} for row in rows]
    lookup["found_512_ms"] = None  # a disk's index is in the server
    return result | {"rows": rows, "lookup": lookup, "recovery": recovery, "hits": found}


def _run_shared(
    address: TierAddress,
    block_bytes: tuple[int, ...],
    total_bytes: int,
    rounds: int,
    hits: bool,
    hit_tokens: tuple[int, ...],
    hit_repeats: int,
) -> dict[str, Any]:
    result: dict[str, Any] = {"floor": "the client library", "engine": "", "hits": []}
    rows, find_ms = shared_tier.rows(address, block_bytes, total_bytes, rounds)
    lookup = _lookup(address, rows) | {"found_512_ms": round(find_ms, 3)}
    if hits and engine_kind():
        result["engine"], result["hits"] = hit_times(address, hit_tokens, hit_repeats)
    return result | {"rows": rows, "lookup": lookup, "recovery": None}


def _lookup(address: TierAddress, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lookups while the tier moves blocks; how fast it reads blocks of that size by the rows, and
    what part of that it moved meanwhile."""
    reads = [row for row in rows if row["direction"] == "read"]
    nearest = min(reads, key=lambda row: abs(row["block_bytes"] - PROBED_BLOCK_BYTES))
    bench_gbps = nearest["gbps"]
    lookup = lookup_times(address, LOOKUPS, most_gbps=_PACE * bench_gbps)
    fraction = round(lookup["moved_gbps"] / bench_gbps, 3)
    return lookup | {"bench_gbps": bench_gbps, "bench_fraction": fraction}


def _recovery(directory: Path, size_bytes: int) -> dict[str, Any]:
    """Writes a log of blocks of 4 KiB, as many as fit, and reads it as a server does at its
    start."""
    layout = Layout(1, b"bench", (SLOT_ALIGN,))
    files = DiskFiles.open(directory, size_bytes, _SLAB_BYTES)
    index = DiskIndex(files.data_bytes, files.slab_bytes, None, files.recovered())
    sums = np.arange(1, _RECOVERED_A_CHAIN + 1, dtype=np.uint64)[:, None]
    for _ in range(_RECOVERED_BLOCKS // _RECOVERED_A_CHAIN):
        keys = secrets.token_bytes(_RECOVERED_A_CHAIN * KEY_BYTES)
        plan = index.plan_write(_TENANT, layout, b"", keys, sums, _now_ms())
        if plan is None:
            break
        files.append(plan.record)
        index.wrote(plan.number, _now_ms())
    files.sync_log()
    files.close()
    started = time.perf_counter()
    files = DiskFiles.open(directory, size_bytes, _SLAB_BYTES)
    index = DiskIndex(files.data_bytes, files.slab_bytes, None, files.recovered(), _now_ms())
    seconds = time.perf_counter() - started
    files.close()
    return {"blocks": index.adoption.blocks, "seconds": round(seconds, 3)}


def _address(tier: str) -> TierAddress:
    try:
        addresses = parse_tiers(tier)
    except ValueError as error:
        raise SettingsError(
            f"--tier {quote_tiers(tier)}: {error}", "disk:///path?size=2GiB, say"
        ) from None
    if len(addresses) != 1:
        raise SettingsError(
            f"--tier {quote_tiers(tier)} is not one tier", "disk:///path?size=2GiB, say"
        )
    (address,) = addresses
    if 0 < address.size_bytes < 4 * LEAST_POOL_BYTES:
        least = format_size(4 * LEAST_POOL_BYTES)
        raise SettingsError(f'--tier "{tier}" is too small to measure', f"use size={least} or more")
    if not address.is_shared and not address.directory.is_dir():
        raise SettingsError(f"{address.directory} is no directory", "make it, or use another")
    return address


Floor = Callable[[Path, str, int, int], float]


def _rows(
    tested: _TierUnderTest, floor: Floor, total_bytes: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """The tier and the floor in turns; the median of each."""
    for direction in ("write", "read"):
        own, plain = [], []
        if direction == "read":
            tested.write(total_bytes)  # what the floor has overwritten
        for turn in range(1, rounds + 1):
            say(f"blocks of {format_size(tested.block_bytes)}, {direction}, {turn} of {rounds}")
            move = tested.write if direction == "write" else tested.read
            own.append(move(total_bytes))
            plain.append(floor(tested.data, direction, tested.block_bytes, total_bytes))
        gbps, floor_gbps = statistics.median(own), statistics.median(plain)
        yield {
            "direction": direction,
            "block_bytes": tested.block_bytes,
            "gbps": round(gbps, 3),
            "floor_gbps": round(floor_gbps, 3),
            "fraction_of_floor": round(gbps / floor_gbps, 3),
        }


class _TierUnderTest:
    """A pool, a disk tier and its mover, for blocks of one size."""

    def __init__(self, address: TierAddress, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._address = address
        self._layout = Layout(1, b"bench", (block_bytes,))
        self._blocks_a_job = JOB_BYTES // block_bytes
        self._written: list[bytes] = []  # the keys of each write
        self._reading: set[int] = set()  # numbers of reads in flight
        self._ends = ExitStack()

    def __enter__(self) -> _TierUnderTest:
        with ExitStack() as ends:
            directory = ends.enter_context(_directory(self._address.directory))
            pool = Pool(_SHM, f"bench-{os.getpid()}", _POOL_BYTES, _SLAB_BYTES, _EPOCH)
            ends.callback(pool.close)
            while pool.filled_bytes < pool.pool_bytes:
                pool.fill_next()
            self._slots = np.arange(
                0, pool.pool_bytes - self.block_bytes + 1, self.block_bytes, dtype="<i8"
            )
            self._fill_pool(pool)
            files = DiskFiles.open(directory, self._address.size_bytes, _SLAB_BYTES)
            ends.callback(files.close)
            self.data = directory / "data"
            self._fill_data()
            self._index = DiskIndex(files.data_bytes, files.slab_bytes)
            watch = pool.watch(1)
            ends.callback(watch.close)
            place = PoolPlace(
                str(pool.directory), str(watch.path), pool.segment_bytes, pool.pool_bytes
            )
            self._mover = Mover(place, _EPOCH, files)
            ends.callback(self._mover.close)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def write(self, total_bytes: int) -> float:
        """Writes new blocks; GB/s."""
        self._written = []
        return self._move(self._next_write, total_bytes)

    def read(self, total_bytes: int) -> float:
        """Reads what was written last, several times if it is less; GB/s."""
        return self._move(self._next_read, total_bytes)

    def _fill_pool(self, pool: Pool) -> None:
        """Fills the first half of the pool, from which blocks are written, with noise; reads go to
        the second half."""
        noise = np.random.default_rng(1)
        sums = []
        for offset in self._slots[: len(self._slots) // 2].tolist():
            slot = pool.segments.view(offset, self.block_bytes)
            slot[:] = np.frombuffer(noise.bytes(self.block_bytes), dtype=np.uint8)
            sums.append(checksum(slot))
        self._checksums = np.array(sums, dtype=np.uint64)
        self._jobs = 0

    def _fill_data(self) -> None:
        noise = memoryview(secrets.token_bytes(MIB))
        with self.data.open("r+b", buffering=0) as file:
            for offset in range(0, os.fstat(file.fileno()).st_size, MIB):
                os.pwrite(file.fileno(), noise, offset)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _move(self, next_job: Callable[[], Write | Read], total_bytes: int) -> float:
        """Keeps the mover busy. GB/s, from the first job to the last result."""
        mover, left = self._mover, -(-total_bytes // JOB_BYTES)
        started = time.perf_counter()
        moved = 0
        while left or mover.jobs:
            while left and mover.can_write and mover.can_read:
                job = next_job()
                moved += len(job.slots) // 8 * job.nbytes
                left -= 1
                assert mover.send(job)
            wait_for(mover, 1000, writable=mover.wants_write)
            for result in mover.results():
                self._end(result)
            if mover.problem or mover.oldest_s > _STALLED_S:
                raise KVKeepError(f"the tier stalled: {mover.problem or 'no answer'}")
        return moved / (time.perf_counter() - started) / 1e9

    def _next_write(self) -> Write:
        first, keys = self._turn(), secrets.token_bytes(self._blocks_a_job * KEY_BYTES)
        sums = self._checksums[first : first + self._blocks_a_job, None]
        plan = self._index.plan_write(_TENANT, self._layout, b"", keys, sums, _now_ms())
        assert plan is not None and len(plan.offsets) == self._blocks_a_job
        self._written.append(keys)
        slots = self._slots[first : first + self._blocks_a_job].tobytes()
        return Write(plan.number, slots, plan.offsets.tobytes(), self.block_bytes, plan.record)

    def _next_read(self) -> Read:
        first = self._turn() + len(self._slots) // 2
        keys = self._written[self._jobs % len(self._written)]
        hit = self._index.find(_TENANT, self._layout, keys, 0, _now_ms())
        assert hit is not None
        self._reading.add(hit.number)
        slots = self._slots[first : first + len(hit.offsets)].tobytes()
        offsets, sums = hit.offsets.tobytes(), hit.checksums.tobytes()
        return Read(hit.number, slots, offsets, self.block_bytes, [0], [self.block_bytes], sums)

    def _turn(self) -> int:
        """The first slot of the next job, in its half of the pool."""
        self._jobs += 1
        jobs = len(self._slots) // 2 // self._blocks_a_job
        return self._jobs % jobs * self._blocks_a_job

    def _end(self, result: Result) -> None:
        if result.error:
            raise KVKeepError(f"the tier failed: {result.error}")
        if result.number in self._reading:
            self._reading.remove(result.number)
            self._index.release(result.number, _now_ms())
        else:
            self._index.wrote(result.number, _now_ms())


@contextmanager
def _directory(above: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-", dir=above) as path:
        yield Path(path)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
