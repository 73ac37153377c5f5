"""Writes blocks to the tiers of one level while they are in memory, in the background.

    stored, or found in memory ─► admitted ─► leased in memory ─► mover writes ─► on the tier

Not when they are evicted: eviction cannot wait for a tier. Blocks that leave memory before they are
written are counted. Where a tier keeps several blocks together, the last ones of a chain, too few to
fill a parcel, rest until the chain has not grown for a while. Tenants have turns, a job each: so
much of what a tier writes has each tenant, whatever the others store."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.fair_queue import FairQueue
from kvkeep.server.lower_tier import MOST_ROOM_PIECES, LowerTier, WriteJob
from kvkeep.store.layouts import Layout
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import NO_ROW, READY
from kvkeep.store.tree import key_at, way_up
from kvkeep.tiers.admission import Admission

_KEYS_A_TURN = 256  # that admission looks at: a quarter of a millisecond
_SEGMENT_BLOCKS = 4096  # of a chain, that are looked at in one turn
_CHAINS_A_TURN = 4  # of which the first that has blocks to write ends the turn
_MOST_REFERENCES = 1024
_MOST_TO_WRITE = 4096  # chains
_TENANTS_A_KEY = 8  # when the queues are full, which tenants are looked through
_SHARED_BLOCKS = 32  # a prefix that may be on several tiers
_GUESSED_SLOT_BYTES = 1 << 20
SETTLED_MS = 1000  # a chain that has not grown for so long
MOST_RESTED_MS = 10_000  # that the end of a chain that grows waits for a full parcel
_WOKEN_A_TURN = 64


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
class _Judged:
    """A reference that admission is being told of, its end first."""

    reference: Reference
    left: int  # blocks
    is_known: bool = False


@dataclass
class _Begun:
    """How far a chain is written. A chain may have a million blocks, so it is cut into segments:

    root |    up to 8192    |    4096    |    4096    | end of the chain
                      ends[0]      ends[1]      ends[2]
    """

    ends: list[bytes]  # the last key of each segment
    is_cut: bool = False  # as far as the root
    first_blocks: int = 0  # of the first segment
    has_rested: bool = False  # the last blocks are written, even if they fill no parcel
    at: int = 0  # the segment that is being written
    room_pieces: int = 0  # made on the tier for its next blocks
    # How many leading blocks of it are written or being written, unless the tier had more than so
    # many `setbacks` since. A tier may not remember that while other chains have their turns.
    blocks: int = 0
    setbacks: int = -1
    tiers: list[LowerTier] = field(default_factory=list)  # that have all segments before it
    having: list[LowerTier] = field(default_factory=list)  # of these, that have this one, too


@dataclass(frozen=True)
class _Resting:
    """A chain whose last blocks do not fill a parcel. `since_ms`: when the first of them came."""

    begun: _Begun
    since_ms: int
    due_ms: int


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
        self._admission = self._admission_of_all() if data_bytes else None
        self._references = FairQueue[int, Reference](_MOST_REFERENCES)
        self._judged: _Judged | None = None
        self._numbers = itertools.count()
        # chains, by their last key, and how far they are written
        self._to_write = FairQueue[bytes, _Begun](_MOST_TO_WRITE)
        # by tenant and last key; the one that is due first is the first, or a second behind it
        self._resting: OrderedDict[tuple[str, bytes], _Resting] = OrderedDict()
        self._is_stuck = False  # nothing could be written in the last turn
        self._has_judged = False  # in the last turn

    @property
    def chains(self) -> int:
        """How many chains wait."""
        return len(self._to_write) + len(self._resting)

    @property
    def has_to_do(self) -> bool:
        """Whether another turn would find work at once."""
        if self._has_to_judge or not self._to_write or self._is_stuck:
            return self._has_to_judge
        return any(tier.can_write for tier in self._tiers())

    @property
    def _has_to_judge(self) -> bool:
        return self._judged is not None or bool(self._references)

    def refer(self, reference: Reference) -> None:
        """Notes that blocks were used. They are looked at in a later turn."""
        self._references.add(reference.tenant, next(self._numbers), reference)

    def turn(self, now_ms: int) -> None:
        """A piece of work, half a millisecond or so. Judges and writes in turns, so that constant
        requests stop neither."""
        self._wake(now_ms)
        self._has_judged = self._has_to_judge and not self._has_judged
        if self._has_judged:
            self._judge_references()
        else:
            self._write_behind(now_ms)

    def _tiers(self) -> Iterator[LowerTier]:
        return (tier for tier in self.tiers if not tier.set_aside)

    def _judge_references(self) -> None:
        """Tells admission of what was used, and queues it: admission decides when it is written."""
        left = _KEYS_A_TURN
        while left > 0 and (judged := self._judged or self._next_to_judge()):
            used, stop = judged.reference, judged.left
            start = max(0, stop - left)
            left -= max(1, stop - start)
            if self._admission is not None:
                self._admit(self._admission, judged, start)
            judged.left = start
            if start:
                return
            self._judged = None
            if not used.ready:
                continue
            end = key_at(used.keys, used.ready - 1)
            begun = self._to_write.get(used.tenant, end) or _Begun([end])
            if not self._to_write.add(used.tenant, end, begun):
                self.evicted_unwritten += 1
                left -= self._to_write.tenants // _TENANTS_A_KEY

    def _next_to_judge(self) -> _Judged | None:
        if not self._references:
            return None
        tenant, number, used = self._references.next()
        self._references.remove(tenant, number)
        self._references.served(tenant)
        self._judged = _Judged(used, len(used.keys) // KEY_BYTES)
        return self._judged

    @staticmethod
    def _admit(admission: Admission, judged: _Judged, start: int) -> None:
        used = judged.reference
        keys = used.keys[start * KEY_BYTES : judged.left * KEY_BYTES]
        if used.is_store:
            judged.is_known = admission.stored(keys, judged.is_known)
        else:
            found = max(0, used.ready - start)
            coming = max(0, used.ready + used.coming - start) - found
            judged.is_known = admission.looked_up(keys, found, judged.is_known, coming=coming)

    def _write_behind(self, now_ms: int) -> None:
        """Gives a mover the next blocks of one chain, or finds that a few chains have none."""
        self._is_stuck = False
        if not self._to_write:
            return
        tiers = [tier for tier in self._tiers() if tier.can_write]
        if all(tier.set_aside and not tier.is_shared for tier in self.tiers):
            self._to_write.clear()  # a shared tier may answer again, a disk does not
        for _ in range(min(_CHAINS_A_TURN, len(self._to_write)) if tiers else 0):
            tenant, key, begun = self._to_write.next()
            row = self._row_of(tenant, begun)
            if row == NO_ROW:
                self.evicted_unwritten += 1
                self._to_write.remove(tenant, key)
                continue
            if not begun.is_cut:
                self._cut(begun, row)
            if not begun.is_cut:
                break
            at, room_pieces = begun.at, begun.room_pieces
            written, more = self._write(tiers, tenant, row, begun, now_ms)
            if begun.at != at or begun.room_pieces > room_pieces:
                break  # another segment, or more room for this one, in the next turn
            self._to_write.served(tenant)
            if not more:
                self._to_write.remove(tenant, key)
            elif not written:  # its tier is busy: another chain may go to another tier
                self._to_write.put_back(tenant, key)
                self._is_stuck = True
            if written or self._is_stuck:
                break

    def _row_of(self, tenant: str, begun: _Begun) -> int:
        """The last row of the segment, or, if it is the only one, the next row above that is READY:
        a block may be stored again. NO_ROW if the chain has left memory."""
        owner, table = self._store.tenants.get(tenant), self._store.blocks.table
        row = owner.index.get(begun.ends[begun.at]) if owner else NO_ROW
        if row == NO_ROW or table.state[row] == READY:
            return row
        rows = way_up(table, row, _SEGMENT_BLOCKS)
        ready = rows[table.many.state[rows] == READY]
        return int(ready[-1]) if len(ready) and len(begun.ends) == 1 else NO_ROW

    def _cut(self, begun: _Begun, row: int) -> None:
        """Cuts one segment off below the others: the one that ends in `row`."""
        table = self._store.blocks.table
        rows = way_up(table, row, 2 * _SEGMENT_BLOCKS)
        begun.ends[0] = table.keys[row]
        begun.is_cut = table.parent[int(rows[0])] == NO_ROW
        begun.first_blocks = len(rows)
        if not begun.is_cut:
            begun.ends.insert(0, table.keys[int(rows[-_SEGMENT_BLOCKS - 1])])

    def _write(
        self, tiers: list[LowerTier], tenant: str, row: int, begun: _Begun, now_ms: int
    ) -> tuple[int, bool]:
        """Begins to write the next blocks of a segment that its tier lacks, or goes on to another
        one. Returns how many, and whether more are left."""
        table = self._store.blocks.table
        layout = self._store.layouts[table.layout[row]]
        rows = way_up(table, row, _SEGMENT_BLOCKS if begun.at else 2 * _SEGMENT_BLOCKS)
        keys = table.keys.words[rows].tobytes()
        tier, known = self._tier_for(tenant, layout, keys, begun)
        if tier is None:
            return 0, False
        if begun.at and begun.setbacks != tier.setbacks:
            begun.at, begun.setbacks = 0, -1  # what it had before may be gone
            return 0, True
        if tier.is_shared and begun.setbacks == tier.setbacks:
            known = max(known, begun.blocks)
        begun.blocks, begun.setbacks = known, tier.setbacks
        has_next = begun.at + 1 < len(begun.ends)
        if known >= len(rows) and has_next:
            begun.at, begun.blocks = begun.at + 1, 0
            begun.tiers = begun.having or [tier]
            return 0, True
        if tier not in tiers:
            return 0, True
        first = begun.first_blocks + (begun.at - 1) * _SEGMENT_BLOCKS if begun.at else 0
        stop = min(len(rows), known + tier.blocks_a_job(layout, first + known))
        if known < stop == len(rows) and not has_next and not begun.has_rested:
            full = stop - (first + stop) % tier.parcel_blocks(layout)
            if full > known:
                stop = full
            elif self._rest(tenant, keys, begun, now_ms):
                return 0, False
        some_keys = keys[known * KEY_BYTES : stop * KEY_BYTES]
        wanted = self._wanted(tier, layout, some_keys)
        some = rows[known : known + wanted]
        if not len(some):
            return 0, False
        parent = begun.ends[begun.at - 1] if begun.at else b""
        parent = key_at(keys, known - 1) if known else parent
        if begun.room_pieces < MOST_ROOM_PIECES and tier.make_some_room(
            tenant, layout, parent, len(some)
        ):
            begun.room_pieces += 1
            return 0, True
        begun.room_pieces = 0
        expires_ms = table.many.expires_ms[some]
        ttl_ms = int(expires_ms[expires_ms > 0].min(initial=1 << 62)) - now_ms
        planned = tier.plan(
            tenant,
            layout,
            first + known,
            parent,
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
        begun.blocks, begun.setbacks = known + len(some), tier.setbacks
        more = begun.blocks < len(rows) or has_next
        return len(some), more and wanted == stop - known

    def _rest(self, tenant: str, keys: bytes, begun: _Begun, now_ms: int) -> bool:
        """Lets a chain wait whether it grows, in place of those that it continues. `keys`: of its
        last segment. False if too many wait."""
        since_ms = now_ms
        last = len(keys) // KEY_BYTES - 1
        for at in range(begun.blocks, last):
            if shorter := self._resting.pop((tenant, key_at(keys, at)), None):
                since_ms = min(since_ms, shorter.since_ms)
        if len(self._resting) >= _MOST_TO_WRITE:
            return False
        due_ms = min(now_ms + SETTLED_MS, since_ms + MOST_RESTED_MS)
        resting = _Resting(begun, since_ms, due_ms)
        self._resting.setdefault((tenant, key_at(keys, last)), resting)
        return True

    def _wake(self, now_ms: int) -> None:
        """Lets chains be written that have rested."""
        for _ in range(min(_WOKEN_A_TURN, len(self._resting))):
            (tenant, key), resting = next(iter(self._resting.items()))
            if now_ms < resting.due_ms:
                return
            del self._resting[tenant, key]
            resting.begun.has_rested = True
            if not self._to_write.add(tenant, key, resting.begun):
                self.evicted_unwritten += 1

    def _admission_of_all(self) -> Admission:
        """Knows what the tiers have from earlier servers."""
        words, slot_bytes = zip(*(tier.words_by_use() for tier in self.tiers), strict=True)
        admission = Admission(self._data_bytes // (max(slot_bytes) or _GUESSED_SLOT_BYTES))
        ages = np.concatenate([np.linspace(0, 1, len(each)) for each in words])
        by_use = np.argsort(ages, kind="stable")  # those of several tiers in turns
        admission.recovered(np.concatenate(words)[by_use])
        return admission

    def _wanted(self, tier: LowerTier, layout: Layout, keys: bytes) -> int:
        """How many leading blocks are worth writing."""
        if self._admission is None:
            return len(keys) // KEY_BYTES
        if not self._slot_bytes:
            self._slot_bytes = layout.slot_bytes
            self._admission.fit(self._data_bytes // layout.slot_bytes)
        return self._admission.wanted(keys, tier.free_blocks(layout))

    def _tier_for(
        self, tenant: str, layout: Layout, keys: bytes, begun: _Begun
    ) -> tuple[LowerTier | None, int]:
        """The tier that a chain goes to, and how many leading blocks of its segment it has: the tier
        that has most of the chain. Chains that share only a short prefix are spread, and the prefix
        is on several."""
        tiers = [tier for tier in self._tiers() if not begun.at or tier in begun.tiers]
        if not tiers:
            return None, 0
        known = [tier.known(tenant, layout, keys) for tier in tiers]
        best = max(range(len(tiers)), key=known.__getitem__)
        begun.having = [
            tiers[at] for at, blocks in enumerate(known) if blocks * KEY_BYTES == len(keys)
        ]
        if known[best] < _SHARED_BLOCKS and not begun.at:
            last = min(_SHARED_BLOCKS, len(keys) // KEY_BYTES) - 1
            best = int.from_bytes(key_at(keys, last)[:8], "little") % len(tiers)
        return tiers[best], known[best]
