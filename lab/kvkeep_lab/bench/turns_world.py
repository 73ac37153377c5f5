"""A store that is filled for the benchmark of turns, and the times that its operations took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.tiers.index_files import FileColumns

SLOT_BYTES = 4096
SLAB_SLOTS = 16384
NOW_MS = 1_000


@dataclass
class Turns:
    """The turns of one operation."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def take(self, turn: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = turn()
        self.cpu_ms.append((time.thread_time() - cpu) * 1e3)
        self.wall_ms.append((time.perf_counter() - wall) * 1e3)
        return result


class World:
    """A store that is filled, and what its operations took."""

    def __init__(self, blocks: int, directory: Path, limits: Limits | None = None) -> None:
        slabs = -(-blocks // SLAB_SLOTS) + 1
        columns = FileColumns(directory)
        self.store = Store(
            slabs * SLAB_SLOTS * SLOT_BYTES, SLAB_SLOTS * SLOT_BYTES, limits, columns=columns
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
        self, tenant: str, parent: bytes, keys: bytes, ttl_ms: int = 0, turns: Turns | None = None
    ) -> int:
        """Stores a chain; returns how many of its blocks were refused."""
        turns = turns or Turns()
        self._number += 1
        ask = (1, self._number, tenant, self.layout, 0, parent, keys, NOW_MS, 50, ttl_ms)
        plan = turns.take(lambda: self.store.prepare_store(*ask))
        if len(plan.slots):
            sums = np.ones(len(plan.slots), np.uint64)
            turns.take(lambda: self.store.complete_store(1, self._number, sums, NOW_MS))
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
        turns = Turns()
        for request in requests:
            turns.take(request)
            while self.store.has_to_tidy:
                turns.take(lambda: self.store.tidy(NOW_MS))
        self.note(operation, blocks, turns)

    def note(self, operation: str, blocks: int, turns: Turns) -> None:
        self.rows.append(
            {
                "operation": operation,
                "blocks": blocks,
                "turns": len(turns.wall_ms),
                "longest_ms": round(max(turns.wall_ms), 2),
                "longest_cpu_ms": round(max(turns.cpu_ms), 2),
            }
        )
