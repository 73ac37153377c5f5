"""What waits for a turn: tenants have turns one after the other, so that one tenant's flood delays no
other's, and loses only its own when the queue is full."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FairQueue(Generic[K, V]):
    """At most `most` items, each under a key of its tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_tenant: OrderedDict[str, OrderedDict[K, V]] = OrderedDict()  # the next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tenants(self) -> int:
        return len(self._by_tenant)

    def add(self, tenant: str, key: K, value: V) -> bool:
        """Puts an item behind those of its tenant, also if it is there already. False if the oldest
        item of the tenant that has most had to go."""
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += key not in own
        own[key] = value
        own.move_to_end(key)
        if self._count <= self._most:
            return True
        longest = max(self._by_tenant, key=lambda each: len(self._by_tenant[each]))
        self.remove(longest, next(iter(self._by_tenant[longest])))
        return False

    def get(self, tenant: str, key: K) -> V | None:
        own = self._by_tenant.get(tenant)
        return own.get(key) if own else None

    def next(self) -> tuple[str, K, V]:
        """The item whose turn it is. There is one."""
        tenant, own = next(iter(self._by_tenant.items()))
        key, value = next(iter(own.items()))
        return tenant, key, value

    def served(self, tenant: str) -> None:
        """It had its turn: other tenants come first."""
        if tenant in self._by_tenant:
            self._by_tenant.move_to_end(tenant)

    def remove(self, tenant: str, key: K) -> None:
        own = self._by_tenant[tenant]
        del own[key]
        self._count -= 1
        if not own:
            del self._by_tenant[tenant]

    def put_back(self, tenant: str, key: K) -> None:
        """Behind the others of its tenant."""
        self._by_tenant[tenant].move_to_end(key)

    def clear(self) -> None:
        self._by_tenant.clear()
        self._count = 0
