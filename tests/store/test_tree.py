"""Chains: longest hits by bisection, nothing described that is no chain, and links in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.kv import native
from kvkeep.store import tree
from kvkeep.store.key_index import KeyIndex
from kvkeep.store.table import NO_ROW, READY, BlockTable
from kvkeep.store.tree import (
    children,
    link_chain,
    longest_hit,
    rows_of_chain,
    split_keys,
    unlink_leaf,
    with_descendants,
)


def a_tree() -> tuple[BlockTable, list[int]]:
    """Rows a b c d in a chain, and e f that branch off b."""
    table = BlockTable()
    rows = table.take(6)
    table.many.state[rows] = READY
    link_chain(table, rows[:4], NO_ROW)
    link_chain(table, rows[4:], int(rows[1]))
    return table, rows.tolist()


def an_index(keys: list[bytes], rows: NDArray[np.int64]) -> KeyIndex:
    index = KeyIndex()
    index.put(keys, rows.tolist())
    return index


def test_keys_are_cut_apart() -> None:
    assert split_keys(b"a" * 16 + b"b" * 16) == [b"a" * 16, b"b" * 16]
    assert split_keys(b"") == []


@pytest.mark.parametrize("resident", [0, 1, 2, 63, 64, 99, 100])
def test_the_longest_hit_of_a_hundred(resident: int) -> None:
    table, keys = BlockTable(), [f"{i}".encode().ljust(16, b".") for i in range(100)]
    rows = table.take(100)
    table.many.state[rows[:resident]] = READY
    index = an_index(keys, rows)
    assert longest_hit(table, index, b"".join(keys)) == resident
    assert (
        longest_hit(table, an_index(keys[:resident], rows[:resident]), b"".join(keys)) == resident
    )
    assert longest_hit(table, index, b"") == 0


def test_a_row_with_another_key_is_not_described() -> None:
    """Were two servers to write into the same columns, rows would change their keys under the
    index."""
    table, keys = BlockTable(), [bytes([letter]) * 16 for letter in b"abc"]
    rows = table.take(3)
    table.keys.put(rows, b"".join(keys))
    table.many.state[rows] = READY
    link_chain(table, rows, NO_ROW)
    index = an_index(keys, rows)
    assert rows_of_chain(table, index, b"".join(keys), 0, 3).tolist() == rows.tolist()
    table.keys.put(rows[1:2], b"x" * 16)
    assert rows_of_chain(table, index, b"".join(keys), 0, 3).tolist() == rows[:1].tolist()


@pytest.mark.parametrize("is_native", [True, False])
def test_both_roads_up_a_chain_find_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    if is_native and not native.available:
        pytest.skip("the C kernel is not built here")
    monkeypatch.setattr(native, "available", is_native)
    table, keys = BlockTable(), [f"{i}".encode().ljust(16, b".") for i in range(300)]
    rows = np.random.default_rng(1).permutation(table.take(300))
    table.keys.put(rows, b"".join(keys))
    table.many.state[rows] = READY
    link_chain(table, rows, NO_ROW)
    index = an_index(keys, rows)
    monkeypatch.setattr(
        tree, "_walk_down", lambda *_: pytest.fail("the way up was not taken for a chain")
    )
    for skip, hit in ((0, 1), (0, 300), (1, 300), (299, 300), (17, 120)):
        assert (
            rows_of_chain(table, index, b"".join(keys), skip, hit).tolist()
            == rows[skip:hit].tolist()
        )


def test_a_parent_that_is_no_row_ends_the_way_up() -> None:
    """Columns are files: whoever writes into them must not send the C kernel anywhere else."""
    if not native.available:
        pytest.skip("the C kernel is not built here")
    for wrong in (NO_ROW, -(1 << 31), 5, (1 << 31) - 1):
        parents = np.array([NO_ROW, 0, wrong, 2, 3], dtype=np.int32)
        walker = native.ChainWalker(parents, np.zeros(5, np.int32))
        assert walker.climb(4, 5).tolist() == [2, 3, 4] and walker.climb(4, 2).tolist() == [3, 4]
        assert walker.not_held(4) == walker.hold([4]) == walker.let_go([4]) == 3


def test_links_go_both_ways() -> None:
    table, (a, b, c, d, e, f) = a_tree()
    assert [table.parent[row] for row in (a, b, c, d, e, f)] == [NO_ROW, a, b, c, b, e]
    assert (
        children(table, a) == [b] and set(children(table, b)) == {c, e} and children(table, d) == []
    )


def test_descendants_are_named_once_and_as_many_as_are_asked_for() -> None:
    table, (a, b, c, d, e, f) = a_tree()
    assert sorted(with_descendants(table, [a], 99)) == sorted([a, b, c, d, e, f])
    assert sorted(with_descendants(table, [c, b], 99)) == sorted([b, c, d, e, f])
    assert (
        with_descendants(table, [a], 3)[:2] == [a, b] and len(with_descendants(table, [a], 3)) == 3
    )
    assert with_descendants(table, [d, f], 1) == [d, f], "the rows themselves in any case"


def test_leaves_come_off_in_any_order() -> None:
    table, (_, b, c, d, e, f) = a_tree()
    assert unlink_leaf(table, f) == e
    assert unlink_leaf(table, e) == b and children(table, b) == [c]
    assert unlink_leaf(table, d) == c and unlink_leaf(table, c) == b and children(table, b) == []
    with pytest.raises(AssertionError):
        unlink_leaf(table, table.parent[b])


def test_the_middle_of_three_siblings_comes_off() -> None:
    table = BlockTable()
    rows = table.take(4).tolist()
    link_chain(table, np.array(rows[:2]), NO_ROW)
    for row in rows[2:]:
        link_chain(table, np.array([row]), rows[0])
    middle = children(table, rows[0])[1]
    unlink_leaf(table, middle)
    assert set(children(table, rows[0])) == {*rows[1:]} - {middle}


def test_garbage_keys_describe_nothing_but_chains(hand: Callable[..., Any]) -> None:
    h = hand(16)
    h.put("abcd")
    h.put("xyz")
    table, index = h.store.blocks.table, h.store.tenants.get("t").index
    k = h.key
    for keys, skip, wanted in (
        ([k("a"), k("abcd"), k("abc")], 0, ["a"]),
        ([k("ab"), k("abc")], 0, []),
        ([k("a"), k("xy"), k("abc")], 0, ["a"]),
        ([k("x"), k("ab"), k("abc")], 1, []),
        ([k("nothere"), k("ab")], 1, []),
        ([k("a"), k("a")], 0, ["a"]),
        ([k("a"), k("nothere"), k("abc")], 0, ["a"]),
        ([k("a"), k("ab"), k("abc")], 2, ["abc"]),
    ):
        rows = rows_of_chain(table, index, b"".join(keys), skip, len(keys)).tolist()
        assert rows == [h.row(word) for word in wanted]
