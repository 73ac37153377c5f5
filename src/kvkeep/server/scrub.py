"""Checks the bytes of adopted blocks in the background.

A seal proves the index, not the bytes; an engine verifies those when it loads them, and this check
does so before. One thread takes a few blocks at a time and computes their checksums beside the
loop, at the lowest priority and resting most of the time. A block that does not match is checked
again in the loop, where nothing changes meanwhile, and dropped if it is bad."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import ABSENT, has_checksum
from kvkeep.server.counters import Counters
from kvkeep.server.network import PoolMemory
from kvkeep.store.store import Store
from kvkeep.store.table import READY

log = logging.getLogger(__name__)

_BYTES_A_TIME = 32 << 20
_ROWS_LOOKED_AT = 128  # less than a millisecond of the loop
_REST = 4  # times as long as it worked: a fifth of one core at most
_NICE = 19


@dataclass(frozen=True)
class Shard:
    """One shard of a block as the index had it a moment ago."""

    position: int
    offset: int
    nbytes: int
    checksum: int


class Scrub:
    """`take` and `judge` in the loop's thread, `look` in any."""

    def __init__(
        self, store: Store, memory: PoolMemory, counters: Counters, rows: NDArray[np.int64]
    ) -> None:
        self._store = store
        self._memory = memory
        self._counters = counters
        self._rows = rows
        self._keys = store.blocks.table.keys.words[rows]
        self._at = 0

    @property
    def left(self) -> int:
        """How many blocks have not been checked."""
        return len(self._rows) - self._at

    def take(self) -> list[Shard]:
        """The shards of the next few blocks that still exist. Empty at the end."""
        shards: list[Shard] = []
        nbytes = 0
        while self.left and nbytes < _BYTES_A_TIME and len(shards) < _ROWS_LOOKED_AT:
            found = self._shards_of(self._at) if self._is_same(self._at) else []
            nbytes += sum(shard.nbytes for shard in found)
            shards += found
            self._counters.scrubbed_blocks += bool(found)
            self._at += 1
        return shards

    def look(self, shards: list[Shard]) -> list[int]:
        """The positions of blocks that do not match, perhaps only because they were replaced."""
        return sorted({shard.position for shard in shards if not self._matches(shard)})

    def judge(self, positions: list[int]) -> int:
        """Drops the bad ones. Returns how many blocks left the index, descendants included."""
        dropped, table = 0, self._store.blocks.table
        for position in positions:
            if self._is_same(position) and not all(map(self._matches, self._shards_of(position))):
                row = int(self._rows[position])
                tenant = self._store.tenants.by_number[table.tenant[row]].name
                self._counters.bad_blocks += 1
                log.error(
                    "an adopted block of tenant %s does not match its checksum; it is dropped",
                    tenant,
                )
                dropped += self._store.drop_blocks(tenant, [table.keys[row]])
        return dropped

    def _is_same(self, position: int) -> bool:
        table, row = self._store.blocks.table, int(self._rows[position])
        return table.state[row] == READY and bool(
            (table.keys.words[row] == self._keys[position]).all()
        )

    def _shards_of(self, position: int) -> list[Shard]:
        table, row = self._store.blocks.table, int(self._rows[position])
        layout, slot = self._store.layouts[table.layout[row]], table.slot[row]
        sums = layout.checks[table.check[row]].tolist()
        places = zip(layout.shard_offsets, layout.shard_bytes, sums, strict=True)
        return [
            Shard(position, slot + at, nbytes, each)
            for at, nbytes, each in places
            if each not in (0, ABSENT)
        ]

    def _matches(self, shard: Shard) -> bool:
        return has_checksum(self._memory.view(shard.offset, shard.nbytes), shard.checksum)


class Scrubber:
    """A thread that scrubs until all is done or it is stopped."""

    def __init__(
        self, scrub: Scrub, run_in_loop: Callable[[Callable[[], Any]], Future[Any]]
    ) -> None:
        self._scrub = scrub
        self._run_in_loop = run_in_loop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-scrub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits for the blocks that are being checked."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._stopping.is_set() and (shards := self._ask(self._scrub.take)):
            started = time.monotonic()
            bad = self._scrub.look(shards)
            if bad:
                self._ask(lambda bad=bad: self._scrub.judge(bad))  # type: ignore[misc]
            self._stopping.wait(_REST * (time.monotonic() - started))

    def _ask(self, duty: Callable[[], Any]) -> Any:
        """The loop's result; None when the server stops first."""
        future = self._run_in_loop(duty)
        while not self._stopping.is_set():
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                continue
            except CancelledError:  # the loop has ended
                return None
        return None
