"""What the loop does for the tiers between two requests, with a tier whose process is a list of jobs."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvkeep.server.movement import Movement
from kvkeep.server.shared import Shared
from kvkeep.store.store import MOVING, Store
from kvkeep.tiers.mover import Job, Mover, Result, Share
from kvkeep.wire.pool_files import Watch
from kvkeep_lab.bench.turns_tiers import Tiered

SLOT = 4096
ENGINE = 1
CHAINS, BLOCKS = 40, 4


class Process:
    """Does each job when it is given the next one."""

    job_bytes = BLOCKS * SLOT
    problem = ""
    oldest_s = 0.0
    in_flight_bytes = 0
    can_read = can_write = True

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.done: deque[Result] = deque()

    def send(self, job: Job) -> bool:
        self.jobs.append(job)
        blocks = len(job.slots) // 8 if isinstance(job, Share) else 0
        self.done.append(Result(job.number, good=b"\1" * blocks))
        return True

    def results(self) -> list[Result]:
        found = list(self.done)
        self.done.clear()
        return found


def test_a_turn_is_one_piece_of_work_and_stops_neither_results_nor_writes(tmp_path: Path) -> None:
    store = Store(1024 * SLOT, 1024 * SLOT)
    store.add_slabs(0, 1)
    store.open_session(ENGINE)
    layout = store.open_layout(ENGINE, b"layout", (SLOT,))
    process = Process()
    made = cast(Mover, process), cast(Watch, None)
    # No chain waits until it fills a parcel.
    tier = Shared("tier", 0, lambda: made, tmp_path / "kept", parcel_blocks=lambda size: 1)
    _, planned = cast(tuple[Job, Any], tier.take_records(1))
    tier.wrote(planned, Result(1))  # it has read the log of clears
    movement = Movement(store, [], [tier], lambda: 0)
    for chain in range(CHAINS):
        keys = b"".join(f"{block:4}{chain:4}        ".encode() for block in range(BLOCKS))
        store.prepare_store(ENGINE, chain, "A", layout.number, 0, b"", keys, 0)
        rows = store.sessions[ENGINE].writes[chain].rows
        store.complete_store(ENGINE, chain, np.full(BLOCKS, 7, np.uint64), 0)
        movement.stored(int(rows[-1]), BLOCKS)
    turns, most = 0, 0
    while tier.counts.written_blocks < CHAINS * BLOCKS:
        before = len(process.jobs), tier.counts.written_blocks
        movement.turn(0)
        sent = len(process.jobs) - before[0]
        ended = (tier.counts.written_blocks - before[1]) // BLOCKS
        most, turns = max(most, sent + ended), turns + 1
        assert turns < 10 * CHAINS, "one kind of work stops the other"
    assert most == 1


def test_a_lookup_makes_no_room_for_what_is_coming(tmp_path: Path) -> None:
    """To evict and to plan takes longer than to answer. Turns do it, when all requests that came
    are answered."""
    world, asked = Tiered(64, tmp_path), 10
    chains = [world.keys(BLOCKS) for _ in range(asked)]
    for keys in chains:
        world.put_on_disk("A", b"", keys)
    for keys in chains:
        ask = ENGINE, "A", world.layout, keys, 0, 0, 0, False
        coming, again_ms = world.movement.coming(*ask)
        assert coming == BLOCKS and again_ms > 0
    assert not world.store.sessions[MOVING].writes and not len(world.store.blocks.table)
    for _ in range(4 * asked):
        world.movement.turn(0)
    assert len(world.store.blocks.table) == asked * BLOCKS == world.disk.counts.promoted_blocks


@pytest.mark.parametrize("is_contended", [False, True])
def test_room_for_a_promotion_is_made_in_turns_that_stores_cannot_stop(
    tmp_path: Path, is_contended: bool
) -> None:
    world, most = Tiered(64, tmp_path), 64
    wanted = world.keys(128)
    world.put_on_disk("A", b"", wanted)
    while world.put("B", b"", world.keys(512)) == 0 and not world.store.eviction.evictions:
        pass
    world.movement.coming(ENGINE, "A", world.layout, wanted, 0, 0, 0, False)
    evicted = list[int]()
    for _ in range(100):
        before = world.store.eviction.evictions
        world.movement.turn(0)
        evicted.append(world.store.eviction.evictions - before)
        if world.disk.counts.promoted_blocks:
            break
        if is_contended:
            world.put("B", b"", world.keys(256))  # takes what room there is
    assert world.disk.counts.promoted_blocks == 128
    if not is_contended:
        assert sum(evicted) <= 128 and max(evicted) <= most
