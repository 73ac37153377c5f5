"""Who owns which blocks, how much memory that is, and how much each is promised.

A quota is a promise, not a ceiling: a tenant may use memory that others do not need (it borrows), and gives it back
when somebody entitled to it asks. A tenant without a quota has no promise and only borrows; the tenants without one
share one eviction queue, so with no quotas set at all the pool is one plain LRU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvkeep.errors import RequestError
from kvkeep.store.columns import Columns, PlainColumns
from kvkeep.store.records import TenantRecords, word_of

COMMONS = -1  # owner of the eviction queues that tenants without a quota share


def tenant_word(name: str) -> int:
    """What stands for a tenant in seals."""
    return word_of(name.encode(errors="surrogatepass"))


@dataclass(eq=False)
class Tenant:
    """One tenant. `usage_bytes` is at all times the sum of the slots of its blocks, evicting ones included."""

    name: str
    number: int
    own_quota_bytes: int | None = None
    quota_bytes: int | None = None  # in force: its own, else the default
    usage_bytes: int = 0
    blocks: int = 0
    storing: bool = False  # at work for it right now: not forgotten even if its last block makes way for its next
    index: dict[bytes, int] = field(default_factory=dict)
    word: int = field(init=False)

    def __post_init__(self) -> None:
        self.word = tenant_word(self.name)

    @property
    def owner(self) -> int:
        """Which eviction queues the tenant's blocks are in."""
        return COMMONS if self.quota_bytes is None else self.number

    def may_lose(self, nbytes: int) -> bool:
        """Whether others may take that much from this tenant: never below its quota."""
        return self.quota_bytes is None or self.usage_bytes - nbytes >= self.quota_bytes

    def may_lose_to(self, taker: Tenant, nbytes: int, taken: int) -> bool:
        """Whether that tenant may take that much from this one, having `taken` bytes more itself then. Own quotas fit
        the pool together and default ones need not: a tenant within its own quota takes from those too."""
        return self.may_lose(nbytes) or (self.own_quota_bytes is None and taker.has_own_right_to(taken))

    def has_own_right_to(self, nbytes: int) -> bool:
        """Whether that much more would still be within a quota that is its own, not the default one."""
        return self.own_quota_bytes is not None and self.entitled_to(nbytes)

    def entitled_to(self, nbytes: int) -> bool:
        """Whether that much more would still be within its quota."""
        return self.quota_bytes is not None and self.usage_bytes + nbytes <= self.quota_bytes


