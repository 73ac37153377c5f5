"""Which blocks have come and gone, for engines that publish that to routers.

    store ─ came, left ─► ring of addresses ─► since ─► engine
    engine ─ describe ──► descriptions ────────┘

The ring says where to look, not what has happened: an answer is what the indexes have at that
moment. So a block that was stored and evicted in between is told as gone once, and an engine that
misses changes asks for all blocks, page by page (`content`), and then for the changes since.

Descriptions are prompts and salts. They are in this process's memory only, go with their block, and
are never logged nor shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.store.layouts import Layout
from kvkeep.store.store import Store
from kvkeep.store.table import NO_ROW, READY, WORDS_A_KEY
from kvkeep.store.tree import split_keys
from kvkeep.wire import messages as m

MOST_CHANGES = 1 << 17  # that an engine may be behind
MOST_DESCRIBED_BYTES = 256 << 20
_ENTRY_BYTES = 256  # what a description takes besides its own bytes
_MOST_OWNERS = 4096  # tenants and layouts in the ring
_CHANGES_A_LOOK = 4096
_PARTS = 128
_ROWS_A_LOOK = 1 << 17
_BLOCKS_A_REPLY = 512
_BYTES_A_REPLY = 1 << 18
_CURSOR_BITS = 40  # of the row; those above are the number of the store

MayName = Callable[[str], bool]  # whether an engine hears of a tenant


class PoolEvents:
    """For the server's loop. `stores` are the indexes: that of memory, then those of disks that are
    in use."""

    def __init__(self, stores: Callable[[], Sequence[Store]]) -> None:
        self._find_stores = stores
        self._stores: Sequence[Store] = ()
        self._words: NDArray[np.uint64] = np.zeros((MOST_CHANGES, WORDS_A_KEY), dtype=np.uint64)
        self._by: NDArray[np.int32] = np.zeros(MOST_CHANGES, dtype=np.int32)
        self._first = self._next = 0  # changes: the oldest that is told, and the next one
        self._owners: dict[tuple[str, bytes], int] = {}
        # In parts, because Python copies a dictionary that grows in one go (store/key_index.py).
        self._parts: list[dict[bytes, bytes]] = [{} for _ in range(_PARTS)]
        self._described_bytes = 0

    # -- what stores tell (kvkeep.store.blocks.BlockChanges)

    def came(self, tenant: str, layout: Layout, words: NDArray[np.uint64]) -> None:
        owner = (tenant, layout.fingerprint)
        number = self._owners.setdefault(owner, len(self._owners))
        if number >= _MOST_OWNERS:
            self._start_over()
            number = self._owners.setdefault(owner, 0)
        start, stop = self._next, self._next + len(words)
        at: Any = start % MOST_CHANGES
        if len(words) > 1:  # one by one takes a tenth
            at = np.arange(start, stop) % MOST_CHANGES
        self._words[at] = words
        self._by[at] = number
        self._next = stop
        self._first = max(self._first, self._next - MOST_CHANGES)

    def left(self, tenant: str, layout: Layout, words: NDArray[np.uint64]) -> None:
        self.came(tenant, layout, words)
        for address in split_keys(words.tobytes()):
            if address in self._part(address) and not self._is_known(tenant, address):
                self._forget(address)

    # -- what engines ask

    def describe(self, tenant: str, layout: Layout, keys: bytes, texts: Sequence[bytes]) -> int:
        """Keeps descriptions of these addresses, as far as their blocks are there and there is
        room. Returns how many."""
        self._follow_stores()
        blocks = split_keys(keys)
        if len(blocks) != len(texts):
            problem = f"{len(texts)} descriptions of {len(blocks)} blocks"
            raise RequestError("bad_descriptions", problem, field="descriptions")
        kept: list[bytes] = []
        for address, text in zip(blocks, texts, strict=True):
            nbytes = len(text) + _ENTRY_BYTES
            if not text or not self._is_known(tenant, address):
                continue
            self._forget(address)
            if self._described_bytes + nbytes <= MOST_DESCRIBED_BYTES:
                self._part(address)[address] = text
                self._described_bytes += nbytes
                kept.append(address)
        if kept:
            words = np.frombuffer(b"".join(kept), dtype=np.uint64).reshape(-1, WORDS_A_KEY)
            self.came(tenant, layout, words)
        return len(kept)

    def since(self, after: int, fingerprint: bytes, may_name: MayName) -> m.PoolChanges:
        """The blocks of a layout that have changed after change `after`. Some of them, if they are
        many: their `after` asks for the next ones."""
        self._follow_stores()
        if not self._first <= after <= self._next:
            return m.PoolChanges(self._next, cursor=0)
        stop = min(self._next, after + _CHANGES_A_LOOK)
        places = np.arange(after, stop) % MOST_CHANGES
        by = self._by[places]
        names = list(self._owners)  # in the order of their numbers
        is_wanted = np.zeros(len(names), dtype=np.bool_)
        for number in set(by.tolist()):
            tenant, of_layout = names[number]
            is_wanted[number] = of_layout == fingerprint and may_name(tenant)
        found = np.flatnonzero(is_wanted[by])
        if len(found) > _BLOCKS_A_REPLY:
            stop = after + int(found[_BLOCKS_A_REPLY])
            found = found[:_BLOCKS_A_REPLY]
        blocks = split_keys(self._words[places[found]].tobytes())
        tenants = [names[number][0] for number in by[found].tolist()]
        told, shown = self._look_at(zip(blocks, tenants, strict=True), with_gone=True)
        if told < len(found):
            stop = after + int(found[told])
        return m.PoolChanges(stop, **shown)

    def content(
        self, after: int, cursor: int, fingerprint: bytes, may_name: MayName
    ) -> m.PoolChanges:
        """The next blocks of a layout that are there, from `cursor` on."""
        self._follow_stores()
        number, start = cursor >> _CURSOR_BITS, cursor & ((1 << _CURSOR_BITS) - 1)
        if number >= len(self._stores):
            return m.PoolChanges(after)
        store = self._stores[number]
        many = store.blocks.table.many
        stop = min(start + _ROWS_A_LOOK, len(many.state))
        here = slice(start, stop)
        layout = next((each.number for each in store.layouts if each.fingerprint == fingerprint), 0)
        is_there = (many.state[here] == READY) & (many.layout[here] == layout)
        found = start + np.flatnonzero(is_there)
        if len(found) > _BLOCKS_A_REPLY:
            stop, found = int(found[_BLOCKS_A_REPLY]), found[:_BLOCKS_A_REPLY]
        names = [store.tenants.by_number[each].name for each in many.tenant[found].tolist()]
        blocks = split_keys(store.blocks.table.keys.words[found].tobytes())
        may = {name: may_name(name) for name in set(names)}
        wanted = [at for at, name in enumerate(names) if may[name]]
        told, shown = self._look_at(((blocks[at], names[at]) for at in wanted), with_gone=False)
        if told < len(wanted):
            stop = int(found[wanted[told]])
        is_last_row = stop >= len(many.state)
        following = (number + 1) << _CURSOR_BITS if is_last_row else number << _CURSOR_BITS | stop
        if is_last_row and number + 1 == len(self._stores):
            following = -1
        return m.PoolChanges(after, cursor=following, **shown)

    # -- inside

    def _look_at(
        self, blocks: Iterable[tuple[bytes, str]], *, with_gone: bool
    ) -> tuple[int, dict[str, Any]]:
        """Where blocks are now, and their descriptions, as many as fit into a reply: at least one.
        Returns how many were looked at, and the fields of PoolChanges."""
        told: dict[bytes, int] = {}
        texts: list[bytes] = []
        looked, nbytes = 0, 0
        for address, tenant in blocks:
            if nbytes >= _BYTES_A_REPLY:
                break
            looked += 1
            media = 0 if address in told else self._media(tenant, address)
            if address in told or not (media or with_gone):
                continue
            text = self._part(address).get(address, b"") if media else b""
            told[address] = media
            texts.append(text)
            nbytes += len(text)
        media_of_all = bytes(told.values())
        return looked, {"addresses": b"".join(told), "media": media_of_all, "descriptions": texts}

    def _media(self, tenant: str, address: bytes) -> int:
        media, place = 0, m.IN_MEMORY
        for store in self._stores:
            owner = store.tenants.get(tenant)
            row = owner.index.get(address) if owner else NO_ROW
            if row != NO_ROW and store.blocks.table.state[row] == READY:
                media |= place
            place = m.ON_DISK
        return media

    def _is_known(self, tenant: str, address: bytes) -> bool:
        """Whether some index has the block, also one that is being written."""
        for store in self._stores:
            owner = store.tenants.get(tenant)
            if owner is not None and owner.index.get(address) != NO_ROW:
                return True
        return False

    def _part(self, address: bytes) -> dict[bytes, bytes]:
        return self._parts[hash(address) & (_PARTS - 1)]

    def _forget(self, address: bytes) -> None:
        text = self._part(address).pop(address, None)
        if text is not None:
            self._described_bytes -= len(text) + _ENTRY_BYTES

    def _follow_stores(self) -> None:
        """A disk that is set aside has nothing any more: all engines ask for all blocks, and
        describe theirs again."""
        stores = self._find_stores()
        if stores == self._stores:
            return
        if any(store not in stores for store in self._stores):
            self._parts, self._described_bytes = [{} for _ in range(_PARTS)], 0
        self._stores = stores
        for store in stores:
            store.blocks.changes = self
        self._start_over()

    def _start_over(self) -> None:
        """All engines have missed something."""
        self._owners.clear()
        self._next += 1
        self._first = self._next
