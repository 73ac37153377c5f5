"""How fast blocks move between an engine's paged KV memory and the server, against a plain memcpy
of the same bytes.

Blocks are gathered from 32 layers (separate arrays, block ids in random order) into slots, and
scattered back, by a WorkerAdapter talking to a real daemon: asking for slots, copying, checksums,
completing and looking up all count. Copies and memcpys alternate, so that noise of the machine
meets both. Half a gigabyte is what a prompt of 4,000 tokens takes in a model of the size of
Llama-8B. With `device` "cuda" the KV is on a GPU: see transfer_cuda."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.bench import transfer_cuda
from kvkeep.bench.transfer_worker import EngineSide
from kvkeep.errors import SettingsError
from kvkeep.kv import native
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.testing.process import ServerProcess
from kvkeep.units import MIB

# What options mean here, where it is more than their name says elsewhere.
OPTIONS = {
    "device": "cpu, or cuda (cuda:1, ...) for an engine whose KV is on a GPU.",
    "block_bytes": "Sizes of a block to measure on a CPU, with commas between.",
    "geometries": f"Models to measure on a GPU: of {', '.join(transfer_cuda.GEOMETRIES)}, with commas between.",
    "total_bytes": "How much is moved in a transfer; 0 is 512MiB, and on a GPU 8GiB.",
    "rounds": "How often each case is measured; 0 is 15 times, and on a GPU 7.",
}

_BLOCK_BYTES = (64 << 10, 1 << 20, 4 << 20)
_GEOMETRIES = tuple(transfer_cuda.GEOMETRIES)
_LAYERS = 32
_WARM_UP = 3  # stores that touch every page of the pool once
# an engine polls once a step; more often only takes the interpreter from the worker
_POLL_S = 0.0002


def run(
    device: str = "cpu",
    block_bytes: tuple[int, ...] = _BLOCK_BYTES,
    geometries: tuple[str, ...] = _GEOMETRIES,
    total_bytes: int = 0,
    rounds: int = 0,
) -> dict[str, Any]:
    """Starts servers and measures store and load for each size of a block, with and without
    verification. SettingsError for a device that is not here, and for options of the other one."""
    if device != "cpu":
        if block_bytes != _BLOCK_BYTES:
            raise SettingsError(
                "--block-bytes is for a CPU",
                "on a GPU a model says how large blocks are: --geometries",
            )
        return transfer_cuda.run(device, geometries, total_bytes or 8192 * MIB, rounds or 7)
    if geometries != _GEOMETRIES:
        raise SettingsError("--geometries is for a GPU", "add --device cuda, or use --block-bytes")
    return _on_cpu(block_bytes, total_bytes or 512 * MIB, rounds or 15)


def _on_cpu(block_bytes: tuple[int, ...], total_bytes: int, rounds: int) -> dict[str, Any]:
    if total_bytes < max(block_bytes):
        raise SettingsError("--total-bytes is less than a block", "move at least one block")
    floors: list[float] = []
    rows: list[dict[str, Any]] = []
    pool_mib = 2 * total_bytes // MIB + 128
    for nbytes in block_bytes:
        for verify in (False, True):
            with ServerProcess(
                "--pool-size", f"{pool_mib}MiB", "--slab-size", "32MiB", "--no-verify"
            ) as server:
                bench = _Bench(server.address, nbytes, total_bytes, verify)
                rows += bench.rows(rounds, floors)
                bench.close()
    floor_gbps = round(float(np.median(floors)), 2)
    return {"device": "cpu", "floor_gbps": floor_gbps, "rows": rows, "native": native.available}


class _Bench:
    """One block size, verified or not: an engine's memory, and its scheduler and worker."""

    def __init__(self, address: str, block_bytes: int, total_bytes: int, verify: bool) -> None:
        self.blocks = total_bytes // block_bytes
        self.block_bytes, self.total_bytes, self.verify = block_bytes, total_bytes, verify
        rng = np.random.default_rng(0)
        layers = {str(i): _tensor(self.blocks, block_bytes // _LAYERS) for i in range(_LAYERS)}
        for layer in layers.values():
            layer[:] = rng.integers(0, 256, layer.shape, dtype=np.uint8)
        self.block_ids = rng.permutation(self.blocks).astype(np.int64)
        self.plain, self.copy = _tensor(1, total_bytes), _tensor(1, total_bytes)
        self.plain[:], self.copy[:] = 1, 0
        self.engine = EngineSide(address, layers, block_bytes, verify, _POLL_S)

    def rows(self, rounds: int, floors: list[float]) -> list[dict[str, Any]]:
        store: list[float] = []
        load: list[float] = []
        floor: list[float] = []
        for turn in range(_WARM_UP + rounds):
            keys = os.urandom(self.blocks * KEY_BYTES)
            times = self._floor(), self.engine.store(keys, self.block_ids), self._load(keys)
            if turn >= _WARM_UP:
                for samples, seconds in zip((floor, store, load), times, strict=True):
                    samples.append(self.total_bytes / seconds / 1e9)
        floors += floor
        return [self._row("store", store, floor), self._row("load", load, floor)]

    def close(self) -> None:
        self.engine.close()

    def _row(self, direction: str, gbps: list[float], floor: list[float]) -> dict[str, Any]:
        return {
            "direction": direction,
            "block_bytes": self.block_bytes,
            "gbps": round(float(np.median(gbps)), 2),
            # Of the memcpy just before.
            "fraction_of_floor": round(float(np.median(np.divide(gbps, floor))), 3),
            "verify": self.verify,
        }

    def _floor(self) -> float:
        started = time.perf_counter()
        np.copyto(self.copy, self.plain)
        return time.perf_counter() - started

    def _load(self, keys: bytes) -> float:
        return self.engine.load(keys, self.block_ids).seconds


def _tensor(blocks: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory on a cache-line boundary, as tensors have it and plain numpy arrays have not."""
    raw: NDArray[np.uint8] = np.empty(blocks * nbytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + blocks * nbytes].reshape(blocks, nbytes)
