"""Prefetches that operators and routers ask for: the chains of a tenant that were used last.

    looking   finds the tenant's blocks on all disks, a window of the index a turn
    running   brings chain after chain to memory, the one that was used last first
    done, cancelled, or failed: `problem` says why

A prefetch gives way to promotions that requests wait for (`PromotionQueue`). While memory is not
full it takes what is free. In a full memory, prefetched blocks that no request has used take at most
a quarter of it, those of one tenant an eighth (`UnusedBlocks`), so that prefetches cannot evict what
is in use."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.store.layouts import Layout
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import NO_ROW, READY
from kvkeep.store.tree import way_up
from kvkeep.tiers.disk_index import DiskIndex

_ROWS_A_TURN = 1 << 15
_MOST_CANDIDATES = 1 << 16  # blocks that may be the ends of chains, of each disk
_CANDIDATES_A_TURN = 256
_CHAINS_UNDER_WAY = 2  # of a prefetch
_MOST_RUNNING = 16
_MOST_SHOWN = 64
_DEFAULT_SHARE = 4  # of the pool
_UNUSED_SHARE, _UNUSED_SHARE_OF_A_TENANT = 4, 8
_MOST_UNUSED = 1024  # chains that are remembered

LOOKING, RUNNING, DONE, CANCELLED, FAILED = "looking", "running", "done", "cancelled", "failed"
_NO_ROOM = "memory is full, and what was prefetched and not used has its share of it"


class UnusedBlocks:
    """Blocks that were prefetched into memory and that no request has used."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # tenant and last key -> when the block was used last, and how many bytes
        self._chains: OrderedDict[tuple[str, bytes], tuple[int, int]] = OrderedDict()

    def add(self, tenant: str, parent: bytes, key: bytes, nbytes: int) -> None:
        """Notes a chain that now ends in `key`; before it ended in `parent`."""
        _, before = self._chains.pop((tenant, parent), (0, 0))
        used = self._store.blocks.table.used[self._row(tenant, key)]
        self._chains[tenant, key] = used, before + nbytes

    def is_room_for(self, tenant: str, layout: Layout, blocks: int) -> bool:
        """Whether so many blocks may be prefetched: they fit without eviction, or within the share
        that unused blocks may take."""
        store, nbytes = self._store, blocks * layout.slot_bytes
        owner, limit = store.tenants.get(tenant), store.tenants.limit_of(tenant)
        usage = owner.usage_bytes if owner else 0
        is_below_limit = limit is None or usage + nbytes <= limit
        if is_below_limit and store.slabs.available(layout.slot_bytes) >= blocks:
            return True
        self._forget_used()
        if len(self._chains) >= _MOST_UNUSED:
            return False
        total = sum(unused for _, unused in self._chains.values())
        own = sum(unused for (name, _), (_, unused) in self._chains.items() if name == tenant)
        room = min(store.pool_bytes, limit if limit is not None else store.pool_bytes)
        return (
            total + nbytes <= store.pool_bytes // _UNUSED_SHARE
            and own + nbytes <= room // _UNUSED_SHARE_OF_A_TENANT
        )

    def _forget_used(self) -> None:
        table = self._store.blocks.table
        for (tenant, key), (used, _) in list(self._chains.items()):
            row = self._row(tenant, key)
            if row == NO_ROW or table.used[row] != used or table.first_child[row] != NO_ROW:
                del self._chains[tenant, key]

    def _row(self, tenant: str, key: bytes) -> int:
        owner = self._store.tenants.get(tenant)
        return owner.index.get(key) if owner else NO_ROW


@dataclass
class PrefetchShown:
    """One prefetch as operators see it. `chains` and `coming` count what was begun, `blocks` and
    `nbytes` what has come."""

    number: int
    tenant: str
    most_bytes: int
    state: str = LOOKING
    problem: str = ""
    chains: int = 0
    coming_blocks: int = 0
    coming_bytes: int = 0
    blocks: int = 0
    nbytes: int = 0


@dataclass
class _Prefetch:
    shown: PrefetchShown
    at: list[int]  # the next row to look at, of each disk
    found: list[list[NDArray[np.int64]]]  # of each disk: its rank, the lowest first, and row
    # rows of each disk that may be the ends of chains; the next disk first
    candidates: deque[tuple[DiskIndex, deque[int]]] = field(default_factory=deque)
    # by row of each disk, whether it was brought with the end of its chain
    covered: dict[DiskIndex, NDArray[np.bool_]] = field(default_factory=dict)
    layouts: set[Layout] = field(default_factory=set)  # that it has opened in memory

    @property
    def owner(self) -> int:
        """Stands for the prefetch among the owners of a promotion, which else are sessions."""
        return -self.shown.number

    @property
    def is_running(self) -> bool:
        return self.shown.state in (LOOKING, RUNNING)


