"""Triton kernels that move blocks between an engine's GPU memory and staging memory beside it,
checksums included.

    engine memory     [unit 0 of block 7] … [unit 1 of block 7] … [unit 0 of block 3] …      where the engine has them
    staging memory    [ unit 0 | unit 1 | … of block 7 ][ unit 0 | unit 1 | … of block 3 ]   one block after the other

A block's runs (`kvkeep.kv.runs`) are cut into units of one length, so that a kernel finds the place
of any byte by one division. The checksum is that of `kvkeep.kv.checksum`, of the very words that
are moved: a program handles some rows of 4,096 bytes and adds their terms to the block's sum, in
whatever order; the definition's last step is left to the host (`checksums`). Sums of 64 bits wrap
around, which is what the definition asks for. Needs torch and triton."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv import checksum as definition
from kvkeep.kv.runs import MAX_RUNS, BlockRuns

_LANES = tl.constexpr(definition.ROW // 8)
_GOLDEN = tl.constexpr(definition.GOLDEN)
_TILE_ROWS = 8  # 32 KiB a program
_GRID_LIMIT = 65_535  # of a grid's second dim
_MOVED_WORDS = 1024  # a program


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_up(word, keys, sums, tile_rows: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums[block] += the sum of mix64(row_j + (j+1) * GOLDEN) over the tile's rows of words."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    key = tl.load(keys + tl.arange(0, _LANES))[None, :]
    a = (word + key) & 0xFFFFFFFF
    b = ((word >> 32) + (key >> 32)) & 0xFFFFFFFF
    value = tl.sum(a * b + a + b, axis=1).to(tl.uint64, bitcast=True)
    term = _mix64(value + (row + 1).to(tl.uint64) * _GOLDEN)
    total = tl.sum(tl.where(row < rows, term, 0).to(tl.int64, bitcast=True), axis=0)
    tl.atomic_add(sums + tl.program_id(1), total, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _addresses(at, block_id, base, stride, inside, unit: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where elements number `at` of a block are, each of `size` bytes; `unit` in elements."""
    number = at // unit
    start = tl.load(base + number, mask=inside, other=0)
    step = tl.load(stride + number, mask=inside, other=0)
    return start + block_id * step + (at - number * unit).to(tl.int64) * size


