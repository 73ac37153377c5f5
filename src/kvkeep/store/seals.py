"""A seal: 64 bits over everything that defines a block, by which the next server verifies it.

    seal = sum of half_j * factor_j  mod 2^64        half_j: the 32-bit halves of these words, in this order

    key (2), parent's key (2, zeros at a root), slot, layout, tenant, expiry and priority, checksum
    of each shard

Factors are fixed odd numbers of 64 bits. A change of one half is always found: an odd number times
less than 2^32 is never 0. Changes of several halves cancel out once in 2^33 for the worst pattern of
damage, and once in 2^64 for random damage. Like a block's checksum, a seal finds accidents, not
forgeries: a process that can write into these columns owns the server. A checksum of 0 adds nothing,
so a seal is computed with the new block, and each arriving shard is added to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import GOLDEN, mix64
from kvkeep.store.layouts import Layout
from kvkeep.store.records import MOST_SHARDS
from kvkeep.store.table import NO_ROW, WORDS_A_KEY, BlockTable

# Where these words begin.
_PARENT = WORDS_A_KEY
_SLOT = 2 * WORDS_A_KEY
_OWNERS = _SLOT + 1
_CHECKS = _OWNERS + 3
_PRIORITY_SHIFT = 56  # above any time in milliseconds
_LOW, _ALL = (1 << 32) - 1, (1 << 64) - 1

_FACTORS: NDArray[np.uint64] = mix64(
    np.arange(1, 2 * (_CHECKS + MOST_SHARDS) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
) | np.uint64(1)
_OWNERS_FACTORS: list[int] = _FACTORS[2 * _OWNERS : 2 * _CHECKS].tolist()


def fold(words: NDArray[np.uint64], first: int = 0) -> NDArray[np.uint64]:
    """What the words of each row add to its seal; `first` is the place of the first word."""
    halves = words.view(np.uint32).astype(np.uint64)
    total: NDArray[np.uint64] = halves @ _FACTORS[2 * first : 2 * first + halves.shape[1]]
    return total


def seals_of_chain(
    keys: NDArray[np.uint64],
    parent_key: bytes,
    slots: NDArray[np.int64],
    layout: Layout,
    tenant: int,
    hints: tuple[int, int],
) -> NDArray[np.uint64]:
    """The seals of new blocks, each the child of the one before, without any checksum. `hints`:
    priority, expiry."""
    words = np.empty((len(keys), _OWNERS), dtype=np.uint64)
    words[:, :_PARENT] = keys
    words[1:, _PARENT:_SLOT] = keys[:-1]
    words[0, _PARENT:_SLOT] = np.frombuffer(parent_key, np.uint64) if parent_key else 0
    words[:, _SLOT] = slots
    owners, at = 0, iter(_OWNERS_FACTORS)
    for word in (layout.word, tenant, hints[1] ^ hints[0] << _PRIORITY_SHIFT):
        owners += (word & _LOW) * next(at) + (word >> 32) * next(at)
    return fold(words) + np.uint64(owners & _ALL)


def fold_checks(checksums: NDArray[np.uint64], shard: int) -> NDArray[np.uint64]:
    """What a shard's checksums add to the seals of their blocks."""
    return fold(np.ascontiguousarray(checksums).reshape(-1, 1), _CHECKS + shard)


def seals(
    table: BlockTable,
    rows: NDArray[np.int64],
    layout: Layout,
    tenants: NDArray[np.uint64] | np.uint64,
) -> NDArray[np.uint64]:
    """The seals that these blocks of one layout must have, computed from their rows. `tenants`: the
    words of their tenants."""
    many, keys = table.many, table.keys.words
    parents = many.parent[rows]
    words = np.empty((len(rows), _CHECKS), dtype=np.uint64)
    words[:, :_PARENT] = keys[rows]
    words[:, _PARENT:_SLOT] = keys[parents]
    words[parents == NO_ROW, _PARENT:_SLOT] = 0
    words[:, _SLOT] = many.slot[rows]
    words[:, _OWNERS] = layout.word
    words[:, _OWNERS + 1] = tenants
    words[:, _OWNERS + 2] = (
        many.expires_ms[rows] ^ many.priority[rows].astype(np.int64) << _PRIORITY_SHIFT
    )
    return fold(words) + fold(layout.checks[many.check[rows]], _CHECKS)
