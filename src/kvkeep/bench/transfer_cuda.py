"""The same with an engine's KV on a GPU: how fast blocks move, against a plain copy through pinned
memory.

A model's KV is one tensor a layer, as vLLM has it, in blocks of 16 tokens. Half of the blocks, in
random order, are stored; the other half, zeroed before, are loaded into, and then compared byte for
byte with the first half. A round:

    floor, store        the first half goes to the server under new keys        floor: device to pinned host
    floor, load         it comes back into the second half                      floor: pinned host to device
    floor, both         a store under new keys and a load, begun together       floor: both copies, on two streams
    latency             a load of 2,000 tokens

All of that is measured with an engine that computes nothing, and says so. At the end come a store
and a load beside copies of an engine's own, to see how long those wait (`OwnCopies`): once more
so, and with one that computes.

What is moved belongs to several requests of 4,096 tokens, all asked for at once. A floor is a plain
copy of the same bytes just before what is compared with it. One worker does all of it, as an engine
has one a GPU. For both directions the rate is the sum of both over the time until the later one has
ended. What a GPU copies to must be registered with CUDA: a worker does that in the background, so
nothing is counted before that is over."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.bench.transfer_floor import DIRECTIONS, ONE_WAY, Gpu, OwnCopies, PlainCopy, check_device
from kvkeep.bench.transfer_worker import BlockIds, EngineSide
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.testing.process import ServerProcess
from kvkeep.units import GIB, MIB, format_size

BLOCK_TOKENS = 16
LATENCY_TOKENS = 2000
REQUEST_TOKENS = 4096

_ITEM_BYTES = 2  # bfloat16
_SLAB_BYTES = 64 * MIB
_SPARE_SLABS = 4
_POLL_S = 0.0002  # of stores; an engine's step takes longer
_WARM_UP_ROUNDS = 2
_REGISTER_S_A_GIB = 10  # at most; a GPU's driver needs 0.6
_LEAST_FRACTION = 0.001  # that is told: on a machine that stands still it may be less


@dataclass(frozen=True)
class Geometry:
    """A model's KV: `memory` are a block's dims as they lie in memory, `order` the dims that the
    engine sees of [blocks, *memory]. `target` is the fraction of the floor that a verified store or
    load shall reach."""

    layers: int
    memory: tuple[int, ...]
    order: tuple[int, ...]
    target: float

    @property
    def block_bytes(self) -> int:
        return self.layers * math.prod(self.memory) * _ITEM_BYTES


# A head's keys and values lie together: vLLM's (blocks, heads, tokens, 2 * head size), in memory
# with tokens outermost.
GEOMETRIES: Mapping[str, Geometry] = {
    "llama-8b": Geometry(32, (BLOCK_TOKENS, 8, 256), (0, 2, 1, 3), 0.97),
    "llama-70b": Geometry(80, (BLOCK_TOKENS, 8, 256), (0, 2, 1, 3), 0.97),
    "mla": Geometry(61, (BLOCK_TOKENS, 576), (0, 1, 2), 0.9),
}
BOTH_TARGET = 0.9
VERIFICATION_TARGET = 0.02  # what it may cost, of the speed without it


# -- one model


@dataclass
class Samples:
    """Seconds of each round: of a transfer, and of the plain copy just before it."""

    transfer: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)


@dataclass
class Measured:
    """What the rounds of one model took, by direction; and the loads of a short prompt, in all and
    looking up alone."""

    directions: dict[str, Samples] = field(
        default_factory=lambda: {way: Samples() for way in DIRECTIONS}
    )
    small: list[float] = field(default_factory=list)
    small_lookup: list[float] = field(default_factory=list)
    own_copies: list[dict[str, Any]] = field(default_factory=list)


class KV:
    """An engine's KV: blocks to store from, and as many to load into."""

    def __init__(self, gpu: Gpu, geometry: Geometry, blocks: int) -> None:
        torch, self.gpu = gpu.torch, gpu
        ids = np.random.default_rng(0).permutation(2 * blocks).astype(np.int64)
        self.sources: BlockIds = ids[:blocks]
        self.targets: BlockIds = ids[blocks:]
        self.layers: dict[str, Any] = {}
        for layer in range(geometry.layers):
            bits = torch.randint(
                -(2**15),
                2**15,
                (2 * blocks, *geometry.memory),
                dtype=torch.int16,
                device=gpu.device,
            )
            self.layers[str(layer)] = bits.view(torch.bfloat16).permute(geometry.order)
        self._at_sources, self._at_targets = (
            torch.from_numpy(ids).to(gpu.device) for ids in (self.sources, self.targets)
        )
        gpu.synchronize()

    def clear_targets(self) -> None:
        for layer in self.layers.values():
            layer.index_fill_(0, self._at_targets, 0)
        self.gpu.synchronize()

    def check_targets(self, blocks: int, what: str) -> None:
        """KVKeepError unless the first `blocks` loaded blocks hold, bit for bit, what was
        stored."""
        torch = self.gpu.torch
        for name, layer in self.layers.items():
            bits = layer.view(torch.int16)  # as numbers, NaN would differ from itself
            stored, loaded = (bits[ids[:blocks]] for ids in (self._at_sources, self._at_targets))
            if not torch.equal(stored, loaded):
                bad = int((stored != loaded).flatten(1).any(1).sum())
                raise KVKeepError(
                    f"wrong KV after {what}: {bad} of {blocks} blocks differ in layer {name}"
                )


