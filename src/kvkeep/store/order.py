"""Which block is evicted first: only leaves, least recently used first, hints before age.

A leaf's rank is one number, lowest first:

    class (2 bits)  | priority (8 bits) | used: sequence number of the last use (48 bits)
    0 its time to live has expired, or some of its shards have been missing for too long
    1 the request that used it last has finished
    2 all others, including incomplete blocks whose shards may still arrive

Of the incomplete blocks, the newest are waited for, up to an eighth of all blocks. They have at most
normal priority, so that blocks of a rank that has ended do not stay forever.

Queues are binary heaps of `rank << 32 | row`, one for each owner and slot size. Entries are
corrected lazily: a block used again stays where it is and is moved only when it comes to the top.
`queued` in the table is the rank of a block's one live entry; any other entry for that row is stale
and dropped when met. One turn of the loop corrects or drops _LOOKS_A_TURN entries. If that does not
bring the next block to go to the front, the queue is `behind`: `catch_up` goes on in the next
turns, and nothing is evicted from it until then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import chain

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvkeep.store.layouts import Layouts
from kvkeep.store.plans import NORMAL_PRIORITY
from kvkeep.store.table import EVICTING, FREE, NO_ROW, WRITING, BlockTable
from kvkeep.store.tenants import Tenant, Tenants

_CLASS_SHIFT = 56
_PRIORITY_SHIFT = 48
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_STALE_SLACK = 1024
_LOOK_AHEAD = 255
_EXPIRED_A_CALL = 256
_MOVED_A_LOOK = 64  # entries of tenants that got other queues
_LOOKS_A_TURN = 1024  # at entries that are out of date: a millisecond or two
_DISCARDED_A_TURN = 16384
_ROWS_A_SCAN = 1 << 15
_AWAITED_PART, _AWAITED_AT_LEAST = 8, 8
_FEW_ENTRIES = 32
_ENTRIES_A_PUSH = 4  # looked at: a long queue is through after a quarter as many pushes


class Queue(Struct, eq=False, gc=False):
    """A priority queue of numbers that drops entries which no longer count, a few with each push.

    When a queue has grown too long, its heap becomes the `former` one. Each push then takes some
    entries from the end of that, and those that still count go into the new heap.

    There may be a queue for each of 100,000 tenants, and to look at as many lists in one go takes
    the garbage collector 20 ms. So the first entries are a tuple, in order: the collector stops
    tracking tuples of numbers."""

    few: tuple[int, ...] = ()
    heap: list[int] | None = None
    former: list[int] | None = None

    def __len__(self) -> int:
        return len(self.few) + len(self.heap or ()) + len(self.former or ())

    def lowest(self) -> int:
        """The lowest entry; -1 if there is none."""
        if self.few:
            return self.few[0]
        front = self._front()
        return front[0] if front else -1

    def drop_lowest(self) -> None:
        if self.few:
            self.few = self.few[1:]
        else:
            heappop(self._front())

    def replace_lowest(self, entry: int) -> None:
        if self.few:
            self.few = tuple(sorted((entry, *self.few[1:])))
        else:
            heapreplace(self._front(), entry)

    def first(self, most: int) -> list[int]:
        """Up to `most` of the lowest entries, or nearly: the beginning of the heap, in order."""
        return sorted((self.few or self._front())[:most])

    def push(self, entry: int, most: int, counts: Callable[[int], bool]) -> None:
        """Adds an entry. A queue with more than `most` loses those that do not count."""
        if self.heap is None and len(self.few) < _FEW_ENTRIES:
            self.few = tuple(sorted((entry, *self.few)))
            return
        if self.heap is None:
            self.few, self.heap = (), list(self.few)  # what is in order is a heap
        heappush(self.heap, entry)
        if self.former is None:
            if len(self.heap) <= most:
                return
            self.former, self.heap = self.heap, []
        for _ in range(min(_ENTRIES_A_PUSH, len(self.former))):
            last = self.former.pop()  # a heap without its last entry is a heap
            if counts(last):
                heappush(self.heap, last)
        self.former = self.former or None

    def entries(self) -> Iterator[int]:
        return chain(self.few, self.heap or (), self.former or ())

    def _front(self) -> list[int]:
        """The heap that begins with the lowest entry of all; an empty one if there is none."""
        heap = self.heap or []
        if not self.former or (heap and heap[0] <= self.former[0]):
            return heap
        return self.former


class EvictionOrder:
    """Each evictable block has exactly one live entry, in the queue of its owner and slot size."""

    def __init__(self, table: BlockTable, tenants: Tenants, layouts: Layouts) -> None:
        self._table = table
        self._tenants = tenants
        self._layouts = layouts
        self._queues: dict[int, dict[int, Queue]] = {}  # owner -> slot size -> queue
        self._expiring = Queue()  # of `expires_ms << 32 | row`
        # owner and slot size of a queue whose front is out of date
        self.behind: tuple[int, int] | None = None
        self._looks = self.looks_a_turn = _LOOKS_A_TURN
        # unused lists, which `discard` frees in pieces: a million numbers take 30 ms
        self.discarded: list[list[int]] = []
        self._awaited: OrderedDict[int, None] = OrderedDict()  # half written, oldest first
        self.noted_ms = 0  # blocks that expire up to here have been noted
        # rows still to be looked at for blocks of tenants that have changed queues
        self.to_scan = 0
        self._scan_at = 0
        self._is_moving: NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)  # by number of a tenant

    def evictable(self, row: int) -> bool:
        """Whether a block is a leaf without leases and writes."""
        table = self._table
        return (
            table.first_child[row] == NO_ROW
            and not table.pins[row]
            and table.state[row] != FREE
            and table.state[row] != EVICTING
        )

    def rank(self, row: int, now_ms: int) -> int:
        table = self._table
        expires_ms = table.expires_ms[row]
        priority, is_half = table.priority[row], table.state[row] == WRITING
        if (expires_ms and expires_ms <= now_ms) or (is_half and row not in self._awaited):
            order_class = 0
        elif table.finished[row] == table.used[row]:
            order_class = 1
        else:
            order_class = 2
        priority = min(priority, NORMAL_PRIORITY) if is_half else priority
        return order_class << _CLASS_SHIFT | priority << _PRIORITY_SHIFT | table.used[row]

    def await_shards(self, rows: list[int]) -> None:
        """These blocks are new, and several ranks will write their shards."""
        self._awaited.update(dict.fromkeys(rows))
        while len(self._awaited) > max(_AWAITED_AT_LEAST, len(self._table) // _AWAITED_PART):
            late, _ = self._awaited.popitem(last=False)
            self.enqueue(late, self.noted_ms)

    def await_no_more(self, rows: Iterable[int]) -> None:
        """These blocks are complete, or freed."""
        for row in rows:
            self._awaited.pop(row, None)

    def enqueue(self, row: int, now_ms: int) -> None:
        """Queues a block if it is evictable, or moves it forward if its rank has fallen."""
        if not self.evictable(row):
            return
        queued = self._table.queued[row]
        if queued != -1 and self._current_owner(row) == self._table.queue_owner[row]:
            rank = self.rank(row, now_ms)
            if rank >= queued:
                return
        self._push(row, self.rank(row, now_ms))

    def forget_owner(self, owner: int) -> None:
        """Drops the queues of a tenant that has no blocks left."""
        for queue in self._queues.pop(owner, {}).values():
            self.discard_later(queue.heap or [])
            self.discard_later(queue.former or [])

    def discard_later(self, numbers: list[int]) -> None:
        """Frees a list in pieces, if it is long."""
        if len(numbers) > _DISCARDED_A_TURN:
            self.discarded.append(numbers)

    def discard(self) -> None:
        """Frees a piece of what was discarded."""
        del self.discarded[-1][-_DISCARDED_A_TURN:]
        if not self.discarded[-1]:
            self.discarded.pop()

    def expire_later(self, row: int) -> None:
        self._expiring.push(
            self._table.expires_ms[row] << _ROW_BITS | row, self._most_entries, self._expires
        )

    def peek(self, owner: int, slot_bytes: int, now_ms: int) -> int:
        """The next block of this owner and size to evict; NO_ROW if there is none, or if the queue
        is `behind`. The block stays queued until it is evicted."""
        queue = self._queues.get(owner, {}).get(slot_bytes)
        if not queue:
            return NO_ROW
        table, moved = self._table, 0
        while (entry := queue.lowest()) >= 0:
            rank, row = entry >> _ROW_BITS, entry & _ROW_MASK
            if table.queued[row] != rank or table.queue_owner[row] != owner:
                queue.drop_lowest()
            elif not self.evictable(row):
                table.queued[row] = -1
                queue.drop_lowest()
            elif self.to_scan and self._current_owner(row) != owner:
                queue.drop_lowest()
                self._push(row, self.rank(row, now_ms))
                moved += 1
                if moved == _MOVED_A_LOOK:
                    return NO_ROW
            else:
                current = self.rank(row, now_ms)
                if current == rank:
                    return row
                table.queued[row] = current
                queue.replace_lowest(current << _ROW_BITS | row)
            self._looks -= 1
            if self._looks <= 0:
                self.behind = owner, slot_bytes
                break
        return NO_ROW

    def catch_up(self, now_ms: int) -> None:
        """Continues to correct the queue that is `behind`."""
        if self.behind is not None:
            behind = self.behind
            self.begin_turn()
            self.peek(*behind, now_ms)

    def begin_turn(self) -> None:
        """Begins a turn: `peek` may look at `looks_a_turn` entries again."""
        self._looks, self.behind = self.looks_a_turn, None

    def peek_any(self, owner: int, now_ms: int) -> int:
        """The next block of this owner to evict, of any size, or NO_ROW."""
        sizes = self._queues.get(owner, {})
        rows = [
            row for slot_bytes in sizes if (row := self.peek(owner, slot_bytes, now_ms)) != NO_ROW
        ]
        return min(rows, key=lambda row: self._table.queued[row], default=NO_ROW)

    def next_after(self, first: int) -> list[int]:
        """Some of the next blocks in the queue that `first` heads, oldest first: the beginning of
        its heap, which is only nearly sorted but costs nothing."""
        table = self._table
        owner = table.queue_owner[first]
        rows = [
            entry & _ROW_MASK
            for entry in self._queues[owner][self._slot_bytes(first)].first(_LOOK_AHEAD)
            if table.queued[entry & _ROW_MASK] == entry >> _ROW_BITS
        ]
        return [row for row in rows if table.queue_owner[row] == owner and self.evictable(row)]

    def move_later(self, tenant: Tenant) -> None:
        """The tenant's blocks belong in other queues from now on. `move` puts them there."""
        if tenant.number >= len(self._is_moving):
            grown = np.zeros(2 * tenant.number, dtype=np.bool_)
            grown[: len(self._is_moving)] = self._is_moving
            self._is_moving = grown
        self._is_moving[tenant.number] = True
        self.to_scan = len(self._table.many.state)

    def is_moving(self, tenant: Tenant) -> bool:
        return (
            self.to_scan > 0
            and tenant.number < len(self._is_moving)
            and bool(self._is_moving[tenant.number])
        )

    def move(self, now_ms: int, most: int) -> None:
        """Puts up to `most` blocks into the queues of their tenants, where these have changed."""
        many = self._table.many
        start = self._scan_at if self._scan_at < len(many.state) else 0
        stop = min(start + _ROWS_A_SCAN, start + self.to_scan, len(many.state))
        here = slice(start, stop)
        numbers = many.tenant[here]
        known = (many.state[here] != FREE) & (numbers < len(self._is_moving))
        moving = self._is_moving[np.where(known, numbers, 0)] & known & (many.queued[here] != -1)
        rows = start + np.flatnonzero(moving)
        for row in rows[:most].tolist():
            self.enqueue(row, now_ms)
        self._scan_at = int(rows[most]) if len(rows) > most else stop
        self.to_scan -= self._scan_at - start
        if not self.to_scan:
            self._is_moving[:] = False

    def note_expired(self, now_ms: int) -> None:
        """Moves blocks whose time to live has run out to the front. Call before looking for
        victims: it begins a turn.

        Some thousand at most: if a million expire at once, the rest waits for the next call.
        """
        self.noted_ms = now_ms
        self.begin_turn()
        for _ in range(_EXPIRED_A_CALL):
            entry = self._expiring.lowest()
            if entry < 0 or entry >> _ROW_BITS > now_ms:
                return
            self._expiring.drop_lowest()
            if self._expires(entry):
                self.enqueue(entry & _ROW_MASK, now_ms)

    @property
    def entries(self) -> int:
        """The number of entries in all queues, stale ones included."""
        queues = (queue for sizes in self._queues.values() for queue in sizes.values())
        return len(self._expiring) + sum(map(len, queues))

    def check_integrity(self) -> None:
        table = self._table
        entries: dict[int, list[tuple[int, int, int]]] = {}
        for owner, sizes in self._queues.items():
            for slot_bytes, queue in sizes.items():
                for entry in queue.entries():
                    entries.setdefault(entry & _ROW_MASK, []).append(
                        (owner, slot_bytes, entry >> _ROW_BITS)
                    )
        for row in table.live_rows().tolist():
            if self.evictable(row):
                live = (table.queue_owner[row], self._slot_bytes(row), table.queued[row])
                tenant = self._tenants.by_number[table.tenant[row]]
                assert live[0] == tenant.owner or self.is_moving(tenant), (
                    f"row {row} waits in another owner's queue"
                )
                assert live in entries.get(row, []), f"row {row} is evictable and in no queue"

    def _expires(self, entry: int) -> bool:
        """Whether the entry is that of a block with this expiry: its row may be another block's by
        now."""
        row = entry & _ROW_MASK
        return self._table.state[row] != FREE and self._table.expires_ms[row] == entry >> _ROW_BITS

    def _current_owner(self, row: int) -> int:
        return self._tenants.by_number[self._table.tenant[row]].owner

    def _slot_bytes(self, row: int) -> int:
        return self._layouts[self._table.layout[row]].slot_bytes

    def _push(self, row: int, rank: int) -> None:
        owner = self._current_owner(row)
        self._table.queued[row] = rank
        self._table.queue_owner[row] = owner
        queue = self._queue(owner, self._slot_bytes(row))
        queue.push(rank << _ROW_BITS | row, self._most_entries, partial(self._is_live, owner))

    def _queue(self, owner: int, slot_bytes: int) -> Queue:
        queues = self._queues.setdefault(owner, {})
        if slot_bytes not in queues:
            queues[slot_bytes] = Queue()
        return queues[slot_bytes]

    @property
    def _most_entries(self) -> int:
        """A queue that is longer has many stale entries: there are fewer blocks."""
        return 2 * len(self._table) + _STALE_SLACK

    def _is_live(self, owner: int, entry: int) -> bool:
        row, table = entry & _ROW_MASK, self._table
        return bool(table.queued[row] == entry >> _ROW_BITS and table.queue_owner[row] == owner)
