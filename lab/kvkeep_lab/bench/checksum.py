"""What a checksum costs and what it sees: ours beside those we could have taken.

    python -m kvkeep_lab.bench.checksum [--json] [--device cuda]

Speed is taken over blocks that lie one after the other in 128 MiB, so mostly from memory, as blocks
do in use. Damage is real: each trial damages a block of KV-like data (bfloat16 normals), and a
candidate misses it when its value stays the same. Candidates that are not installed are left out by
name. docs/decisions/0003-checksum.md decides."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import SettingsError
from kvkeep.kv import checksum as ours
from kvkeep.kv import native

Bytes = NDArray[np.uint8]
Rng = np.random.Generator

AREA_BYTES = 128 << 20
DAMAGED_BLOCK_BYTES = 16 << 10


@dataclass(frozen=True)
class Candidate:
    """One way to take a checksum, its bits, and how its parts could be put together on a GPU."""

    take: Callable[[Bytes], object]
    bits: int
    on_gpu: str


def run(
    *,
    block_bytes: tuple[int, ...] = (64 << 10, 1 << 20, 4 << 20),
    repeats: int = 5,
    trials: int = 20_000,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure all candidates; with device "cuda" also our kernel on the GPU, compared with the
    CPU's values first.

    Returns the parameters, `gb_per_s` by name and size, `missed` by name and kind of damage, and
    the names `left_out`. SettingsError for a device that is not here, before anything is measured.
    """
    if any(size % 8 for size in block_bytes):
        raise SettingsError(
            "--block-bytes: expected multiples of 8, because some candidates take words"
        )
    if device != "cpu":
        _check_gpu(device)
    candidates, left_out = _candidates()
    result: dict[str, Any] = {
        "repeats": repeats,
        "trials": trials,
        "seed": seed,
        "bits": {name: candidate.bits for name, candidate in candidates.items()},
        "on_gpu": {name: candidate.on_gpu for name, candidate in candidates.items()},
        "gb_per_s": _speeds(candidates, block_bytes, repeats, seed),
        "missed": _missed(candidates, trials, seed),
        "left_out": left_out,
    }
    if device != "cpu":
        result["gpu_gb_per_s"] = {
            _label(size): _gpu_speed(size, device, repeats) for size in block_bytes
        }
    return result


def _candidates() -> tuple[dict[str, Candidate], list[str]]:
    every = {"kvkeep, numpy": Candidate(ours._checksum, 64, "sums, any order")}
    left_out = []
    if native.available:
        every = {"kvkeep, C": Candidate(ours.checksum, 64, "sums, any order"), **every}
    else:
        left_out.append("kvkeep, C")
    for name, module, constructor, bits, on_gpu in [
        ("XXH3", "xxhash", "xxh3_64", 64, "in order, 1 KiB by 1 KiB"),
        ("BLAKE3", "blake3", "blake3", 256, "a tree, much arithmetic"),
    ]:
        try:
            imported = importlib.import_module(module)
        except ImportError:
            left_out.append(name)
        else:
            every[name] = Candidate(_digest(getattr(imported, constructor)), bits, on_gpu)
    every["CRC-32"] = Candidate(lambda d: zlib.crc32(d.data), 32, "pieces, joined by matrices")
    every["Adler-32"] = Candidate(lambda d: zlib.adler32(d.data), 32, "weighted sums")
    every["sum of words"] = Candidate(lambda d: int(d.view(np.uint64).sum()), 64, "sums, any order")
    every["xor of words"] = Candidate(
        lambda d: int(np.bitwise_xor.reduce(d.view(np.uint64))), 64, "xor, any order"
    )
    return every, left_out


def _digest(constructor: Callable[[Bytes], Any]) -> Callable[[Bytes], object]:
    return lambda data: constructor(data).digest()


# --- speed ----------------------------------------------------------------------------------------