class Bench:
    """One model, verified or not: its KV, a scheduler and a worker."""

    def __init__(self, name: str, kv: KV, floor: PlainCopy, verify: bool) -> None:
        self.name, self.geometry, self.verify = name, GEOMETRIES[name], verify
        self.blocks = len(kv.sources)
        self.nbytes = self.blocks * self.geometry.block_bytes
        self.small_blocks = min(LATENCY_TOKENS // BLOCK_TOKENS, self.blocks)
        self.registered = False
        self._kv, self._floor, self._gpu = kv, floor, kv.gpu

    @property
    def pool_bytes(self) -> int:
        """Room for two transfers: while one is loaded, another is stored."""
        slabs = math.ceil(2 * self.blocks / (_SLAB_BYTES // (self.geometry.block_bytes + 4096)))
        return (slabs + _SPARE_SLABS) * _SLAB_BYTES

    def measure(self, rounds: int) -> Measured:
        """Starts a server, warms up and measures."""
        measured = Measured()
        slab = f"{_SLAB_BYTES // MIB}MiB"
        sizes = ("--pool-size", f"{self.pool_bytes // MIB}MiB", "--slab-size", slab)
        # so that the engine's own choice holds
        with ServerProcess(*sizes, "--no-verify") as server:
            side = EngineSide(
                server.address,
                self._kv.layers,
                self.geometry.block_bytes,
                self.verify,
                _POLL_S,
                "bfloat16",
                REQUEST_TOKENS // BLOCK_TOKENS,
            )
            with closing(side):
                side.worker.set_engine_busy(busy=False)
                self._warm_up(side)
                for _ in range(rounds):
                    self._round(side, measured)
                measured.own_copies = list(self._own_copies(side))
        return measured

    def _warm_up(self, side: EngineSide) -> None:
        deadline = time.monotonic() + _REGISTER_S_A_GIB * (1 + self.pool_bytes / GIB)
        while not (self.registered or time.monotonic() > deadline):
            segments = side.worker.connection.segments
            self.registered = segments is not None and segments.is_populated
            time.sleep(0.05)
        for _ in range(_WARM_UP_ROUNDS):
            self._round(side, Measured())

    def _round(self, side: EngineSide, into: Measured) -> None:
        kv, first, second = self._kv, *(os.urandom(self.blocks * KEY_BYTES) for _ in range(2))
        for way in DIRECTIONS:
            if way != "store":
                kv.clear_targets()
            samples = into.directions[way]
            samples.floor.append(self._floor.seconds(way, self.nbytes))
            match way:
                case "store":
                    samples.transfer.append(side.store(first, kv.sources))
                case "load":
                    samples.transfer.append(side.load(first, kv.targets).seconds)
                case _:
                    samples.transfer.append(side.both(second, kv.sources, first, kv.targets))
            if way != "store":
                kv.check_targets(self.blocks, f"{self.name}, {way}")
        # What was stored while something else was loaded is as good.
        kv.clear_targets()
        small = side.load(second[: self.small_blocks * KEY_BYTES], kv.targets[: self.small_blocks])
        kv.check_targets(self.small_blocks, f"{self.name}, small load")
        into.small.append(small.seconds)
        into.small_lookup.append(small.lookup_seconds)

    def _own_copies(self, side: EngineSide) -> Iterator[dict[str, Any]]:
        kv, own = self._kv, OwnCopies(self._gpu)
        for computes in (False, True):
            side.worker.set_engine_busy(busy=computes)
            keys = os.urandom(self.blocks * KEY_BYTES)
            with own.beside("store") as took:
                stored_s = side.store(keys, kv.sources)
            yield own.row("store", computes, took) | {"gbps": _gbps(self.nbytes, [stored_s])}
            kv.clear_targets()
            with own.beside("load") as took:
                loaded_s = side.load(keys, kv.targets).seconds
            kv.check_targets(self.blocks, f"{self.name}, load beside other copies")
            yield own.row("load", computes, took) | {"gbps": _gbps(self.nbytes, [loaded_s])}

    # -- what came out

    def rows(self, measured: Measured) -> Iterator[dict[str, Any]]:
        for way, samples in measured.directions.items():
            moved = self.nbytes * (2 if way == "both" else 1)
            yield {
                "geometry": self.name,
                "direction": way,
                "block_bytes": self.geometry.block_bytes,
                "verify": self.verify,
                "gbps": _gbps(moved, samples.transfer),
                "floor_gbps": _gbps(moved, samples.floor),
                "fraction_of_floor": round(fraction(samples), 3),
            }

    def latency(self, measured: Measured) -> dict[str, Any]:
        """A small load beside what its bytes take at the floor's rate."""
        nbytes = self.small_blocks * self.geometry.block_bytes
        floor_s = statistics.median(measured.directions["load"].floor) * nbytes / self.nbytes
        return {
            "geometry": self.name,
            "verify": self.verify,
            "blocks": self.small_blocks,
            "bytes": nbytes,
            "ms": round(statistics.median(measured.small) * 1e3, 3),
            "lookup_ms": round(statistics.median(measured.small_lookup) * 1e3, 3),
            "floor_ms": round(floor_s * 1e3, 3),
        }


def fraction(samples: Samples) -> float:
    """The median of the rounds' own fractions, so that what disturbs a round disturbs both."""
    return statistics.median(
        floor / took for floor, took in zip(samples.floor, samples.transfer, strict=True)
    )


def _gbps(nbytes: int, seconds: Sequence[float]) -> float:
    return round(nbytes / statistics.median(seconds) / 1e9, 2)


# -- all of them


def run(device: str, geometries: Sequence[str], total_bytes: int, rounds: int) -> dict[str, Any]:
    """Measures each model with and without verification, each with a server of its own."""
    for name in geometries:
        if name not in GEOMETRIES:
            raise SettingsError(f'--geometries "{name}": expected some of {", ".join(GEOMETRIES)}')
        if total_bytes < GEOMETRIES[name].block_bytes:
            raise SettingsError(
                f"--total-bytes is less than a block of {name}", "move at least one block"
            )
    check_device(device)
    return measure(Gpu(device), list(dict.fromkeys(geometries)), total_bytes, rounds)


def measure(gpu: Gpu, geometries: Sequence[str], total_bytes: int, rounds: int) -> dict[str, Any]:
    """As `run`, on a GPU that is there."""
    # half of it for the KV, half for the floor; and what a worker needs
    needed_bytes = 4 * total_bytes + GIB
    if needed_bytes > gpu.free_bytes:
        problem = f"the GPU has {format_size(gpu.free_bytes)} free, this takes {format_size(needed_bytes)}"
        raise SettingsError(problem, "use a smaller --total-bytes")
    floor, report = PlainCopy(gpu, total_bytes), Report()
    for name in geometries:
        report.measure(name, gpu, floor, total_bytes, rounds)
    return {
        "device": gpu.device,
        "gpu": gpu.name,
        "total_bytes": total_bytes,
        "rounds": rounds,
        "floor_gbps": round(statistics.median(report.floors_gbps), 2),
        "rows": report.rows,
        "latency": report.latency,
        "own_copies": report.own_copies,
        "verification": verification_costs(report.rows),
        "warm_up": report.warm_up,
        "targets": targets(geometries),
    }


@dataclass
class Report:
    """The result's lists, as they grow."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    latency: list[dict[str, Any]] = field(default_factory=list)
    own_copies: list[dict[str, Any]] = field(default_factory=list)
    warm_up: list[dict[str, Any]] = field(default_factory=list)
    floors_gbps: list[float] = field(default_factory=list)  # of one direction, each round's

    def measure(self, name: str, gpu: Gpu, floor: PlainCopy, total_bytes: int, rounds: int) -> None:
        """One model, without verification and with it. Its KV is gone at the end."""
        kv = KV(gpu, GEOMETRIES[name], total_bytes // GEOMETRIES[name].block_bytes)
        for verify in (False, True):
            say(f"{name}, {'verified' if verify else 'not verified'} ...")
            bench = Bench(name, kv, floor, verify)
            self._add(bench, bench.measure(rounds))

    def _add(self, bench: Bench, measured: Measured) -> None:
        self.rows += bench.rows(measured)
        self.latency.append(bench.latency(measured))
        case = {"geometry": bench.name, "verify": bench.verify}
        self.own_copies += [case | row for row in measured.own_copies]
        self.warm_up.append(case | {"registered": bench.registered})
        for way in ONE_WAY:
            self.floors_gbps += [
                bench.nbytes / seconds / 1e9 for seconds in measured.directions[way].floor
            ]


def verification_costs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What verification takes of the speed without it; below zero it is noise."""
    fractions = {
        (row["geometry"], row["direction"], row["verify"]): row["fraction_of_floor"] for row in rows
    }
    plain = {
        (name, way): max(part, _LEAST_FRACTION)
        for (name, way, verify), part in fractions.items()
        if not verify
    }
    return [
        {"geometry": name, "direction": way, "cost": round(1 - verified / plain[name, way], 3)}
        for (name, way, verify), verified in fractions.items()
        if verify
    ]


def targets(geometries: Sequence[str]) -> dict[str, Any]:
    """At least these fractions of the floor, by direction, verified; and what verification may
    cost."""
    one_way = {name: GEOMETRIES[name].target for name in geometries}
    return {
        "store": one_way,
        "load": one_way,
        "both": dict.fromkeys(geometries, BOTH_TARGET),
        "cost": VERIFICATION_TARGET,
    }
