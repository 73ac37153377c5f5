"""Whose turn it is to read from a tier.

Promotions that a request waits for come first, one job for each tenant in turn, so that one tenant's
many or long promotions delay no other's. Prefetches are served when no request waits. A promotion
whose tier is still asked what it has is in the queue, has no bytes left, and is not over."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

_MOST_OF_A_TENANT = 64
_MOST_PREFETCHES_OF_A_TENANT = 16
_MOST_WAITING = 1024


class Waiting(Protocol):
    """What the queue knows of a promotion."""

    tenant: str
    is_prefetch: bool  # no request waits for it

    @property
    def left_bytes(self) -> int: ...

    @property
    def is_over(self) -> bool: ...


P = TypeVar("P", bound=Waiting)


class PromotionQueue(Generic[P]):
    """The promotions of one tier."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[P]] = OrderedDict()  # the next tenant first

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[P]:
        return chain.from_iterable(self._by_tenant.values())

    def of(self, tenant: str) -> list[P]:
        return list(self._by_tenant.get(tenant, ()))

    def has_room(self, tenant: str, is_prefetch: bool) -> bool:
        """Whether the tenant may have one more."""
        most = _MOST_PREFETCHES_OF_A_TENANT if is_prefetch else _MOST_OF_A_TENANT
        same = sum(each.is_prefetch == is_prefetch for each in self.of(tenant))
        return same < most and len(self) < _MOST_WAITING

    def add(self, promotion: P) -> None:
        self._by_tenant.setdefault(promotion.tenant, deque()).append(promotion)

    def next(self, with_prefetches: bool) -> P | None:
        """The promotion to be read next."""
        for is_prefetch in (False, True) if with_prefetches else (False,):
            for each in self:
                if each.is_prefetch == is_prefetch and each.left_bytes:
                    return each
        return None

    def served(self, promotion: P) -> None:
        """It had its turn: other tenants come first, and others of this tenant."""
        own = self._by_tenant[promotion.tenant]
        own.remove(promotion)
        own.append(promotion)
        self._by_tenant.move_to_end(promotion.tenant)

    def take_over(self) -> list[P]:
        """Removes those that are over."""
        over = [each for each in self if each.is_over]
        for promotion in over:
            own = self._by_tenant[promotion.tenant]
            own.remove(promotion)
            if not own:
                del self._by_tenant[promotion.tenant]
        return over

    def bytes_until(self, promotion: P) -> int:
        """How many bytes are read until it ends, those of others included: another promotion of the
        tenant has as much of them as it, another tenant as much as this one."""
        own = self._left(promotion.tenant, promotion)
        others = [name for name in self._by_tenant if name != promotion.tenant]
        return own + sum(min(own, self._left(name, promotion)) for name in others)

    def _left(self, tenant: str, promotion: P) -> int:
        return sum(
            min(each.left_bytes, promotion.left_bytes)
            if tenant == promotion.tenant
            else each.left_bytes
            for each in self._by_tenant[tenant]
            if promotion.is_prefetch or not each.is_prefetch
        )
