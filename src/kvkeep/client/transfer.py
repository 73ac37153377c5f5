"""Stores and loads that block, each up to a deadline, on either data plane: for a caller that
waits. None raises for a server's fault."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.loads import Load
from kvkeep.client.rank_memory import RankMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.stores import SourceBlocks, Store, source_blocks


class Transfer(RankMemory):
    """Moves one KV rank's part of blocks."""

    def store(self, request: StoreRequest, sources: SourceBlocks | None = None) -> Store:
        """Stores what the server lacks; failures are counted, not raised. `written` and
        `is_complete` of the result say what came of it."""
        store = Store(self, request, sources or source_blocks(self, [request])[0])
        store.run()
        return store

    def load(self, request: LoadRequest) -> NDArray[np.bool_]:
        """True where the block is in place and verified; the others must be computed."""
        return Load(self, [request]).finish()[0]
