"""A store with a hand on it: short names for what engines do, chains written as words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import pytest

from kvkeep.store import operators
from kvkeep.store.plans import Hit, Limits, StorePlan
from kvkeep.store.store import Store
from kvkeep.store.table import STATE_NAMES
from kvkeep_lab.simulation.store_integrity import check_integrity

SLOT = 4096


@dataclass
class Hand:
    """Drives one store. A chain is a word, a block each letter: "abc" and "abd" share the blocks of
    "a" and "ab"."""

    store: Store
    now_ms: int = 1000
    layout: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1_000_000)))

    def keys(self, chain: str, layout: int | None = None) -> bytes:
        number = self.layout if layout is None else layout
        names = (f"{number}{chain[: i + 1]}".encode() for i in range(len(chain)))
        return b"".join(
            name.ljust(16, b".") if len(name) <= 16 else blake2b(name, digest_size=16).digest()
            for name in names
        )

    def key(self, chain: str, layout: int | None = None) -> bytes:
        return self.keys(chain, layout)[-16:]

    def prepare(
        self,
        chain: str,
        tenant: str = "t",
        *,
        after: str = "",
        shard: int | None = 0,
        session: int = 1,
        write: int = 0,
        layout: int | None = None,
        priority: int = 50,
        ttl_ms: int = 0,
        further_shards: tuple[int, ...] = (),
    ) -> tuple[int, StorePlan]:
        number = self.layout if layout is None else layout
        keys, parent = self.keys(after + chain, number)[16 * len(after) :], self.key(after, number)
        write = write or next(self.numbers)
        hints = (self.now_ms, priority, ttl_ms, further_shards)
        return write, self.store.prepare_store(
            session, write, tenant, number, shard, parent, keys, *hints
        )

    def complete(self, write: int, session: int = 1, checksum: int = 7) -> int:
        work = self.store.sessions[session].writes[write]
        checksums = np.full(len(work.rows) * len(work.shards), checksum, np.uint64)
        return self.store.complete_store(session, write, checksums, self.now_ms).blocks

    def put(
        self, chain: str, tenant: str = "t", *, priority: int = 50, ttl_ms: int = 0, layout: int = 0
    ) -> int:
        """Stores all shards of a chain; returns how many of its blocks were refused."""
        number, refused = layout or self.layout, 0
        for shard in range(self.store.layouts[number].shards):
            write, plan = self.prepare(
                chain, tenant, shard=shard, priority=priority, ttl_ms=ttl_ms, layout=number
            )
            refused = plan.refused
            if len(plan.slots):
                self.complete(write)
        return refused

    def lookup(
        self, chain: str, tenant: str = "t", *, skip: int = 0, session: int = 1, layout: int = 0
    ) -> Hit:
        """Looks up and releases at once: a use."""
        lease, hit = self.lease(chain, tenant, skip=skip, session=session, layout=layout)
        self.store.release(session, lease, self.now_ms)
        return hit

    def lease(
        self, chain: str, tenant: str = "t", *, skip: int = 0, session: int = 1, layout: int = 0
    ) -> tuple[int, Hit]:
        lease, number = next(self.numbers), layout or self.layout
        keys = self.keys(chain, number)
        return lease, self.store.lookup(session, lease, tenant, number, keys, skip, self.now_ms)

    def finish(self, chain: str, tenant: str = "t") -> bool:
        return self.store.finish(1, tenant, self.key(chain), self.now_ms)

    def quota(self, tenant: str, slots: int | None) -> None:
        operators.set_quota(
            self.store, tenant, None if slots is None else slots * SLOT, self.now_ms
        )

    def row(self, chain: str, tenant: str = "t", layout: int = 0) -> int:
        owner = self.store.tenants.get(tenant)
        assert owner is not None
        return owner.index.get(self.key(chain, layout or self.layout))

    def chains(self, tenant: str = "t") -> set[str]:
        """What is in the index, as words."""
        owner = self.store.tenants.get(tenant)
        return {key.decode().rstrip(".")[1:] for key, _ in owner.index.items()} if owner else set()

    def usage(self, tenant: str = "t") -> int:
        """In slots of the smallest size."""
        owner = self.store.tenants.get(tenant)
        return owner.usage_bytes // SLOT if owner else 0

    def states(self) -> list[str]:
        table = self.store.blocks.table
        return sorted(STATE_NAMES[table.state[row]] for row in table.live_rows().tolist())


@pytest.fixture
def hand() -> Iterator[Callable[..., Hand]]:
    """Makes Hands on stores of a few slots. Whatever a test did, its stores are sound at the
    end."""
    made: list[Hand] = []

    def make(
        slots: int = 4,
        *,
        slabs: int = 1,
        shard_bytes: tuple[int, ...] = (64,),
        limits: Limits | None = None,
        default_quota: int | None = None,
    ) -> Hand:
        default = None if default_quota is None else default_quota * SLOT
        store = Store(slabs * slots * SLOT, slots * SLOT, limits, default)
        store.add_slabs(0, slabs)
        store.open_session(1)
        made.append(Hand(store))
        made[-1].layout = store.open_layout(1, b"first", shard_bytes).number
        return made[-1]

    yield make
    for each in made:
        check_integrity(each.store)
