"""A tier below a simulated server, in simulated time: what an engine sees of a disk.

    tiers = SimulatedTiers(server, block_ms=2)
    network.serve(tiers)             # in the service's place: before each request, due blocks come up
    tiers.take_down()                # memory is empty now, and the tier has it all

Blocks come up one after another, in the order in which lookups asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.store import Store
from kvkeep.store.table import READY
from kvkeep.store.tree import split_keys
from kvkeep_lab.simulation.server import SimulatedServer

_SESSION = -1
_Name = tuple[str, bytes]  # tenant and the store's address


class SimulatedTiers:
    """Keeps blocks by name. A tier that is `stalled` has blocks that never come."""

    def __init__(self, server: SimulatedServer, block_ms: int = 1) -> None:
        self.block_ms = block_ms
        self.guess_ms = 0  # how much later than true the server expects the last block
        self.stalled = False
        self.promoted = 0
        self._kept: dict[_Name, tuple[list[bytes], NDArray[np.uint64]]] = {}
        self._due: dict[_Name, tuple[int, int, bytes]] = {}  # when, layout, parent
        self._writes = 0
        self.attach(server)

    def attach(self, server: SimulatedServer) -> None:
        """The tier of this server from now on; what it keeps stays."""
        self._server = server
        self._due.clear()
        server.store.open_session(_SESSION)
        server.service.tiers = self

    def take_down(self) -> int:
        """Keeps all READY blocks and drops them from memory. Returns how many."""
        store, memory = self._server.store, self._server.memory
        table = store.blocks.table
        names = {tenant.number: tenant.name for tenant in store.tenants}
        rows = [row for row in table.live_rows().tolist() if table.state[row] == READY]
        for row in rows:
            layout, slot = store.layouts[table.layout[row]], table.slot[row]
            places = zip(layout.shard_offsets, layout.shard_bytes, strict=True)
            shards = [memory.view(slot + offset, nbytes).tobytes() for offset, nbytes in places]
            checksums = layout.checks[table.check[row]].copy()
            self._kept[names[table.tenant[row]], table.keys[row]] = shards, checksums
        for name in names.values():
            store.drop_blocks(name, [address for tenant, address in self._kept if tenant == name])
        return len(rows)

    # -- the network's server

    def handle(self, frames: Sequence[bytes], now_ms: int) -> list[Any] | None:
        self.promote(now_ms)
        return self._server.service.handle(frames, now_ms)

    def promote(self, now_ms: int) -> None:
        """Brings up what is due by now."""
        due = [name for name, (due_ms, *_) in self._due.items() if due_ms <= now_ms]
        for name in due:
            _, layout, parent = self._due.pop(name)
            self._bring_up(name, layout, parent, now_ms)

    # -- the service's tiers

    def coming(
        self,
        session: int,
        tenant: str,
        layout: int,
        keys: bytes,
        hit_blocks: int,
        patience_ms: int,
        now_ms: int,
        again: bool,
        trace: str = "",
    ) -> tuple[int, int]:
        chain, count = split_keys(keys), 0
        last_ms = max((due_ms for due_ms, *_ in self._due.values()), default=now_ms)
        for at in range(hit_blocks, len(chain)):
            name = tenant, chain[at]
            if name not in self._kept:
                break
            count += 1
            if name not in self._due:
                last_ms += 1 << 40 if self.stalled else self.block_ms
                self._due[name] = last_ms, layout, chain[at - 1] if at else b""
        if not count:
            return 0, 0
        expected_ms = self._due[tenant, chain[hit_blocks + count - 1]][0] - now_ms + self.guess_ms
        return count, self.block_ms * count if self.stalled else max(1, expected_ms)

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        return {}

    def stores(self) -> list[Store]:
        return []

    def stored(self, row: int, blocks: int) -> None:
        pass

    def prefetch(self, session: int, tenant: str, layout: int, keys: bytes, now_ms: int) -> int:
        store = self._server.store
        owner, found = store.tenants.get(tenant), 0
        for address in split_keys(keys):
            row = owner.index.get(address) if owner else -1
            if row < 0 or store.blocks.table.state[row] != READY:
                break
            found += 1
        return self.coming(session, tenant, layout, keys, found, 0, now_ms, again=False)[0]

    def _bring_up(self, name: _Name, layout: int, parent: bytes, now_ms: int) -> None:
        store, (tenant, address) = self._server.store, name
        shards, checksums = self._kept[name]
        assert len(address) == KEY_BYTES
        for shard, content in enumerate(shards):
            self._writes += 1
            write = self._writes
            plan = store.prepare_store(
                _SESSION, write, tenant, layout, shard, parent, address, now_ms
            )
            if not len(plan.slots):
                return  # an engine has stored it, or there is no room
            offset = int(plan.slots[0]) + store.layouts.get(layout).shard_offsets[shard]
            self._server.memory.view(offset, len(content))[:] = np.frombuffer(content, np.uint8)
            store.complete_store(_SESSION, write, checksums[shard : shard + 1], now_ms)
        self.promoted += 1
