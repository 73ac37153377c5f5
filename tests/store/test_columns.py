"""Columns keep what they hold as they grow, and outlive whoever asked for them."""

from __future__ import annotations

import numpy as np

from kvkeep.store.columns import PlainColumns


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