def _label(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _speeds(
    candidates: dict[str, Candidate], sizes: tuple[int, ...], repeats: int, seed: int
) -> dict[str, dict[str, float]]:
    """GB/s, the median of the rounds. In rounds, so that a slow moment of the machine hits all
    alike."""
    area = np.random.default_rng(seed).integers(0, 256, max(AREA_BYTES, *sizes), dtype=np.uint8)
    speeds: dict[str, dict[str, float]] = {name: {} for name in candidates}
    for size in sizes:
        blocks = [area[at : at + size] for at in range(0, len(area) - size + 1, size)]
        rounds: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(repeats):
            for name, candidate in candidates.items():
                start = perf_counter()
                for block in blocks:
                    candidate.take(block)
                rounds[name].append(len(blocks) * size / (perf_counter() - start) / 1e9)
        for name, taken in rounds.items():
            speeds[name][_label(size)] = round(float(np.median(taken)), 2)
    return speeds


def _check_gpu(device: str) -> None:
    remedy = "leave out --device to measure the CPU alone"
    if not re.fullmatch(r"cuda(:[0-9]{1,3})?", device):
        raise SettingsError(f'--device "{device}": expected cpu, cuda or cuda:N', remedy)
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("triton")
    except ImportError as error:
        raise SettingsError(
            f"--device {device} needs torch and triton: {error}", f"install both, or {remedy}"
        ) from None
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= found:
        raise SettingsError(
            f"--device {device} is not here: torch finds {found} CUDA devices", remedy
        )


def _gpu_speed(size: int, device: str, repeats: int) -> float:
    """GB/s of our kernel, which copies 1 GiB of blocks with their checksums; RuntimeError if one is
    not the CPU's."""
    import torch

    from kvkeep.gpu.kernels import Units
    from kvkeep.kv.runs import BlockRuns

    blocks = torch.randint(0, 256, ((1 << 30) // size, size), dtype=torch.uint8, device=device)
    units = Units.of(BlockRuns.of([blocks]), blocks.device)
    ids = torch.arange(len(blocks), device=device)
    staging = torch.empty(len(blocks), units.pitch // 8, dtype=torch.int64, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    taken = []
    for _ in range(repeats + 1):
        sums = torch.zeros(len(blocks), dtype=torch.int64, device=device)
        start.record()
        units.gather(ids, staging, sums)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    values = units.checksums(sums.cpu().numpy().view(np.uint64))
    for i in (0, len(blocks) // 2, len(blocks) - 1):
        if int(values[i]) != ours.checksum(blocks[i].cpu().numpy()):
            raise RuntimeError(f"the GPU's checksum of block {i} of {size} bytes is not the CPU's")
    return round(blocks.numel() / float(np.median(taken[1:])) / 1e9, 1)


# --- damage ---------------------------------------------------------------------------------------


def _flip_bits(block: Bytes, other: Bytes, rng: Rng) -> None:
    for bit in rng.choice(8 * len(block), int(rng.integers(1, 5)), replace=False):
        block[bit // 8] ^= 1 << int(bit) % 8


def _flip_in_pairs(block: Bytes, other: Bytes, rng: Rng) -> None:
    words = block.view(np.uint32)
    words[rng.choice(len(words), 2, replace=False)] ^= np.uint32(1 << int(rng.integers(32)))


def _burst(block: Bytes, other: Bytes, rng: Rng) -> None:
    length = int(rng.integers(2, 65))
    at = int(rng.integers(len(block) - length))
    block[at : at + length] ^= rng.integers(1, 256, length, dtype=np.uint8)


def _swap(width: int) -> Callable[[Bytes, Bytes, Rng], None]:
    def damage(block: Bytes, other: Bytes, rng: Rng) -> None:
        pieces = block.reshape(-1, width)
        i, j = rng.choice(len(pieces), 2, replace=False)
        pieces[[i, j]] = pieces[[j, i]]

    return damage


def _zero_a_piece(block: Bytes, other: Bytes, rng: Rng) -> None:
    length = 64 << int(rng.integers(7))
    at = int(rng.integers(len(block) // length)) * length
    block[at : at + length] = 0


def _stale_piece(block: Bytes, other: Bytes, rng: Rng) -> None:
    length = 64 << int(rng.integers(7))
    at = int(rng.integers(len(block) // length)) * length
    block[at : at + length] = other[at : at + length]


DAMAGE: dict[str, Callable[[Bytes, Bytes, Rng], None]] = {
    "1 to 4 bit flips": _flip_bits,
    "one bit flipped in two words": _flip_in_pairs,
    "burst of 2 to 64 bytes": _burst,
    "swapped 4-byte words": _swap(4),
    "swapped 8-byte words": _swap(8),
    "swapped 4 KiB rows": _swap(4096),
    "zeroed piece": _zero_a_piece,
    "stale piece": _stale_piece,
}


def _missed(candidates: dict[str, Candidate], trials: int, seed: int) -> dict[str, dict[str, int]]:
    """How many damaged blocks kept their value. Both roads of ours give one number, so only the
    first is tried."""
    tried = {
        name: c.take
        for name, c in candidates.items()
        if name != "kvkeep, numpy" or not native.available
    }
    missed = {name: dict.fromkeys(DAMAGE, 0) for name in tried}
    rng = np.random.default_rng(seed)
    for kind, damage in DAMAGE.items():
        for trial in range(trials):
            if (
                trial % 100 == 0
            ):  # a fresh pair of blocks now and then: making them costs more than a trial
                good, other = _kv_like(rng), _kv_like(rng)
                values = {name: take(good) for name, take in tried.items()}
            bad = good.copy()
            damage(bad, other, rng)
            if np.array_equal(bad, good):  # two equal words swapped, say
                continue
            for name, take in tried.items():
                missed[name][kind] += take(bad) == values[name]
    return missed


def _kv_like(rng: Rng) -> Bytes:
    """A block of bfloat16 normals: the upper halves of float32, as keys and values look."""
    numbers = rng.standard_normal(DAMAGED_BLOCK_BYTES // 2, dtype=np.float32)
    return np.ascontiguousarray((numbers.view(np.uint32) >> 16).astype("<u2")).view(np.uint8)


# --- for people -----------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    speeds: dict[str, dict[str, float]] = result["gb_per_s"]
    sizes = list(next(iter(speeds.values())))
    heads = " | ".join(f"{size}, GB/s" for size in sizes)
    lines = [f"| checksum | bits | {heads} | on a GPU |", "|---" * (len(sizes) + 3) + "|"]
    for name, taken in speeds.items():
        cells = [
            name,
            str(result["bits"][name]),
            *(f"{taken[size]:.2f}" for size in sizes),
            result["on_gpu"][name],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if "gpu_gb_per_s" in result:
        cells = [
            "kvkeep, GPU",
            "64",
            *(f"{result['gpu_gb_per_s'][size]:.1f}" for size in sizes),
            "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    names = list(result["missed"])
    missed = f"missed of {result['trials']:,} damaged blocks"
    lines += ["", f"| {missed} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind in DAMAGE:
        lines.append(
            f"| {kind} | "
            + " | ".join(f"{result['missed'][name][kind]:,}" for name in names)
            + " |"
        )
    if result["left_out"]:
        lines += ["", "Left out, not installed: " + ", ".join(result["left_out"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Checksums compared: speed, and damage missed.")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--device", default="cpu", help="cpu, or cuda to measure the GPU kernel too"
    )
    parser.add_argument(
        "--trials", type=int, default=20_000, help="damaged blocks per kind of damage"
    )
    arguments = parser.parse_args()
    result = run(device=arguments.device, trials=arguments.trials)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()
