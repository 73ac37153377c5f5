"""How long the server's loop is held by what it does for tiers and for many tenants on them.

The disk has an index and no process: its jobs end at once and move nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.clearing import Clearing
from kvkeep.server.disk import Disk
from kvkeep.server.movement import Movement
from kvkeep.server.shared import tenant_digest
from kvkeep.store import operators
from kvkeep.store.plans import Limits
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.mover import Check, Job, Mover, Read, Result, Write
from kvkeep.wire.pool_files import Watch
from kvkeep_lab.bench.turns_world import NOW_MS, SLAB_SLOTS, SLOT_BYTES, Turns, World

_TENANTS = 100_000
_PART_BLOCKS = 512
_BAD_BLOCKS = 256
_LONGEST_CHAIN = 65_536
_SHORT_CHAINS, _SHORT_CHAIN_BLOCKS = 200, 64


class EndsAtOnce:
    """Does nothing, and says that it has."""

    job_bytes = 512 * SLOT_BYTES
    problem = ""
    oldest_s = 0.0
    in_flight_bytes = 0
    can_read = can_write = True

    def __init__(self) -> None:
        self._results: list[Result] = []

    def send(self, job: Job) -> bool:
        blocks = 0
        if isinstance(job, Read | Write | Check):
            blocks = len(job.offsets) // 8
        self._results.append(Result(job.number, good=b"\1" * blocks, seconds=1e-6))
        return True

    def results(self) -> list[Result]:
        results, self._results = self._results, []
        return results


class Tiered(World):
    """A store above a disk of the same size."""

    def __init__(self, blocks: int, directory: Path, limits: Limits | None = None) -> None:
        super().__init__(blocks, directory, limits)
        slabs = -(-blocks // SLAB_SLOTS) + 1
        tenants = self.store.limits.tenants
        self.index = DiskIndex(
            slabs * SLAB_SLOTS * SLOT_BYTES, SLAB_SLOTS * SLOT_BYTES, tenants=tenants
        )
        made = cast(DiskFiles, None), self.index, cast(Mover, EndsAtOnce()), cast(Watch, None)
        self.disk = Disk("disk", *made, lambda: NOW_MS)
        self.movement = Movement(self.store, [self.disk], [], lambda: NOW_MS)

    def put_on_disk(self, tenant: str, parent: bytes, keys: bytes) -> None:
        shape = self.store.layouts.get(self.layout)
        checksums = np.ones((len(keys) // KEY_BYTES, 1), np.uint64)
        plan = self.index.plan_write(tenant, shape, parent, keys, checksums, NOW_MS)
        assert plan is not None and len(plan.positions) == len(checksums)
        self.index.wrote(plan.number, NOW_MS)

    def tidy(self, turns: Turns) -> None:
        for store in (self.store, self.index.store):
            while store.has_to_tidy:
                turns.take(lambda store=store: store.tidy(NOW_MS))  # type: ignore[misc]


def _many_tenants(blocks: int, directory: Path) -> list[dict[str, Any]]:
    """Each with some blocks in memory and as many on the disk."""
    tenants = max(2, min(_TENANTS, blocks // 10))
    world = Tiered(blocks, directory, Limits(tenants=tenants))
    each = blocks // tenants
    for number in range(tenants):
        for put in (world.put, world.put_on_disk):
            put(f"tenant {number}", b"", world.keys(each))
    while world.index.take_records():
        pass
    _quotas(world, tenants)
    for heard, name in ((tenant_digest("tenant 7"), "one tenant"), ("*", "all tenants")):
        turns = Turns()
        clearing = turns.take(partial(Clearing, world.store, [world.index], [heard]))
        while turns.take(clearing.turn):
            pass
        world.note(f"clear of {name}, in memory and on a disk", tenants, turns)
    turns = Turns()
    world.tidy(turns)
    world.note("what that has freed", 2 * blocks, turns)
    turns = Turns()
    while turns.take(world.index.take_records):
        pass
    world.note("records of freed slots", blocks, turns)
    return world.rows


def _quotas(world: Tiered, tenants: int) -> None:
    """When each tenant has a quota of its own."""
    store, turns = world.store, Turns()
    quota = store.pool_bytes // tenants
    names = [f"tenant {number}" for number in range(tenants)]
    operators.restore(store, dict.fromkeys(names, quota), {}, None, None, NOW_MS)
    world.movement.follow_quotas(names)
    world.tidy(Turns())
    turns.take(lambda: operators.set_quota(store, "tenant 1", 1, NOW_MS))
    turns.take(lambda: world.movement.follow_quotas(["tenant 1"]))
    world.tidy(turns)
    world.note(f"quota of one of {tenants} tenants with quotas, on a disk, too", tenants, turns)
    turns = Turns()
    turns.take(lambda: operators.set_default_limit(store, store.pool_bytes, NOW_MS))
    turns.take(world.movement.follow_quotas)
    world.tidy(turns)
    world.note("default limit of all tenants, on a disk, too", tenants, turns)


def _long_chains(blocks: int, directory: Path) -> list[dict[str, Any]]:
    world, count = Tiered(blocks, directory), min(blocks // 4, _LONGEST_CHAIN)
    in_memory, on_disk = world.keys(count), world.keys(count)
    for keys, put in ((in_memory, world.put), (on_disk, world.put_on_disk)):
        for at in range(0, len(keys), _PART_BLOCKS * KEY_BYTES):
            parent = keys[at - KEY_BYTES : at] if at else b""
            put("reader", parent, keys[at : at + _PART_BLOCKS * KEY_BYTES])
    turns, movement, layout = Turns(), world.movement, world.layout
    ask = (1, "reader", layout, in_memory, count, 0, NOW_MS, False)
    turns.take(lambda: movement.coming(*ask))
    until_done(movement, turns)
    assert world.index.known("reader", in_memory) == count
    world.note(f"chain of {count} blocks written to a disk", count, turns)
    turns = Turns()
    lease = (1, 1 << 40, "reader", layout, on_disk, 0, NOW_MS)

    def lookup() -> None:
        hit = world.store.lookup(*lease)
        movement.coming(1, "reader", layout, on_disk, hit.blocks, 0, NOW_MS, False)

    turns.take(lookup)
    until_done(movement, turns)
    world.note(f"lookup of {count} blocks on a disk, which come up", count, turns)
    _bad_blocks(world, blocks)
    return world.rows


def until_done(movement: Movement, turns: Turns) -> None:
    """Turns until nothing is to be done and no job is under way."""
    while movement.has_to_do or any(tier.jobs for tier in movement.tiers):
        turns.take(lambda: movement.turn(NOW_MS))


def _bad_blocks(world: Tiered, blocks: int) -> None:
    """Many of them found at once, each with others below."""
    below = max(1, blocks // 4 // _BAD_BLOCKS)
    bad = [world.keys(1) for _ in range(_BAD_BLOCKS)]
    for key in bad:
        world.put_on_disk("bad", b"", key)
        for at in range(0, below, _PART_BLOCKS):
            world.put_on_disk("bad", key, world.keys(min(_PART_BLOCKS, below - at)))
    turns = Turns()
    turns.take(lambda: world.index.drop([("bad", key) for key in bad]))
    world.tidy(turns)
    world.note(f"{_BAD_BLOCKS} bad blocks of a disk", _BAD_BLOCKS * (1 + below), turns)


def _full_memory(blocks: int, directory: Path) -> list[dict[str, Any]]:
    """What comes up makes others leave."""
    count = _SHORT_CHAINS * _SHORT_CHAIN_BLOCKS
    world, turns = Tiered(count, directory), Turns()
    world.store.remember_departures()
    chains = [world.keys(_SHORT_CHAIN_BLOCKS) for _ in range(_SHORT_CHAINS)]
    for keys in chains:
        world.put_on_disk("reader", b"", keys)
    while world.store.slabs.available(SLOT_BYTES):
        world.put("other", b"", world.keys(_SHORT_CHAIN_BLOCKS))
    movement, layout = world.movement, world.layout
    for keys in chains:
        ask = (1, "reader", layout, keys, 0, 0, NOW_MS, False)
        turns.take(partial(movement.coming, *ask))
        until_done(movement, turns)
    assert world.disk.counts.promoted_blocks == world.store.eviction.evictions == count
    world.note(
        f"chains of {_SHORT_CHAIN_BLOCKS} blocks on a disk come up into a full memory", count, turns
    )
    return world.rows


CASES = (_many_tenants, _long_chains, _full_memory)
