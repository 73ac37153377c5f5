"""Where one KV rank's part of blocks lies: in the engine's memory and in the server's pool."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.connection import Connection
from kvkeep.client.copier import Copier, HostCopier
from kvkeep.errors import PoolError, RequestError
from kvkeep.kv import native
from kvkeep.kv.runs import BlockRuns

log = logging.getLogger(__name__)

_BYTES_PER_MESSAGE = 8 << 20  # on the network plane: what a server sends in one reply


@dataclass(frozen=True)
class GroupMemory:
    """Where one group of an engine's layers keeps its part of each block, or one shard of it.
    Engines with one kind of layer have one group.

    may_lack   whether a block is of use without it: attention over a window, or a recurrent state,
               is needed near the end of a prefix only
    """

    runs: BlockRuns
    may_lack: bool = False


def physical_fingerprint(groups: Sequence[GroupMemory]) -> bytes:
    """Equal where blocks can be exchanged, whichever way each group lies in memory."""
    fingerprints = [bytes.fromhex(group.runs.fingerprint) for group in groups]
    return (
        fingerprints[0]
        if len(groups) == 1
        else hashlib.blake2b(b"".join(fingerprints), digest_size=16).digest()
    )


def physical_fingerprint_of_each(groups: Sequence[GroupMemory], shards_per_rank: int) -> bytes:
    """The same for a rank that holds several shards of each group, which must lie alike."""
    each = [physical_fingerprint(groups[at::shards_per_rank]) for at in range(shards_per_rank)]
    if len(set(each)) > 1:
        problem = "the shards of a rank do not lie in memory alike"
        raise RequestError("bad_layer", problem, field="layers")
    return each[0]


def check_sizes(groups: Sequence[GroupMemory], expected: Sequence[int]) -> None:
    """RequestError unless each of these groups has so many bytes a block."""
    given = [group.runs.nbytes for group in groups]
    if given != list(expected):
        have, wanted = (" + ".join(map(str, each)) for each in (given, expected))
        problem = f"the tensors have {have} bytes a block, the block shape says {wanted}"
        hint = "shard_bytes of the BlockShape must be what each KV rank's tensors really hold"
        raise RequestError("bad_shards", problem, field="layers", hint=hint)


@functools.cache
def _note_slow_copies() -> None:
    """Says once in a process that the C kernel is missing."""
    if not native.available:
        log.warning(
            "kvkeep: the C kernel was not built, blocks are copied with numpy, several times"
            " slower. Install a C compiler and reinstall kvkeep."
        )


class RankMemory:
    """A rank's groups, and the copier that moves their blocks. A group has `shards_per_rank`
    neighbours in `groups`, one for each of its shards, and all of them have the group's block ids:

        two groups, shards_per_rank = 2      groups    a.0  a.1  b.0  b.1
        first_shard = 4                      shard       4    6    5    7
    """

    def __init__(
        self,
        connection: Connection,
        groups: Sequence[GroupMemory],
        first_shard: int,
        copier: Copier | None = None,
        shards_per_rank: int = 1,
    ) -> None:
        self.connection = connection
        self.groups = groups  # empty while the engine has taken its memory away
        self.copier: Copier = copier or HostCopier([group.runs for group in groups])
        self.shards_per_rank = shards_per_rank
        engine_groups = len(groups) // shards_per_rank
        self._shards = [
            first_shard + shard * engine_groups + group
            for group in range(engine_groups)
            for shard in range(shards_per_rank)
        ]
        # What an engine may need back soonest is copied first. All shards of a group are stored
        # together.
        together = [
            range(first, first + shards_per_rank)
            for first in range(0, len(groups), shards_per_rank)
        ]
        self.store_order = sorted(together, key=lambda each: not groups[each[0]].may_lack)
        if isinstance(self.copier, HostCopier):
            _note_slow_copies()

    def relocate(self, groups: Sequence[GroupMemory]) -> None:
        """The engine's blocks are in this memory from now on, of the same sizes, or in none.

        No copy may be under way.
        """
        self.copier.relocate([group.runs for group in groups])
        self.groups = groups

    def table(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block ids with a row for each of `groups`. RequestError if the engine has more or fewer
        groups."""
        table, groups = np.atleast_2d(block_ids), len(self.groups) // self.shards_per_rank
        if len(table) != groups:
            problem = f"block ids for {len(table)} groups, but the engine's blocks have {groups}"
            raise RequestError("bad_request", problem, field="block_ids")
        return table if self.shards_per_rank == 1 else table.repeat(self.shards_per_rank, axis=0)

    def shard(self, group: int) -> int:
        return self._shards[group]

    def nbytes(self, group: int) -> int:
        return self.groups[group].runs.nbytes

    def blocks_per_message(self, group: int) -> int:
        """On the network plane: how many blocks one message carries."""
        welcome = self.connection.welcome
        frame_bytes = min(welcome.limits.frame_bytes, _BYTES_PER_MESSAGE) if welcome else 0
        return max(1, min(64, frame_bytes // self.nbytes(group)))

    @contextlib.contextmanager
    def addresses(
        self, group: int, slots: NDArray[np.int64], epoch: int, session: int = 0
    ) -> Iterator[NDArray[np.uint64] | None]:
        """The address in this process of the group's part of each slot, valid inside the `with`
        block.

        None if the pool is gone or never had these slots.
        """
        with self.connection.pool(epoch, session) as pool:
            if pool is None:
                self.connection.counters.fail("stale_epoch")
                yield None
                return
            segments, layout = pool
            offsets = slots + layout.shard_offsets[self.shard(group)]
            try:
                addresses = segments.addresses(offsets, self.nbytes(group))
            except PoolError as error:
                self.connection.counters.fail("pool")
                self.connection.refusal = str(error)
                addresses = None
            yield addresses

    def was_cut_off(self, error: PoolError) -> None:
        """The pool's memory went away during a copy: the load failed, or the store ends.

        Logged once a session.
        """
        self.connection.counters.fail("pool")
        if self.connection.refusal != str(error):
            self.connection.refusal = str(error)
            log.warning(
                "kvkeep: blocks are computed or not stored: %s (%s)", error.message, error.hint
            )
