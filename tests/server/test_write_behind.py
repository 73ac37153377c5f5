"""Which blocks are written next, with a real store and a tier whose process is a list of jobs; and
with a disk, which blocks are written at all."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvkeep.bench import replay
from kvkeep.bench.traces import Trace
from kvkeep.server import write_behind
from kvkeep.server.disk import Disk
from kvkeep.server.lower_tier import WriteJob
from kvkeep.server.movement import Movement
from kvkeep.server.shared import Shared, tenant_digest
from kvkeep.server.write_behind import MOST_RESTED_MS, SETTLED_MS, Reference, WriteBehind
from kvkeep.store import tree
from kvkeep.store.operators import clear_all
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import BlockTable
from kvkeep.tiers.admission import Admission
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.mover import Job, Mover, Result, Share
from kvkeep.wire.pool_files import Watch
from kvkeep_lab.bench.turns_tiers import EndsAtOnce

SLOT = 4096
ENGINE = 1


class Process:
    """Takes a number of jobs at a time."""

    job_bytes = 4 * SLOT

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.jobs: list[Job] = []
        self.oldest_s = 0.0

    @property
    def can_write(self) -> bool:
        return len(self.jobs) < self.at_once

    def send(self, job: Job) -> bool:
        self.jobs.append(job)
        return True


class World:
    def __init__(self, directory: Path, parcel_blocks: int = 1) -> None:
        self.now_ms = 0
        # Of plain keys the tier confuses blocks of a chain: it remembers by some bits.
        self.is_plain = parcel_blocks == 1
        self.store = Store(1024 * SLOT, 1024 * SLOT)
        self.store.add_slabs(0, 1)
        for session in (MOVING, ENGINE):
            self.store.open_session(session)
        self.layout = self.store.open_layout(ENGINE, b"layout", (SLOT,))
        self.process = Process(at_once=2)
        made = cast(Mover, self.process), cast(Watch, None)
        self.tier = Shared(
            "tier", 0, lambda: made, directory / "kept", None, lambda slot_bytes: parcel_blocks
        )
        _, planned = cast(tuple[Job, Any], self.tier.take_records(1))
        self.tier.wrote(planned, Result(1))  # it has read the log of clears
        self.numbers = iter(range(2, 1 << 20))
        self.behind = WriteBehind(self.store, [self.tier], 0, self.numbers.__next__)

    def stores(self, tenant: str, chain: int, blocks: int) -> None:
        """An engine stores a chain, or goes on with it."""
        keys = self.keys(chain, blocks)
        number = next(self.numbers)
        plan = self.store.prepare_store(ENGINE, number, tenant, self.layout.number, 0, b"", keys, 0)
        self.store.complete_store(ENGINE, number, np.full(len(plan.slots), 7, np.uint64), 0)
        self.behind.refer(Reference(tenant, keys, blocks, is_store=True))

    def keys(self, chain: int, blocks: int) -> bytes:
        plain = [f"{number:4}{chain:4}        ".encode() for number in range(blocks)]
        if self.is_plain:
            return b"".join(plain)
        return b"".join(blake2b(key, digest_size=12).digest() + key[:4] for key in plain)

    def turns(self) -> None:
        """Until there is nothing to do."""
        while self.behind.has_to_do:
            self.behind.turn(self.now_ms)

    def waits(self, ms: int) -> None:
        """The loop has a turn after that time."""
        self.now_ms += ms
        self.behind.turn(self.now_ms)
        self.turns()

    def taken(self) -> list[tuple[int, int]]:
        """Which blocks of a chain the next jobs write: the process ends all of them."""
        ranges = []
        while self.process.jobs:
            job = self.process.jobs[0]
            assert isinstance(job, Share)
            first, stop = (int(key[12:]) for key in (job.keys[:16], job.keys[-16:]))
            assert job.first == first
            ranges.append((first, stop + 1))
            self.written(1, "AB")
        return ranges

    def written(self, jobs: int, tenants: str) -> str:
        """The tenants of the next jobs: the process ends one after the other."""
        names = ""
        for _ in range(jobs):
            self.turns()
            if not self.process.jobs:
                break
            job = self.write_next()
            names += next(each for each in tenants if tenant_digest(each) in job.place)
        return names

    def write_next(self) -> Share:
        """The process ends a job that has written all of its blocks."""
        job, ended = self._end_next()
        self.tier.wrote(ended.planned, Result(job.number, good=b"\1" * ended.blocks))
        return job

    def fail(self) -> list[Share]:
        """The process ends all its jobs, which have written nothing."""
        jobs = []
        while self.process.jobs:
            job, ended = self._end_next()
            self.tier.failed(ended.planned)
            jobs.append(job)
        return jobs

    def _end_next(self) -> tuple[Share, WriteJob]:
        job = self.process.jobs.pop(0)
        assert isinstance(job, Share)
        ended = self.tier.jobs.pop(job.number)
        assert isinstance(ended, WriteJob)
        self.store.release(MOVING, job.number, 0)
        return job, ended


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_flood_of_one_tenant_does_not_delay_another(world: World) -> None:
    for chain in range(100):
        world.stores("A", chain, 8)
    world.stores("B", 1000, 8)
    world.stores("C", 2000, 4)
    first = world.written(6, "ABC")
    assert first == "ABCABA"
    world.stores("B", 1001, 4)
    then = world.written(3, "ABC")
    assert "B" in then
    assert Counter(first + then + world.written(1000, "ABC")) == {"A": 200, "B": 3, "C": 1}


def test_a_flood_loses_its_own_and_is_counted(world: World) -> None:
    world.stores("B", 9999, 4)
    for chain in range(1020):
        world.stores("A", chain, 1)
    for _ in range(5):  # what is used again and again, and more than can wait
        for chain in range(1020):
            keys = f"{0:4}{chain:4}        ".encode()
            world.behind.refer(Reference("A", keys, 1))
    assert "B" in world.written(3, "AB")


def test_chains_that_the_tier_confuses_are_written_once_each(world: World) -> None:
    """It remembers by words of a table, in which new ones replace old ones."""
    world.stores("A", 1, 40)
    world.stores("B", 1000, 40)  # the same words, by the way these keys are made
    assert world.written(100, "AB") == "AB" * 10


def test_what_was_refused_is_offered_again_from_the_beginning(world: World) -> None:
    world.stores("A", 1, 12)
    world.turns()
    first, _ = world.fail()
    world.turns()
    again = world.process.jobs[0]
    assert isinstance(again, Share) and again.keys == first.keys


def test_a_tier_that_must_not_be_used_gets_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stores("A", 1, 4)
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert world.written(1, "A") == "", "it has not read the log of clears"
    monkeypatch.undo()
    assert world.written(1, "A") == "A"


def test_a_turn_looks_at_a_few_chains_and_writes_one(world: World) -> None:
    world.process.at_once = 1 << 20
    for chain in range(100):
        world.stores("A", chain, 1)
        world.behind.refer(Reference("A", b"is not in memory" + bytes([chain] * 16), 2))
    while world.behind.has_to_do:
        jobs, chains = len(world.process.jobs), world.behind.chains
        world.behind.turn(0)
        assert len(world.process.jobs) <= jobs + 1 and world.behind.chains >= chains - 4
    assert len(world.process.jobs) == world.behind.evicted_unwritten == 100


def test_requests_that_never_end_do_not_stop_writes(world: World) -> None:
    world.process.at_once = 1 << 20
    for chain in range(100):
        world.stores("A", chain, 1)
    for _ in range(200):
        world.behind.refer(Reference("A", f"{0:4}{0:4}        ".encode(), 1))
        world.behind.turn(0)
    assert len(world.process.jobs) >= 90


@pytest.mark.parametrize("blocks", [7, 8, 9, 15, 16, 17, 40])
def test_a_long_chain_is_written_in_order_a_segment_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    looked_at: list[int] = []

    def way_up(table: BlockTable, row: int, count: int) -> Any:
        rows = tree.way_up(table, row, count)
        looked_at.append(len(rows))
        return rows

    monkeypatch.setattr(write_behind, "_SEGMENT_BLOCKS", 8)
    monkeypatch.setattr(write_behind, "way_up", way_up)
    world.stores("A", 1, blocks)
    keys = b""
    while world.behind.has_to_do:
        looked_at.clear()
        world.behind.turn(0)
        assert sum(looked_at) <= 3 * 2 * 8
        while world.process.jobs:
            keys += world.write_next().keys
    assert keys == b"".join(f"{number:4}{1:4}        ".encode() for number in range(blocks))


def test_a_long_chain_that_was_refused_begins_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "_SEGMENT_BLOCKS", 8)
    world.stores("A", 1, 40)
    first = ""
    for _ in range(7):  # it is in its third segment
        first += world.written(1, "A")
    world.turns()
    world.fail()
    world.turns()
    again = world.process.jobs[0]
    assert first == "A" * 7 and isinstance(again, Share) and again.keys[:4] == b"   0"


def test_a_turn_tells_admission_of_some_blocks_of_a_long_prompt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []

    def looked_up(
        self: Admission, keys: bytes, found: int, known_below: bool = False, *, coming: int = 0
    ) -> bool:
        blocks = len(keys) // 16
        told.append((blocks, min(blocks, found), min(max(0, blocks - found), coming)))
        return True

    monkeypatch.setattr(Admission, "looked_up", looked_up)
    behind = WriteBehind(world.store, [world.tier], 1 << 20, world.numbers.__next__)
    behind.refer(Reference("A", os.urandom(16 * 2000), 700, 100))
    while behind.has_to_do:
        before = sum(blocks for blocks, *_ in told)
        behind.turn(0)
        assert sum(blocks for blocks, *_ in told) - before <= 512
    assert [sum(each) for each in zip(*told, strict=True)] == [2000, 700, 100]


# -- a tier that keeps four blocks together


@pytest.fixture
def parcels(tmp_path: Path) -> World:
    return World(tmp_path, parcel_blocks=4)


def test_full_parcels_are_written_at_once_and_the_rest_when_the_chain_has_settled(
    parcels: World,
) -> None:
    parcels.stores("A", 1, 10)
    parcels.turns()
    assert parcels.taken() == [(0, 4), (4, 8)]
    assert parcels.behind.chains == 1 and not parcels.behind.has_to_do, "it waits, without a spin"
    parcels.waits(SETTLED_MS - 1)
    assert parcels.taken() == []
    parcels.waits(1)
    assert parcels.taken() == [(8, 10)]
    assert parcels.behind.chains == 0 and parcels.behind.evicted_unwritten == 0


def test_a_chain_that_grows_waits_until_its_parcel_is_full(parcels: World) -> None:
    for blocks in (1, 2, 3):
        parcels.stores("A", 1, blocks)
        parcels.waits(SETTLED_MS - 1)
        assert parcels.taken() == []
        assert parcels.behind.chains == 1, "the longer chain has the place of the shorter one"
    parcels.stores("A", 1, 5)
    parcels.turns()
    assert parcels.taken() == [(0, 4)]
    parcels.waits(SETTLED_MS)
    assert parcels.taken() == [(4, 5)]


def test_a_chain_that_grows_slowly_waits_for_a_bounded_time(tmp_path: Path) -> None:
    world, waited_ms, blocks = World(tmp_path, parcel_blocks=100), 0, 0
    world.process.job_bytes = 100 * SLOT
    while not world.taken():
        assert waited_ms <= MOST_RESTED_MS + SETTLED_MS
        blocks += 1
        world.stores("A", 1, blocks)
        world.turns()
        world.waits(SETTLED_MS - 100)
        waited_ms += SETTLED_MS - 100
    assert waited_ms >= MOST_RESTED_MS - SETTLED_MS


def test_a_prompt_that_is_used_again_and_again_does_not_wait_longer(parcels: World) -> None:
    parcels.stores("A", 1, 2)
    for _ in range(5):
        parcels.turns()
        parcels.behind.refer(Reference("A", parcels.keys(1, 2), 2))
        parcels.waits(SETTLED_MS // 5)
    assert parcels.taken() == [(0, 2)]


def test_a_chain_goes_on_where_its_last_parcel_ended(parcels: World) -> None:
    parcels.stores("A", 1, 2)
    parcels.turns()
    parcels.waits(SETTLED_MS)
    assert parcels.taken() == [(0, 2)]
    parcels.stores("A", 1, 9)
    parcels.turns()
    assert parcels.taken() == [(2, 4), (4, 8)]


def test_chains_that_leave_memory_while_they_rest_are_counted(parcels: World) -> None:
    parcels.stores("A", 1, 2)
    parcels.turns()
    clear_all(parcels.store, ["A"])
    parcels.waits(SETTLED_MS)
    assert parcels.taken() == [] and parcels.behind.evicted_unwritten == 1


@pytest.mark.parametrize("blocks", [8, 17, 18, 19, 20, 45])
def test_blocks_of_a_long_chain_keep_their_place_in_parcels(
    parcels: World, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(write_behind, "_SEGMENT_BLOCKS", 8)
    parcels.stores("A", 1, blocks)
    parcels.turns()
    ranges = parcels.taken()
    parcels.waits(SETTLED_MS)
    ranges += parcels.taken()
    assert [number for each in ranges for number in range(*each)] == list(range(blocks))


# -- a server with a disk, against `kvkeep bench replay`

MEMORY_BLOCKS, DISK_BLOCKS, PROMPT = 50, 300, 10


class Serving:
    """A memory and a disk that serve requests as the server does, one after the other."""

    def __init__(self, slabs: int = 1, slab_bytes: int = DISK_BLOCKS * SLOT) -> None:
        self.index = DiskIndex(slabs * slab_bytes, slab_bytes)
        self.numbers = itertools.count(1)
        self.begin()

    def begin(self) -> None:
        """Another server: what memory had is lost."""
        nbytes = MEMORY_BLOCKS * SLOT
        self.store = Store(nbytes, nbytes)
        self.store.add_slabs(0, 1)
        self.store.open_session(ENGINE)
        self.layout = self.store.open_layout(ENGINE, b"layout", (SLOT,)).number
        made = cast(DiskFiles, None), self.index, cast(Mover, EndsAtOnce()), cast(Watch, None)
        self.disk = Disk("disk", *made, lambda: 0)
        self.movement = Movement(self.store, [self.disk], [], lambda: 0)

    def request(self, keys: bytes) -> int:
        """Returns how many blocks memory and disk had."""
        lease, write = next(self.numbers), next(self.numbers)
        hit = self.store.lookup(ENGINE, lease, "A", self.layout, keys, 0, 0)
        coming, _ = self.movement.coming(ENGINE, "A", self.layout, keys, hit.blocks, 0, 0, False)
        self.turns()
        self.store.release(ENGINE, lease, 0)
        plan = self.store.prepare_store(ENGINE, write, "A", self.layout, 0, b"", keys, 0)
        if len(plan.slots):
            ones = np.ones(len(plan.slots), np.uint64)
            stored = self.store.complete_store(ENGINE, write, ones, 0)
            self.movement.stored(stored.last_row, stored.blocks)
        self.turns()
        return hit.blocks + coming

    def turns(self) -> None:
        while self.movement.has_to_do:
            self.movement.turn(0)

    def replay(self, trace: Trace) -> tuple[float, float]:
        """Hits and writes for each reference."""
        keys_of, hits, before = trace.keys(), 0, self.disk.counts.written_blocks
        for _, blocks in trace:
            hits += self.request(keys_of[np.frombuffer(blocks, np.int64)].tobytes())
        written = self.disk.counts.written_blocks - before
        return hits / trace.references, written / trace.references


def expected(trace: Trace) -> tuple[float, float]:
    """The same from `kvkeep bench replay`."""
    in_memory = replay.memory_hits(trace, MEMORY_BLOCKS)
    hits, writes, _ = replay.replay(trace, "adaptive", in_memory, DISK_BLOCKS)
    return hits / trace.references, writes / trace.references


def prompts(numbers: Iterable[int]) -> Trace:
    """A request for each number, with blocks of its own."""
    trace = Trace()
    for number in numbers:
        trace.blocks.extend(range(PROMPT * number, PROMPT * (number + 1)))
        trace.ends.append(len(trace.blocks))
        trace.times.append(0)
    trace.distinct = max(trace.blocks) + 1
    return trace


def returning(count: int) -> Iterator[int]:
    """Every third prompt returns once, when memory has lost it and the disk has not."""
    for number in range(count):
        yield number
        if number % 3 == 0 and number >= 18:
            yield number - 18


def test_the_disk_gets_what_the_replay_says() -> None:
    """Here first use pays, because of blocks that the disk brings up."""
    trace = prompts(returning(300))
    replayed = expected(trace)
    assert replayed[0] > 0.2
    assert Serving().replay(trace) == pytest.approx(replayed, abs=0.01)


def test_a_disk_is_full_though_its_slots_leave_rests_of_slabs() -> None:
    """The rests add up to a fifth of the disk, and no block fits into them."""
    trace = prompts(range(150))
    served = Serving(DISK_BLOCKS // 2, 5 * SLOT // 2).replay(trace)
    assert served == pytest.approx(expected(trace), abs=0.1)


def test_a_disk_that_was_full_before_a_restart_is_full() -> None:
    """It gets what prompts that never return are worth to a full disk, not all of them."""
    serving = Serving()
    serving.replay(prompts(range(40)))
    assert serving.disk.free_blocks(serving.store.layouts.get(serving.layout)) == 0
    serving.begin()
    _, writes = serving.replay(prompts(range(40, 80)))
    assert writes < 0.5
