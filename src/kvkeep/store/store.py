"""The store: a single-threaded state machine that takes a request and answers with a plan.

Every operation either happens completely or raises RequestError and changes nothing. The caller
chooses the numbers of sessions, leases and writes: a lease has the number of the lookup that asked
for it, a write the number of its prepare_store. So a client that lost an answer can still release
what the answer granted.

No request takes more than a few milliseconds. Longer work, such as freeing a million blocks, takes
effect at once and is continued by `tidy`."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.outcomes import NO_ROOM, OVER_LIMIT
from kvkeep.kv.presence import Presence
from kvkeep.store.blocks import Blocks
from kvkeep.store.departed import Departures
from kvkeep.store.eviction import Eviction
from kvkeep.store.key_index import KeyIndex
from kvkeep.store.layouts import SLOT_ALIGN, Layout, Layouts
from kvkeep.store.plans import (
    HIGHEST_PRIORITY,
    LONGEST_TTL_MS,
    LOWEST_PRIORITY,
    NORMAL_PRIORITY,
    Hit,
    Limits,
    Stored,
    StorePlan,
)
from kvkeep.store.slabs import Slabs
from kvkeep.store.table import EVICTING, FREE, NO_ROW, READY, WRITING, Columns, PlainColumns
from kvkeep.store.tenants import Tenant, Tenants
from kvkeep.store.tree import key_at, longest_hit, not_held, rows_of_chain, split_keys, way_up

BLOCKS_PER_STORE = 512  # most blocks of one prepare_store: three milliseconds in a full pool
_ROWS_A_SCAN = 1 << 15
_LET_GO_A_BLOCK = 64  # blocks that are not held any more, in the time that one is freed
_CHAINS_LOOKED_AT = 4  # by a lookup that finds dropped blocks
# the session that stands for all sessions of the previous server while any of their processes lives
OLD_SESSIONS = 0
MOVING = -1  # the session that holds what is on its way to or from a disk


def mask_of(shards: Sequence[int]) -> int:
    """A bit for each of these shards."""
    return sum(1 << shard for shard in shards)


@dataclass
class Write:
    """These shards of some blocks, which one session is writing."""

    layout: Layout
    shards: Sequence[int]
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def mask(self) -> int:
        """A bit for each shard."""
        return mask_of(self.shards)


@dataclass
class Session:
    """One engine process, with everything that it holds and that is released when it ends."""

    # lease -> its deepest row; a pin on it protects its ancestors
    leases: dict[int, int] = field(default_factory=dict)
    writes: dict[int, Write] = field(default_factory=dict)
    writing_blocks: int = 0


class Store:
    """See the module's docstring. `pool_bytes` is the size that the pool will have; `add_slabs` adds
    memory as it becomes ready. A store over columns of an earlier store must be adopted first."""

    def __init__(
        self,
        pool_bytes: int,
        slab_bytes: int,
        limits: Limits | None = None,
        default_quota_bytes: int | None = None,
        columns: Columns | None = None,
        presence: Presence | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.pool_bytes = pool_bytes
        columns = columns or PlainColumns()
        self.slabs = Slabs(slab_bytes)
        self.layouts = Layouts(self.limits.layouts, slab_bytes, columns, pool_bytes)
        self.tenants = Tenants(self.limits.tenants, default_quota_bytes, columns, pool_bytes)
        self.blocks = Blocks(
            self.tenants,
            self.layouts,
            self.slabs,
            columns,
            presence,
            most_blocks=pool_bytes // SLOT_ALIGN,
        )
        self.eviction = Eviction(self.blocks)
        self.tenants.on_moved = self.blocks.order.move_later
        # found by lookups but not leased, because their tenant may hold no more
        self.withheld_blocks = 0
        self.sessions: dict[int, Session] = {}
        # ended sessions that still hold something
        self.closing: deque[Session] = deque()
        # row -> bit mask of the shards that are being written
        self.writers: dict[int, int] = {}

    def remember_departures(self) -> Departures:
        """From now on, remembers why blocks have left or were refused."""
        self.blocks.departures = self.blocks.departures or Departures()
        return self.blocks.departures

    # -- memory, sessions, layouts -----------------------------------------------------------------

    def add_slabs(self, first: int, count: int) -> None:
        """Adds `count` slabs of memory from slab `first` on."""
        self.slabs.add(first, count)

    def open_session(self, session: int) -> None:
        if session in self.sessions:
            raise RequestError(
                "session_exists", f"session {session} is open already", field="session"
            )
        engines = sum(number > OLD_SESSIONS for number in self.sessions)
        if session > OLD_SESSIONS and engines >= self.limits.sessions:
            raise RequestError(
                "too_many_sessions",
                f"{self.limits.sessions} sessions are open",
                field="session",
                hint="stop engines that are not needed, or raise --max-sessions",
            )
        self.sessions[session] = Session()

    def close_session(self, session: int, now_ms: int) -> None:
        """Releases everything that the session holds. Only when its process has stopped using the
        memory, or has ended."""
        self.closing.append(self._session(session))
        self.layouts.forget_session(session)
        del self.sessions[session]
        self._give_back(now_ms)

    def open_layout(self, session: int, fingerprint: bytes, shard_bytes: tuple[int, ...]) -> Layout:
        self._session(session)
        if not 0 < len(shard_bytes) <= self.limits.shards:
            raise RequestError(
                "bad_shards",
                f"a block has 1 to {self.limits.shards} shards, not {len(shard_bytes)}",
                field="shard_bytes",
            )
        if min(shard_bytes) <= 0:
            raise RequestError(
                "bad_shards", "every shard has at least one byte", field="shard_bytes"
            )
        if self.layouts.opened_by(session) >= self.limits.layouts_per_session:
            raise RequestError(
                "too_many_layouts",
                f"this session has opened {self.limits.layouts_per_session} layouts",
                field="fingerprint",
                hint="an engine has one layout for each model it serves; open each once",
            )
        layout = self.layouts.open(session, fingerprint, shard_bytes)
        self._drop_leaving_layout()
        return layout

    def tidy(self, now_ms: int) -> bool:
        """Continues work that requests have started, for one turn. Returns whether there is more."""
        if self.closing:
            self._give_back(now_ms)
        elif self.blocks.has_to_sweep:
            self.blocks.sweep()
        elif self.tenants.to_update:
            self.tenants.update(self.blocks.a_turn)
        elif self.blocks.order.to_scan:
            self.blocks.order.move(now_ms, self.blocks.a_turn)
        elif self.blocks.order.behind:
            self.blocks.order.catch_up(now_ms)
        elif self.blocks.order.discarded:
            self.blocks.order.discard()
        elif self.tenants.to_shrink:
            tenant = next(iter(self.tenants.to_shrink))
            if self.eviction.shrink_to_limit(tenant, now_ms, self.blocks.a_turn):
                self.tenants.to_shrink.pop(tenant, None)
        elif self.eviction.is_emptying:
            self.eviction.continue_to_empty(now_ms)
        else:
            self._drop_leaving_layout()
        return self.has_to_tidy

    @property
    def has_to_tidy(self) -> bool:
        blocks, tenants = self.blocks, self.tenants
        order, leaving = blocks.order, self.layouts.leaving
        return bool(
            self.closing
            or blocks.has_to_sweep
            or tenants.to_update
            or order.to_scan
            or tenants.to_shrink
            or self.eviction.is_emptying
            or order.behind
            or order.discarded
            or (leaving and max(leaving.values()) >= 0)
        )

    # -- lookup and release ------------------------------------------------------------------------

    def lookup(
        self,
        session: int,
        lease: int,
        tenant: str,
        layout: int,
        keys: bytes,
        skip: int,
        now_ms: int,
    ) -> Hit:
        """Finds the longest prefix of READY blocks. Leases and describes those after the first
        `skip`."""
        state = self._session(session)
        shape = self.layouts.get(layout)
        if self.blocks.departures is not None:
            self.blocks.departures.uses.note(self.blocks.sequence, now_ms)
        self.check_keys(keys)
        if not 0 <= skip <= len(keys) // KEY_BYTES:
            raise RequestError(
                "bad_skip", f"skip is {skip}, of {len(keys) // KEY_BYTES} keys", field="skip"
            )
        if lease in state.leases or lease in state.writes:
            raise RequestError("lease_exists", f"lease {lease} is held already", field="lease")
        if len(state.leases) >= self.limits.leases_per_session:
            raise RequestError(
                "too_many_leases",
                f"this session holds {self.limits.leases_per_session} leases",
                field="lease",
                hint="release what is loaded, or raise --max-leases-per-session",
            )
        owner = self.tenants.get(tenant)
        blocks = longest_hit(self.blocks.table, owner.index, keys) if owner else 0
        if owner and blocks and self.blocks.unswept:
            blocks = self._without_unswept(owner, keys, blocks)
        if not owner or blocks <= skip:
            return Hit.unleased(blocks, shape.shards)
        rows = rows_of_chain(self.blocks.table, owner.index, keys, skip, blocks)
        many = self.blocks.table.many
        if not len(rows) or many.layout[rows[-1]] != layout:
            return Hit.unleased(0, shape.shards)
        if self.tenants.reserved_bytes:
            rows = self._that_may_be_held(owner, shape, rows, blocks, now_ms)
            if not len(rows):
                return Hit.unleased(skip, shape.shards)
        deepest = int(rows[-1])
        shape.used = self.blocks.next_use()
        self.blocks.touch(deepest, shape.used)
        self.blocks.pin(deepest)
        self.blocks.hold(np.array([deepest]))
        state.leases[lease] = deepest
        return Hit(skip + len(rows), many.slot[rows], shape.checks.take(many.check[rows], axis=0))

    def lease_chain(self, session: int, lease: int, row: int) -> None:
        """Leases the chain that ends in `row`, which does not count as a use of it."""
        self.blocks.pin(row)
        self.blocks.hold(np.array([row]))
        self._session(session).leases[lease] = row

    def release(self, session: int, lease: int, now_ms: int) -> bool:
        """Ends a lease. False if there is no such lease: releasing twice is not an error."""
        row = self._session(session).leases.pop(lease, NO_ROW)
        if row == NO_ROW:
            return False
        self._release(row, now_ms)
        return True

    def release_all(self, session: int, leases: Sequence[int], now_ms: int) -> set[int]:
        """Ends leases; of many, or long ones, `tidy` ends the rest. Returns the numbers of those
        that existed."""
        held = self._session(session).leases
        ended = {lease: held.pop(lease) for lease in leases if lease in held}
        numbers = set(ended)
        left = self.blocks.a_turn
        while ended and left > 0:
            left -= 1 + self._release(ended.popitem()[1], now_ms) // _LET_GO_A_BLOCK
        if ended:
            self.closing.append(Session(leases=ended))
        return numbers

    def tenant_of_lease(self, session: int, lease: int) -> str:
        """The tenant whose blocks are leased; "" if there is no such lease."""
        row = self._session(session).leases.get(lease, NO_ROW)
        return "" if row == NO_ROW else self.tenants.by_number[self.blocks.table.tenant[row]].name

    def finish(self, session: int, tenant: str, key: bytes, now_ms: int) -> bool:
        """Hint: the request that used the chain ending in `key` has finished. The chain is evicted
        early unless it is used again."""
        self._session(session)
        owner = self.tenants.get(tenant)
        row = owner.index.get(key) if owner else NO_ROW
        if row == NO_ROW:
            return False
        table = self.blocks.table
        table.finished[row] = table.used[row]
        self.blocks.order.enqueue(row, now_ms)
        return True

    # -- stores ------------------------------------------------------------------------------------

    def prepare_store(
        self,
        session: int,
        write: int,
        tenant: str,
        layout: int,
        shard: int | None,
        parent: bytes,
        keys: bytes,
        now_ms: int,
        priority: int = NORMAL_PRIORITY,
        ttl_ms: int = 0,
        further_shards: Sequence[int] = (),
    ) -> StorePlan:
        """Plans the store of one shard and the `further_shards`, for the blocks that lack all of
        them. Evicts to make room. `parent` is b"" at a root. Shard None stands for all shards: then
        only new blocks are stored.

        If there is no room for all blocks, the first ones are stored: a prefix is useful, a chain
        without its beginning is not."""
        state = self._session(session)
        shape = self.layouts.get(layout)
        shards = range(shape.shards) if shard is None else (shard, *further_shards)
        self._check_store(state, write, shape, shards, parent, keys, priority, ttl_ms)
        if self.blocks.departures is not None:
            self.blocks.departures.uses.note(self.blocks.sequence, now_ms)
        known = self.tenants.get(tenant)
        above = known.index.get(parent) if known and parent else NO_ROW
        wanted = split_keys(keys)
        if parent and (above == NO_ROW or self.blocks.is_unswept(above)):
            self._note_refused(tenant, parent, keys, 0, now_ms)
            return StorePlan(np.empty(0, np.int32), np.empty(0, np.int64), len(wanted), orphan=True)
        joined, is_apart, new_from, above = self._walk_known(
            known, shape, () if shard is None else shards, above, wanted
        )
        may_write = self.limits.writing_blocks_per_session - state.writing_blocks
        if len(joined) > may_write:
            new_from, joined = joined[may_write][0], joined[:may_write]
            may_write = 0
        room = min(len(wanted) - new_from, may_write - len(joined))
        if self.tenants.reserved_bytes:
            may_hold = self.tenants.may_hold(known, self.slabs.capacity_bytes) // shape.slot_bytes
            if self.blocks.draining.is_active(now_ms) and self.blocks.draining.reaches(above):
                may_hold = 0
            may_hold -= not_held(self.blocks.table, above)
            room = min(room, may_hold)
            if may_hold < 0 and joined:
                new_from, joined = joined[0][0], []
        work = Write(shape, shards)
        if joined:
            self.add_to_write(state, work, np.array([row for _, row in joined], dtype=np.int64))
        positions = [position for position, _ in joined]
        if above != NO_ROW:
            self.blocks.touch(above, self.blocks.next_use())
        if room > 0:
            keys_of_new = wanted[new_from : new_from + room]
            created = self._create(tenant, shape, above, keys_of_new, now_ms, priority, ttl_ms)
            self.add_to_write(state, work, created)
            positions.extend(range(new_from, new_from + len(created)))
            new_from += len(created)
        if len(work.rows):
            state.writes[write] = work
        if new_from < len(wanted) and not is_apart:
            self._note_refused(tenant, b"", keys, new_from, now_ms, shape)
        slots = self.blocks.table.many.slot[work.rows]
        return StorePlan(
            np.array(positions, dtype=np.int32), slots, len(wanted) - new_from, apart=is_apart
        )

    def make_some_room(
        self, tenant: str, layout: int, parent: bytes, blocks: int, now_ms: int
    ) -> bool:
        """Evicts a few of those blocks that `prepare_store` of so many new ones below `parent` would
        evict. False if there are none: the room is there, or cannot be had like this."""
        shape, known = self.layouts.get(layout), self.tenants.get(tenant)
        above = known.index.get(parent) if known and parent else NO_ROW
        is_there = self.slabs.available(shape.slot_bytes) >= blocks
        if is_there and self.tenants.limit_of(tenant) is None:
            return False
        if (parent and above == NO_ROW) or not self.tenants.has_place(tenant):
            return False
        owner = self.tenants.get_or_add(tenant)
        with self._storing(owner, above, now_ms):
            return self.eviction.make_some_room(owner, shape, blocks, now_ms)

    def complete_store(
        self, session: int, write: int, checksums: NDArray[np.uint64], now_ms: int
    ) -> Stored:
        """Notes that the bytes of the write's shards are in their slots. A block becomes visible
        with its last shard. Returns what was written. `checksums` are those of block after block, a
        block's shards together."""
        state = self._session(session)
        work = self._write(state, write)
        if checksums.size != len(work.rows) * len(work.shards):
            raise RequestError(
                "bad_checksums",
                f"{len(work.rows)} blocks of {len(work.shards)} shards were to be written,"
                f" {checksums.size} checksums came",
                field="checksums",
            )
        self.blocks.begin_turn()
        columns = checksums.reshape(len(work.rows), -1).T
        for shard, of_shard in zip(work.shards, columns, strict=True):
            self.blocks.note_checksums(work.rows, shard, work.layout, of_shard)
        self.blocks.shards_arrived(work.rows, work.mask, work.layout)
        del state.writes[write]
        state.writing_blocks -= len(work.rows)
        self._end_write(work, work.rows, now_ms)
        nbytes = sum(work.layout.shard_bytes[shard] for shard in work.shards)
        return Stored(len(work.rows), len(work.rows) * nbytes, int(work.rows[-1]))

    def abandon_store(self, session: int, write: int, now_ms: int) -> bool:
        """Releases the slots of a write. False if there is no such write: abandoning twice is not
        an error."""
        return bool(self.abandon_all(session, [write], now_ms))

    def drop_blocks(self, tenant: str, keys: Iterable[bytes]) -> int:
        """Takes blocks that proved bad out of use, with all their descendants. Returns how many
        have left the index; unknown keys are no error."""
        owner = self.tenants.get(tenant)
        rows = [owner.index.get(key) for key in keys] if owner else []
        return self.blocks.drop([row for row in rows if row != NO_ROW])

    def abandon_all(self, session: int, writes: Iterable[int], now_ms: int) -> set[int]:
        """Abandons several writes. Returns the numbers of those that existed."""
        state = self._session(session)
        abandoned = {
            write: work for write in writes if (work := state.writes.pop(write, None)) is not None
        }
        state.writing_blocks -= sum(len(work.rows) for work in abandoned.values())
        numbers = set(abandoned)
        if abandoned:
            self.closing.append(Session(writes=abandoned))
            self._give_back(now_ms)
        return numbers

    # -- inside ------------------------------------------------------------------------------------

    def _session(self, session: int) -> Session:
        state = self.sessions.get(session)
        if state is None:
            raise RequestError(
                "unknown_session",
                f"session {session} is not open",
                field="session",
                hint="send Hello",
            )
        return state

    def _write(self, state: Session, write: int) -> Write:
        work = state.writes.get(write)
        if work is None:
            raise RequestError("unknown_write", f"this session has no write {write}", field="write")
        return work

    def _give_back(self, now_ms: int) -> None:
        """Releases what ended sessions held, the oldest session first: up to `a_turn` leases and
        blocks."""
        self.blocks.begin_turn()
        left = self.blocks.a_turn
        while self.closing and left > 0:
            state = self.closing[0]
            while state.leases and left > 0:
                left -= 1 + self._release(state.leases.popitem()[1], now_ms) // _LET_GO_A_BLOCK
            while state.writes and left > 0:
                write, work = next(reversed(state.writes.items()))
                rows = work.rows[-left:]  # the last ones first: the others hang above them
                work.rows = work.rows[:-left]
                left -= len(rows)
                if not len(work.rows):
                    del state.writes[write]
                self._end_write(work, rows, now_ms)
            if not state.leases and not state.writes:
                self.closing.popleft()

    def _release(self, row: int, now_ms: int) -> int:
        """Ends a lease. Returns how many blocks are not held any more."""
        blocks = self.blocks.let_go(np.array([row]))
        self.blocks.unpin(row, now_ms)
        return blocks

    def _without_unswept(self, owner: Tenant, keys: bytes, blocks: int) -> int:
        """How many of the leading blocks are READY, where some that hang on dropped blocks are
        still in the index, perhaps below a prefix that was stored again."""
        table, dropped = self.blocks.table, dict[int, int]()

        def is_missing(position: int) -> bool:
            row = owner.index.get(key_at(keys, position))
            is_ready = row != NO_ROW and table.state[row] == READY
            return not is_ready or row == dropped.get(position)

        for _ in range(_CHAINS_LOOKED_AT):
            if not blocks:
                break
            rows = way_up(table, owner.index.get(key_at(keys, blocks - 1)), blocks)
            gone = np.flatnonzero(table.many.state[rows] != READY)
            if not len(gone):
                return blocks
            below = rows[gone[0] :].tolist()
            dropped.update(enumerate(below, start=blocks - len(below)))
            blocks = bisect_left(range(blocks), True, key=is_missing)
        return 0

    def _that_may_be_held(
        self, owner: Tenant, shape: Layout, rows: NDArray[np.int64], blocks: int, now_ms: int
    ) -> NDArray[np.int64]:
        """The first ones of these rows, as many as the tenant may hold. They are the last of a
        chain of `blocks`."""
        if self.blocks.draining.is_active(now_ms):
            above = self.blocks.draining.blocks_above(int(rows[-1]), blocks)
            may_stay = max(0, above - (blocks - len(rows)))
            self.withheld_blocks += len(rows) - may_stay
            rows = rows[:may_stay]
            if not len(rows):
                return rows
        may_hold = self.tenants.may_hold(owner, self.slabs.capacity_bytes) // shape.slot_bytes
        too_many = min(max(0, not_held(self.blocks.table, int(rows[-1])) - may_hold), len(rows))
        self.withheld_blocks += too_many
        return rows[: len(rows) - too_many]

    def _drop_leaving_layout(self) -> None:
        """Drops trees of a layout that is being removed: those with roots in the next rows of the
        table."""
        number, start = next(((n, at) for n, at in self.layouts.leaving.items() if at >= 0), (0, 0))
        if not number:
            return
        many = self.blocks.table.many
        stop = min(start + _ROWS_A_SCAN, len(many.state))
        here = slice(start, stop)
        is_root = (many.layout[here] == number) & (many.parent[here] == NO_ROW)
        is_root &= (many.state[here] != FREE) & (many.state[here] != EVICTING)
        roots = start + np.flatnonzero(is_root)
        some = roots[: self.blocks.a_turn]
        at = int(roots[len(some)]) if len(roots) > len(some) else stop
        self.layouts.leaving[number] = at if at < len(many.state) else -1
        self.blocks.drop(some.tolist())

    def check_keys(self, keys: bytes) -> None:
        """RequestError unless these are whole keys, and no more than one request may name."""
        if len(keys) % KEY_BYTES:
            raise RequestError(
                "bad_keys",
                f"{len(keys)} bytes are no whole number of {KEY_BYTES}-byte keys",
                field="keys",
            )
        if len(keys) // KEY_BYTES > self.limits.blocks_per_request:
            raise RequestError(
                "too_many_blocks",
                f"{len(keys) // KEY_BYTES} keys in one request, of "
                f"{self.limits.blocks_per_request} allowed",
                field="keys",
                hint="send fewer at a time, or raise --max-blocks-per-request",
            )

    def _check_store(
        self,
        state: Session,
        write: int,
        shape: Layout,
        shards: Sequence[int],
        parent: bytes,
        keys: bytes,
        priority: int,
        ttl_ms: int,
    ) -> None:
        self.check_keys(keys)
        if len(keys) // KEY_BYTES > BLOCKS_PER_STORE:
            raise RequestError(
                "too_many_blocks",
                f"{len(keys) // KEY_BYTES} keys in one store, of {BLOCKS_PER_STORE} allowed",
                field="keys",
                hint="send fewer at a time",
            )
        if len(parent) not in (0, KEY_BYTES):
            raise RequestError(
                "bad_keys", f"a parent key has {KEY_BYTES} bytes, not {len(parent)}", field="parent"
            )
        shape.check_shards(shards)
        if not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
            raise RequestError(
                "bad_priority",
                f"priority {priority} is not in {LOWEST_PRIORITY}..{HIGHEST_PRIORITY}",
                field="priority",
            )
        if not 0 <= ttl_ms <= LONGEST_TTL_MS:
            raise RequestError(
                "bad_ttl",
                f"ttl_ms is {ttl_ms}, of {LONGEST_TTL_MS} at most; 0 means for ever",
                field="ttl_ms",
            )
        if state.writing_blocks >= self.limits.writing_blocks_per_session:
            raise RequestError(
                "too_many_writes",
                f"this session is writing {state.writing_blocks} blocks",
                field="keys",
                hint="complete or abandon stores first, or raise --max-writing-blocks-per-session",
            )
        if write in state.writes or write in state.leases:
            raise RequestError("write_exists", f"write {write} is under way already", field="write")

    def _walk_known(
        self,
        owner: Tenant | None,
        shape: Layout,
        shards: Sequence[int],
        above: int,
        wanted: list[bytes],
    ) -> tuple[list[tuple[int, int]], bool, int, int]:
        """Follows the chain as far as it is known. Returns (position, row) of the blocks of which
        all these shards are missing and not being written, whether there is a block of which only
        some are, the position of the first unknown key, and the last known row."""
        table, joined, is_apart, mask = self.blocks.table, [], False, mask_of(shards)
        if above != NO_ROW and table.layout[above] != shape.number:
            raise RequestError(
                "broken_chain", "the parent is a block of another layout", field="parent"
            )
        index = owner.index if owner else KeyIndex()
        new_from = len(wanted)
        for position, key in enumerate(wanted):
            row = index.get(key)
            if row == NO_ROW:
                new_from = position
                break
            if table.parent[row] != above or table.layout[row] != shape.number:
                raise RequestError(
                    "broken_chain",
                    f"key {position} is not the child of the key before it",
                    field="keys",
                )
            is_writing = table.state[row] == WRITING
            if is_writing or shape.lacking:
                if is_writing:
                    lacks = mask & ~self.blocks.shards_in[row]
                else:
                    # a reader of such a block knows what is absent and does not read it
                    checks = shape.checks[table.check[row]]
                    lacks = mask_of([shard for shard in shards if checks[shard] == ABSENT])
                lacks &= ~self.writers.get(row, 0)
                if lacks == mask != 0:
                    joined.append((position, row))
                is_apart |= 0 < lacks < mask
            above = row
        rest = wanted[new_from:]
        unswept = self._unswept_among(index, rest) if self.blocks.unswept else {}
        known = rest if not unswept else [key for key in rest if key not in unswept]
        if len(set(rest)) != len(rest) or index.has_any(known):
            raise RequestError(
                "broken_chain", "a key appears twice, or before its parent", field="keys"
            )
        for row in unswept.values():  # new blocks replace them
            self.blocks.take_out(row)
        return joined, is_apart, new_from, above

    def _unswept_among(self, index: KeyIndex, keys: list[bytes]) -> dict[bytes, int]:
        """The keys whose blocks descend from dropped blocks, with their rows."""
        table, unswept, gone = self.blocks.table, dict[bytes, int](), set[int]()
        for key in keys:
            row = index.get(key)
            above = table.parent[row] if row != NO_ROW else NO_ROW
            if above != NO_ROW and (table.state[above] == EVICTING or above in gone):
                unswept[key] = row
                gone.add(row)
        return unswept

    def _create(
        self,
        tenant: str,
        shape: Layout,
        above: int,
        keys: list[bytes],
        now_ms: int,
        priority: int,
        ttl_ms: int,
    ) -> NDArray[np.int64]:
        rows = np.empty(0, np.int64)
        limit_bytes = self.tenants.limit_of(tenant)
        if limit_bytes is not None and limit_bytes < shape.slot_bytes:
            return rows  # without evicting anything
        if not self.tenants.has_place(tenant) and (coldest := self.tenants.make_way()):
            self.blocks.clear(coldest)
        owner = self.tenants.get_or_add(tenant)
        shape.used = self.blocks.next_use()
        with self._storing(owner, above, now_ms):
            room = self.eviction.make_room(owner, shape, len(keys), now_ms)
            if room:
                expires_ms = now_ms + ttl_ms if ttl_ms else 0
                rows = self.blocks.create(owner, shape, above, keys[:room], priority, expires_ms)
        return rows

    @contextmanager
    def _storing(self, owner: Tenant, above: int, now_ms: int) -> Iterator[None]:
        """A turn in which room is made for blocks of this tenant below row `above`: both stay."""
        owner.storing += 1
        if above != NO_ROW:
            self.blocks.pin(above)
        self.blocks.begin_turn()
        yield
        if above != NO_ROW:
            self.blocks.unpin(above, now_ms)
        owner.storing -= 1
        self.tenants.forget_if_idle(owner)

    def _note_refused(
        self,
        tenant: str,
        parent: bytes,
        keys: bytes,
        first: int,
        now_ms: int,
        shape: Layout | None = None,
    ) -> None:
        """Remembers why the blocks from `first` on are not stored. Those without their parent are
        refused for the reason for which that was, if it was."""
        departures = self.blocks.departures
        if departures is None:
            return
        words = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)[first:]
        if shape is None:
            above = np.frombuffer(parent, dtype=np.uint64).reshape(-1, 2)
            cause = int(departures.table.find(above)[0][0])
            if cause not in (OVER_LIMIT, NO_ROOM):
                return
        else:
            owner, limit_bytes = self.tenants.get(tenant), self.tenants.limit_of(tenant)
            usage_bytes = owner.usage_bytes if owner else 0
            is_limited = limit_bytes is not None and usage_bytes + shape.slot_bytes > limit_bytes
            cause = OVER_LIMIT if is_limited else NO_ROOM
        departures.table.note_refused(words, cause, tenant, now_ms)

    def add_to_write(self, state: Session, work: Write, rows: NDArray[np.int64]) -> None:
        """Makes the session the writer of its shards of these blocks."""
        mask, writers = work.mask, self.writers
        self.blocks.pin_many(rows)
        if len(rows):
            self.blocks.hold(rows)
        row_list = rows.tolist()
        are_new = writers.keys().isdisjoint(row_list)
        writers.update(
            dict.fromkeys(row_list, mask)
            if are_new
            else {row: writers.get(row, 0) | mask for row in row_list}
        )
        work.rows = np.concatenate((work.rows, rows)) if len(work.rows) else rows
        state.writing_blocks += len(rows)

    def _end_write(self, work: Write, rows: NDArray[np.int64], now_ms: int) -> None:
        """Ends the write for some of its rows."""
        others, writers = ~work.mask, self.writers
        for row in rows.tolist():
            if left := writers.pop(row) & others:
                writers[row] = left
        if len(rows):
            self.blocks.let_go(rows)
        self.blocks.unpin_many(rows, now_ms)
