"""What each tenant has asked for and what it got, counted since the server started, for a bounded
number of tenants.

Metrics databases pay for every label value for months, and whoever can mint tenant names could mint
labels. So only TENANTS_LABELLED tenants have a label of their own, those that ask for most; all
others count under OTHER. What is counted for one label never becomes less, as counters must not: a
tenant that gets a label begins at 0 there, and what it had until then stays under OTHER."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields, replace
from typing import Final

OTHER: Final = "other"  # no tenant's id
TENANTS_LABELLED: Final = 20
TENANTS_COUNTED: Final = 4096  # beyond them the one whose last lookup is longest ago is forgotten


@dataclass
class TenantCounts:
    """Of one tenant.

    lookups         lookups answered
    hit_blocks      blocks asked for in lookups that were ready
    missed_blocks   blocks asked for in lookups that were not
    loaded_tokens   tokens whose blocks engines loaded, verified and used
    """

    lookups: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0
    loaded_tokens: int = 0

    @property
    def asked_blocks(self) -> int:
        return self.hit_blocks + self.missed_blocks


class CountsByTenant:
    """Counting costs a few dictionary accesses a request."""

    def __init__(self) -> None:
        self._counted: OrderedDict[str, TenantCounts] = OrderedDict()  # the last one looked up last
        self._labelled: dict[str, TenantCounts] = {}
        self._other = TenantCounts()
        self._shown: dict[str, TenantCounts] = {}

    def count_lookup(self, tenant: str, hit_blocks: int, missed_blocks: int) -> None:
        for counts in self._places(tenant):
            counts.lookups += 1
            counts.hit_blocks += hit_blocks
            counts.missed_blocks += missed_blocks

    def count_loaded(self, tenant: str, tokens: int) -> None:
        for counts in self._places(tenant):
            counts.loaded_tokens += tokens

    def of(self, tenant: str) -> TenantCounts:
        """All that is counted of a tenant; zeros for one that is not counted, or no longer."""
        return replace(self._counted.get(tenant, TenantCounts()))

    def by_label(self) -> dict[str, TenantCounts]:
        """What metrics show: some tenants by name, and the rest together. A tenant without a label
        that has asked for more than twice as much as one with a label takes its place."""
        counted, labelled = self._counted, self._labelled
        asked = {
            name: each.hit_blocks + each.missed_blocks
            for name, each in counted.items()
            if name not in labelled
        }
        largest = sorted(asked, key=asked.__getitem__, reverse=True)[:TENANTS_LABELLED]
        for name, smallest in zip(
            largest, sorted(self._labelled, key=self._asked_blocks), strict=False
        ):
            if self._asked_blocks(name) > 2 * self._asked_blocks(smallest):
                self._withdraw(smallest)
                self._labelled[name] = TenantCounts()
        self._shown = {
            name: replace(counts)
            for name, counts in (*self._labelled.items(), (OTHER, self._other))
        }
        return dict(self._shown)

    def _withdraw(self, label: str) -> None:
        """What was counted under a label since it was last shown goes to OTHER: the rest was
        seen."""
        counts, seen = self._labelled.pop(label), self._shown.get(label, TenantCounts())
        for field in fields(TenantCounts):
            unseen = getattr(counts, field.name) - getattr(seen, field.name)
            setattr(self._other, field.name, getattr(self._other, field.name) + unseen)

    def _places(self, tenant: str) -> tuple[TenantCounts, TenantCounts]:
        """Where something of this tenant is counted: its own counts, and those of a label."""
        counted = self._counted
        if tenant not in counted:
            counted[tenant] = TenantCounts()
            if len(counted) > TENANTS_COUNTED:
                counted.popitem(last=False)
            if len(self._labelled) < TENANTS_LABELLED:
                self._labelled.setdefault(tenant, TenantCounts())
        else:
            counted.move_to_end(tenant)
        return counted[tenant], self._labelled.get(tenant, self._other)

    def _asked_blocks(self, tenant: str) -> int:
        counts = self._counted.get(tenant)
        return counts.asked_blocks if counts else 0
