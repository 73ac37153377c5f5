"""The checksum of `kvkeep.kv.checksum`, computed on the GPU where the blocks are: the same number, at memory speed.

The definition is all sums, so a tile of rows goes to each program in whatever order, and a second, tiny kernel adds up
the tiles of each block. Sums of 64 bits wrap around, which is what the definition asks for. Needs torch and triton.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from kvkeep.errors import RequestError
from kvkeep.kv import checksum as definition

_LANES = tl.constexpr(definition.ROW // 8)
_GOLDEN = tl.constexpr(definition.GOLDEN)
_TILE_ROWS = 8  # 32 KiB a program
_TILES_AT_A_TIME = 256


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_tile(lanes, keys, tiles, rows, tile_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """tiles[block, tile] = the sum of mix64(row_j + (j+1) * GOLDEN) over the tile's rows. Grid: (tiles, blocks)."""
    tile = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64)
    row = tile * tile_rows + tl.arange(0, tile_rows)
    lane = tl.arange(0, _LANES)
    inside = row < rows
    word = tl.load(lanes + (block * rows + row)[:, None] * _LANES + lane[None, :], mask=inside[:, None], other=0)
    key = tl.load(keys + lane)[None, :]
    a = (word + key) & 0xFFFFFFFF
    b = ((word >> 32) + (key >> 32)) & 0xFFFFFFFF
    value = tl.sum(a * b + a + b, axis=1).to(tl.uint64, bitcast=True)
    term = _mix64(value + (row + 1).to(tl.uint64) * _GOLDEN)
    total = tl.sum(tl.where(inside, term, 0).to(tl.int64, bitcast=True), axis=0)
    tl.store(tiles + block * tl.num_programs(0) + tile, total)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _finish(tiles, sums, count, nbytes, at_a_time: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums[block] = mix64(nbytes + the sum of its tiles). Grid: (blocks,)."""
    block = tl.program_id(0).to(tl.int64)
    total = tl.zeros([at_a_time], dtype=tl.int64)
    for first in range(0, count, at_a_time):
        tile = first + tl.arange(0, at_a_time)
        total += tl.load(tiles + block * count + tile, mask=tile < count, other=0)
    value = tl.sum(total, axis=0) + nbytes
    tl.store(sums + block, _mix64(value.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True))


@functools.cache
def _keys_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(definition.KEYS.view(np.int64).copy()).to(device)


def checksum(blocks: torch.Tensor) -> torch.Tensor:
    """The checksum of each row of a contiguous uint8 tensor [n, nbytes], as the 64 bits of an int64 tensor [n].

    `nbytes` is a multiple of 4096. Runs on the current stream of the tensor's device and does not wait for it; once the
    result is on the host, `.numpy().view(numpy.uint64)` gives the numbers of `kvkeep.kv.checksum`.
    """
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or not blocks.is_contiguous():
        raise RequestError(
            "bad_request", "checksums on the GPU need a contiguous uint8 tensor [n, nbytes]", field="blocks"
        )
    n, nbytes = blocks.shape
    if nbytes == 0 or nbytes % definition.ROW or blocks.data_ptr() % 8:
        message = f"blocks of {nbytes} bytes: on the GPU they must be aligned and a multiple of {definition.ROW}"
        raise RequestError("bad_request", message, field="blocks")
    sums = torch.empty(n, dtype=torch.int64, device=blocks.device)
    if n == 0:
        return sums
    rows = nbytes // definition.ROW
    count = -(-rows // _TILE_ROWS)
    tiles = torch.empty((n, count), dtype=torch.int64, device=blocks.device)
    # The grid's second dim ends at 65,535, so very many blocks go in several launches.
    for first in range(0, n, 65_535):
        part = slice(first, first + 65_535)
        grid = (count, len(sums[part]))
        lanes = blocks[part].view(torch.int64)
        _sum_tile[grid](lanes, _keys_on(blocks.device), tiles[part], rows, tile_rows=_TILE_ROWS, num_warps=8)
    _finish[(n,)](tiles, sums, count, nbytes, at_a_time=_TILES_AT_A_TIME)
    return sums