class Tenants:
    """All tenants that have blocks or a quota of their own. Others are forgotten, so names cannot pile up."""

    def __init__(self, limit: int, default_quota_bytes: int | None, columns: Columns | None = None) -> None:
        self.limit = limit
        self._records = TenantRecords(columns or PlainColumns())
        self.default_quota_bytes = default_quota_bytes
        self.by_number: dict[int, Tenant] = {}
        self.borrowers: dict[Tenant, None] = {}  # tenants above their quota, in no order that matters
        self.on_default: dict[Tenant, None] = {}  # tenants with blocks whose quota is the default one, likewise
        self._by_name: dict[str, Tenant] = {}
        self._next = 0
        self._free_numbers: list[int] = []  # of tenants that were forgotten
        self._promised_bytes = 0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def get_or_add(self, name: str) -> Tenant:
        tenant = self._by_name.get(name)
        if tenant is not None:
            return tenant
        if len(self._by_name) >= self.limit:
            raise RequestError(
                "too_many_tenants",
                f"{self.limit} tenants hold blocks",
                field="tenant",
                hint="raise --max-tenants",
            )
        if not self._free_numbers:
            self._free_numbers.append(self._next)
            self._next += 1
        number = self._free_numbers.pop()
        self._records.put(number, name)
        return self._add(name, number)

    def names_left(self, numbers: list[int]) -> dict[int, str]:
        """Those of the numbers whose tenants an earlier store has left, with their names, none of them twice."""
        names = {number: name for number in numbers if (name := self._records.get(number)) is not None}
        owners: dict[str, list[int]] = {}
        for number, name in names.items():
            owners.setdefault(name, []).append(number)
        return {number: name for number, name in names.items() if len(owners[name]) == 1}

    def take_over(self, names: dict[int, str]) -> None:
        """These are the tenants that have blocks. Before any was added."""
        for number, name in names.items():
            self._add(name, number)
        self._next = max(names, default=-1) + 1
        self._free_numbers = [number for number in range(self._next) if number not in names]

    def _add(self, name: str, number: int) -> Tenant:
        tenant = Tenant(name, number, quota_bytes=self.default_quota_bytes)
        self._by_name[name] = self.by_number[number] = tenant
        return tenant

    def without_own_quota(self) -> list[int]:
        """The numbers of tenants that were promised nothing by name."""
        return [tenant.number for tenant in self if tenant.own_quota_bytes is None]

    def charge(self, tenant: Tenant, blocks: int, nbytes: int) -> None:
        """Adds (or, negative, takes away) blocks and their bytes."""
        tenant.blocks += blocks
        tenant.usage_bytes += nbytes
        self._note_borrowing(tenant)

    def forget_if_idle(self, tenant: Tenant) -> None:
        idle = not tenant.blocks and tenant.own_quota_bytes is None and not tenant.storing
        if idle and self._by_name.get(tenant.name) is tenant:
            del self._by_name[tenant.name], self.by_number[tenant.number]
            self.borrowers.pop(tenant, None)
            self._free_numbers.append(tenant.number)

    def set_quota(self, tenant: Tenant, quota_bytes: int | None) -> None:
        """Gives the tenant a quota of its own, or with None the default again."""
        self._promised_bytes += (quota_bytes or 0) - (tenant.own_quota_bytes or 0)
        tenant.own_quota_bytes = quota_bytes
        tenant.quota_bytes = self.default_quota_bytes if quota_bytes is None else quota_bytes
        self._note_borrowing(tenant)

    def set_default_quota(self, quota_bytes: int | None) -> None:
        self.default_quota_bytes = quota_bytes
        for tenant in self:
            if tenant.own_quota_bytes is None:
                tenant.quota_bytes = quota_bytes
                self._note_borrowing(tenant)

    def promised_bytes(self, *, without: Tenant | None = None) -> int:
        """The sum of the tenants' own quotas."""
        return self._promised_bytes - ((without.own_quota_bytes or 0) if without else 0)

    def check_integrity(self) -> None:
        assert self._promised_bytes == sum(tenant.own_quota_bytes or 0 for tenant in self)
        for tenant in self:
            over = tenant.quota_bytes is not None and tenant.usage_bytes > tenant.quota_bytes
            assert over == (tenant in self.borrowers), f"{tenant.name}: borrowing is noted wrongly"
            assert tenant.blocks or tenant.own_quota_bytes is not None, f"{tenant.name}: should be forgotten"
            by_default = tenant.blocks > 0 and tenant.own_quota_bytes is None and tenant.quota_bytes is not None
            assert by_default == (tenant in self.on_default), f"{tenant.name}: its default quota is noted wrongly"
        assert all(self._by_name.get(t.name) is t for t in (*self.borrowers, *self.on_default))
        assert sorted([*self.by_number, *self._free_numbers]) == list(range(self._next))

    def _note_borrowing(self, tenant: Tenant) -> None:
        if tenant.quota_bytes is not None and tenant.usage_bytes > tenant.quota_bytes:
            self.borrowers[tenant] = None
        elif self.borrowers:
            self.borrowers.pop(tenant, None)
        if tenant.blocks and tenant.own_quota_bytes is None and tenant.quota_bytes is not None:
            self.on_default[tenant] = None
        elif self.on_default:
            self.on_default.pop(tenant, None)
