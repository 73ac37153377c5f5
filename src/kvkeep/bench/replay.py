"""How many blocks of a trace each cache size would have served, and what a disk would have written.

Each request looks its blocks up and stores what is missing, in real stores: one for memory and, in
rows with `disk_blocks`, one for the disk. A row's policy says which blocks go to disk. A hit counts
only as far as all blocks before it are there. `default` marks what the server does.

    lru          memory only: the server evicts ends of chains first, least recently used first
    first-use    every block goes to disk
    second-use   a block goes to disk at its second use, while 200,000 keys are remembered
    ten-minutes  first use while the disk has room, or the block that is evicted next has been
                 unused for ten minutes; otherwise second use
    adaptive     what the server does (kvkeep.tiers.admission)"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.bench.traces import Trace, belady_hit_rate, infinite_hit_rate, read_trace
from kvkeep.errors import SettingsError
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.plans import Limits
from kvkeep.store.store import BLOCKS_PER_STORE, Store
from kvkeep.store.table import NO_ROW
from kvkeep.store.tree import split_keys
from kvkeep.tiers.admission import Admission

MEMORY_BLOCKS_BESIDE_A_DISK = 1000
_SLOT_BYTES = 4096
_SESSION = 1
_REMEMBERED_KEYS = 200_000
_TEN_MINUTES_MS = 600_000
_DECIMALS = 3
SERVERS_POLICY = "adaptive"

OPTIONS = {
    "trace": "File of requests, one JSON object a line.",
    "policy": "Policies to compare, with commas between, or all.",
    "blocks": "Cache sizes in blocks, with commas between. Those above 1000 are also tried as a"
    " disk beside 1000 blocks of memory.",
}


def run(
    trace: str,
    policy: tuple[str, ...] = ("all",),
    blocks: tuple[int, ...] = (1000, 3000, 10_000, 50_000),
) -> dict[str, Any]:
    """Replays the trace for each policy and size."""
    known = ("lru", *DISK_POLICIES)
    policies = known if "all" in policy else policy
    for name in policies:
        if name not in known:
            raise SettingsError(
                f'--policy "{name}" is unknown', f"policies: all, {', '.join(known)}"
            )
    requests = read_trace(trace)
    replays = [(name, size, 0) for size in blocks for name in policies if name == "lru"]
    replays += [
        (name, MEMORY_BLOCKS_BESIDE_A_DISK, size)
        for size in blocks
        for name in policies
        if name != "lru" and size > MEMORY_BLOCKS_BESIDE_A_DISK
    ]
    if not replays:
        raise SettingsError(
            f"--policy {','.join(policies)} needs a disk, and --blocks has no size for one",
            f"use a size above {MEMORY_BLOCKS_BESIDE_A_DISK}",
        )
    rows, by_size = [], dict[int, Sequence[int]]()
    for number, (name, memory_blocks, disk_blocks) in enumerate(replays, start=1):
        say(f"{number}/{len(replays)}: {name}, memory {memory_blocks:,}, disk {disk_blocks:,}")
        if memory_blocks not in by_size:
            by_size[memory_blocks] = memory_hits(requests, memory_blocks)
        hits, writes, _ = replay(requests, name, by_size[memory_blocks], disk_blocks)
        rows.append(_row(requests, name, memory_blocks, disk_blocks, hits, writes))
    return {"requests": requests.requests, "rows": rows}


def _row(
    trace: Trace, policy: str, memory_blocks: int, disk_blocks: int, hits: int, writes: int
) -> dict[str, Any]:
    return {
        "policy": policy,
        "blocks": memory_blocks,
        "disk_blocks": disk_blocks,
        "hit_rate": round(hits / trace.references, _DECIMALS),
        "writes_per_reference": round(writes / trace.references, _DECIMALS),
        "infinite": round(infinite_hit_rate(trace), _DECIMALS),
        "belady": round(belady_hit_rate(trace, memory_blocks + disk_blocks), _DECIMALS),
        "default": policy in ("lru", SERVERS_POLICY),
    }


class Replayed(NamedTuple):
    """Blocks that were found, blocks that were written to the disk, and how many of the found ones
    memory had."""

    hits: int
    writes: int
    in_memory: int


def memory_hits(trace: Trace, memory_blocks: int) -> Sequence[int]:
    """How many leading blocks of each request are in a memory of this size."""
    if memory_blocks >= trace.distinct:
        return _hits_without_eviction(trace)
    memory, keys_of = _Cache(memory_blocks), trace.keys()
    found = array("q")
    for now_ms, blocks in trace:
        keys = keys_of[np.frombuffer(blocks, np.int64)].tobytes() if blocks else b""
        found.append(memory.lookup(keys, now_ms))
        memory.put(keys, found[-1], now_ms)
    return found


def _hits_without_eviction(trace: Trace) -> Sequence[int]:
    found, seen = array("q"), bytearray(trace.distinct)
    for _, blocks in trace:
        found.append(next((n for n, block in enumerate(blocks) if not seen[block]), len(blocks)))
        for block in blocks:
            seen[block] = 1
    return found


def replay(trace: Trace, policy: str, in_memory: Sequence[int], disk_blocks: int) -> Replayed:
    """What a disk of this size adds to a memory that had these blocks (`memory_hits`). Memory does
    not depend on the disk."""
    from_memory = sum(in_memory)
    if not disk_blocks:
        return Replayed(from_memory, 0, from_memory)
    admits = DISK_POLICIES[policy](disk_blocks)
    # `idle_ms`, which this policy asks for, needs the order of a real store.
    is_roomy = disk_blocks >= trace.distinct and not isinstance(admits, _TenMinutes)
    disk = _RoomyCache(disk_blocks) if is_roomy else _Cache(disk_blocks)
    keys_of, hits, writes = trace.keys(), 0, 0
    for (now_ms, blocks), had in zip(trace, in_memory, strict=True):
        keys = keys_of[np.frombuffer(blocks, np.int64)].tobytes() if blocks else b""
        on_disk = disk.lookup(keys, now_ms)
        hits += max(had, on_disk)
        wanted = max(admits.wanted(keys, had, disk, now_ms), on_disk)
        writes += disk.put(keys[: wanted * KEY_BYTES], on_disk, now_ms)
    return Replayed(hits, writes, from_memory)


class _Cache:
    """A store with room for a number of blocks."""

    def __init__(self, blocks: int) -> None:
        nbytes = blocks * _SLOT_BYTES
        self.store = Store(nbytes, nbytes, Limits(blocks_per_request=sys.maxsize))
        self.store.add_slabs(0, 1)
        self.store.open_session(_SESSION)
        self._layout = self.store.open_layout(_SESSION, b"replay", (_SLOT_BYTES,)).number
        self._blocks = blocks
        self._requests = 0
        # the store's sequence numbers, and the time of each
        self._sequences, self._times = array("q"), array("q")

    @property
    def free_blocks(self) -> int:
        return self._blocks - len(self.store.blocks.table)

    def lookup(self, keys: bytes, now_ms: int) -> int:
        """How many leading blocks are there. Leases none: `put` follows, which counts as the use of
        all of them."""
        skip, layout = len(keys) // KEY_BYTES, self._layout
        return self.store.lookup(_SESSION, 0, "replay", layout, keys, skip, now_ms).blocks

    def put(self, keys: bytes, found: int, now_ms: int) -> int:
        """Stores a chain, whose first `found` blocks are there, as far as there is room. Returns how
        many blocks were written."""
        written = 0
        # A chain that is there as a whole is only used: its last block tells which.
        known = min(found * KEY_BYTES, max(len(keys) - KEY_BYTES, 0))
        for start in range(known, len(keys), BLOCKS_PER_STORE * KEY_BYTES):
            parent = keys[max(start - KEY_BYTES, 0) : start]
            part = keys[start : start + BLOCKS_PER_STORE * KEY_BYTES]
            self._requests += 1
            plan = self.store.prepare_store(
                _SESSION, self._requests, "replay", self._layout, 0, parent, part, now_ms
            )
            if new := len(plan.positions):
                checksums = np.ones(new, np.uint64)
                self.store.complete_store(_SESSION, self._requests, checksums, now_ms)
            written += new
            if plan.refused:
                break
        while self.store.has_to_tidy:
            self.store.tidy(now_ms)
        self._sequences.append(self.store.blocks.sequence)
        self._times.append(now_ms)
        return written

    def idle_ms(self, now_ms: int) -> int:
        """For how long the block that is evicted next has not been used."""
        many, rows = self.store.blocks.table.many, self.store.blocks.table.live_rows()
        leaves = rows[many.first_child[rows] == NO_ROW]
        if not len(leaves):
            return 0
        used = bisect_left(self._sequences, int(many.used[leaves].min()))
        return now_ms - self._times[min(used, len(self._times) - 1)]


class _RoomyCache(_Cache):
    """A store with room for all blocks of a trace: it never evicts, so the keys are enough."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._there: set[bytes] = set()

    @property
    def free_blocks(self) -> int:
        return self._blocks - len(self._there)

    def lookup(self, keys: bytes, now_ms: int) -> int:
        there, each = self._there, split_keys(keys)
        return next((n for n, key in enumerate(each) if key not in there), len(each))

    def put(self, keys: bytes, found: int, now_ms: int) -> int:
        before = len(self._there)
        self._there.update(split_keys(keys))
        return len(self._there) - before


