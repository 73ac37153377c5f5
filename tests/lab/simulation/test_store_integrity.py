"""check_integrity() can fail: each fault that is planted here is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.store.conftest import Hand

from kvkeep.store.store import Store
from kvkeep.store.table import EVICTING, READY, WAITING, WRITING
from kvkeep.store.tenants import COMMONS
from kvkeep_lab.simulation.store_integrity import check_integrity


def rows_of(store: Store) -> list[int]:
    """Rows of "a" "ab" "abc", which are READY, and "abcd", which is being written."""
    tenant = store.tenants.get("t")
    assert tenant is not None
    return [row for _, row in tenant.index.items()]


def set_column(name: str, which: int, value: int) -> Callable[[Store], None]:
    def plant(store: Store) -> None:
        getattr(store.blocks.table, name)[rows_of(store)[which]] = value

    return plant


def out_of_the_index(store: Store) -> None:
    tenant = store.tenants.get("t")
    assert tenant is not None
    tenant.index.pop_some(1)


def another_key(store: Store) -> None:
    store.blocks.table.keys.put(np.array([rows_of(store)[1]]), b"another key.....")


def one_slot_twice(store: Store) -> None:
    table, rows = store.blocks.table, rows_of(store)
    table.slot[rows[0]] = table.slot[rows[1]]


def usage(store: Store) -> None:
    tenant = store.tenants.get("t")
    assert tenant is not None
    tenant.usage_bytes += 4096


def blocks_of_a_layout(store: Store) -> None:
    next(iter(store.layouts)).blocks += 1


def a_lost_lease(store: Store) -> None:
    store.sessions[1].leases.clear()


def a_lease_on_nothing(store: Store) -> None:
    store.sessions[1].leases[999] = 500


def a_lost_writer(store: Store) -> None:
    store.writers.clear()


def a_wrong_count(store: Store) -> None:
    store.sessions[1].writing_blocks += 1


def a_lost_mask(store: Store) -> None:
    store.blocks.shards_in.clear()


def a_child_of_nobody(store: Store) -> None:
    table, rows = store.blocks.table, rows_of(store)
    table.first_child[rows[1]] = -1


def a_child_of_another(store: Store) -> None:
    table, rows = store.blocks.table, rows_of(store)
    table.first_child[rows[3]] = rows[0]


def a_lost_queue(store: Store) -> None:
    store.release(1, next(iter(store.sessions[1].leases)), 0)
    for write in list(store.sessions[1].writes):
        store.abandon_store(1, write, 0)
    store.blocks.order.forget_owner(COMMONS)


def a_lost_slot(store: Store) -> None:
    store.slabs.take(4096, 1)


def two_writers(store: Store) -> None:
    work = store.sessions[1].writes
    number = next(iter(work))
    work[number + 1000] = work[number]


FAULTS: dict[str, Callable[[Store], None]] = {
    "a ready block below one being written": set_column("state", 3, READY),
    "a parent that is not ready": set_column("state", 1, WRITING),
    "waiting for nothing": set_column("state", 2, WAITING),
    "evicting, and in the index": set_column("state", 2, EVICTING),
    "a free row in the index": set_column("state", 3, 0),
    "another tenant": set_column("tenant", 2, 77),
    "another parent": set_column("parent", 2, 900),
    "a pin too many": set_column("pins", 1, 1),
    "no pin for a lease": set_column("pins", 2, 0),
    **{
        plant.__name__: plant
        for plant in (
            out_of_the_index,
            another_key,
            one_slot_twice,
            usage,
            blocks_of_a_layout,
            a_lost_lease,
            a_lease_on_nothing,
            a_lost_writer,
            a_wrong_count,
            a_lost_mask,
            a_child_of_nobody,
            a_child_of_another,
            a_lost_queue,
            a_lost_slot,
            two_writers,
        )
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    store = Store(16 * 4096, 8 * 4096)
    store.add_slabs(0, 2)
    store.open_session(1)
    h = Hand(store)
    h.layout = store.open_layout(1, b"f", (64,)).number
    h.put("abc")
    h.lease("abc")
    h.prepare("d", after="abc")
    check_integrity(store)
    FAULTS[fault](store)
    with pytest.raises((AssertionError, KeyError)):
        check_integrity(store)
