"""The C kernel: copies and checks bytes, hashes chains of keys and walks chains of blocks. Where it
was not built, `available` is false and callers use numpy or Python.

KVKEEP_NATIVE=0 disables it, to test those. The library is loaded with ctypes, so a call releases the
GIL, and two threads copy at the same time."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import PoolError

_log = logging.getLogger(__name__)
_int64, _pointer = ctypes.c_int64, ctypes.c_void_p

# Variants of the kernel. The last one that the processor supports is used.
INSTRUCTION_SETS = ("portable", "avx2", "avx512f", "neon")


def _load() -> ctypes.CDLL | None:
    file = Path(__file__).with_name("_native.so")
    if os.environ.get("KVKEEP_NATIVE") == "0" or not file.exists():
        return None
    try:
        library = ctypes.CDLL(str(file))
        library.kvkeep_use.argtypes, library.kvkeep_use.restype = [ctypes.c_int], ctypes.c_int
        library.kvkeep_move.argtypes = [
            _int64,
            *[_pointer] * 2,
            _int64,
            *[_pointer] * 4,
            ctypes.c_int,
        ]
        library.kvkeep_move.restype = ctypes.c_int
        library.kvkeep_checksum.argtypes = [_int64, _pointer, _int64, _pointer]
        library.kvkeep_checksum.restype = ctypes.c_int
        library.kvkeep_peek.restype = _int64  # a kernel without it does not tell of faults
        library.kvkeep_chain.argtypes = [ctypes.c_char_p, ctypes.c_char_p, _int64, _int64, _pointer]
        library.kvkeep_chain.restype = None
        library.kvkeep_drive.argtypes = [_pointer, _pointer, _int64, _pointer]
        library.kvkeep_halt.argtypes, library.kvkeep_halt.restype = [_pointer], _int64
        library.kvkeep_drive.restype = ctypes.c_int
    except (OSError, AttributeError) as error:  # for another system, or of another version
        _log.warning(
            "the C kernel was built but cannot be loaded, copies run at numpy's speed: %s", error
        )
        return None
    return library


_library = _load()
available: bool = _library is not None
# For short calls: a thread that releases the GIL may have to wait for it afterwards.
_quick = ctypes.PyDLL(_library._name, handle=_library._handle) if _library else None
if _quick:
    _quick.kvkeep_peek.argtypes, _quick.kvkeep_peek.restype = [ctypes.c_uint64], _int64
    _quick.kvkeep_climb.argtypes = [_pointer, *[_int64] * 3, _pointer]
    _quick.kvkeep_hold.argtypes = [*[_pointer] * 2, _int64, _pointer, _int64]
    _quick.kvkeep_let_go.argtypes = _quick.kvkeep_hold.argtypes
    _quick.kvkeep_not_held.argtypes = [*[_pointer] * 2, *[_int64] * 2]
    for _function in (
        _quick.kvkeep_climb,
        _quick.kvkeep_hold,
        _quick.kvkeep_let_go,
        _quick.kvkeep_not_held,
    ):
        _function.restype = _int64


def use(instruction_set: str) -> str:
    """Selects the kernel for this instruction set, or the best one below it, and returns its name.
    Not while copies run."""
    assert _library is not None
    return INSTRUCTION_SETS[_library.kvkeep_use(INSTRUCTION_SETS.index(instruction_set))]


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """A writable view of raw memory. The caller keeps the memory alive."""
    return np.frombuffer(
        memoryview((ctypes.c_uint8 * nbytes).from_address(address)), dtype=np.uint8
    )


def move(
    block_ids: NDArray[np.int64],
    slots: NDArray[np.uint64],
    base: NDArray[np.uint64],
    stride: NDArray[np.int64],
    length: NDArray[np.int64],
    *,
    sums: NDArray[np.uint64] | None,
    to_runs: bool,
) -> None:
    """Copies blocks into slots, or back with `to_runs`, and fills `sums` with their checksums.

    copy.py has checked that every array is C-contiguous with exactly this dtype and every address
    valid. PoolError if the memory of an address is gone; some blocks may have been copied."""
    assert _library is not None
    failed = _library.kvkeep_move(
        len(block_ids),
        block_ids.ctypes.data,
        slots.ctypes.data,
        len(base),
        base.ctypes.data,
        stride.ctypes.data,
        length.ctypes.data,
        None if sums is None else sums.ctypes.data,
        int(to_runs),
    )
    _check(failed)


def _check(failed: int) -> None:
    if failed:
        raise PoolError(
            "a segment of the pool was cut off while it was in use",
            "see who has truncated its files",
        )


def checksum(address: int, nbytes: int) -> int:
    """The checksum of `nbytes` > 0 bytes, without the cost of making arrays."""
    assert _library is not None
    area, value = ctypes.c_uint64(address), ctypes.c_uint64()
    _check(_library.kvkeep_checksum(1, ctypes.byref(area), nbytes, ctypes.byref(value)))
    return value.value


def checksums(addresses: NDArray[np.uint64], nbytes: int) -> NDArray[np.uint64]:
    """The checksums of `nbytes` > 0 bytes at each address, which must be valid. PoolError as in
    `move`."""
    assert _library is not None
    sums = np.empty(len(addresses), dtype=np.uint64)
    _check(
        _library.kvkeep_checksum(len(addresses), addresses.ctypes.data, nbytes, sums.ctypes.data)
    )
    return sums


def peek(address: int) -> int:
    """The 32-bit word at that address; -1 if its memory is gone. Keeps the GIL."""
    assert _quick is not None
    word: int = _quick.kvkeep_peek(address)
    return word


def chain(parent: bytes, blocks: bytes, width: int, key_bytes: int) -> bytes:
    """The joined keys of blocks of `width` bytes each; the first follows the key `parent`
    (keys.py)."""
    assert _library is not None
    count = len(blocks) // width
    keys = bytearray(count * key_bytes)
    _library.kvkeep_chain(parent, blocks, width, count, _at(keys))
    return bytes(keys)


class ChainWalker:
    """Walks up chains of blocks, over the columns of a table. Keeps their addresses: asking numpy
    costs more than a short walk."""

    def __init__(self, parents: NDArray[np.int32], held: NDArray[np.int32]) -> None:
        assert _quick is not None
        self._library = _quick
        self._columns = parents, held  # which must outlive their addresses
        self._parents, self._held = parents.ctypes.data, held.ctypes.data
        self._count = len(parents)
        self._use_rows(64)

    def climb(self, row: int, count: int) -> NDArray[np.int64]:
        """The last `count` rows, or fewer, of the chain that ends in `row`."""
        if count > len(self._rows):
            self._use_rows(count)
        found: int = self._library.kvkeep_climb(
            self._parents, self._count, row, count, self._rows_at
        )
        return self._rows[count - found : count].copy()

    def hold(self, rows: NDArray[np.int64]) -> int:
        """Counts one more lease or write on each row. Returns how many rows have become held,
        ancestors included."""
        return self._change(self._library.kvkeep_hold, rows)

    def let_go(self, rows: NDArray[np.int64]) -> int:
        """Counts one lease or write less on each row. Returns how many rows are no longer held."""
        return self._change(self._library.kvkeep_let_go, rows)

    def not_held(self, row: int) -> int:
        """How many rows a lease that ends in `row` would newly hold."""
        found: int = self._library.kvkeep_not_held(self._parents, self._held, self._count, row)
        return found

    def _change(self, function: Callable[..., int], rows: NDArray[np.int64]) -> int:
        if len(rows) > len(self._rows):
            self._use_rows(len(rows))
        self._rows[: len(rows)] = rows
        return function(self._parents, self._held, self._count, self._rows_at, len(rows))

    def _use_rows(self, count: int) -> None:
        self._rows = np.empty(count, dtype=np.int64)
        self._rows_at = self._rows.ctypes.data


def _at(buffer: Any) -> Any:
    """The address of a buffer, found faster than with numpy or a ctypes array."""
    return ctypes.byref(ctypes.c_char.from_buffer(buffer))


def drive(entries: ctypes.Array[ctypes.c_void_p], commands: int, count: int) -> tuple[int, int]:
    """Gives commands to a GPU's driver (`kvkeep.gpu.driver`). What it answered, 0 if all is well,
    and to which."""
    assert _library is not None
    failed = ctypes.c_int64()
    return _library.kvkeep_drive(entries, commands, count, ctypes.byref(failed)), failed.value


def halt(gate: int) -> int:
    """Closes the gate at that address: how many bays have passed it, when all of these are read."""
    assert _library is not None
    passed: int = _library.kvkeep_halt(gate)
    return passed
