"""The index of a disk tier: a second store, whose slots are offsets in the tier's data file.

It plans and does no I/O. Each plan comes with the log record that makes it durable; its block is
found once the record is on the disk (`wrote`). It runs on wall-clock time, because its blocks
outlive the host."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.presence import Presence
from kvkeep.store import operators
from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.layouts import Layout
from kvkeep.store.plans import NORMAL_PRIORITY, Limits
from kvkeep.store.records import LayoutRecords, TenantRecords
from kvkeep.store.seals import fold_checks
from kvkeep.store.store import BLOCKS_PER_STORE, Store
from kvkeep.store.table import KEPT, NO_ROW, READY, WORDS_A_KEY, PlainColumns
from kvkeep.store.tenants import COMMONS
from kvkeep.store.tree import key_at, known_blocks, way_up
from kvkeep.tiers.disk_log import ALL_TENANTS, ROOT, ROW, Record, Recovered

_SESSION = 1  # the one that does everything
_USES_A_RECORD = 1 << 12
_FREED_A_RECORD = 1 << 15


@dataclass(frozen=True)
class DiskWrite:
    """Blocks to write, and the record to append when they are durable.

    positions   int32[n]: which of the keys
    offsets     int64[n]: where each goes in the data file
    """

    number: int
    positions: NDArray[np.int32]
    offsets: NDArray[np.int64]
    slot_bytes: int
    record: bytes


@dataclass(frozen=True)
class DiskAppend:
    """A record without blocks. To be answered with `wrote` or `failed` as a write is."""

    number: int
    record: bytes


@dataclass(frozen=True)
class DiskHit:
    """The blocks after `skip` that are on the disk, leased until `release(number)`.

    blocks      number of leading blocks that are there, of all keys asked for
    offsets     int64[blocks - skip]
    checksums   uint64[blocks - skip, shards]
    """

    number: int
    blocks: int
    offsets: NDArray[np.int64]
    checksums: NDArray[np.uint64]


@dataclass
class _Pending:
    """A record that is not known to be durable."""

    generation: int
    checksums: NDArray[np.uint64] | None  # of the blocks; None: it has none
    clears: dict[str, int]


class DiskIndex:
    """See the module's docstring. `adoption` says what was recovered."""

    def __init__(
        self,
        data_bytes: int,
        slab_bytes: int,
        presence: Presence | None = None,
        recovered: Recovered | None = None,
        now_ms: int = 0,
        tenants: int = Limits.tenants,
    ) -> None:
        recovered = recovered or Recovered()
        columns, physical = _columns(recovered, now_ms)
        layouts = Limits.layouts
        limits = Limits(layouts_per_session=layouts, layouts=layouts, tenants=tenants)
        self.store = Store(data_bytes, slab_bytes, limits, columns=columns, presence=presence)
        self.adoption: Adoption = adopt(self.store, data_bytes // slab_bytes, False, now_ms)
        for layout in self.store.layouts:
            layout.physical = physical[layout.number]
        self.store.open_session(_SESSION)
        # Slots that came back and are not logged yet: a clear frees a million, so they are in pieces
        # with the number of the plan before which they came back.
        self._freed: deque[tuple[int, array[int]]] = deque()
        self.store.slabs.given = array("q")
        self._used: dict[int, None] = {}  # slots
        self._clears: dict[str, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._most_image_bytes = recovered.most_image_bytes
        self._number = recovered.number
        self._generation = recovered.generation

    # -- to the disk -------------------------------------------------------------------------------

    def plan_write(
        self,
        tenant: str,
        shape: Layout,
        parent: bytes,
        keys: bytes,
        checksums: NDArray[np.uint64],
        now_ms: int,
        priority: int = NORMAL_PRIORITY,
        ttl_ms: int = 0,
    ) -> DiskWrite | None:
        """Plans to write those of the blocks that are not there yet, as far as there is room. None
        if there is nothing to write. `parent` must be on the disk, or be written to it.

        `shape` is the layout in memory. `checksums` has a row for each key; the blocks from the
        first incomplete one on are left out."""
        complete = np.append((checksums != ABSENT).all(axis=1) & checksums.all(axis=1), False)
        keys = keys[: min(int(np.argmin(complete)), BLOCKS_PER_STORE) * KEY_BYTES]
        known = self._known(shape.fingerprint)
        if not keys or (known and not _means_the_same(known, shape)):
            return None
        try:
            layout = self.store.open_layout(_SESSION, shape.fingerprint, shape.shard_bytes)
            layout.sessions.clear()  # so that another layout may take its place
            if not self._shorten_image(layout, len(keys) // KEY_BYTES, now_ms):
                return None
            self._number += 1
            plan = self.store.prepare_store(
                _SESSION,
                self._number,
                tenant,
                layout.number,
                None,
                parent,
                keys,
                now_ms,
                priority,
                ttl_ms,
            )
        except RequestError:
            return None
        if not len(plan.slots):
            return None
        layout.physical |= shape.physical
        checks = checksums[plan.positions]
        record = self._record(tenant)
        record.fingerprint, record.shard_bytes = layout.fingerprint, layout.shard_bytes
        record.physical = layout.physical
        rows = self.store.sessions[_SESSION].writes[self._number].rows
        record.rows = self._images(rows, checks).tobytes()
        record.checks = np.ascontiguousarray(checks, "<u8").tobytes()
        self._pending[self._number].checksums = checks
        encoded = self._encode(record)
        return DiskWrite(self._number, plan.positions, plan.slots, layout.slot_bytes, encoded)

    def make_some_room(
        self, tenant: str, shape: Layout, parent: bytes, blocks: int, now_ms: int
    ) -> bool:
        """Evicts a few of the blocks that `plan_write` would evict. False if there are none."""
        layout = self._known(shape.fingerprint)
        return layout is not None and self.store.make_some_room(
            tenant, layout.number, parent, blocks, now_ms
        )

    def take_records(self) -> DiskAppend | None:
        """What has changed without a write: clears, freed slots, uses. None if nothing has."""
        if not (self._clears or self._freed or self.store.slabs.given or self._used):
            return None
        self._number += 1
        return DiskAppend(self._number, self._encode(self._record("")))

    @property
    def has_unlogged_clears(self) -> bool:
        """Whether a clear is not durable yet."""
        return bool(self._clears) or any(each.clears for each in self._pending.values())

    def wrote(self, number: int, now_ms: int) -> None:
        """The write and its record are durable: its blocks are found from now on."""
        pending = self._pending.pop(number)
        if pending.checksums is not None:
            self.store.complete_store(_SESSION, number, pending.checksums, now_ms)

    def failed(self, number: int, now_ms: int) -> None:
        """The write has failed, and nothing touches its slots any more."""
        pending = self._pending.pop(number)
        self._clears = pending.clears | self._clears
        if pending.checksums is not None:
            self.store.abandon_store(_SESSION, number, now_ms)

    # -- from the disk -----------------------------------------------------------------------------

    def find(
        self, tenant: str, shape: Layout, keys: bytes, skip: int, now_ms: int
    ) -> DiskHit | None:
        """The longest prefix that is on the disk, if it goes beyond the first `skip` blocks. The
        blocks after them are leased."""
        layout = self._known(shape.fingerprint)
        if layout is None or not _means_the_same(layout, shape):
            return None
        self._number += 1
        try:
            hit = self.store.lookup(
                _SESSION, self._number, tenant, layout.number, keys, skip, now_ms
            )
        except RequestError:
            return None
        if not len(hit.slots):
            return None
        self._note_use(int(hit.slots[-1]))
        return DiskHit(self._number, hit.blocks, hit.slots, hit.checksums)

    def lease(self, row: int) -> int:
        """Keeps a block until `release` of the number that is returned. No use of it."""
        self._number += 1
        self.store.lease_chain(_SESSION, self._number, row)
        return self._number

    def release(self, number: int, now_ms: int) -> None:
        """Ends a lease."""
        self.store.release(_SESSION, number, now_ms)

    def known(self, tenant: str, keys: bytes) -> int:
        """How many leading blocks are on the disk or being written to it. Counts as a use."""
        owner = self.store.tenants.get(tenant)
        known = known_blocks(owner.index, keys) if owner else 0
        if owner and known:
            row = owner.index.get(key_at(keys, known - 1))
            self.store.blocks.touch(row, self.store.blocks.next_use())
            self._note_use(self.store.blocks.table.slot[row])
        return known

    def hints(self, tenant: str, keys: bytes) -> tuple[int, int]:
        """The priority of the last of these blocks that is here, and the time when the first of
        them expires, in ms; 0: never."""
        owner, table = self.store.tenants.get(tenant), self.store.blocks.table
        known = known_blocks(owner.index, keys) if owner else 0
        if owner is None or not known:
            return NORMAL_PRIORITY, 0
        rows = way_up(table, owner.index.get(key_at(keys, known - 1)), known)
        expires, priority = table.many.expires_ms[rows], table.priority[int(rows[-1])]
        return priority, int(expires[expires > 0].min()) if expires.any() else 0

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        """Shard -> digest of the order of its bytes, for `Layouts.inherit` of the memory store."""
        known = self._known(fingerprint)
        return dict(known.physical) if known else {}

    def free_blocks(self, shape: Layout) -> int:
        """How many blocks of this layout can be written before others are evicted: not as many as
        the free bytes hold. Slabs are not used to their end by slots that do not divide them, slabs
        of another slot size are not free, and an image of the log has room for so many."""
        log_bytes = self._most_image_bytes - self._bytes_of_image()
        fit = self.store.slabs.available(shape.slot_bytes)
        return max(0, min(fit, log_bytes // _image_bytes(shape)))

    def words_by_use(self) -> tuple[NDArray[np.uint64], int]:
        """The first words of the keys of all blocks, least recently used first, and the bytes of a
        slot, of the layout that has most of them; 0 if there is none."""
        table, layouts = self.store.blocks.table, self.store.layouts
        rows = table.live_rows()
        rows = rows[np.argsort(table.many.used[rows], kind="stable")]
        largest = max(layouts, key=lambda each: each.blocks, default=None)
        return table.keys.words[rows, 0], largest.slot_bytes if largest else 0

    # -- operators ---------------------------------------------------------------------------------

    def clear(self, tenant: str) -> int:
        """Takes all blocks of a tenant out of use. Returns how many. They stay unreadable after a
        restart as soon as the next record is durable.

        A tenant without blocks here is noted, too: the log may know blocks that were evicted."""
        self._note_clear(tenant)
        return self.take_out([tenant])

    def note_clear_of_all(self) -> None:
        """No block that is here now is readable after a restart, as soon as the next record is
        durable. The caller takes all tenants out of use with `take_out`, and plans no write before."""
        self._note_clear(ALL_TENANTS)

    def take_out(self, tenants: list[str]) -> int:
        """Takes all blocks of these tenants out of use until a restart. Returns how many."""
        return operators.clear_all(self.store, tenants)

    def _note_clear(self, name: str) -> None:
        self._generation += 1
        self._clears[name] = self._generation

    def drop(self, blocks: Iterable[tuple[str, bytes]]) -> int:
        """Takes blocks that proved bad, by tenant and key, out of use with their descendants.
        Returns how many have left the index so far."""
        owners = [(self.store.tenants.get(tenant), key) for tenant, key in blocks]
        rows = [owner.index.get(key) for owner, key in owners if owner is not None]
        return self.store.blocks.drop([row for row in rows if row != NO_ROW])

    # -- inside ------------------------------------------------------------------------------------

    def _known(self, fingerprint: bytes) -> Layout | None:
        return next((each for each in self.store.layouts if each.fingerprint == fingerprint), None)

    def _shorten_image(self, layout: Layout, blocks: int, now_ms: int) -> bool:
        """Evicts until an image of the log with so many more blocks fits. Only blocks of a few KiB
        come near that. False if nothing more can be evicted."""
        store = self.store
        while True:
            excess = blocks * _image_bytes(layout) - self._most_image_bytes
            excess += self._bytes_of_image()
            if excess <= 0:
                return True
            store.blocks.begin_turn()
            row = store.blocks.order.peek_any(COMMONS, now_ms)
            if row == NO_ROW:
                return False
            store.eviction.evictions += store.blocks.evict(
                row, now_ms, -(-excess // _image_bytes(layout))
            )

    def _bytes_of_image(self) -> int:
        """What all blocks take in an image of the log."""
        return sum(each.blocks * _image_bytes(each) for each in self.store.layouts)

    def _note_use(self, slot: int) -> None:
        if len(self._used) < _USES_A_RECORD:
            self._used[slot] = None

    def _oldest(self) -> int:
        return min((each.generation for each in self._pending.values()), default=self._generation)

    def _record(self, tenant: str) -> Record:
        """A record with the present number and everything that is to be logged."""
        oldest = self._oldest()
        self._pending[self._number] = _Pending(self._generation, None, self._clears)
        record = Record(self._number, self._generation, oldest, tenant)
        if given := self.store.slabs.given:
            self._freed.append((self._number, given))
            self.store.slabs.given = array("q")
        record.used = np.array(list(self._used), "<i8").tobytes()
        self._clears = {}
        self._used.clear()
        return record

    def _encode(self, record: Record) -> bytes:
        clears = self._pending[record.number].clears.items()
        further = [
            Record(record.number, generation, record.oldest, name, cleared=True)
            for name, generation in clears
        ]
        further += [
            Record(number, record.generation, record.oldest, freed=freed)
            for number, freed in self._take_freed()
        ]
        return b"".join(each.encode() for each in (record, *further))

    def _take_freed(self) -> Iterator[tuple[int, bytes]]:
        """Some of the slots to be logged as free, the first ones first. Each goes with the number of
        the plan before which it came back: it does not end a later claim, even if logged after it."""
        left = _FREED_A_RECORD
        while self._freed and left > 0:
            number, slots = self._freed[0]
            some = slots[-left:]
            del slots[-left:]
            left -= len(some)
            yield number, np.array(some).astype("<i8").tobytes()
            if not slots:
                self._freed.popleft()

    def _images(self, rows: NDArray[np.int64], checks: NDArray[np.uint64]) -> NDArray[np.void]:
        table, many = self.store.blocks.table, self.store.blocks.table.many
        images = np.zeros(len(rows), ROW)
        parents = many.parent[rows]
        images["key"] = table.keys.words[rows]
        images["seal"] = many.seal[rows]
        for shard in range(checks.shape[1]):
            images["seal"] += fold_checks(checks[:, shard], shard)
        images["slot"] = many.slot[rows]
        images["parent"] = np.where(parents == NO_ROW, ROOT, many.slot[parents])
        images["expires_ms"] = many.expires_ms[rows]
        images["number"] = images["used"] = self._number
        images["generation"] = self._generation
        images["priority"] = many.priority[rows]
        return images


def _image_bytes(layout: Layout) -> int:
    """What a block takes in an image of the log."""
    return ROW.itemsize + 8 * layout.shards


def _means_the_same(known: Layout, shape: Layout) -> bool:
    """Whether blocks of these layouts with one fingerprint can be exchanged: not if their sizes
    differ, or the order of their tensors."""
    return known.shard_bytes == shape.shard_bytes and all(
        known.physical.get(shard, digest) == digest for shard, digest in shape.physical.items()
    )


def _columns(recovered: Recovered, now_ms: int) -> tuple[PlainColumns, dict[int, dict[int, bytes]]]:
    """The columns that a store with these rows would have left, and the orders of its layouts."""
    columns, physical = PlainColumns(), dict[int, dict[int, bytes]]()
    if not len(recovered.rows):
        return columns, physical
    tenants, layouts = TenantRecords(columns), LayoutRecords(columns)
    for number, name in enumerate(recovered.tenants):
        tenants.put(number, name)
    for number, layout in enumerate(recovered.layouts, start=1):
        layouts.put(number, layout.fingerprint, layout.shard_bytes)
        physical[number] = layout.physical
        checks = columns.grow(
            f"checks-{number}", np.uint64, layout.checks.shape[1], len(layout.checks)
        )
        checks[: len(layout.checks)] = layout.checks
    rows = recovered.rows
    values = {name: rows[name] for name in ("priority", "slot", "used", "expires_ms", "seal")}
    values["state"] = np.where(
        (rows["expires_ms"] > 0) & (rows["expires_ms"] <= now_ms), np.int8(0), np.int8(READY)
    )
    values["parent"] = _rows_of(rows["slot"], rows["parent"])
    values["tenant"], values["layout"] = recovered.tenant, recovered.layout + 1
    values["check"] = recovered.check
    for name, kind in KEPT.items():
        column = columns.grow(name, kind, 0, len(rows))
        if name in values:
            column[: len(rows)] = values[name]
    columns.grow("keys", np.uint64, WORDS_A_KEY, len(rows))[:] = rows["key"]
    return columns, physical


def _rows_of(slots: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row of each parent, given by its slot. One that is not there is a row that does not
    exist, so that its children are dropped."""
    order = np.argsort(slots)
    place = np.minimum(np.searchsorted(slots[order], parents), len(slots) - 1)
    rows = np.where(slots[order][place] == parents, order[place], len(slots))
    return np.where(parents == ROOT, NO_ROW, rows)