@triton.jit(do_not_specialize=["ids", "sums"])  # type: ignore[untyped-decorator, unused-ignore]
def _gather(  # type: ignore[no-untyped-def]
    ids,
    base,
    stride,
    staging,
    keys,
    sums,
    nbytes: tl.constexpr,
    unit: tl.constexpr,
    by_words: tl.constexpr,
    verify: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """staging[i] = block ids[i], filled up with zeros to whole words, and its sum. Grid: (tiles,
    blocks)."""
    words: tl.constexpr = (nbytes + 7) // 8
    rows: tl.constexpr = (words + _LANES - 1) // _LANES
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    at = row[:, None] * _LANES + tl.arange(0, _LANES)[None, :]
    block_id = tl.load(ids + tl.program_id(1))
    inside = at < words
    if by_words:
        place = _addresses(at, block_id, base, stride, inside, unit // 8, 8)
        word = tl.load(place.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
    else:
        word = tl.zeros([tile_rows, _LANES], dtype=tl.int64)
        for byte in tl.static_range(8):
            here = (at * 8 + byte) < nbytes
            place = _addresses(at * 8 + byte, block_id, base, stride, here, unit, 1)
            value = tl.load(place.to(tl.pointer_type(tl.uint8)), mask=here, other=0)
            word = word | (value.to(tl.int64) << (8 * byte))
    tl.store(staging + tl.program_id(1).to(tl.int64) * words + at, word, mask=inside)
    if verify:
        _add_up(word, keys, sums, tile_rows, rows)


@triton.jit(do_not_specialize=["ids", "sums"])  # type: ignore[untyped-decorator, unused-ignore]
def _scatter(  # type: ignore[no-untyped-def]
    ids,
    base,
    stride,
    staging,
    keys,
    sums,
    nbytes: tl.constexpr,
    unit: tl.constexpr,
    by_words: tl.constexpr,
    verify: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Block ids[i] = staging[i], and its sum. Grid: (tiles, blocks)."""
    words: tl.constexpr = (nbytes + 7) // 8
    rows: tl.constexpr = (words + _LANES - 1) // _LANES
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    at = row[:, None] * _LANES + tl.arange(0, _LANES)[None, :]
    block_id = tl.load(ids + tl.program_id(1))
    inside = at < words
    word = tl.load(staging + tl.program_id(1).to(tl.int64) * words + at, mask=inside, other=0)
    if by_words:
        place = _addresses(at, block_id, base, stride, inside, unit // 8, 8)
        tl.store(place.to(tl.pointer_type(tl.int64)), word, mask=inside)
    else:
        moved = tl.zeros([tile_rows, _LANES], dtype=tl.int64)
        for byte in tl.static_range(8):
            here = (at * 8 + byte) < nbytes
            value = tl.where(here, (word >> (8 * byte)) & 0xFF, 0)
            place = _addresses(at * 8 + byte, block_id, base, stride, here, unit, 1)
            tl.store(place.to(tl.pointer_type(tl.uint8)), value.to(tl.uint8), mask=here)
            moved = moved | (value << (8 * byte))
        word = moved  # what filled up the last word in staging memory is no part of the block
    if verify:
        _add_up(word, keys, sums, tile_rows, rows)


@triton.jit(do_not_specialize=["target", "source", "count"])  # type: ignore[untyped-decorator, unused-ignore]
def _move(target, source, count, at_a_time: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * at_a_time + tl.arange(0, at_a_time)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def move(target: torch.Tensor, source: torch.Tensor) -> Any:
    """A few words, on the current stream; either may be host memory that the bus can reach. A copy
    would take one of the GPU's copy engines, and what is under way there in the same direction
    pauses for 75 µs, however small it is."""
    count = len(source)
    return _move[(Mover.programs(count),)](
        target, source, count, at_a_time=_MOVED_WORDS, num_warps=4
    )


class Mover:
    """`move` as the driver knows it."""

    def __init__(self, device: torch.device) -> None:
        words = torch.zeros(2, dtype=torch.int64, device=device)
        made = move(words[:1], words[1:])
        self.function: int = made.function
        self.threads: int = 32 * made.metadata.num_warps
        self.shared_bytes: int = made.metadata.shared

    @staticmethod
    def programs(words: int) -> int:
        return -(-words // _MOVED_WORDS)


@functools.cache
def _keys_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(definition.KEYS.view(np.int64).copy()).to(device)


class Made(NamedTuple):
    """A kernel as the driver knows it, and those of its arguments that never change. It fits every
    launch: staging memory is always aligned alike, and nothing else depends on the arguments."""

    function: int
    threads: int
    shared_bytes: int
    tiles: int
    base: int
    stride: int
    keys: int


@dataclass(frozen=True, eq=False)
class Units:
    """A block's runs as units of one length, in GPU memory: unit u of block b starts at base[u] + b
    * stride[u]."""

    nbytes: int  # of a block
    unit: int
    base: torch.Tensor
    stride: torch.Tensor
    by_words: bool  # whether each word of 8 bytes lies together, aligned
    keys: torch.Tensor
    # By name and whether the kernel verifies.
    _compiled: dict[tuple[str, bool], Any] = field(default_factory=dict)
    _made: dict[tuple[str, bool], Made] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: BlockRuns, device: torch.device) -> Units:
        """RequestError if that takes more units than there is sense in."""
        unit = math.gcd(*runs.length.tolist())
        counts = runs.length // unit
        if counts.sum() > MAX_RUNS:
            problem = (
                f"a block's {len(runs.length)} pieces have lengths with no greater common measure "
                f"than {unit} bytes"
            )
            raise RequestError(
                "bad_layer", problem, field="layers", hint="serve this engine without kvkeep"
            )
        within = np.concatenate(
            [np.arange(count, dtype=np.uint64) * np.uint64(unit) for count in counts.tolist()]
        )
        base = (np.repeat(runs.base, counts) + within).view(np.int64)
        stride = np.repeat(runs.stride, counts)
        by_words = unit % 8 == 0 and not (base % 8).any() and not (stride % 8).any()
        return cls(
            runs.nbytes,
            unit,
            torch.from_numpy(base.copy()).to(device),
            torch.from_numpy(stride.copy()).to(device),
            by_words,
            _keys_on(device),
        )

    @property
    def pitch(self) -> int:
        """From one block to the next in staging memory, in bytes."""
        return -(-self.nbytes // 8) * 8

    def gather(self, ids: torch.Tensor, staging: torch.Tensor, sums: torch.Tensor | None) -> None:
        """Engine blocks `ids` to the beginning of staging memory, on the current stream, which is
        not waited for. What `checksums` makes checksums of is added to `sums`, which were 0."""
        self._launch("gather", ids, staging, sums)

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor, sums: torch.Tensor | None) -> None:
        """The other way round."""
        self._launch("scatter", ids, staging, sums)

    def checksums(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The last step of the definition."""
        return definition.mix64(sums + np.uint64(self.nbytes))

    def made(self, name: str, *, verify: bool) -> Made:
        """What Triton made of a kernel when it was first launched, for who launches it without
        Triton."""
        made = self._made.get((name, verify))
        if made is None:
            compiled = self._compiled[name, verify]
            made = self._made[name, verify] = Made(
                compiled.function,
                32 * compiled.metadata.num_warps,
                compiled.metadata.shared,
                self._tiles,
                self.base.data_ptr(),
                self.stride.data_ptr(),
                self.keys.data_ptr(),
            )
        return made

    def _launch(
        self, name: str, ids: torch.Tensor, staging: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        assert len(ids) <= _GRID_LIMIT
        kernel = _gather if name == "gather" else _scatter
        self._compiled[name, sums is not None] = kernel[(self._tiles, len(ids))](
            ids,
            self.base,
            self.stride,
            staging,
            self.keys,
            ids if sums is None else sums,
            nbytes=self.nbytes,
            unit=self.unit,
            by_words=self.by_words,
            verify=sums is not None,
            tile_rows=_TILE_ROWS,
            num_warps=8,
        )

    @functools.cached_property
    def _tiles(self) -> int:
        return -(-self.nbytes // (definition.ROW * _TILE_ROWS))
