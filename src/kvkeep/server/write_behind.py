"""Writes blocks to the tiers of one level while they are in memory, in the background.

    stored, or found in memory ─► admitted ─► leased in memory ─► mover writes ─► on the tier

Not when they are evicted: eviction cannot wait for a tier. Blocks that leave memory before they are
written are counted. Tenants have turns, a job each: so much of what a tier writes has each tenant,
whatever the others store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.fair_queue import FairQueue
from kvkeep.server.lower_tier import LowerTier, WriteJob
from kvkeep.store.layouts import Layout
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import NO_ROW, READY
from kvkeep.store.tree import key_at, way_up
from kvkeep.tiers.admission import Admission

_KEYS_A_TURN = 256  # that admission looks at: a quarter of a millisecond, or one reference
_CHAINS_A_TURN = 4  # of which the first that has blocks to write ends the turn
_MOST_REFERENCES = 1024
_MOST_TO_WRITE = 4096  # chains
_TENANTS_A_KEY = 8  # when the queues are full, which tenants are looked through
_SHARED_BLOCKS = 32  # a prefix that may be on several tiers
_GUESSED_SLOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Reference:
    """Blocks that a request looked up or an engine has stored. Memory has the first `ready`, and the
    next `coming` are on their way there."""

    tenant: str
    keys: bytes
    ready: int
    coming: int = 0
    is_store: bool = False


@dataclass
class _Begun:
    """How many leading blocks of a chain are written or being written, unless the tier had more than
    so many `setbacks` since. A tier may not remember that while other chains have their turns."""

    blocks: int = 0
    setbacks: int = -1


class WriteBehind:
    """Tiers that share the prompts between them: a chain goes to one of them. `data_bytes` is the
    room of all; 0: they decide what to keep, and get everything."""

    def __init__(
        self,
        store: Store,
        tiers: Sequence[LowerTier],
        data_bytes: int,
        next_number: Callable[[], int],
    ) -> None:
        self.tiers = tiers
        self.evicted_unwritten = 0  # chains that left memory before they were written
        self._store = store
        self._data_bytes = data_bytes
        self._next_number = next_number
        self._slot_bytes = 0  # of the first layout that is written
        self._admission = Admission(data_bytes // _GUESSED_SLOT_BYTES) if data_bytes else None
        self._references = FairQueue[int, Reference](_MOST_REFERENCES)
        self._numbers = itertools.count()
        # chains, by their last key, and how far they are written
        self._to_write = FairQueue[bytes, _Begun](_MOST_TO_WRITE)
        self._is_stuck = False  # nothing could be written in the last turn
        self._has_judged = False  # in the last turn

    @property
    def chains(self) -> int:
        """How many chains wait."""
        return len(self._to_write)

    @property
    def has_to_do(self) -> bool:
        """Whether another turn would find work at once."""
        can_write = any(tier.can_write for tier in self._tiers())
        return bool(self._references) or (bool(self._to_write) and can_write and not self._is_stuck)

    def refer(self, reference: Reference) -> None:
        """Notes that blocks were used. They are looked at in a later turn."""
        self._references.add(reference.tenant, next(self._numbers), reference)

    def turn(self, now_ms: int) -> None:
        """A piece of work, half a millisecond or so. Judges and writes in turns, so that constant
        requests stop neither."""
        self._has_judged = bool(self._references) and not self._has_judged
        if self._has_judged:
            self._judge_references()
        else:
            self._write_behind(now_ms)

    def _tiers(self) -> Iterator[LowerTier]:
        return (tier for tier in self.tiers if not tier.set_aside)

    def _judge_references(self) -> None:
        """Tells admission of what was used, and queues it: admission decides when it is written."""
        left = _KEYS_A_TURN
        while self._references and left > 0:
            tenant, number, used = self._references.next()
            self._references.remove(tenant, number)
            self._references.served(tenant)
            left -= len(used.keys) // KEY_BYTES
            if self._admission is not None:
                self._admit(self._admission, used)
            if not used.ready:
                continue
            if not self._to_write.add(tenant, key_at(used.keys, used.ready - 1), _Begun()):
                self.evicted_unwritten += 1
                left -= self._to_write.tenants // _TENANTS_A_KEY

    def _admit(self, admission: Admission, used: Reference) -> None:
        if used.is_store:
            admission.stored(used.keys)
        else:
            admission.looked_up(used.keys, used.ready + used.coming)

    def _write_behind(self, now_ms: int) -> None:
        """Gives a mover the next blocks of one chain, or finds that a few chains have none."""
        tiers = [tier for tier in self._tiers() if tier.can_write]
        if all(tier.set_aside and not tier.is_shared for tier in self.tiers):
            self._to_write.clear()  # a shared tier may answer again, a disk does not
        self._is_stuck = False
        table = self._store.blocks.table
        for _ in range(min(_CHAINS_A_TURN, len(self._to_write)) if tiers else 0):
            tenant, key, begun = self._to_write.next()
            owner = self._store.tenants.get(tenant)
            row = owner.index.get(key) if owner else NO_ROW
            while row != NO_ROW and table.state[row] != READY:
                row = table.parent[row]
            if row == NO_ROW:
                self.evicted_unwritten += 1
                self._to_write.remove(tenant, key)
                continue
            written, more = self._write(tiers, tenant, row, begun, now_ms)
            self._to_write.served(tenant)
            if not more:
                self._to_write.remove(tenant, key)
            elif not written:  # its tier is busy: another chain may go to another tier
                self._to_write.put_back(tenant, key)
                self._is_stuck = True
            if written or self._is_stuck:
                break

    def _write(
        self, tiers: list[LowerTier], tenant: str, row: int, begun: _Begun, now_ms: int
    ) -> tuple[int, bool]:
        """Begins to write the next blocks of a chain that its tier lacks. Returns how many, and
        whether more are left."""
        table = self._store.blocks.table
        layout = self._store.layouts[table.layout[row]]
        rows = way_up(table, row, len(table))
        keys = table.keys.words[rows].tobytes()
        tier, known = self._tier_for(tenant, row, keys)
        if tier is None or tier not in tiers:
            return 0, tier is not None
        if tier.is_shared and begun.setbacks == tier.setbacks:
            known = max(known, begun.blocks)
        stop = min(len(rows), known + tier.blocks_a_job(layout))
        some_keys = keys[known * KEY_BYTES : stop * KEY_BYTES]
        wanted = self._wanted(tier, layout, some_keys)
        some = rows[known : known + wanted]
        if not len(some):
            return 0, False
        expires_ms = table.many.expires_ms[some]
        ttl_ms = int(expires_ms[expires_ms > 0].min(initial=1 << 62)) - now_ms
        planned = tier.plan(
            tenant,
            layout,
            key_at(keys, known - 1) if known else b"",
            some_keys[: wanted * KEY_BYTES],
            layout.checks[table.many.check[some]],
            int(table.priority[some[-1]]),
            max(1, ttl_ms) if expires_ms.any() else 0,
        )
        if planned is None:
            return 0, False
        some = some[planned.positions]
        number = self._next_number()
        if not tier.mover.send(tier.write_job(number, planned, layout, table.many.slot[some])):
            tier.failed(planned)
            return 0, True
        self._store.lease_chain(MOVING, number, int(some[-1]))
        tier.jobs[number] = WriteJob(planned, len(some), len(some) * layout.slot_bytes)
        begun.setbacks, begun.blocks = tier.setbacks, known + len(some)
        return len(some), known + len(some) < len(rows) and wanted == stop - known

    def _wanted(self, tier: LowerTier, layout: Layout, keys: bytes) -> int:
        """How many leading blocks are worth writing."""
        if self._admission is None:
            return len(keys) // KEY_BYTES
        if not self._slot_bytes:
            self._slot_bytes = layout.slot_bytes
            self._admission.fit(self._data_bytes // layout.slot_bytes)
        return self._admission.wanted(keys, tier.free_blocks(layout))

    def _tier_for(self, tenant: str, row: int, keys: bytes) -> tuple[LowerTier | None, int]:
        """The tier that a chain goes to, and how many leading blocks it has: the tier that has most
        of it. Chains that share only a short prefix are spread, and the prefix is on several."""
        tiers = list(self._tiers())
        if not tiers:
            return None, 0
        layout = self._store.layouts[self._store.blocks.table.layout[row]]
        known = [tier.known(tenant, layout, keys) for tier in tiers]
        best = max(range(len(tiers)), key=known.__getitem__)
        if known[best] < _SHARED_BLOCKS:
            last = min(_SHARED_BLOCKS, len(keys) // KEY_BYTES) - 1
            best = int.from_bytes(key_at(keys, last)[:8], "little") % len(tiers)
        return tiers[best], known[best]
