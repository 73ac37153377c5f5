"""Whose turn it is. Tenants are named by letters; a promotion has so many bytes left."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.server.promotions import PromotionQueue


@dataclass(eq=False)
class Reading:
    tenant: str
    left_bytes: int
    is_prefetch: bool = False

    @property
    def is_over(self) -> bool:
        return not self.left_bytes


def served(queue: PromotionQueue[Reading], turns: int, with_prefetches: bool = True) -> str:
    """The tenants of so many turns; each turn reads one byte. A prefetch is a small letter."""
    names = ""
    for _ in range(turns):
        promotion = queue.next(with_prefetches)
        if promotion is None:
            break
        names += promotion.tenant.lower() if promotion.is_prefetch else promotion.tenant
        promotion.left_bytes -= 1
        queue.served(promotion)
        queue.take_over()
    return names


def queue_of(*promotions: Reading) -> PromotionQueue[Reading]:
    queue = PromotionQueue[Reading]()
    for promotion in promotions:
        queue.add(promotion)
    return queue


def test_tenants_have_turns_however_many_promotions_they_have() -> None:
    queue = queue_of(*(Reading("A", 5) for _ in range(60)), Reading("B", 3), Reading("C", 1))
    assert served(queue, 9) == "ABCABABAA"


def test_promotions_of_a_tenant_have_turns() -> None:
    long, short = Reading("A", 9), Reading("A", 1)
    queue = queue_of(long, short)
    assert served(queue, 2) == "AA"
    assert not short.left_bytes and list(queue) == [long]


def test_prefetches_wait_until_no_request_does() -> None:
    queue = queue_of(Reading("A", 3, is_prefetch=True), Reading("B", 2))
    assert served(queue, 3) == "BBa"
    queue.add(Reading("A", 1))
    assert served(queue, 9) == "Aaa"
    assert not len(queue)


def test_no_prefetch_is_served_if_one_is_being_read() -> None:
    queue = queue_of(Reading("A", 3, is_prefetch=True))
    assert served(queue, 3, with_prefetches=False) == ""


def test_a_tenant_has_a_limit_and_leaves_room_for_others() -> None:
    queue = PromotionQueue[Reading]()
    while queue.has_room("A", is_prefetch=False):
        queue.add(Reading("A", 1))
    assert len(queue.of("A")) == 64
    assert queue.has_room("A", is_prefetch=True) and queue.has_room("B", is_prefetch=False)
    while queue.has_room("A", is_prefetch=True):
        queue.add(Reading("A", 1, is_prefetch=True))
    assert len(queue.of("A")) == 80 and queue.has_room("B", is_prefetch=True)


def test_when_a_promotion_ends() -> None:
    """Its tenant's others have as much as it, other tenants as much as both; prefetches wait."""
    mine = Reading("A", 10)
    queue = queue_of(mine, Reading("A", 30), Reading("B", 100), Reading("B", 100), Reading("C", 5))
    queue.add(Reading("D", 1000, is_prefetch=True))
    assert queue.bytes_until(mine) == 20 + 20 + 5
