"""What a worker is asked to do: blocks to store, blocks to load, and what came of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.keys import KEY_BYTES

NO_BLOCK = -1  # in a table of block ids: the engine has, or wants, no block here


def _ids(block_ids: Any) -> NDArray[np.int64]:
    """Block ids as engines have them (a list, an array, a CPU tensor; with several groups a row for
    each) as an array. RequestError, in the thread that makes the request, for anything else."""
    array = np.asarray(block_ids)
    if array.ndim not in (1, 2) or (array.dtype.kind not in "iu" and array.size):
        raise RequestError(
            "bad_request",
            f"block_ids must be integers, not {array.dtype} of shape {array.shape}",
            field="block_ids",
        )
    return array.astype(np.int64, copy=False)


@dataclass(frozen=True)
class StoreRequest:
    """Blocks to store: `block_ids[i]` of the engine holds the block of the i-th key, or
    `block_ids[g, i]` group g of it, where an engine has several (NO_BLOCK: the engine lacks it).

    parent     the key before the first one; b"" if the first one begins the prompt
    priority   0 to 100, 50 is normal; blocks of higher priority stay longer
    ttl_ms     after that time the blocks are the first to be evicted; 0 means no limit
    trace      the span of the store, for workers and the server; "" if there is none
    """

    tenant: str
    parent: bytes
    keys: bytes
    block_ids: NDArray[np.int64]
    priority: int = 50
    ttl_ms: int = 0
    trace: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_ids", _ids(self.block_ids))
        if len(self.keys) != self.blocks * KEY_BYTES:
            raise RequestError(
                "bad_request",
                f"{self.blocks} blocks, but {len(self.keys)} bytes of keys",
                field="keys",
            )
        if len(self.parent) not in (0, KEY_BYTES):
            raise RequestError(
                "bad_keys", f"a parent key has {KEY_BYTES} bytes, or none at a root", field="parent"
            )
        if not 0 <= self.priority <= 100:
            raise RequestError(
                "bad_priority", f"priority {self.priority} is not in 0..100", field="priority"
            )
        if self.ttl_ms < 0:
            raise RequestError(
                "bad_ttl", f"ttl_ms is {self.ttl_ms}; 0 means no limit", field="ttl_ms"
            )

    @property
    def blocks(self) -> int:
        return int(self.block_ids.shape[-1])


@dataclass(frozen=True)
class LoadRequest:
    """Blocks to load: those of `keys[skip:]`, into `block_ids` of the engine, from the slots that a
    lookup gave; group g of them into `block_ids[g]`, where an engine has several (NO_BLOCK: the
    engine does not want it).

    `keys` begins at the root: on the network plane the worker looks up for itself, with a lease of
    its own. There are as many block_ids as the lookup described blocks: `answer.blocks -
    answer.skip`. `trace` is as in StoreRequest."""

    tenant: str
    keys: bytes
    skip: int
    block_ids: NDArray[np.int64]
    epoch: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]  # [blocks, shards]
    trace: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_ids", _ids(self.block_ids))
        if len(self.slots) not in (0, self.blocks):
            raise RequestError(
                "bad_request",
                f"{self.blocks} blocks to load from {len(self.slots)} slots",
                field="block_ids",
                hint="one for each block that the lookup described: answer.blocks - answer.skip",
            )

    @property
    def blocks(self) -> int:
        return int(self.block_ids.shape[-1])

    def outcome(
        self, loaded: NDArray[np.bool_] | None = None, seconds: float | None = None
    ) -> LoadOutcome:
        """The outcome if these of the blocks are in place; None: none of them."""
        missing = slice(None) if loaded is None else ~loaded
        ids = np.atleast_2d(self.block_ids)[:, missing].ravel()
        return LoadOutcome(frozenset(ids[ids != NO_BLOCK].tolist()), seconds)


@dataclass(frozen=True)
class LoadOutcome:
    """What came of one load: on one rank, or joined, on several.

    failed    engine blocks that are not in place and verified: they must be computed
    seconds   how long the load took; None if it did not begin
    """

    failed: frozenset[int] = frozenset()
    seconds: float | None = field(default=None, compare=False)

    def joined(self, other: LoadOutcome) -> LoadOutcome:
        """With another rank's: a block is in place where every rank has its shard."""
        measured = [each.seconds for each in (self, other) if each.seconds is not None]
        return LoadOutcome(self.failed | other.failed, max(measured, default=None))


@dataclass
class Finished:
    """The jobs that have ended since the last poll, on one rank.

    stored      how many blocks each store wrote
    incomplete  stores that left something out: offer those blocks again
    loads       what came of each load
    withdrawn   blocks that the engine took back before they were copied
    times       when each job that is traced began and ended here, in nanoseconds of the epoch
    """

    rank: int = 0
    stored: dict[Hashable, int] = field(default_factory=dict)
    incomplete: list[Hashable] = field(default_factory=list)
    loads: dict[Hashable, LoadOutcome] = field(default_factory=dict)
    withdrawn: int = 0
    times: dict[Hashable, tuple[int, int]] = field(default_factory=dict)

    @property
    def failed_blocks(self) -> set[int]:
        """The engine blocks that these loads did not bring."""
        return {block for outcome in self.loads.values() for block in outcome.failed}

    @property
    def is_nothing(self) -> bool:
        return not (self.stored or self.incomplete or self.loads or self.withdrawn)
