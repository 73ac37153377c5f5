"""How fast blocks move between an engine's paged KV memory and the server, against a plain memcpy of the same bytes.

Blocks are gathered from 32 layers (separate arrays, block ids in random order) into slots, and scattered back, by a
WorkerAdapter talking to a real daemon: asking for slots, copying, checksums, completing and looking up all count.
Copies and memcpys alternate, so that noise of the machine meets both. Half a gigabyte is what a prompt of 4,000 tokens
takes in a model of the size of Llama-8B.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import Unavailable
from kvkeep.kv import native
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess

_LAYERS = 32
_WARM_UP = 3  # stores that touch every page of the pool once
_POLL_S = 0.0002  # an engine polls once a step; more often only takes the interpreter from the worker


def run(
    block_bytes: tuple[int, ...] = (64 << 10, 1 << 20, 4 << 20), total_bytes: int = 512 << 20, rounds: int = 15
) -> dict[str, Any]:
    """Starts a server and measures store and load for each block size, with and without verification."""
    floors: list[float] = []
    rows: list[dict[str, Any]] = []
    pool_mib = 2 * total_bytes // (1 << 20) + 128
    for nbytes in block_bytes:
        for verify in (False, True):
            with ServerProcess("--pool-size", f"{pool_mib}MiB", "--slab-size", "32MiB") as server:
                bench = _Bench(server.address, nbytes, total_bytes, verify)
                rows += bench.rows(rounds, floors)
                bench.close()
    return {"floor_gbps": round(float(np.median(floors)), 2), "rows": rows, "native": native.available}


class _Bench:
    """One block size, verified or not: an engine's memory, a scheduler and a worker."""

    def __init__(self, address: str, block_bytes: int, total_bytes: int, verify: bool) -> None:
        identity = ModelIdentity(
            model="bench", revision="1", kv_dtype="uint8", block_tokens=16, layout=f"bench {block_bytes}"
        )
        shape = BlockShape(identity, (block_bytes,))
        options = ClientOptions(address=address, verify=verify, store_deadline_ms=60_000)
        self.blocks = total_bytes // block_bytes
        self.block_bytes, self.total_bytes, self.verify = block_bytes, total_bytes, verify
        rng = np.random.default_rng(0)
        self.layers = [_tensor(self.blocks, block_bytes // _LAYERS) for _ in range(_LAYERS)]
        for layer in self.layers:
            layer[:] = rng.integers(0, 256, layer.shape, dtype=np.uint8)
        self.block_ids = rng.permutation(self.blocks).astype(np.int64)
        self.plain, self.copy = _tensor(1, total_bytes), _tensor(1, total_bytes)
        self.plain[:], self.copy[:] = 1, 0
        self.scheduler = SchedulerAdapter(shape, options)
        self.worker = WorkerAdapter(shape, ParallelStrategy.of(), options)
        self.worker.register_kv_caches({str(i): layer for i, layer in enumerate(self.layers)})
        deadline = time.monotonic() + 20
        while not (self.scheduler.connection.up and self.worker.connection.up):
            if time.monotonic() > deadline:
                raise Unavailable(f"no session with {address}: {self.worker.connection.refusal}")
            time.sleep(0.01)

    def rows(self, rounds: int, floors: list[float]) -> list[dict[str, Any]]:
        store: list[float] = []
        load: list[float] = []
        floor: list[float] = []
        for turn in range(_WARM_UP + rounds):
            keys = os.urandom(self.blocks * KEY_BYTES)
            times = self._floor(), self._store(keys), self._load(keys)
            if turn >= _WARM_UP:
                for samples, seconds in zip((floor, store, load), times, strict=True):
                    samples.append(self.total_bytes / seconds / 1e9)
        floors += floor
        return [self._row("store", store, floor), self._row("load", load, floor)]

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()

    def _row(self, direction: str, gbps: list[float], floor: list[float]) -> dict[str, Any]:
        return {
            "direction": direction,
            "block_bytes": self.block_bytes,
            "gbps": round(float(np.median(gbps)), 2),
            "fraction_of_floor": round(float(np.median(np.divide(gbps, floor))), 3),  # of the memcpy just before
            "verify": self.verify,
        }

    def _floor(self) -> float:
        started = time.perf_counter()
        np.copyto(self.copy, self.plain)
        return time.perf_counter() - started

    def _store(self, keys: bytes) -> float:
        started = time.perf_counter()
        self.worker.store("store", StoreRequest(DEFAULT_TENANT, b"", keys, self.block_ids))
        while not (finished := self.worker.poll()).stored:
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - started
        if finished.stored["store"] != self.blocks:
            raise Unavailable(f"{finished.stored['store']} of {self.blocks} blocks stored: {self._why()}")
        return seconds

    def _load(self, keys: bytes) -> float:
        started = time.perf_counter()
        while (answer := self.scheduler.lookup("load", None, keys)) is None:
            time.sleep(_POLL_S)
        self.worker.load(
            "load",
            LoadRequest(DEFAULT_TENANT, keys, 0, self.block_ids, answer.epoch, answer.slots, answer.checksums),
        )
        while not (finished := self.worker.poll()).loaded:
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - started
        self.scheduler.release("load")
        if finished.failed or answer.blocks != self.blocks:
            raise Unavailable(f"{answer.blocks} of {self.blocks} blocks hit, then {self._why()}")
        return seconds

    def _why(self) -> str:
        return f"{self.worker.connection.counters.failures} {self.worker.connection.refusal}"


def _tensor(blocks: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory on a cache-line boundary, as tensors have it and plain numpy arrays have not."""
    raw: NDArray[np.uint8] = np.empty(blocks * nbytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + blocks * nbytes].reshape(blocks, nbytes)
