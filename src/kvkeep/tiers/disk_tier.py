"""A disk as a `Tier`: the files and the index of a disk, for callers that may wait for it.

The server does not use it: it plans in its loop and leaves the waiting to the mover."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np

from kvkeep.errors import TierError
from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.layouts import SLOT_ALIGN, Layout
from kvkeep.store.table import NO_ROW
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskAppend, DiskHit, DiskIndex, DiskWrite
from kvkeep.tiers.tier import Part, Usage
from kvkeep.units import MIB


class DiskTier:
    """Owns the files, and closes them. `index` is that of these files."""

    best_bytes = MIB

    def __init__(self, files: DiskFiles, index: DiskIndex) -> None:
        self._files = files
        self._index = index
        self._planning = threading.Lock()  # of the index; not held during I/O
        self._committing = threading.Lock()

    def leading(self, names: Sequence[str]) -> int:
        for position, name in enumerate(names):
            with self._found(name) as (_, hit):
                if hit is None:
                    return position
        return len(names)

    def read(self, parts: Sequence[Part]) -> list[int]:
        return [self._read(part) for part in parts]

    def write(self, parts: Sequence[Part]) -> list[bool]:
        planned: list[DiskWrite] = []
        kept: list[bool] = []
        try:
            for part in parts:
                plan = self._plan(part)
                if plan is not None:
                    planned.append(plan)
                    self._files.write(int(plan.offsets[0]), [_padded(part)])
                kept.append(plan is not None or bool(self.leading([part.name])))
            self._commit(planned)
        except OSError as error:
            with self._planning:
                for plan in planned:
                    self._index.failed(plan.number, _now_ms())
            raise TierError(f"the disk failed: {error}", "look at the device") from error
        return kept

    def delete(self, prefix: str) -> int:
        with self._planning:
            places = [each.name for each in self._index.store.tenants]
            count = sum(
                self._index.clear(place) for place in places if f"{place}/".startswith(prefix)
            )
            while self._index.store.tidy(_now_ms()):
                pass
            append = self._index.take_records()
        if append is not None:
            try:
                self._commit([append])
            except OSError as error:
                with self._planning:
                    self._index.failed(append.number, _now_ms())
                raise TierError(f"the disk failed: {error}", "look at the device") from error
        return count

    def usage(self) -> Usage:
        with self._planning:
            store = self._index.store
            used = sum(layout.blocks * layout.slot_bytes for layout in store.layouts)
            return Usage(len(store.blocks.table), used, store.slabs.capacity_bytes)

    def close(self) -> None:
        self._files.close()

    def _plan(self, part: Part) -> DiskWrite | None:
        place, key = _split(part.name)
        data = _padded(part)[: part.nbytes]
        shape = Layout(0, str(part.nbytes).encode(), (part.nbytes,))
        checks = np.array([[checksum(data)]], np.uint64)
        with self._planning:
            return self._index.plan_write(place, shape, b"", key, checks, _now_ms())

    def _commit(self, plans: Sequence[DiskWrite | DiskAppend]) -> None:
        with self._committing:
            self._files.sync_data()
            self._files.append(b"".join(plan.record for plan in plans))
            self._files.sync_log()
        with self._planning:
            for plan in plans:
                self._index.wrote(plan.number, _now_ms())

    @contextmanager
    def _found(self, name: str) -> Iterator[tuple[Layout | None, DiskHit | None]]:
        """The block of this name and its layout, leased."""
        place, key = _split(name)
        with self._planning:
            store = self._index.store
            owner, layout, hit = store.tenants.get(place), None, None
            row = owner.index.get(key) if owner else NO_ROW
            if row != NO_ROW:
                layout = store.layouts[store.blocks.table.layout[row]]
                hit = self._index.find(place, layout, key, 0, _now_ms())
        try:
            yield layout, hit
        finally:
            if hit is not None:
                with self._planning:
                    self._index.release(hit.number, _now_ms())

    def _read(self, part: Part) -> int:
        with self._found(part.name) as (layout, hit):
            if layout is None or hit is None:
                return -1
            nbytes = layout.shard_bytes[0]
            with mmap.mmap(-1, layout.slot_bytes) as memory, memoryview(memory) as data:
                try:
                    self._files.read(int(hit.offsets[0]), [data])
                except OSError as error:
                    raise TierError(f"the disk failed: {error}", "look at the device") from error
                with data[:nbytes] as block:
                    if checksum(block) == int(hit.checksums[0, 0]):
                        return _fill(part, block)
        with self._planning:
            self._index.drop([_split(part.name)])
        return -1


def _split(name: str) -> tuple[str, bytes]:
    """Place and key of a name."""
    place, _, key = name.rpartition("/")
    return place, blake2b(key.encode(), digest_size=KEY_BYTES).digest()


def _padded(part: Part) -> memoryview:
    """The bytes of a part in one piece, up to a whole slot."""
    data = bytearray(-(-max(part.nbytes, 1) // SLOT_ALIGN) * SLOT_ALIGN)
    at = 0
    for view in part.views:
        data[at : at + view.nbytes] = view
        at += view.nbytes
    return memoryview(data)


def _fill(part: Part, block: memoryview) -> int:
    at = part.offset
    for view in part.views:
        some = block[at : at + view.nbytes]
        view[: some.nbytes] = some
        at += some.nbytes
        some.release()
    return max(0, at - part.offset)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
