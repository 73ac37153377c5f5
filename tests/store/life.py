"""Random lives of a store whose clients write into a pool, cut off at any line of the store's own
code.

What a client may touch is known here independently of the store: slots it was told of and has not
given back. What a slot holds is known too, so a block that is adopted with another's bytes, or a
slot in two hands, is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from types import FrameType
from typing import Any

import numpy as np

from kvkeep.kv.checksum import ABSENT
from kvkeep.store import operators
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.store.table import READY, PlainColumns

SLOT = 4096
SLABS, SLAB_SLOTS = 5, 8
POOL, SLAB = SLABS * SLAB_SLOTS * SLOT, SLAB_SLOTS * SLOT
LAYOUTS = ((b"one shard", (64,)), (b"two shards", (64, 64)), (b"two slots", (4096, 4096)))
LIMITS = Limits(sessions=3, layouts=4, tenants=8)
HALF_WRITTEN = b"half written"


class Killed(BaseException):
    """The process is gone, at this very line."""


def content(tenant: str, key: bytes, shard: int) -> bytes:
    return blake2b(tenant.encode() + key + bytes([shard]), digest_size=8).digest()


def new_store(columns: PlainColumns) -> Store:
    return Store(POOL, SLAB, LIMITS, columns=columns)


@dataclass
class Held:
    """What a client was told and has not given back: the slots that it may touch."""

    session: int
    tenant: str
    layout: int
    shard: int  # -1 for a lease
    keys: list[bytes]
    slots: list[int]


@dataclass
class Life:
    """One store and its clients."""

    random: Random
    columns: PlainColumns = field(default_factory=PlainColumns)
    # slot and shard -> what was written there
    memory: dict[tuple[int, int], bytes] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    # keys of the request that is being carried out
    under_way: set[bytes] = field(default_factory=set)
    now_ms: int = 1000
    number: int = 0

    def __post_init__(self) -> None:
        self.store = new_store(self.columns)
        self.store.add_slabs(0, SLABS)
        self.layouts = []
        for session in (1, 2):
            self.store.open_session(session)
            for fingerprint, shards in LAYOUTS:
                self.layouts.append(self.store.open_layout(session, fingerprint, shards).number)

    def chain(self) -> tuple[str, int, list[bytes]]:
        """Keys of some prompt: few beginnings, so that prompts share them."""
        tenant, layout = self.random.choice("ab"), self.random.choice(self.layouts)
        path, keys = f"{layout}", list[bytes]()
        for _ in range(self.random.randint(1, 6)):
            path += self.random.choice("xxxy")
            keys.append(blake2b((tenant + path).encode(), digest_size=16).digest())
        return tenant, layout, keys

    def live(self, operations: int) -> None:
        for _ in range(operations):
            self.step()

    def step(self) -> None:
        self.now_ms += self.random.randint(0, 3)
        actions: list[tuple[Callable[[], None], int]] = [
            (self.prepare, 8),
            (self.end_something, 9),
            (self.lookup, 4),
            (self.finish, 1),
            (self.drop, 1),
            (self.set_quota, 1),
            (self.another_layout, 1),
        ]
        self.random.choices([act for act, _ in actions], [weight for _, weight in actions])[0]()
        self.under_way = set()

    def prepare(self) -> None:
        tenant, layout, keys = self.chain()
        session, shard = (
            self.random.choice((1, 2)),
            self.random.randrange(self.store.layouts[layout].shards),
        )
        self.number += 1
        ttl_ms = self.random.choice((0, 0, 5))
        plan = self.store.prepare_store(
            session,
            self.number,
            tenant,
            layout,
            shard,
            b"",
            b"".join(keys),
            self.now_ms,
            50,
            ttl_ms,
        )
        if len(plan.slots):
            chosen = [keys[position] for position in plan.positions.tolist()]
            self.held[self.number] = Held(
                session, tenant, layout, shard, chosen, plan.slots.tolist()
            )
            for slot in plan.slots.tolist():
                self.memory[slot, shard] = HALF_WRITTEN

    def end_something(self) -> None:
        if not self.held:
            return
        number = self.random.choice(list(self.held))
        it = self.held[number]
        self.under_way = set(it.keys)
        complete = it.shard >= 0 and self.random.random() < 0.8
        if complete:
            for key, slot in zip(it.keys, it.slots, strict=True):
                self.memory[slot, it.shard] = content(it.tenant, key, it.shard)
        del self.held[number]  # it has said that it is done: from here on the slots are not its own
        if it.shard < 0:
            self.store.release(it.session, number, self.now_ms)
        elif complete:
            sums = [int.from_bytes(content(it.tenant, key, it.shard), "little") for key in it.keys]
            if self.random.random() < 0.1:
                sums[-1] = ABSENT
            self.store.complete_store(it.session, number, np.array(sums, np.uint64), self.now_ms)
        else:
            self.store.abandon_store(it.session, number, self.now_ms)

    def lookup(self) -> None:
        tenant, layout, keys = self.chain()
        session = self.random.choice((1, 2))
        self.number += 1
        hit = self.store.lookup(
            session, self.number, tenant, layout, b"".join(keys), 0, self.now_ms
        )
        if hit.blocks:
            self.held[self.number] = Held(
                session, tenant, layout, -1, keys[: hit.blocks], hit.slots.tolist()
            )

    def finish(self) -> None:
        tenant, _, keys = self.chain()
        self.store.finish(1, tenant, keys[-1], self.now_ms)

    def drop(self) -> None:
        """Some block; half of the time one in the middle of what somebody has leased."""
        tenant, _, keys = self.chain()
        leases = [held for held in self.held.values() if held.shard < 0]
        if leases and self.random.random() < 0.5:
            lease = self.random.choice(leases)
            tenant, keys = lease.tenant, lease.keys[: self.random.randint(1, len(lease.keys))]
        self.store.drop_blocks(tenant, [keys[-1]])

    def set_quota(self) -> None:
        operators.set_quota(self.store, "a", self.random.choice((0, POOL // 2)), self.now_ms)

    def another_layout(self) -> None:
        if 2 not in {held.session for held in self.held.values()}:
            self.store.close_session(2, self.now_ms)
            self.store.open_session(2)
            self.store.open_layout(2, b"another %d" % self.random.randrange(3), (64,))

    # -- what is true of it

    def ready(self) -> dict[tuple[str, bytes], int]:
        """Tenant and key of every READY block -> its row."""
        table = self.store.blocks.table
        rows = {
            (owner.name, key): row
            for owner in self.store.tenants
            for key, row in owner.index.items()
        }
        return {name: row for name, row in rows.items() if table.state[row] == READY}

    def touchable(self) -> set[int]:
        """Slots that some client may be reading or writing this moment."""
        return {slot for held in self.held.values() for slot in held.slots}


def killed_after(lines: int, act: Callable[[], Any]) -> bool:
    """Runs `act` and kills it after so many lines of the store's code. False if it ended before."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "kvkeep/store" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
        return False
    except Killed:
        return True
    finally:
        sys.settrace(before)