class _Policy(Protocol):
    """Decides what goes to disk; made for a disk of some size."""

    def wanted(self, keys: bytes, in_memory: int, disk: _Cache, now_ms: int) -> int:
        """How many leading blocks of a request are to be on disk. The first `in_memory` were found
        there; the request has stored the others."""


class _FirstUse:
    def __init__(self, disk_blocks: int) -> None: ...

    def wanted(self, keys: bytes, in_memory: int, disk: _Cache, now_ms: int) -> int:
        return len(keys) // KEY_BYTES


class _SecondUse:
    def __init__(self, disk_blocks: int) -> None:
        self._used: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def wanted(self, keys: bytes, in_memory: int, disk: _Cache, now_ms: int) -> int:
        each = split_keys(keys)
        wanted = next((n for n, key in enumerate(each) if key not in self._used), len(each))
        for key in reversed(each):
            self._used[key] = None
            self._used.move_to_end(key)
        while len(self._used) > _REMEMBERED_KEYS:
            self._used.popitem(last=False)
        return wanted


class _TenMinutes(_SecondUse):
    def wanted(self, keys: bytes, in_memory: int, disk: _Cache, now_ms: int) -> int:
        blocks, used_again = len(keys) // KEY_BYTES, super().wanted(keys, in_memory, disk, now_ms)
        is_roomy = disk.free_blocks >= blocks or disk.idle_ms(now_ms) > _TEN_MINUTES_MS
        return blocks if is_roomy else used_again


class _Adaptive:
    def __init__(self, disk_blocks: int) -> None:
        self._admission = Admission(disk_blocks)

    def wanted(self, keys: bytes, in_memory: int, disk: _Cache, now_ms: int) -> int:
        self._admission.looked_up(keys, in_memory)
        self._admission.stored(keys[in_memory * KEY_BYTES :])
        return self._admission.wanted(keys, disk.free_blocks)


DISK_POLICIES: dict[str, Callable[[int], _Policy]] = {
    "first-use": _FirstUse,
    "second-use": _SecondUse,
    "ten-minutes": _TenMinutes,
    "adaptive": _Adaptive,
}
