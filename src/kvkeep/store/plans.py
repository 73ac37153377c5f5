"""The limits of requests, and the plans that the store answers with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Hints to eviction. Blocks of a higher priority stay longer.
LOWEST_PRIORITY, NORMAL_PRIORITY, HIGHEST_PRIORITY = 0, 50, 100
LONGEST_TTL_MS = 10 * 365 * 24 * 3600 * 1000


@dataclass(frozen=True)
class Limits:
    """What one session may hold at a time, and one request may name."""

    blocks_per_request: int = 65536
    leases_per_session: int = 4096
    writing_blocks_per_session: int = 65536
    sessions: int = 256
    layouts: int = 64
    layouts_per_session: int = 16
    tenants: int = 100_000
    shards: int = 1024


@dataclass(frozen=True)
class Hit:
    """The longest READY prefix. The blocks after `skip` are leased and described.

    blocks      number of leading READY blocks, of all keys asked for
    slots       int64[blocks - skip]: byte offset of each block's slot in the pool
    checksums   uint64[blocks - skip, shards]
    """

    blocks: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]

    @classmethod
    def unleased(cls, blocks: int, shards: int) -> Hit:
        """A hit that does not reach beyond `skip`."""
        return cls(blocks, np.empty(0, np.int64), np.empty((0, shards), np.uint64))


@dataclass(frozen=True)
class StorePlan:
    """Which of the keys to write, and where. Blocks that are stored already are not written again.

    positions   int32[n]: index of each block to write in the request's keys, ascending
    slots       int64[n]: byte offset of each block's slot in the pool
    refused     number of keys without room, or without a stored parent (`orphan`); always the last
    apart       whether a block that is not written lacks some of several shards: each shard alone
                may be stored
    """

    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    refused: int
    orphan: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Stored:
    """What a completed write added: blocks, and bytes of its shards. `last_row` is that of the last
    block."""

    blocks: int
    nbytes: int
    last_row: int


@dataclass(frozen=True)
class TenantUsage:
    """One tenant as operators see it.

    quota_bytes, limit_bytes   in force; None: no quota, no limit
    set_quota_bytes            the tenant's own quota as it was set; more than the one in force if
                               all own quotas exceed the pool, or if the limit is lower
    own_quota, own_limit       whether they are the tenant's own instead of the defaults
    """

    tenant: str
    blocks: int
    usage_bytes: int
    quota_bytes: int | None
    own_quota: bool
    set_quota_bytes: int | None = None
    limit_bytes: int | None = None
    own_limit: bool = False
