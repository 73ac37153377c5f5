"""How long the server's loop is held, by which request, with a million blocks in the index.

The loop answers one request at a time, so the longest turn is what every other engine may have to
wait. Each operation is carried out on a store of its own process, without pool and sockets, whose
index is in files in shared memory as the server's is: the request first, then what it has begun,
turn by turn (`Store.tidy`), as the loop does it. `longest_ms` is on the clock, `longest_cpu_ms` on
the processor: on a machine that does other things too, the second one is the loop's own."""

from __future__ import annotations

import gc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store import operators
from kvkeep.store.plans import Limits
from kvkeep_lab.bench import turns_tiers
from kvkeep_lab.bench.turns_world import NOW_MS, SLAB_SLOTS, SLOT_BYTES, Turns, World

_PART_BLOCKS = 512  # of one store
_CHAIN_BLOCKS = 16
_TENANTS = 100_000
_NAMES = 200
_LEASES = 4_000
_SINGLES = 20
_SLABS_MOVED = 4
_TTL_MS = 1_000


def run(blocks: int = 1_000_000) -> dict[str, Any]:
    """Fills several stores one after the other, and measures what takes much out of use at once or
    makes room."""
    rows: list[dict[str, Any]] = []
    cases = (_one_tenant, _many_tenants, _layouts, _full_pool, _used_again, _other_sizes)
    for measure in (*cases, *turns_tiers.CASES):
        with TemporaryDirectory(prefix="kvkeep-turns-", dir="/dev/shm") as directory:
            rows += measure(blocks, Path(directory))
        gc.collect()
    return {"rows": rows}


