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
    """Where one group of an engine's layers keeps its part of each block. Engines with one kind of
    layer have one group.

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
            "kvkeep: the C kernel was not built, blocks are copied with numpy, several times slower. "
            "Install a C compiler and reinstall kvkeep."
        )


class RankMemory:
    """A rank's groups, each in a shard of its own, and the copier that moves their blocks."""

    def __init__(
        self,
        connection: Connection,
        groups: Sequence[GroupMemory],
        first_shard: int,
        copier: Copier | None = None,
    ) -> None:
        self.connection = connection
        self.groups = groups  # empty while the engine has taken its memory away
        self.copier: Copier = copier or HostCopier([group.runs for group in groups])
        self._first_shard = first_shard
        # What an engine may need back soonest is copied first.
        self.store_order = sorted(range(len(groups)), key=lambda group: not groups[group].may_lack)
        if isinstance(self.copier, HostCopier):
            _note_slow_copies()

    def relocate(self, groups: Sequence[GroupMemory]) -> None:
        """The engine's blocks are in this memory from now on, of the same sizes, or in none.

        No copy may be under way.
        """
        self.copier.relocate([group.runs for group in groups])
        self.groups = groups

    def table(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block ids with a row for each group. RequestError if the engine has more or fewer
        groups."""
        table = np.atleast_2d(block_ids)
        if len(table) != len(self.groups):
            problem = f"block ids for {len(table)} groups, but the engine's blocks have {len(self.groups)}"
            raise RequestError("bad_request", problem, field="block_ids")
        return table

    def shard(self, group: int) -> int:
        return self._first_shard + group

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
