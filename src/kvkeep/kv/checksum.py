"""The checksum of a block: 64 bits, taken where the bytes were made and compared where they are
used.

Definition. Cut the bytes into rows of 4096, the last one filled up with zeros. A row is 512 lanes
of 8 bytes, a lane is two little-endian 32-bit words, lo and hi. Keys k[0..1023] are fixed 32-bit
numbers: splitmix64 started at SEED gives 512 numbers of 64 bits, and the i-th holds k[2i] in its
low half and k[2i+1] in its high half. Then

    A_i = (lo_i + k[2i])   mod 2^32                      what lane i adds to its row:
    B_i = (hi_i + k[2i+1]) mod 2^32                      (A_i + 1)(B_i + 1) - 1 = A_i B_i + A_i + B_i

    row_j    = sum of its lanes                          mod 2^64
    checksum = mix64(nbytes + sum of mix64(row_j + (j+1) * GOLDEN))     mod 2^64

with mix64 the finalizer of splitmix64, a bijection. All is sums, so lanes and rows can be computed
in any order and in parallel: on a GPU at the speed of its memory, in vector registers here.

What it promises. A change inside one 32-bit word is always seen: with the other word left alone the
lane changes by d * (B + 1), 0 < |d| < 2^32 and 1 <= B + 1 <= 2^32, which is never 0 mod 2^64;
bijections carry that difference through, as long as no other row changed. Bytes that move within a
row meet other keys, and rows that move another multiple of GOLDEN. Two changed words in one row can
cancel out only if the words next to them happen to agree in 32 bits after keying, so for the worst
pattern of damage one case in 2^32 is missed, and for damage of any size to data that does not
conspire one in 2^64. The keys are public: this finds accidents, not forgeries (a tenant cannot
write into another's slot in the first place). See docs/decisions/0003-checksum.md for the
measurements behind the choice."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import PoolError, RequestError
from kvkeep.kv import native

ROW = 4096
GOLDEN = 0x9E3779B97F4A7C15
SEED = 0x6B766B6565700001
_MASK = (1 << 64) - 1

# Stands where a checksum would, for a shard of a block that was never written: an engine may do
# without parts of old blocks. That bytes really have this checksum is as likely as any other
# accident, and then they are a miss.
ABSENT = _MASK

_ROWS_AT_A_TIME = 32  # 128 KiB: the temporaries of a piece stay in the second-level cache


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, element by element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _multiples_of_golden(first: int, count: int) -> NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64) * np.uint64(GOLDEN)


# k[0..1023] of the definition.
KEYS: NDArray[np.uint32] = (
    mix64(np.uint64(SEED) + _multiples_of_golden(1, ROW // 8)).astype("<u8").view("<u4")
)


def checksum(data: bytes | bytearray | memoryview | NDArray[Any]) -> int:
    """The checksum of any C-contiguous buffer."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise RequestError("bad_request", "a checksum needs contiguous bytes", field="data")
    if view.nbytes == 0:
        return 0
    array = np.frombuffer(view, dtype=np.uint8)
    if native.available:
        return native.checksum(array.ctypes.data, array.nbytes)
    return _checksum(array)


def has_checksum(data: NDArray[np.uint8], expected: int) -> bool:
    """Not if the memory behind it is gone: a segment of the pool that somebody has made shorter."""
    try:
        return checksum(data) == expected
    except PoolError:
        return False


def checksum_at(addresses: NDArray[np.uint64], nbytes: int) -> NDArray[np.uint64]:
    """The checksums of `nbytes` bytes at each address. The memory must be readable and stay so."""
    if nbytes < 0:
        raise RequestError(
            "bad_request", f"cannot take the checksum of {nbytes} bytes", field="nbytes"
        )
    addresses = np.ascontiguousarray(addresses, dtype=np.uint64)
    if nbytes == 0:
        return np.zeros(len(addresses), dtype=np.uint64)
    if native.available:
        return native.checksums(addresses, nbytes)
    return np.array(
        [_checksum(native.bytes_at(int(a), nbytes)) for a in addresses], dtype=np.uint64
    )


def checksums_of(views: Sequence[memoryview]) -> NDArray[np.uint64]:
    """The checksums of writable buffers of one size, in one call."""
    nbytes = views[0].nbytes if views else 0
    if not nbytes:
        return np.zeros(len(views), np.uint64)
    at = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]
    return checksum_at(np.array(at, np.uint64), nbytes)


def _checksum(data: NDArray[np.uint8]) -> int:
    """The definition in numpy."""
    whole = data.nbytes // ROW * ROW
    rest = np.zeros(ROW if whole < data.nbytes else 0, dtype=np.uint8)
    rest[: data.nbytes - whole] = data[whole:]
    total = data.nbytes
    for at in range(0, whole, ROW * _ROWS_AT_A_TIME):
        total += _sum_of_rows(data[at : min(at + ROW * _ROWS_AT_A_TIME, whole)], at // ROW)
    total += _sum_of_rows(rest, whole // ROW)
    return int(mix64(np.array([total & _MASK], dtype=np.uint64))[0])


def _sum_of_rows(data: NDArray[np.uint8], first: int) -> int:
    """The sum over some whole rows, the first of which is row number `first`."""
    lanes = (data.view("<u4").reshape(-1, ROW // 4) + KEYS).view("<u8")
    a1, b1 = (lanes & np.uint64(0xFFFFFFFF)) + np.uint64(1), (lanes >> np.uint64(32)) + np.uint64(1)
    rows = np.einsum("ji,ji->j", a1, b1) - np.uint64(ROW // 8)
    return int(mix64(rows + _multiples_of_golden(first + 1, len(rows))).sum(dtype=np.uint64))