class Promoting(Protocol):
    """What prefetches need of `Movement`."""

    def start_prefetch(
        self, owner: int, tenant: str, layout: Layout, keys: bytes, most_bytes: int, now_ms: int
    ) -> int:
        """Begins to bring these blocks to memory. Returns how many are coming that no one else has
        asked for."""

    def prefetches_under_way(self, owner: int, tenant: str) -> int: ...

    def end_prefetches(self, owner: int | None) -> None:
        """Ends promotions that only this owner wants; None: all prefetches."""


class Prefetches:
    """All prefetches of operators. For the loop's thread."""

    def __init__(self, store: Store, indexes: Sequence[DiskIndex], promoting: Promoting) -> None:
        self._store = store
        self._indexes = indexes
        self._promoting = promoting
        self._all: dict[int, _Prefetch] = {}  # by number, the next to be served first
        self._number = 0

    def begin(self, tenant: str, most_bytes: int | None) -> PrefetchShown:
        """Begins a prefetch, or returns the one of the tenant that runs."""
        for each in self._all.values():
            if each.is_running and each.shown.tenant == tenant:
                return each.shown
        if sum(each.is_running for each in self._all.values()) >= _MOST_RUNNING:
            raise RequestError(
                "too_many_prefetches",
                f"{_MOST_RUNNING} prefetches are running",
                hint="wait, or cancel one: `kvkeep prefetch --list` shows them",
            )
        while len(self._all) >= _MOST_SHOWN:
            del self._all[min(n for n, each in self._all.items() if not each.is_running)]
        self._number += 1
        pool_bytes = self._store.pool_bytes
        most = pool_bytes // _DEFAULT_SHARE if most_bytes is None else min(most_bytes, pool_bytes)
        shown = PrefetchShown(self._number, tenant, most)
        count = len(self._indexes)
        self._all[self._number] = _Prefetch(shown, [0] * count, [[] for _ in range(count)])
        return shown

    def shown(self) -> list[PrefetchShown]:
        """All that run, and the last that have ended."""
        return [PrefetchShown(**asdict(self._all[number].shown)) for number in sorted(self._all)]

    def cancel(self, number: int) -> PrefetchShown:
        """Ends a prefetch. What has come stays in memory."""
        if number not in self._all:
            raise RequestError(
                "unknown_prefetch",
                f"there is no prefetch {number}",
                field="number",
                hint="`kvkeep prefetch --list` shows those that run",
            )
        prefetch = self._all[number]
        if prefetch.is_running:
            self._end(prefetch, CANCELLED)
        return prefetch.shown

    def cancel_all(self) -> int:
        """Ends all prefetches, those of engines too. Returns how many of operators ran."""
        running = [each for each in self._all.values() if each.is_running]
        for prefetch in running:
            self._end(prefetch, CANCELLED)
        self._promoting.end_prefetches(None)
        return len(running)

    def forget(self, is_cleared: Callable[[str], bool]) -> None:
        """Some tenants are cleared: what was found of them is no more."""
        for prefetch in self._all.values():
            if prefetch.is_running and is_cleared(prefetch.shown.tenant):
                self._end(prefetch, CANCELLED)

    def arrived(self, owners: set[int], blocks: int, nbytes: int) -> None:
        """Notes that blocks of a promotion are in memory."""
        for owner in owners:
            if (prefetch := self._all.get(-owner)) is not None:
                prefetch.shown.blocks += blocks
                prefetch.shown.nbytes += nbytes

    def no_room(self, owners: set[int]) -> None:
        """Memory takes no more of a promotion."""
        for owner in owners:
            prefetch = self._all.get(-owner)
            if prefetch is not None and prefetch.is_running:
                self._end(prefetch, FAILED, _NO_ROOM)

    @property
    def has_to_do(self) -> bool:
        """Whether another turn would find work at once."""
        return any(
            each.shown.state == LOOKING or (each.shown.state == RUNNING and self._may_start(each))
            for each in self._all.values()
        )

    def turn(self, now_ms: int) -> None:
        """Continues one prefetch for a millisecond or so; the next turn another one."""
        for number, prefetch in list(self._all.items()):
            if prefetch.shown.state == LOOKING:
                self._look(prefetch)
            elif prefetch.shown.state == RUNNING and self._may_start(prefetch):
                self._start_chain(prefetch, now_ms)
            elif prefetch.shown.state == RUNNING and self._is_through(prefetch):
                self._end(prefetch, DONE)
            else:
                continue
            self._all[number] = self._all.pop(number)
            return

    # -- inside

    def _look(self, prefetch: _Prefetch) -> None:
        """Looks at one window of one disk's index."""
        for disk, index in enumerate(self._indexes):
            table, start = index.store.blocks.table, prefetch.at[disk]
            owner = index.store.tenants.get(prefetch.shown.tenant)
            if owner is None or start >= len(table.many.state):
                continue
            stop = prefetch.at[disk] = start + _ROWS_A_TURN
            window, many = slice(start, stop), table.many
            is_own = (many.state[window] == READY) & (many.tenant[window] == owner.number)
            rows = start + np.flatnonzero(is_own)
            is_inner = many.first_child[rows] != NO_ROW
            found = prefetch.found[disk]
            # the one that was used last first; of those that were used at once the ends of chains
            found.append(np.array([is_inner - 2 * many.used[rows], rows], np.int64))
            if sum(each.shape[1] for each in found) > 2 * _MOST_CANDIDATES:
                prefetch.found[disk] = [_latest(found)]
            return
        # Times of use of two disks cannot be compared: they take turns.
        for index, found in zip(self._indexes, prefetch.found, strict=True):
            if found and len(rows := _latest(found)[1]):
                prefetch.candidates.append((index, deque(rows.tolist())))
        prefetch.found.clear()
        prefetch.shown.state = RUNNING

    def _may_start(self, prefetch: _Prefetch) -> bool:
        if not prefetch.candidates or not self._left_bytes(prefetch):
            return False
        shown, store = prefetch.shown, self._store
        if store.slabs.capacity_bytes < store.pool_bytes and not store.slabs.unused_slabs:
            return False  # more memory is being added
        under_way = self._promoting.prefetches_under_way(prefetch.owner, shown.tenant)
        return under_way < _CHAINS_UNDER_WAY

    def _is_through(self, prefetch: _Prefetch) -> bool:
        if prefetch.candidates and self._left_bytes(prefetch):
            return False
        return not self._promoting.prefetches_under_way(prefetch.owner, prefetch.shown.tenant)

    @staticmethod
    def _left_bytes(prefetch: _Prefetch) -> int:
        return max(0, prefetch.shown.most_bytes - prefetch.shown.coming_bytes)

    def _start_chain(self, prefetch: _Prefetch, now_ms: int) -> None:
        """Begins to bring up the next chain that memory lacks."""
        shown = prefetch.shown
        known = self._store.tenants.get(shown.tenant)
        for _ in range(_CANDIDATES_A_TURN):
            if not prefetch.candidates:
                return
            index, rows = prefetch.candidates.popleft()
            row = rows.popleft()
            if rows:
                prefetch.candidates.append((index, rows))
            owner, table = index.store.tenants.get(shown.tenant), index.store.blocks.table
            if index not in prefetch.covered:
                prefetch.covered[index] = np.zeros(len(table.many.state), np.bool_)
            covered = prefetch.covered[index]
            key = table.keys[row]
            if covered[row] or (known and known.index.get(key) != NO_ROW):
                continue
            # the row may be another block's by now
            if not owner or owner.index.get(key) != row or table.state[row] != READY:
                continue
            chain = way_up(table, row, self._store.limits.blocks_per_request)
            if table.parent[int(chain[0])] != NO_ROW:
                continue  # no lookup could ask for it
            covered[chain[chain < len(covered)]] = True
            keys = table.keys.words[chain].tobytes()
            layout = self._layout(prefetch, index, index.store.layouts[table.layout[row]])
            if layout is None:
                continue
            started = self._promoting.start_prefetch(
                prefetch.owner, shown.tenant, layout, keys, self._left_bytes(prefetch), now_ms
            )
            if started:
                shown.chains += 1
                shown.coming_blocks += started
                shown.coming_bytes += started * layout.slot_bytes
            elif self._left_bytes(prefetch) < layout.slot_bytes:
                prefetch.candidates.clear()
            return

    def _layout(self, prefetch: _Prefetch, index: DiskIndex, on_disk: Layout) -> Layout | None:
        """The layout in memory, where after a restart no engine may have opened it."""
        try:
            layout = self._store.open_layout(MOVING, on_disk.fingerprint, on_disk.shard_bytes)
        except RequestError:
            return None
        self._store.layouts.inherit(layout, index.orders(on_disk.fingerprint))
        prefetch.layouts.add(layout)
        return layout

    def _end(self, prefetch: _Prefetch, state: str, problem: str = "") -> None:
        prefetch.shown.state, prefetch.shown.problem = state, problem
        self._promoting.end_prefetches(prefetch.owner)
        prefetch.candidates.clear()
        prefetch.covered.clear()
        prefetch.found.clear()
        in_use = {
            each for other in self._all.values() if other.is_running for each in other.layouts
        }
        for layout in prefetch.layouts - in_use:
            layout.sessions.discard(MOVING)  # so that another may take its place
        prefetch.layouts.clear()


def _latest(found: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Those with the lowest ranks, in that order."""
    together = np.concatenate(found, axis=1)
    if together.shape[1] > _MOST_CANDIDATES:
        together = together[:, np.argpartition(together[0], _MOST_CANDIDATES)[:_MOST_CANDIDATES]]
    return together[:, np.argsort(together[0])]
