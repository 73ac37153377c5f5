"""Files of a simulated disk: what was written since the last sync may be lost, torn or reordered in
a power cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

SECTOR = 512


class PowerCut(Exception):
    """The host is gone, at this very operation."""


class SimulatedFile:
    """A file in memory. It keeps what was written since the last sync apart; a power cut keeps any
    part of that, in sectors. `before` is called before each write and sync, and may raise
    PowerCut."""

    def __init__(self, nbytes: int, before: Callable[[], None] = lambda: None) -> None:
        self.nbytes = nbytes
        self.durable = bytearray(nbytes)
        self.seen = bytearray(nbytes)  # by the running host
        self.unsynced: list[tuple[int, bytes]] = []
        self.under_way = (0, b"")
        self.before = before

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        at = offset
        for view in views:
            part = self.seen[at : at + view.nbytes]
            view.cast("B")[: len(part)] = part
            at += len(part)
        return at - offset

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        data = b"".join(view.tobytes() for view in views)
        assert offset + len(data) <= self.nbytes, "a file never grows"
        self.under_way = (offset, data)
        self.before()
        self.under_way = (0, b"")
        self.unsynced.append((offset, data))
        self.seen[offset : offset + len(data)] = data

    def sync(self) -> None:
        self.before()
        for offset, data in self.unsynced:
            self.durable[offset : offset + len(data)] = data
        self.unsynced.clear()

    def close(self) -> None: ...

    def cut(self, random: Random) -> None:
        """Keeps some sectors of what was not synced, in any order."""
        kept = random.choice((0.0, 0.5, 0.9, 1.0))
        self.unsynced.append(self.under_way)
        sectors = [
            (offset + at, data[at : at + SECTOR])
            for offset, data in self.unsynced
            for at in range(0, len(data), SECTOR)
            if random.random() < kept
        ]
        random.shuffle(sectors)
        for offset, data in sectors:
            self.durable[offset : offset + len(data)] = data
        self.unsynced.clear()
        self.seen = bytearray(self.durable)
