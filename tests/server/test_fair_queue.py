"""Turns of tenants. Tenants are named by letters."""

from __future__ import annotations

from kvkeep.server.fair_queue import FairQueue


def served(queue: FairQueue[int, None], turns: int) -> str:
    names = ""
    while queue and len(names) < turns:
        tenant, key, _ = queue.next()
        queue.remove(tenant, key)
        queue.served(tenant)
        names += tenant
    return names


def queue_of(most: int, tenants: str) -> FairQueue[int, None]:
    queue = FairQueue[int, None](most)
    for number, tenant in enumerate(tenants):
        queue.add(tenant, number, None)
    return queue


def test_tenants_have_turns_however_much_waits() -> None:
    assert served(queue_of(99, "A" * 60 + "BBBC"), 9) == "ABCABABAA"


def test_what_waits_longest_is_first_and_what_is_added_again_is_last() -> None:
    queue = queue_of(99, "AAA")
    assert queue.add("A", 0, None) and len(queue) == 3
    assert [queue.next()[1], served(queue, 1), queue.next()[1]] == [1, "A", 2]
    queue.put_back("A", 2)
    assert queue.next()[1] == 0


def test_a_flood_loses_its_own() -> None:
    queue = queue_of(10, "AB" + "C" * 8)
    assert not queue.add("C", 10, None) and not queue.add("D", 11, None)
    assert len(queue) == 10 and queue.tenants == 4
    assert served(queue, 10) == "ABCDCCCCCC"
    assert not queue and not queue.tenants
