"""Clears all tenants, or those that another host has cleared, in memory and on disks: there may be
100,000 of them, so a piece a turn.

The caller moves nothing between memory and tiers meanwhile (`Movement.is_held`): a disk could bring
back a block of a tenant that is cleared already, and a shared tier keep one of a tenant that is not.
So what has come to a tenant since is new, and a tenant is cleared in each place once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from kvkeep.server.shared import tenant_digest
from kvkeep.store.operators import clear_all
from kvkeep.store.store import Store
from kvkeep.tiers.clear_log import ALL
from kvkeep.tiers.disk_index import DiskIndex

TENANTS_A_TURN = 128  # two milliseconds, with the work that follows


class Clearing:
    """Of the tenants with these digests, or of ALL. `in_memory` and `on_disks` are blocks that were
    taken out of use so far."""

    def __init__(
        self, store: Store, disks: Sequence[DiskIndex] = (), digests: Collection[str] = (ALL,)
    ) -> None:
        self.in_memory = self.on_disks = 0
        self._store = store
        self._disks = disks
        self._digests = digests
        self._names = self._all_names()
        if ALL in digests:
            for disk in disks:
                disk.note_clear_of_all()

    def includes(self, tenant: str) -> bool:
        return ALL in self._digests or tenant_digest(tenant) in self._digests

    def turn(self) -> bool:
        """Clears some tenants. Returns whether there are more."""
        looked_at = list(islice(self._names, TENANTS_A_TURN))
        names = [name for name in looked_at if self.includes(name)]
        self.in_memory += clear_all(self._store, names)
        for disk in self._disks:
            if ALL in self._digests:
                self.on_disks += disk.take_out(names)
            else:
                self.on_disks += sum(map(disk.clear, names))
        return bool(looked_at)

    def _all_names(self) -> Iterator[str]:
        yield from self._store.tenants.names()
        for disk in self._disks:
            yield from disk.store.tenants.names()
