"""A queue hands out its lowest entry first, and loses what no longer counts a few entries at a
time."""

from __future__ import annotations

from heapq import heappop
from random import Random

from kvkeep.store.queue import Queue


def pop_all(queue: Queue) -> list[int]:
    popped = []
    while heap := queue.front():
        popped.append(heappop(heap))
    return popped


def test_a_long_queue_gets_shorter_a_few_entries_a_push() -> None:
    queue, looked_at = Queue(), list[int]()

    def counts(entry: int) -> bool:
        looked_at.append(entry)
        return entry >= 10_000

    for entry in range(10_000):
        queue.push(entry, 100_000, counts)
    assert not looked_at
    for entry in range(10_000, 14_000):
        before = len(looked_at)
        queue.push(entry, 9_000, counts)
        assert len(looked_at) - before <= 4
    assert pop_all(queue) == list(range(10_000, 14_000))


def test_the_order_holds_while_a_queue_gets_shorter() -> None:
    chance, queue = Random(2), Queue()
    entries = chance.sample(range(1 << 40), 3000)
    for entry in entries[:2500]:
        queue.push(entry, 5000, lambda _: True)
    for entry in entries[2500:]:
        queue.push(entry, 1000, lambda _: True)
    assert queue.former and queue.heap and len(queue) == 3000
    assert pop_all(queue) == sorted(entries)
