"""How long the server's loop is held, by which request, with a million blocks in the index.

The loop answers one request at a time, so the longest turn is what every other engine may have to
wait. Each operation is carried out on a store of its own process, without pool and sockets, whose
index is in files in shared memory as the server's is: the request first, then what it has begun,
turn by turn (`Store.tidy`), as the loop does it. `longest_ms` is on the clock, `longest_cpu_ms` on
the processor: on a machine that does other things too, the second one is the loop's own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store import operators
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.tiers.index_files import FileColumns

_SLOT_BYTES = 4096
_SLAB_SLOTS = 16384
_PART_BLOCKS = 512  # of one store
_CHAIN_BLOCKS = 16
_TENANTS = 100_000
_NAMES = 200
_LEASES = 4_000
_SINGLES = 20
_SLABS_MOVED = 4
_NOW_MS = 1_000
_TTL_MS = 1_000


@dataclass
class _Turns:
    """The turns of one operation."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def take(self, turn: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = turn()
        self.cpu_ms.append((time.thread_time() - cpu) * 1e3)
        self.wall_ms.append((time.perf_counter() - wall) * 1e3)
        return result


class _World:
    """A store that is filled, and what its operations took."""

    def __init__(self, blocks: int, directory: Path, limits: Limits | None = None) -> None:
        slabs = -(-blocks // _SLAB_SLOTS) + 1
        columns = FileColumns(directory)
        self.store = Store(
            slabs * _SLAB_SLOTS * _SLOT_BYTES, _SLAB_SLOTS * _SLOT_BYTES, limits, columns=columns
        )
        self.store.add_slabs(0, slabs)
        self.store.open_session(1)
        self.layout = self.store.open_layout(1, b"bench", (64,)).number
        self.rows: list[dict[str, Any]] = []
        self._random, self._number = Random(0), 0
        self.leaves: list[bytes] = []

    def keys(self, blocks: int) -> bytes:
        return self._random.randbytes(blocks * KEY_BYTES)

    def put(
        self, tenant: str, parent: bytes, keys: bytes, ttl_ms: int = 0, turns: _Turns | None = None
    ) -> int:
        """Stores a chain; returns how many of its blocks were refused."""
        turns = turns or _Turns()
        self._number += 1
        ask = (1, self._number, tenant, self.layout, 0, parent, keys, _NOW_MS, 50, ttl_ms)
        plan = turns.take(lambda: self.store.prepare_store(*ask))
        if len(plan.slots):
            sums = np.ones(len(plan.slots), np.uint64)
            turns.take(lambda: self.store.complete_store(1, self._number, sums, _NOW_MS))
        return int(plan.refused)

    def fill(self, tenant: str, blocks: int, chain: int, ttl_ms: int = 0) -> bytes:
        """A root with chains under it. Returns the root."""
        root = self.keys(1)
        self.put(tenant, b"", root, ttl_ms)
        for _ in range((blocks - 1) // chain):
            keys = self.keys(chain)
            self.put(tenant, root, keys, ttl_ms)
            self.leaves.append(keys[-KEY_BYTES:])
        return root

    def measure(self, operation: str, blocks: int, *requests: Callable[[], Any]) -> None:
        """One after the other, each with all that follows from it."""
        turns = _Turns()
        for request in requests:
            turns.take(request)
            while self.store.has_to_tidy:
                turns.take(lambda: self.store.tidy(_NOW_MS))
        self.note(operation, blocks, turns)

    def note(self, operation: str, blocks: int, turns: _Turns) -> None:
        self.rows.append(
            {
                "operation": operation,
                "blocks": blocks,
                "turns": len(turns.wall_ms),
                "longest_ms": round(max(turns.wall_ms), 2),
                "longest_cpu_ms": round(max(turns.cpu_ms), 2),
            }
        )


def run(blocks: int = 1_000_000) -> dict[str, Any]:
    """Fills several stores one after the other, and measures what takes much out of use at once or
    makes room."""
    rows: list[dict[str, Any]] = []
    for measure in (_one_tenant, _many_tenants, _layouts, _full_pool, _used_again, _other_sizes):
        with TemporaryDirectory(prefix="kvkeep-turns-", dir="/dev/shm") as directory:
            rows += measure(blocks, Path(directory))
        gc.collect()
    return {"rows": rows}


def _one_tenant(blocks: int, directory: Path) -> list[dict[str, Any]]:
    world, part = _World(blocks, directory), blocks // 4
    store = world.store
    for _ in range(blocks // 8 // _PART_BLOCKS):
        world.put("filler", b"", world.keys(_PART_BLOCKS))
    root = world.fill("greedy", 2 * part, _CHAIN_BLOCKS)
    longest = world.keys(min(part, 65536))
    for at in range(0, len(longest), _PART_BLOCKS * KEY_BYTES):
        parent = longest[at - KEY_BYTES : at] if at else b""
        world.put("reader", parent, longest[at : at + _PART_BLOCKS * KEY_BYTES])
    count = len(longest) // KEY_BYTES
    ask = (1, 1 << 40, "reader", world.layout, longest, 0, _NOW_MS)
    world.measure(f"lookup of {count} blocks", count, lambda: store.lookup(*ask))
    world.measure(f"release of {count} blocks", count, lambda: store.release(1, 1 << 40, _NOW_MS))
    world.measure(
        "first quota of a tenant",
        2 * part,
        lambda: operators.set_quota(store, "greedy", 1, _NOW_MS),
    )
    operators.set_quota(store, "greedy", 0, _NOW_MS)
    _end_of_a_session(world)
    world.measure(
        "a bad block with all below it",
        2 * part,
        lambda: store.drop_blocks("greedy", [root]),
    )
    world.fill("limited", part, _CHAIN_BLOCKS)
    world.measure("limit of 0", part, lambda: operators.set_limit(store, "limited", 0, _NOW_MS))
    world.fill("short", part // 2, 4, _TTL_MS)
    late = (1, 1 << 41, "other", world.layout, 0, b"", world.keys(1), _NOW_MS + 2 * _TTL_MS)
    world.measure("a store when all has expired", part // 2, lambda: store.prepare_store(*late))
    world.fill("cleared", part, _CHAIN_BLOCKS)
    held = store.tenants.get("cleared")
    assert held is not None
    world.measure("clear a tenant", len(held.index), lambda: operators.clear(store, "cleared"))
    return world.rows


def _end_of_a_session(world: _World) -> None:
    """With as many writes and leases as it may have."""
    store = world.store
    most = min(store.limits.writing_blocks_per_session, len(store.blocks.table) // 8)
    store.open_session(2)
    for write in range(most // _PART_BLOCKS):
        store.prepare_store(2, write, "w", world.layout, 0, b"", world.keys(_PART_BLOCKS), _NOW_MS)
    for lease, leaf in enumerate(world.leaves[:_LEASES], start=most):
        store.lookup(2, lease, "greedy", world.layout, leaf, 0, _NOW_MS)
    world.measure("end of a session", most + _LEASES, lambda: store.close_session(2, _NOW_MS))


def _many_tenants(blocks: int, directory: Path) -> list[dict[str, Any]]:
    tenants = max(2, min(_TENANTS, blocks // 10))
    world = _World(blocks, directory, Limits(tenants=tenants))
    each = blocks // 2 // tenants
    world.fill("large", blocks // 2, _CHAIN_BLOCKS)  # the first that makes way
    for number in range(tenants - 1):
        world.put(f"tenant {number}", b"", world.keys(each))
    turns = _Turns()
    for number in range(_NAMES):
        world.put(f"new {number}", b"", world.keys(1), turns=turns)
        while world.store.has_to_tidy:
            turns.take(lambda: world.store.tidy(_NOW_MS))
    world.note(f"{_NAMES} tenants beyond max_tenants", blocks // 2, turns)
    store = world.store
    default = _SLOT_BYTES * each
    world.measure(
        "default quota of all tenants",
        blocks // 2,
        lambda: operators.set_default_quota(store, default, 0),
    )
    world.measure(
        "default limit of all tenants",
        blocks // 2,
        lambda: operators.set_default_limit(store, default, 0),
    )
    return world.rows


def _layouts(blocks: int, directory: Path) -> list[dict[str, Any]]:
    world = _World(blocks, directory, Limits(layouts=2))
    store = world.store
    store.open_session(2)
    cold = store.open_layout(2, b"cold", (64,)).number
    world.layout = cold
    world.fill("t", blocks, _CHAIN_BLOCKS)
    store.close_session(2, _NOW_MS)
    world.measure(
        "a layout beyond max_layouts", blocks, lambda: store.open_layout(1, b"new", (64,))
    )
    return world.rows


def _full_pool(blocks: int, directory: Path) -> list[dict[str, Any]]:
    world = _World(blocks, directory)
    store, turns = world.store, _Turns()
    while store.slabs.available(_SLOT_BYTES) >= _PART_BLOCKS:
        world.put("long", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note(
        f"store {_PART_BLOCKS} blocks into an empty pool until it is full",
        len(store.blocks.table),
        turns,
    )
    turns = _Turns()
    for _ in range(_NAMES):
        world.put("long", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note(f"store {_PART_BLOCKS} blocks into a full pool", _NAMES * _PART_BLOCKS, turns)
    for _ in range(_SINGLES * _PART_BLOCKS):
        world.put("single", b"", world.keys(1))
    turns = _Turns()
    operators.clear(store, "long")  # so that single blocks are next
    while store.tidy(_NOW_MS):
        pass
    while store.slabs.available(_SLOT_BYTES):
        world.put("other", b"", world.keys(_PART_BLOCKS))
    for _ in range(_SINGLES):
        world.put("other", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note("the same, where single blocks make way", _SINGLES * _PART_BLOCKS, turns)
    return world.rows


def _other_sizes(blocks: int, directory: Path) -> list[dict[str, Any]]:
    """Slabs change their size: for one with cold blocks only, and where a recent block is in each of
    those with the oldest leaves, so that the coldest slab is looked for."""
    world = _World(blocks, directory)
    store, small = world.store, world.layout
    root = world.fill("t", blocks + _SLAB_SLOTS, _CHAIN_BLOCKS)
    for name, again in (("old", 0), ("mixed", len(world.leaves))):
        for number, leaf in enumerate(world.leaves[:again:97], start=1 << 40):
            store.lookup(1, number, "t", small, root + leaf, 0, _NOW_MS)
            store.release(1, number, _NOW_MS)
        turns = _Turns()
        for slots in range(2, 2 + _SLABS_MOVED):
            shard_bytes = (_SLOT_BYTES * (slots + len(name)),)
            world.layout = store.open_layout(1, name.encode() + b"%d" % slots, shard_bytes).number
            while world.put("u", b"", world.keys(16), turns=turns):
                while store.has_to_tidy:
                    turns.take(lambda: store.tidy(_NOW_MS))
        world.note(
            f"{_SLABS_MOVED} slabs change their size, {name}", _SLABS_MOVED * _SLAB_SLOTS, turns
        )
    return world.rows


def _used_again(blocks: int, directory: Path) -> list[dict[str, Any]]:
    """Each entry of the eviction order is out of date, and then stale."""
    world = _World(blocks // 20, directory)
    store, keys = world.store, list[bytes]()
    while store.slabs.available(_SLOT_BYTES):
        keys.append(world.keys(1))
        world.put("t", b"", keys[-1])
    for number, key in enumerate(keys, start=1 << 40):
        store.lookup(1, number, "t", world.layout, key, 0, _NOW_MS)
        store.release(1, number, _NOW_MS)
    some = world.keys(_PART_BLOCKS)
    world.measure(
        "a store when all blocks were used again", len(keys), lambda: world.put("t", b"", some)
    )
    operators.clear(store, "t")
    while store.tidy(_NOW_MS):
        pass
    turns = _Turns()
    for _ in range(_NAMES):
        world.put("t", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note("stores after all blocks were cleared", len(keys), turns)
    return world.rows
