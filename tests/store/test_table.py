"""Rows: handed out once, reused, and the same memory behind columns and views however often the
table grows."""

from __future__ import annotations

import numpy as np

from kvkeep.store.table import FREE, READY, BlockTable, PlainColumns


def test_rows_are_handed_out_once_and_reused() -> None:
    table = BlockTable()
    rows = table.take(3).tolist()
    table.many.state[rows] = READY
    assert sorted(rows) == [0, 1, 2] and len(table) == 3
    table.give([rows[1]])
    assert len(table) == 2 and table.state[rows[1]] == FREE and table.queued[rows[1]] == -1
    assert table.live_rows().tolist() == [rows[0], rows[2]]
    again = table.take(2).tolist()
    assert rows[1] in again and len({*rows, *again}) == 4


def test_rows_freed_leaf_first_come_back_in_the_order_of_a_chain() -> None:
    table = BlockTable()
    rows = table.take(5).tolist()
    table.give(rows[::-1])
    assert table.take(5).tolist() == rows


def test_rows_hold_keys_in_order_or_not() -> None:
    table = BlockTable()
    keys = np.random.default_rng(0).integers(0, 1 << 63, (100, 2), dtype=np.uint64)
    rows = table.take(100)
    table.keys.put(rows, keys.tobytes())
    assert table.keys[7] == keys[7].tobytes()
    assert table.keys.hold(rows[[3, 90, 5]], keys[[3, 90, 5]].tobytes())
    assert not table.keys.hold(rows[[3, 90, 5]], keys[[3, 5, 90]].tobytes())
    assert not table.keys.hold(rows[:3], keys[:2].tobytes())


def test_columns_and_views_are_one_memory_before_and_after_growth() -> None:
    table = BlockTable()
    first = table.take(1000)
    table.many.slot[first] = first * 4096
    table.many.state[first] = READY
    more = table.take(5000)
    assert len(table) == 6000 and len(table.keys) >= 6000
    assert [table.slot[row] for row in first.tolist()] == [row * 4096 for row in first.tolist()]
    table.used[int(more[-1])] = 17
    assert table.many.used[more[-1]] == 17
    table.many.pins[more[0]] = 3
    assert table.pins[int(more[0])] == 3


def test_fresh_rows_after_growth_are_free() -> None:
    table = BlockTable()
    table.take(1024)
    row = int(table.take(1)[0])
    assert table.state[row] == FREE
    assert len(table.live_rows()) == 0


def test_a_table_with_reserved_rows_grows_in_place_and_in_small_steps() -> None:
    table = BlockTable(most_rows=1 << 17)
    first, capacity = table.many, len(table.keys)
    before = (first.held, first.slot, table.keys.words)
    while len(table) < 1 << 17:
        rows = table.take(512)
        table.many.slot[rows] = rows * 4096
        assert len(table.keys) - capacity <= 1 << 14
        capacity = len(table.keys)
    after = (table.many.held, table.many.slot, table.keys.words)
    assert all(np.shares_memory(one, other) for one, other in zip(before, after, strict=True))
    assert (table.many.slot[: 1 << 17] == np.arange(1 << 17) * 4096).all()


def test_a_column_grows_with_zeros_and_keeps_its_rows() -> None:
    columns = PlainColumns()
    flat = columns.grow("a", np.int32, 0, 3)
    flat[:] = [1, 2, 3]
    assert columns.grow("a", np.int32, 0, 2) is flat, "there is no less of it"
    assert columns.grow("a", np.int32, 0, 5).tolist() == [1, 2, 3, 0, 0]
    assert columns.grow("b", np.uint64, 2, 4).shape == (4, 2)


def test_a_dropped_column_begins_anew() -> None:
    columns = PlainColumns()
    columns.grow("a", np.int8, 0, 2)[:] = 7
    columns.drop("a")
    columns.drop("never there")
    assert columns.grow("a", np.int8, 0, 2).tolist() == [0, 0]


def test_a_column_grows_in_place_up_to_what_was_reserved() -> None:
    columns = PlainColumns()
    flat = columns.grow("a", np.int32, 0, 3, 1000)
    assert len(flat) == 3
    assert np.shares_memory(columns.grow("a", np.int32, 0, 1000), flat)
    flat[:] = 5
    longer = columns.grow("a", np.int32, 0, 1001)
    assert not np.shares_memory(longer, flat) and longer[:4].tolist() == [5, 5, 5, 0]
