"""The memory of each tenant: what it uses, what it is promised (quota), and the most that it may use
(limit).

A quota is a promise: a tenant may borrow memory that others do not need, and loses it when an
entitled tenant stores. A limit is a ceiling: a tenant never uses more, even if memory is free. A
tenant without a quota only borrows. Tenants without quota and limit share one eviction queue, so
without any setting the pool is a plain LRU.

    limit in force   the tenant's own, else the default; None: no limit
    quota in force   the tenant's own, else the default; at most the limit. If the own quotas
                     together exceed the pool, each is scaled down by pool / sum of all

A block with a lease or write, and each of its ancestors, is *held* and cannot be evicted. A tenant
may hold as much as its own quota. What all tenants hold beyond that fits into the memory that no own
quota promises (`may_hold`), so each own quota is available whatever the others hold."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct, field

from kvkeep.errors import RequestError
from kvkeep.store.key_index import KeyIndex
from kvkeep.store.records import TenantRecords, word_of
from kvkeep.store.table import Columns, PlainColumns

COMMONS = -1  # owner of the eviction queues shared by tenants without quota and limit
_UNBOUNDED = 1 << 62


def tenant_word(name: str) -> int:
    """The word that stands for a tenant in seals."""
    return word_of(name.encode(errors="surrogatepass"))


class Tenant(Struct, eq=False, gc=False):
    """One tenant. `usage_bytes` is at all times the sum of the slots of its blocks, evicting ones
    included.

    Not tracked by the garbage collector: to look at 100,000 tenants in one go took it 130 ms.
    """

    name: str
    number: int
    own_quota_bytes: int | None = None  # as an operator set it
    quota_bytes: int | None = None  # in force
    own_limit_bytes: int | None = None
    limit_bytes: int | None = None  # in force
    usage_bytes: int = 0
    blocks: int = 0
    unindexed_bytes: int = 0  # of its EVICTING blocks, which no lookup finds
    held_bytes: int = 0  # of its blocks with leases or writes, and of their ancestors
    share_bytes: int = 0  # its own quota in force: what it may hold in any case
    cleared: int = 0  # its old indices that are not swept yet
    defaults: int = 0  # after which change for all tenants its quota and limit were computed
    # stores under way, and slabs being emptied for them: the tenant is not forgotten meanwhile, even
    # if its last block is evicted for the next
    storing: int = 0
    index: KeyIndex = field(default_factory=KeyIndex)
    word: int = 0

    def __post_init__(self) -> None:
        self.word = tenant_word(self.name)

    @property
    def owner(self) -> int:
        """Which eviction queues the tenant's blocks are in."""
        return COMMONS if self.quota_bytes is None and self.limit_bytes is None else self.number

    @property
    def is_named(self) -> bool:
        """Whether an operator has set something for this tenant. Such a tenant is never
        forgotten."""
        return self.own_quota_bytes is not None or self.own_limit_bytes is not None

    @property
    def excess_bytes(self) -> int:
        """What the tenant holds beyond its share."""
        return max(0, self.held_bytes - self.share_bytes)

    @property
    def is_over_limit(self) -> bool:
        """True only after the limit was lowered, until enough blocks are evicted."""
        return self.limit_bytes is not None and self.usage_bytes > self.limit_bytes

    def may_lose(self, nbytes: int) -> bool:
        """Whether others may take `nbytes` from this tenant without undercutting its quota."""
        return self.quota_bytes is None or self.usage_bytes - nbytes >= self.quota_bytes

    def may_lose_to(self, taker: Tenant, nbytes: int, taken: int) -> bool:
        """Whether `taker` may take `nbytes` from this tenant, to use `taken` bytes more itself. A
        tenant within its own quota may also undercut default quotas: own quotas fit the pool
        together, default ones need not."""
        return self.may_lose(nbytes) or (
            self.own_quota_bytes is None and taker.has_own_right_to(taken)
        )

    def has_own_right_to(self, nbytes: int) -> bool:
        """Whether `nbytes` more would be within the tenant's own quota."""
        return self.own_quota_bytes is not None and self.entitled_to(nbytes)

    def entitled_to(self, nbytes: int) -> bool:
        """Whether `nbytes` more would be within the tenant's quota."""
        return self.quota_bytes is not None and self.usage_bytes + nbytes <= self.quota_bytes


