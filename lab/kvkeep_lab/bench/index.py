"""What the index costs: memory a block, time to store and time to evict one, at a million blocks
and at ten thousand.

Conversations of 64 blocks are stored turn by turn; groups of them begin with the same system
prompt. Evictions are measured by storing on into the full pool, so they include the store that asks
for the room. The two sizes take turns in one process, so that whatever else the machine is doing
slows both."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from resource import getpagesize
from statistics import median
from time import perf_counter

import numpy as np

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.store import Store

_SMALL_BLOCKS = 10_000
_TURN_BLOCKS = 16
_TURNS = 4
_SYSTEM_PROMPT_BLOCKS = 8
_SAME_SYSTEM_PROMPT = 16  # conversations in a row
_TENANTS = 8
_SLOT_BYTES = 65536
_SLAB_SLOTS = 1000
_ROUNDS = 20


def run(blocks: int = 1_000_000, rounds: int = _ROUNDS) -> dict[str, float]:
    """Measures in a process of its own, so that its memory is the index's and nobody else's."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_measure, blocks, rounds).result()


@dataclass
class _Load:
    """A store, and conversations to put into it."""

    store: Store
    layout: int
    blocks: int
    random: np.random.Generator
    conversations: int = 0
    now_ms: int = 0
    system_prompt: bytes = b""

    @classmethod
    def of(cls, blocks: int, seed: int) -> _Load:
        slabs = -(-blocks // _SLAB_SLOTS)
        store = Store(slabs * _SLAB_SLOTS * _SLOT_BYTES, _SLAB_SLOTS * _SLOT_BYTES)
        store.add_slabs(0, slabs)
        store.open_session(1)
        layout = store.open_layout(1, b"bench", (_SLOT_BYTES,))
        return cls(store, layout.number, slabs * _SLAB_SLOTS, np.random.default_rng(seed))

    @property
    def resident(self) -> int:
        return len(self.store.blocks.table)

    def put(self, at_least: int) -> tuple[int, float]:
        """Stores conversations with that many new blocks or a few more; returns how many, and the
        seconds it took."""
        coming, planned = [], 0
        while planned < at_least:
            coming.append(self._next_conversation())
            planned += _TURNS * _TURN_BLOCKS - _SYSTEM_PROMPT_BLOCKS
        written, began = 0, perf_counter()
        for tenant, keys in coming:
            written += self._store_turns(tenant, keys)
        return written, perf_counter() - began

    def fill(self, most_at_a_time: int) -> Iterator[tuple[int, float]]:
        """Stores until the pool is full but for less than one conversation."""
        spare = _TURNS * _TURN_BLOCKS
        while (room := self.blocks - self.resident - spare) > 0:
            yield self.put(min(room, most_at_a_time))

    def _next_conversation(self) -> tuple[str, bytes]:
        if self.conversations % _SAME_SYSTEM_PROMPT == 0:
            self.system_prompt = self.random.bytes(_SYSTEM_PROMPT_BLOCKS * KEY_BYTES)
        tenant = f"tenant-{self.conversations // _SAME_SYSTEM_PROMPT % _TENANTS}"
        self.conversations += 1
        rest = self.random.bytes((_TURNS * _TURN_BLOCKS - _SYSTEM_PROMPT_BLOCKS) * KEY_BYTES)
        return tenant, self.system_prompt + rest

    def _store_turns(self, tenant: str, keys: bytes) -> int:
        store, written, parent = self.store, 0, b""
        for start in range(0, len(keys), _TURN_BLOCKS * KEY_BYTES):
            turn = keys[start : start + _TURN_BLOCKS * KEY_BYTES]
            self.now_ms += 1
            plan = store.prepare_store(1, 1, tenant, self.layout, 0, parent, turn, self.now_ms)
            store.complete_store(1, 1, np.zeros(len(plan.slots), np.uint64), self.now_ms)
            written += len(plan.slots)
            parent = turn[-KEY_BYTES:]
        return written


@dataclass
class _Pace:
    """Blocks and seconds of each piece of work."""

    pieces: list[tuple[int, float]]

    @property
    def per_s(self) -> float:
        """Of all of it: what growing costs now and then is part of the price."""
        return sum(blocks for blocks, _ in self.pieces) / sum(seconds for _, seconds in self.pieces)

    @property
    def median_per_s(self) -> float:
        return median(blocks / seconds for blocks, seconds in self.pieces)


def _measure(blocks: int, rounds: int) -> dict[str, float]:
    warm = _Load.of(_SMALL_BLOCKS, seed=0)
    list(warm.fill(_SMALL_BLOCKS))
    del warm
    gc.collect()
    stores, small_stores = _Pace([]), _Pace([])
    before = _resident_bytes()
    large = _Load.of(blocks, seed=1)
    for piece in large.fill(max(blocks // rounds, 1)):
        stores.pieces.append(piece)
        small_stores.pieces.extend(_Load.of(_SMALL_BLOCKS, seed=2).fill(_SMALL_BLOCKS))
    gc.collect()
    bytes_per_block = (_resident_bytes() - before) / large.resident

    small = _Load.of(_SMALL_BLOCKS, seed=3)
    list(small.fill(_SMALL_BLOCKS))
    for load in (large, small):
        load.put(_TURNS * _TURN_BLOCKS)  # from here on the pool is full
    evictions, small_evictions = _Pace([]), _Pace([])
    for _ in range(rounds):
        evictions.pieces.append(_evictions(large))
        small_evictions.pieces.append(_evictions(small))
    return {
        "blocks": large.resident,
        "bytes_per_block": round(bytes_per_block, 1),
        "stores_per_s": round(stores.per_s),
        "evictions_per_s": round(evictions.median_per_s),
        "stores_per_s_10k": round(small_stores.per_s),
        "evictions_per_s_10k": round(small_evictions.median_per_s),
        "store_cost_ratio": round(small_stores.per_s / stores.per_s, 3),
        "eviction_cost_ratio": round(small_evictions.median_per_s / evictions.median_per_s, 3),
    }


def _evictions(load: _Load) -> tuple[int, float]:
    before = load.store.eviction.evictions
    _, seconds = load.put(_SMALL_BLOCKS)
    return load.store.eviction.evictions - before, seconds


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
