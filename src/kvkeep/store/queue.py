"""A priority queue that may hold entries which no longer count, and gets rid of them in pieces.

former  |  heap         `push` puts entries into the heap. When a queue has grown too long, its heap
                        becomes the former one, and each push takes some entries from the end of
                        that: what still counts goes into the new heap
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush

from msgspec import Struct, field

_ENTRIES_A_PUSH = 4  # looked at: a long queue is through after a quarter as many pushes


class Queue(Struct, eq=False, gc=False):
    """Two binary heaps of numbers. Most of the time there is only one. Not tracked by the garbage
    collector: there may be a queue for each of 100,000 tenants."""

    heap: list[int] = field(default_factory=list)
    former: list[int] | None = None

    def __len__(self) -> int:
        return len(self.heap) + len(self.former or ())

    def front(self) -> list[int]:
        """The heap that begins with the lowest entry of all; an empty one if there is none."""
        if not self.former or (self.heap and self.heap[0] <= self.former[0]):
            return self.heap
        return self.former

    def push(self, entry: int, most: int, counts: Callable[[int], bool]) -> None:
        """Adds an entry. A queue with more than `most` loses those that do not count."""
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