class Tenants:
    """All tenants with blocks, or with a quota or limit of their own; `limit` of them at most. Others
    are forgotten."""

    def __init__(
        self,
        limit: int,
        default_quota_bytes: int | None,
        columns: Columns | None = None,
        pool_bytes: int = _UNBOUNDED,
    ) -> None:
        self.limit = limit
        self.pool_bytes = pool_bytes
        self._records = TenantRecords(columns or PlainColumns())
        self.default_quota_bytes = default_quota_bytes  # as set; see default_in_force
        self.default_limit_bytes: int | None = None
        self.by_number: dict[int, Tenant] = {}
        # Tenants with a queue of their own that may lose blocks to others, in any order: those
        # above their quota, and those with blocks and a limit but no quota.
        self.borrowers: dict[Tenant, None] = {}
        # tenants with blocks and the default quota, in any order
        self.on_default: dict[Tenant, None] = {}
        # Tenants that a new tenant may replace, the one that was held longest ago first: those with
        # blocks but without held ones, and without a quota or limit of their own.
        self.idle: dict[Tenant, None] = {}
        # replaced tenants that still have blocks
        self.leaving: dict[Tenant, None] = {}
        # tenants over a limit that was lowered
        self.to_shrink: dict[Tenant, None] = {}
        self.to_update = 0  # tenants with lower numbers may still have old quotas and limits
        # called when the blocks of a tenant belong in other eviction queues
        self.on_moved: Callable[[Tenant], None] = lambda tenant: None
        self.reserved_bytes = 0  # the sum of all shares
        self._excess_bytes = 0  # the sum of what all tenants hold beyond their shares
        self._defaults = 0
        self._by_name: dict[str, Tenant] = {}
        self._next = 0
        self._free_numbers: list[int] = []  # of tenants that were forgotten
        self._promised_bytes = 0
        self.in_force_bytes = 0  # the sum of all quotas in force
        self._usage = array("q")  # in bytes, by number; -1 where no tenant has the number
        # own quotas of tenants without a limit of their own, by number; else 0
        self._unlimited = array("q")

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def numbers(self) -> int:
        """All numbers of tenants are lower."""
        return self._next

    def names(self) -> list[str]:
        """The names of all tenants."""
        return list(self._by_name)

    def unlimited_above(self, nbytes: int) -> int:
        """How many tenants have an own quota of more than that, and no limit of their own."""
        return int((np.array(self._unlimited) > nbytes).sum())

    def largest(self, most: int) -> list[Tenant]:
        """Up to `most` tenants that use the most memory, the largest first."""
        usage = np.array(self._usage)
        numbers = np.flatnonzero(usage >= 0)
        if most < len(numbers):
            numbers = numbers[np.argpartition(usage[numbers], -most)[-most:]]
        numbers = numbers[np.argsort(-usage[numbers], kind="stable")]
        return [self.by_number[number] for number in numbers.tolist()]

    def get(self, name: str) -> Tenant | None:
        tenant = self._by_name.get(name)
        if tenant is not None and tenant.defaults != self._defaults:
            self._put_in_force(tenant)
        return tenant

    def has_place(self, name: str) -> bool:
        """Whether the tenant is known or may be added."""
        tenant = self._by_name.get(name)
        is_known = tenant is not None and tenant not in self.leaving
        return is_known or len(self._by_name) - len(self.leaving) < self.limit

    def get_or_add(self, name: str) -> Tenant:
        has_place, tenant = self.has_place(name), self.get(name)
        if tenant is not None and has_place:
            if tenant in self.leaving:
                del self.leaving[tenant]
                self._note_idle(tenant)
            return tenant
        if not has_place:
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
        """The names that an earlier store left for these numbers. Names that appear twice are left
        out."""
        names = {
            number: name for number in numbers if (name := self._records.get(number)) is not None
        }
        owners: dict[str, list[int]] = {}
        for number, name in names.items():
            owners.setdefault(name, []).append(number)
        return {number: name for number, name in names.items() if len(owners[name]) == 1}

    def take_over(self, names: dict[int, str]) -> None:
        """Adds the tenants that an earlier store left. Before any other is added."""
        for number, name in names.items():
            self._add(name, number)
        self._next = max(names, default=-1) + 1
        self._free_numbers = [number for number in range(self._next) if number not in names]

    def _add(self, name: str, number: int) -> Tenant:
        tenant = Tenant(name, number)
        while number >= len(self._usage):
            self._usage.append(-1)
            self._unlimited.append(0)
        self._usage[number] = 0
        self._by_name[name] = self.by_number[number] = tenant
        self._put_in_force(tenant)
        return tenant

    def make_way(self) -> Tenant | None:
        """Chooses the tenant that a new one replaces; None if each holds blocks or has a quota or
        limit of its own."""
        coldest = next(iter(self.idle), None)
        if coldest is not None:
            self.leaving[coldest] = None
            self._note_idle(coldest)
        return coldest

    def may_hold(self, tenant: Tenant | None, capacity_bytes: int) -> int:
        """How much more a tenant may hold: what is left of its share, and of the memory that no
        share reserves. None stands for a new tenant."""
        of_share = 0 if tenant is None else max(0, tenant.share_bytes - tenant.held_bytes)
        return of_share + max(0, capacity_bytes - self.reserved_bytes - self._excess_bytes)

    def hold(self, tenant: Tenant, nbytes: int) -> None:
        """Adds to what the tenant holds; a negative number subtracts."""
        before = tenant.excess_bytes
        tenant.held_bytes += nbytes
        self._excess_bytes += tenant.excess_bytes - before
        self._note_idle(tenant)

    def limit_of(self, name: str) -> int | None:
        """The limit in force for a tenant, known or not."""
        tenant = self.get(name)
        return self.default_limit_bytes if tenant is None else tenant.limit_bytes

    def charge(self, tenant: Tenant, blocks: int, nbytes: int) -> None:
        """Adds blocks and their bytes; negative numbers subtract."""
        tenant.blocks += blocks
        tenant.usage_bytes += nbytes
        self._usage[tenant.number] = tenant.usage_bytes
        self._note_borrowing(tenant)
        self._note_idle(tenant)

    def forget_if_idle(self, tenant: Tenant) -> None:
        idle = not tenant.blocks and not tenant.is_named and not tenant.storing
        if idle and self._by_name.get(tenant.name) is tenant:
            del self._by_name[tenant.name], self.by_number[tenant.number]
            for noted in (self.borrowers, self.idle, self.leaving, self.to_shrink):
                noted.pop(tenant, None)
            self._free_numbers.append(tenant.number)
            self._usage[tenant.number] = -1
            self.in_force_bytes -= tenant.quota_bytes or 0

    def set_quota(self, tenant: Tenant, quota_bytes: int | None) -> None:
        """Sets the tenant's own quota; None: the default again. While own quotas exceed the pool,
        this changes all quotas in force."""
        was_scaled = self.is_scaled
        self._promised_bytes += (quota_bytes or 0) - (tenant.own_quota_bytes or 0)
        tenant.own_quota_bytes = quota_bytes
        if was_scaled or self.is_scaled:
            self._change_all()
        self._put_in_force(tenant)

    def set_default_quota(self, quota_bytes: int | None) -> None:
        self.default_quota_bytes = quota_bytes
        self._change_all()

    def set_limit(self, tenant: Tenant, limit_bytes: int | None) -> None:
        """Sets the tenant's own limit; None: the default again."""
        tenant.own_limit_bytes = limit_bytes
        self._put_in_force(tenant)

    def set_default_limit(self, limit_bytes: int | None) -> None:
        self.default_limit_bytes = limit_bytes
        self._change_all()

    def update(self, most: int) -> int:
        """Puts what has changed for all tenants in force for up to `most` of them without a request
        since. Returns how many numbers of tenants it has looked at; 0 when all are done."""
        stop, self.to_update = self.to_update, max(0, self.to_update - most)
        for number in range(self.to_update, stop):
            tenant = self.by_number.get(number)
            if tenant is not None and tenant.defaults != self._defaults:
                self._put_in_force(tenant)
        return stop - self.to_update

    @property
    def is_scaled(self) -> bool:
        """Whether the own quotas together exceed the pool and are scaled down."""
        return self._promised_bytes > self.pool_bytes

    @property
    def default_in_force(self) -> int | None:
        """The quota of a tenant without quota and limit of its own."""
        caps = [cap for cap in (self.default_limit_bytes, self.pool_bytes) if cap is not None]
        return None if self.default_quota_bytes is None else min(self.default_quota_bytes, *caps)

    def promised_bytes(self, *, without: Tenant | None = None) -> int:
        """The sum of the tenants' own quotas, as they were set."""
        return self._promised_bytes - ((without.own_quota_bytes or 0) if without else 0)

    def check_integrity(self) -> None:
        assert self._promised_bytes == sum(tenant.own_quota_bytes or 0 for tenant in self)
        for tenant in self:
            assert self._borrows(tenant) == (tenant in self.borrowers), (
                f"{tenant.name}: borrowing is noted wrongly"
            )
            assert tenant.blocks or tenant.is_named or tenant.storing, (
                f"{tenant.name}: should be forgotten"
            )
            idle = (
                tenant.blocks > 0
                and not tenant.held_bytes
                and not tenant.is_named
                and tenant not in self.leaving
            )
            assert idle == (tenant in self.idle), (
                f"{tenant.name}: whether it may make way is noted wrongly"
            )
            own = tenant.quota_bytes if tenant.own_quota_bytes is not None else 0
            assert tenant.share_bytes == own, f"{tenant.name}: its share"
            promised = tenant.own_quota_bytes if tenant.own_limit_bytes is None else 0
            assert self._unlimited[tenant.number] == (promised or 0)
            by_default = (
                tenant.blocks > 0
                and tenant.own_quota_bytes is None
                and tenant.quota_bytes is not None
            )
            assert by_default == (tenant in self.on_default), (
                f"{tenant.name}: its default quota is noted wrongly"
            )
        in_force = sum(
            tenant.quota_bytes or 0 for tenant in self if tenant.own_quota_bytes is not None
        )
        assert self.to_update or in_force <= self.pool_bytes, "own quotas in force exceed the pool"
        assert self.reserved_bytes == sum(tenant.share_bytes for tenant in self)
        assert self.in_force_bytes == sum(tenant.quota_bytes or 0 for tenant in self)
        usage = {number: nbytes for number, nbytes in enumerate(self._usage) if nbytes >= 0}
        assert usage == {tenant.number: tenant.usage_bytes for tenant in self}, "usage by number"
        assert self._excess_bytes == sum(tenant.excess_bytes for tenant in self)
        noted = (
            *self.borrowers,
            *self.on_default,
            *self.idle,
            *self.leaving,
            *self.to_shrink,
        )
        assert all(self._by_name.get(tenant.name) is tenant for tenant in noted)
        assert sorted([*self.by_number, *self._free_numbers]) == list(range(self._next))

    def _change_all(self) -> None:
        """The quotas and limits of all tenants may have changed: they are put in force with their
        next request, or by `update`."""
        self._defaults += 1
        self.to_update = self._next

    def _put_in_force(self, tenant: Tenant) -> None:
        owner, excess = tenant.owner, tenant.excess_bytes
        tenant.defaults = self._defaults
        limit = (
            self.default_limit_bytes if tenant.own_limit_bytes is None else tenant.own_limit_bytes
        )
        quota = tenant.own_quota_bytes
        if quota is None and self.default_quota_bytes is not None:
            quota = min(self.default_quota_bytes, self.pool_bytes)
        elif quota is not None and self.is_scaled:
            quota = quota * self.pool_bytes // self._promised_bytes
        tenant.limit_bytes = limit
        self.in_force_bytes -= tenant.quota_bytes or 0
        tenant.quota_bytes = quota if quota is None or limit is None else min(quota, limit)
        self.in_force_bytes += tenant.quota_bytes or 0
        share = (
            0
            if tenant.own_quota_bytes is None or tenant.quota_bytes is None
            else tenant.quota_bytes
        )
        self.reserved_bytes += share - tenant.share_bytes
        tenant.share_bytes = share
        self._excess_bytes += tenant.excess_bytes - excess
        is_unlimited = tenant.own_limit_bytes is None
        self._unlimited[tenant.number] = tenant.own_quota_bytes or 0 if is_unlimited else 0
        self._note_borrowing(tenant)
        self._note_idle(tenant)
        if tenant.is_over_limit:
            self.to_shrink[tenant] = None
        if tenant.owner != owner:
            self.on_moved(tenant)

    def _note_idle(self, tenant: Tenant) -> None:
        if tenant.held_bytes or not tenant.blocks or tenant.is_named or tenant in self.leaving:
            self.idle.pop(tenant, None)
        else:
            self.idle.setdefault(tenant)

    @staticmethod
    def _borrows(tenant: Tenant) -> bool:
        if tenant.quota_bytes is None:
            return tenant.limit_bytes is not None and tenant.blocks > 0
        return tenant.usage_bytes > tenant.quota_bytes

    def _note_borrowing(self, tenant: Tenant) -> None:
        if self._borrows(tenant):
            self.borrowers[tenant] = None
        elif self.borrowers:
            self.borrowers.pop(tenant, None)
        if tenant.blocks and tenant.own_quota_bytes is None and tenant.quota_bytes is not None:
            self.on_default[tenant] = None
        elif self.on_default:
            self.on_default.pop(tenant, None)
