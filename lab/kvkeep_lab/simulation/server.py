"""A whole server in this process, without sockets, threads or shared memory: store, service, a pool
of plain bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvkeep.server.service import Service
from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.store.table import PlainColumns
from kvkeep.wire.messages import PoolPlace, WireLimits
from kvkeep.wire.pool_files import Watch
from kvkeep_lab.simulation.store_integrity import check_integrity


class PlainMemory:
    """A pool that is one array."""

    def __init__(self, nbytes: int) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros(nbytes, dtype=np.uint8)

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        assert offset >= 0 and offset + nbytes <= len(self.bytes)
        return self.bytes[offset : offset + nbytes]


class SimulatedServer:
    """A server that clients on a SimulatedNetwork can talk to. They all use the network data
    plane."""

    def __init__(
        self,
        pool_bytes: int,
        slab_bytes: int,
        *,
        epoch: int = 1,
        limits: Limits | None = None,
        frame_bytes: int = 1 << 20,
        network_timeout_ms: int = 30_000,
        before: SimulatedServer | None = None,
        old_sessions: Callable[[], int] = lambda: 0,
        now_ms: int = 0,
        make_watch: Callable[[int], Watch | None] = lambda number: None,
    ) -> None:
        """`before` is a server that was killed: its memory is taken over and what it had is
        adopted. `old_sessions` says how many of its clients may still touch that memory."""
        limits = limits or Limits()
        slabs = pool_bytes // slab_bytes
        self.adoption = Adoption(contradiction=True)  # unless there is something to adopt
        if before is not None:
            self.memory: PlainMemory = before.memory
            self.columns: PlainColumns = before.columns
            self.store = Store(pool_bytes, slab_bytes, limits, columns=self.columns)
            self.adoption = adopt(self.store, slabs, old_sessions() > 0, now_ms)
        if self.adoption.contradiction:
            self.memory, self.columns = PlainMemory(pool_bytes), PlainColumns()
            self.store = Store(pool_bytes, slab_bytes, limits, columns=self.columns)
            self.store.add_slabs(0, slabs)
        self.service = Service(
            self.store,
            self.memory,
            PoolPlace("", "", slab_bytes, pool_bytes),
            WireLimits(
                frame_bytes,
                limits.blocks_per_request,
                limits.leases_per_session,
                limits.writing_blocks_per_session,
            ),
            epoch,
            make_watch,
            network_timeout_ms,
            old_sessions=old_sessions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the store contradicts itself."""
        check_integrity(self.store)
