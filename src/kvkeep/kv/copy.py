"""Moves blocks between engine memory (`BlockRuns`) and slots (absolute addresses of `runs.nbytes`
bytes each).

Arguments are checked before the first byte moves. The C kernel copies and hashes a block in one pass;
numpy gives the same results, more slowly. Either way a checksum covers the bytes that were written,
not a second look at their source.

If memory of the pool is gone (its file was truncated), the C kernel raises PoolError, and the copied
blocks must not be used. With numpy it is a bus error."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv import native
from kvkeep.kv.checksum import checksum
from kvkeep.kv.runs import BlockRuns


def gather(
    runs: BlockRuns, block_ids: NDArray[np.int64], slots: NDArray[np.uint64], *, verify: bool
) -> NDArray[np.uint64] | None:
    """Copies engine block `block_ids[i]` into slot `slots[i]`. Returns checksums if `verify`.

    Raises RequestError, having copied nothing, if a block id is out of range or the arrays differ in
    length."""
    block_ids, slots = _checked(runs, block_ids, slots)
    sums = np.empty(len(block_ids), dtype=np.uint64) if verify else None
    if native.available:
        native.move(block_ids, slots, runs.base, runs.stride, runs.length, sums=sums, to_runs=False)
        return sums
    block = np.empty(runs.nbytes, dtype=np.uint8)
    for i, (block_id, slot) in enumerate(zip(block_ids.tolist(), slots.tolist(), strict=True)):
        for address, at, nbytes in _pieces(runs, block_id):
            ctypes.memmove(block.ctypes.data + at, address, nbytes)
        if sums is not None:
            sums[i] = checksum(block)
        ctypes.memmove(slot, block.ctypes.data, runs.nbytes)
    return sums


def scatter(
    runs: BlockRuns,
    block_ids: NDArray[np.int64],
    slots: NDArray[np.uint64],
    expected: NDArray[np.uint64] | None,
) -> NDArray[np.bool_]:
    """Copies slot `slots[i]` into engine block `block_ids[i]`. Returns True where the copied bytes
    have checksum `expected[i]`; everywhere without `expected`.

    Where False, the block holds bytes that must not be used: the engine has to compute it. Raises
    RequestError as `gather` does."""
    block_ids, slots = _checked(runs, block_ids, slots)
    if expected is not None and len(expected) != len(block_ids):
        message = f"{len(block_ids)} blocks, but {len(expected)} checksums to compare with"
        raise RequestError("bad_request", message, field="expected")
    sums = np.empty(len(block_ids), dtype=np.uint64) if expected is not None else None
    if native.available:
        native.move(block_ids, slots, runs.base, runs.stride, runs.length, sums=sums, to_runs=True)
    else:
        _scatter_with_numpy(runs, block_ids, slots, sums)
    if sums is None or expected is None:
        return np.ones(len(block_ids), dtype=np.bool_)
    return np.equal(sums, np.asarray(expected, dtype=np.uint64))


def move_rows(
    rows: int, pitch: int, slots: NDArray[np.uint64], nbytes: int, *, to_slots: bool
) -> None:
    """Copies `nbytes` of memory at rows, rows + pitch, … into slots, or back."""
    if native.available and len(slots):
        ids, base = np.arange(len(slots), dtype=np.int64), np.array([rows], dtype=np.uint64)
        stride, length = np.array([pitch], dtype=np.int64), np.array([nbytes], dtype=np.int64)
        slots = np.ascontiguousarray(slots, dtype=np.uint64)
        native.move(ids, slots, base, stride, length, sums=None, to_runs=not to_slots)
        return
    for at, slot in enumerate(slots.tolist()):
        to, source = (slot, rows + at * pitch) if to_slots else (rows + at * pitch, slot)
        ctypes.memmove(to, source, nbytes)


def _scatter_with_numpy(
    runs: BlockRuns,
    block_ids: NDArray[np.int64],
    slots: NDArray[np.uint64],
    sums: NDArray[np.uint64] | None,
) -> None:
    block = np.empty(runs.nbytes, dtype=np.uint8)
    for i, (block_id, slot) in enumerate(zip(block_ids.tolist(), slots.tolist(), strict=True)):
        ctypes.memmove(block.ctypes.data, slot, runs.nbytes)
        if sums is not None:
            sums[i] = checksum(block)
        for address, at, nbytes in _pieces(runs, block_id):
            ctypes.memmove(address, block.ctypes.data + at, nbytes)


def _pieces(runs: BlockRuns, block_id: int) -> list[tuple[int, int, int]]:
    """(address, offset in the slot, nbytes) of each run of a block."""
    addresses = runs.base + (runs.stride * block_id).astype(np.uint64)
    offsets = np.cumsum(runs.length) - runs.length
    return list(zip(addresses.tolist(), offsets.tolist(), runs.length.tolist(), strict=True))


def _checked(
    runs: BlockRuns, block_ids: NDArray[np.int64], slots: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The arrays as the kernel needs them, or RequestError. Floats are refused, not rounded."""
    for field, array in (("block_ids", block_ids), ("slots", slots)):
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            message = (
                f"{field} must be a list of integers, not {array.dtype} of shape {array.shape}"
            )
            raise RequestError("bad_request", message, field=field)
    if len(block_ids) != len(slots):
        raise RequestError(
            "bad_request", f"{len(block_ids)} blocks, but {len(slots)} slots", field="slots"
        )
    wrong = (block_ids < 0) | (block_ids >= runs.num_blocks)
    if wrong.any():
        message = f"block {int(block_ids[wrong][0])} does not exist: the engine has blocks 0 to {runs.num_blocks - 1}"
        raise RequestError("bad_request", message, field="block_ids")
    if (slots <= 0).any():
        raise RequestError("bad_request", "a slot's address cannot be zero or less", field="slots")
    return np.ascontiguousarray(block_ids, dtype=np.int64), np.ascontiguousarray(
        slots, dtype=np.uint64
    )
