"""Records of tenants and layouts: what was put is found, and what is damaged is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.store.records import LAYOUT, MOST_SHARDS, LayoutFound, LayoutRecords, TenantRecords
from kvkeep.store.table import PlainColumns

DIGEST = bytes(range(16))


def test_tenants_are_found_by_number() -> None:
    columns = PlainColumns()
    records = TenantRecords(columns)
    records.put(0, "default")
    records.put(500, "t-" + "0f" * 16)
    records.put(0, "älter")
    again = TenantRecords(columns)
    assert [again.get(number) for number in (0, 500, 1, -1, 10**6)] == [
        "älter",
        "t-" + "0f" * 16,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("length", [0, -1, 61, 2**31 - 1])
def test_a_name_of_no_length_is_none(length: int) -> None:
    columns = PlainColumns()
    TenantRecords(columns).put(0, "default")
    columns.grow("tenants", np.int8, 0, 0)[0]["length"] = length
    assert TenantRecords(columns).get(0) is None


def test_a_name_that_is_no_text_is_none() -> None:
    columns = PlainColumns()
    TenantRecords(columns).put(0, "default")
    columns.grow("tenants", np.int8, 0, 0)[0]["name"][:3] = 0xFF
    assert TenantRecords(columns).get(0) is None


def test_layouts_are_found_with_all_that_was_said() -> None:
    columns = PlainColumns()
    records = LayoutRecords(columns)
    records.put(3, b"fingerprint", (100, 200))
    records.put(4, b"", tuple(range(1, MOST_SHARDS + 1)))
    records.put_physical(3, 1, DIGEST)
    assert LayoutRecords(columns).find_all() == [
        LayoutFound(3, b"fingerprint", (100, 200), {1: DIGEST}),
        LayoutFound(4, b"", tuple(range(1, MOST_SHARDS + 1)), {}),
    ]


def test_the_place_of_a_layout_that_was_removed_is_used_again() -> None:
    columns = PlainColumns()
    records = LayoutRecords(columns)
    records.put(1, b"a", (1, 2))
    records.put_physical(1, 0, DIGEST)
    records.put(2, b"b", (1,))
    records.remove(1)
    assert [found.number for found in LayoutRecords(columns).find_all()] == [2]
    records.put(7, b"c", (5,))
    assert LayoutRecords(columns).find_all() == [
        LayoutFound(7, b"c", (5,), {}),
        LayoutFound(2, b"b", (1,), {}),
    ]
    assert len(columns.grow("layouts", LAYOUT, 0, 0)) == 2


@pytest.mark.parametrize(
    "name", ["check", "number", "fingerprint_bytes", "fingerprint", "shards", "shard_bytes"]
)
def test_a_damaged_layout_is_none(name: str) -> None:
    columns = PlainColumns()
    LayoutRecords(columns).put(1, b"a", (1, 2))
    field = columns.grow("layouts", LAYOUT, 0, 0)[name][0:1]
    field.view(np.uint8).reshape(-1)[1] ^= 16
    assert LayoutRecords(columns).find_all() == []
    assert LayoutRecords(columns).find_all() == [], "and it stays so"


def test_what_a_worker_said_counts_whole_or_not_at_all() -> None:
    columns = PlainColumns()
    records = LayoutRecords(columns)
    records.put(1, b"a", (1, 2))
    records.put_physical(1, 1, DIGEST)
    entry = columns.grow("layouts", LAYOUT, 0, 0)[0]["physical"][1]
    entry[2], check = 0, int(entry[2])
    assert LayoutRecords(columns).find_all()[0].physical == {}, (
        "killed before the worker heard of it"
    )
    entry[2] = check
    entry[0] ^= np.uint64(1)
    assert LayoutRecords(columns).find_all() == [], (
        "else another kind of worker could take its place"
    )
