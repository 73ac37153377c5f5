"""What it costs to move blocks between engine memory and slots, beside one plain memcpy of the same
bytes.

    python -m kvkeep_lab.bench.copy [--json]

Blocks are spread over many layers, so a block of 64 KiB is 32 pieces of 2 KiB; block numbers and
slots are shuffled. All ways run in rounds on one thread, and speeds are given as parts of that
round's memcpy: the machine's mood cancels out. docs/decisions/0004-native-copy.md decides."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import SettingsError
from kvkeep.kv import native
from kvkeep.kv.copy import gather, scatter
from kvkeep.kv.runs import BlockRuns

Bytes = NDArray[np.uint8]
ALIGNMENT = 4096  # as slots and torch's tensors are; numpy alone would give 16


def run(
    *,
    block_bytes: tuple[int, ...] = (64 << 10, 1 << 20, 4 << 20),
    total_bytes: int = 256 << 20,
    layers: int = 32,
    repeats: int = 7,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure every way; returns `memcpy_gb_per_s` by block size and `of_memcpy` by way and size,
    medians of rounds."""
    if any(size % layers or total_bytes % size for size in block_bytes):
        raise SettingsError(
            "--block-bytes: expected multiples of --layers that divide --total-bytes"
        )
    memcpy: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    left_out: list[str] = [] if native.available else ["C"]
    for size in block_bytes:
        label = f"{size >> 10} KiB"
        ways = _ways(size, total_bytes, layers, np.random.default_rng(seed), left_out)
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats + 1):
            for name, way in ways.items():
                start = perf_counter()
                way()
                rounds[name].append(total_bytes / (perf_counter() - start) / 1e9)
        speeds = {
            name: np.array(taken[1:]) for name, taken in rounds.items()
        }  # the first one touches new memory
        reference = speeds.pop("memcpy")
        memcpy[label] = round(float(np.median(reference)), 2)
        for name, speed in speeds.items():
            parts.setdefault(name, {})[label] = round(float(np.median(speed / reference)), 2)
    return {
        "total_bytes": total_bytes,
        "layers": layers,
        "repeats": repeats,
        "memcpy_gb_per_s": memcpy,
        "of_memcpy": parts,
        "left_out": sorted(set(left_out)),
    }


def _aligned(nbytes: int) -> Bytes:
    memory = np.ones(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def _ways(
    size: int, total_bytes: int, layers: int, rng: np.random.Generator, left_out: list[str]
) -> dict[str, Callable[[], object]]:
    """Each way to move all blocks, by name; they share memory, and each runs on one thread."""
    count, piece = total_bytes // size, size // layers
    engine = [_aligned(count * piece).reshape(count, piece) for _ in range(layers)]
    for layer in engine:
        layer[:] = rng.integers(0, 256, layer.shape, dtype=np.uint8)
    pool = _aligned(total_bytes).reshape(count, layers, piece)
    source, target = _aligned(total_bytes), _aligned(total_bytes)
    ids, places = rng.permutation(count), rng.permutation(count)
    slots = (pool.ctypes.data + places * size).astype(np.uint64)
    runs = BlockRuns.of(engine)
    sums = gather(runs, ids, slots, verify=True)

    def by_piece() -> None:
        for block, place in zip(ids.tolist(), places.tolist(), strict=True):
            for number, layer in enumerate(engine):
                pool[place, number] = layer[block]

    def by_index() -> None:
        for number, layer in enumerate(engine):
            pool[places, number] = layer[ids]

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "gather, numpy by piece": by_piece,
        "gather, numpy by index": by_index,
    }
    if (with_torch := _with_torch(engine, pool, ids, places)) is None:
        left_out.append("torch")
    else:
        ways["gather, torch by stack"] = with_torch
    if native.available:
        ways["gather, C"] = lambda: gather(runs, ids, slots, verify=False)
        ways["scatter, C"] = lambda: scatter(runs, ids, slots, None)
        ways["gather + checksum, C"] = lambda: gather(runs, ids, slots, verify=True)
        ways["scatter + checksum, C"] = lambda: scatter(runs, ids, slots, sums)
    return ways


def _with_torch(
    engine: list[Bytes], pool: Bytes, ids: NDArray[np.int64], places: NDArray[np.int64]
) -> Callable[[], None] | None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    layers, slots = [torch.from_numpy(layer) for layer in engine], torch.from_numpy(pool)

    def move() -> None:
        """Block by block: the fastest of its ways here, index_select and index_copy_ or index_put_
        are slower."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for block, place in zip(ids.tolist(), places.tolist(), strict=True):
            torch.stack([layer[block] for layer in layers], out=slots[place])
        torch.set_num_threads(threads)

    return move


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    sizes = list(result["memcpy_gb_per_s"])
    lines = ["| blocks of | " + " | ".join(sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    lines.append(
        "| memcpy | " + " | ".join(f"{result['memcpy_gb_per_s'][s]:.1f} GB/s" for s in sizes) + " |"
    )
    for name, parts in result["of_memcpy"].items():
        lines.append(f"| {name} | " + " | ".join(f"{parts[s]:.0%} of memcpy" for s in sizes) + " |")
    if result["left_out"]:
        lines += ["", "Left out: " + ", ".join(result["left_out"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Moving blocks, as parts of memcpy's speed.")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    result = run()
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()
