"""Where one KV rank's part of blocks lies: in the engine's memory and in the server's pool."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.connection import Connection
from kvkeep.client.copier import Copier, HostCopier
from kvkeep.client.sources import Piece
from kvkeep.errors import PoolError, RequestError

log = logging.getLogger(__name__)

_BYTES_A_MESSAGE = 8 << 20  # on the network plane: what a server sends in one reply


class RankMemory:
    """A rank's pieces of blocks, each in a shard of its own, and the copier that moves them."""

    def __init__(
        self,
        connection: Connection,
        pieces: Sequence[Piece],
        first_shard: int,
        copier: Copier | None = None,
    ) -> None:
        self.connection = connection
        self.pieces = pieces  # empty while the engine has taken its memory away
        self.copier: Copier = copier or HostCopier([piece.runs for piece in pieces])
        self._first_shard = first_shard

    def relocate(self, pieces: Sequence[Piece]) -> None:
        """The engine's blocks are in this memory from now on, of the same sizes, or in none.

        No copy may be under way.
        """
        self.copier.relocate([piece.runs for piece in pieces])
        self.pieces = pieces

    def table(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block ids with a row for each piece. RequestError if the engine has more or fewer
        pieces."""
        table = np.atleast_2d(block_ids)
        if len(table) != len(self.pieces):
            problem = f"block ids for {len(table)} pieces, but the engine's blocks have {len(self.pieces)}"
            raise RequestError("bad_request", problem, field="block_ids")
        return table

    def shard(self, piece: int) -> int:
        return self._first_shard + piece

    def nbytes(self, piece: int) -> int:
        return self.pieces[piece].runs.nbytes

    def blocks_a_message(self, piece: int) -> int:
        """On the network plane: how many blocks one message carries."""
        welcome = self.connection.welcome
        frame_bytes = min(welcome.limits.frame_bytes, _BYTES_A_MESSAGE) if welcome else 0
        return max(1, min(64, frame_bytes // self.nbytes(piece)))

    @contextlib.contextmanager
    def addresses(
        self, piece: int, slots: NDArray[np.int64], epoch: int, session: int = 0
    ) -> Iterator[NDArray[np.uint64] | None]:
        """The address in this process of the piece's part of each slot, valid inside the `with`
        block.

        None if the pool is gone or never had these slots.
        """
        with self.connection.pool(epoch, session) as pool:
            if pool is None:
                self.connection.counters.fail("stale_epoch")
                yield None
                return
            segments, layout = pool
            offsets = slots + layout.shard_offsets[self.shard(piece)]
            try:
                addresses = segments.addresses(offsets, self.nbytes(piece))
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