def _one_tenant(blocks: int, directory: Path) -> list[dict[str, Any]]:
    world, part = World(blocks, directory), blocks // 4
    store = world.store
    for _ in range(blocks // 8 // _PART_BLOCKS):
        world.put("filler", b"", world.keys(_PART_BLOCKS))
    root = world.fill("greedy", 2 * part, _CHAIN_BLOCKS)
    longest = world.keys(min(part, 65536))
    for at in range(0, len(longest), _PART_BLOCKS * KEY_BYTES):
        parent = longest[at - KEY_BYTES : at] if at else b""
        world.put("reader", parent, longest[at : at + _PART_BLOCKS * KEY_BYTES])
    count = len(longest) // KEY_BYTES
    ask = (1, 1 << 40, "reader", world.layout, longest, 0, NOW_MS)
    world.measure(f"lookup of {count} blocks", count, lambda: store.lookup(*ask))
    world.measure(f"release of {count} blocks", count, lambda: store.release(1, 1 << 40, NOW_MS))
    leases = range(1 << 42, (1 << 42) + _LEASES)
    for lease in leases:
        store.lookup(1, lease, "greedy", world.layout, root + world.leaves[0], 0, NOW_MS)
    world.measure(
        f"release of {_LEASES} leases",
        _LEASES,
        lambda: store.release_all(1, leases, NOW_MS),
    )
    world.measure(
        "first quota of a tenant",
        2 * part,
        lambda: operators.set_quota(store, "greedy", 1, NOW_MS),
    )
    operators.set_quota(store, "greedy", 0, NOW_MS)
    _end_of_a_session(world)
    world.measure(
        "a bad block with all below it",
        2 * part,
        lambda: store.drop_blocks("greedy", [root]),
    )
    world.fill("limited", part, _CHAIN_BLOCKS)
    world.measure("limit of 0", part, lambda: operators.set_limit(store, "limited", 0, NOW_MS))
    world.fill("short", part // 2, 4, _TTL_MS)
    late = (1, 1 << 41, "other", world.layout, 0, b"", world.keys(1), NOW_MS + 2 * _TTL_MS)
    world.measure("a store when all has expired", part // 2, lambda: store.prepare_store(*late))
    world.fill("cleared", part, _CHAIN_BLOCKS)
    held = store.tenants.get("cleared")
    assert held is not None
    world.measure("clear a tenant", len(held.index), lambda: operators.clear(store, "cleared"))
    return world.rows


def _end_of_a_session(world: World) -> None:
    """With as many writes and leases as it may have."""
    store = world.store
    most = min(store.limits.writing_blocks_per_session, len(store.blocks.table) // 8)
    store.open_session(2)
    for write in range(most // _PART_BLOCKS):
        store.prepare_store(2, write, "w", world.layout, 0, b"", world.keys(_PART_BLOCKS), NOW_MS)
    for lease, leaf in enumerate(world.leaves[:_LEASES], start=most):
        store.lookup(2, lease, "greedy", world.layout, leaf, 0, NOW_MS)
    world.measure("end of a session", most + _LEASES, lambda: store.close_session(2, NOW_MS))


def _many_tenants(blocks: int, directory: Path) -> list[dict[str, Any]]:
    tenants = max(2, min(_TENANTS, blocks // 10))
    world = World(blocks, directory, Limits(tenants=tenants))
    each = blocks // 2 // tenants
    world.fill("large", blocks // 2, _CHAIN_BLOCKS)  # the first that makes way
    for number in range(tenants - 1):
        world.put(f"tenant {number}", b"", world.keys(each))
    turns = Turns()
    for number in range(_NAMES):
        world.put(f"new {number}", b"", world.keys(1), turns=turns)
        while world.store.has_to_tidy:
            turns.take(lambda: world.store.tidy(NOW_MS))
    world.note(f"{_NAMES} tenants beyond max_tenants", blocks // 2, turns)
    store = world.store
    default = SLOT_BYTES * each
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
    world = World(blocks, directory, Limits(layouts=2))
    store = world.store
    store.open_session(2)
    cold = store.open_layout(2, b"cold", (64,)).number
    world.layout = cold
    world.fill("t", blocks, _CHAIN_BLOCKS)
    store.close_session(2, NOW_MS)
    world.measure(
        "a layout beyond max_layouts", blocks, lambda: store.open_layout(1, b"new", (64,))
    )
    return world.rows


def _full_pool(blocks: int, directory: Path) -> list[dict[str, Any]]:
    world = World(blocks, directory)
    store, turns = world.store, Turns()
    while store.slabs.available(SLOT_BYTES) >= _PART_BLOCKS:
        world.put("long", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note(
        f"store {_PART_BLOCKS} blocks into an empty pool until it is full",
        len(store.blocks.table),
        turns,
    )
    turns = Turns()
    for _ in range(_NAMES):
        world.put("long", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note(f"store {_PART_BLOCKS} blocks into a full pool", _NAMES * _PART_BLOCKS, turns)
    for _ in range(_SINGLES * _PART_BLOCKS):
        world.put("single", b"", world.keys(1))
    turns = Turns()
    operators.clear(store, "long")  # so that single blocks are next
    while store.tidy(NOW_MS):
        pass
    while store.slabs.available(SLOT_BYTES):
        world.put("other", b"", world.keys(_PART_BLOCKS))
    for _ in range(_SINGLES):
        world.put("other", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note("the same, where single blocks make way", _SINGLES * _PART_BLOCKS, turns)
    return world.rows


def _other_sizes(blocks: int, directory: Path) -> list[dict[str, Any]]:
    """Slabs change their size: for one with cold blocks only, and where a recent block is in each of
    those with the oldest leaves, so that the coldest slab is looked for."""
    world = World(blocks, directory)
    store, small = world.store, world.layout
    root = world.fill("t", blocks + SLAB_SLOTS, _CHAIN_BLOCKS)
    for name, again in (("old", 0), ("mixed", len(world.leaves))):
        for number, leaf in enumerate(world.leaves[:again:97], start=1 << 40):
            store.lookup(1, number, "t", small, root + leaf, 0, NOW_MS)
            store.release(1, number, NOW_MS)
        turns = Turns()
        for slots in range(2, 2 + _SLABS_MOVED):
            shard_bytes = (SLOT_BYTES * (slots + len(name)),)
            world.layout = store.open_layout(1, name.encode() + b"%d" % slots, shard_bytes).number
            while world.put("u", b"", world.keys(16), turns=turns):
                while store.has_to_tidy:
                    turns.take(lambda: store.tidy(NOW_MS))
        world.note(
            f"{_SLABS_MOVED} slabs change their size, {name}", _SLABS_MOVED * SLAB_SLOTS, turns
        )
    return world.rows


def _used_again(blocks: int, directory: Path) -> list[dict[str, Any]]:
    """Each entry of the eviction order is out of date, and then stale."""
    world = World(blocks // 20, directory)
    store, keys = world.store, list[bytes]()
    while store.slabs.available(SLOT_BYTES):
        keys.append(world.keys(1))
        world.put("t", b"", keys[-1])
    for number, key in enumerate(keys, start=1 << 40):
        store.lookup(1, number, "t", world.layout, key, 0, NOW_MS)
        store.release(1, number, NOW_MS)
    some = world.keys(_PART_BLOCKS)
    world.measure(
        "a store when all blocks were used again", len(keys), lambda: world.put("t", b"", some)
    )
    operators.clear(store, "t")
    while store.tidy(NOW_MS):
        pass
    turns = Turns()
    for _ in range(_NAMES):
        world.put("t", b"", world.keys(_PART_BLOCKS), turns=turns)
    world.note("stores after all blocks were cleared", len(keys), turns)
    return world.rows
