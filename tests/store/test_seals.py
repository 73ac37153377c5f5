"""A seal changes with everything that it covers, and with nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.store.layouts import Layout
from kvkeep.store.seals import seals
from kvkeep.store.table import BlockTable

WORD = np.uint64(77)


def table_of_two() -> tuple[BlockTable, Layout, np.ndarray]:
    table, layout = BlockTable(), Layout(1, b"f", (64, 64))
    rows = table.take(2)
    table.keys.put(rows, bytes(range(32)))
    many = table.many
    many.parent[rows], many.slot[rows], many.check[rows] = (
        [-1, rows[0]],
        [4096, 8192],
        layout.take_checks(2),
    )
    many.priority[rows], many.expires_ms[rows] = 50, [0, 99]
    layout.checks[:2] = [[1, 2], [3, 4]]
    return table, layout, rows


def test_a_seal_is_the_same_whoever_asks() -> None:
    table, layout, rows = table_of_two()
    both = seals(table, rows, layout, WORD)
    assert both[0] != both[1]
    assert seals(table, rows[1:], layout, np.array([WORD])).tolist() == both[1:].tolist()
    table.many.used[rows], table.many.pins[rows], table.many.finished[rows] = 5, 6, 7
    assert seals(table, rows, layout, WORD).tolist() == both.tolist(), (
        "what changes with every use is not covered"
    )


@pytest.mark.parametrize("bit", [0, 1, 31, 62])
@pytest.mark.parametrize(
    "name", ["slot", "expires_ms", "key", "parent's key", "checks", "layout", "tenant"]
)
def test_one_bit_of_anything_else_changes_it(name: str, bit: int) -> None:
    table, layout, rows = table_of_two()
    before, word = seals(table, rows[1:], layout, WORD)[0], WORD
    flip = 1 << bit
    match name:
        case "key":
            table.keys.words[rows[1], 1] ^= np.uint64(flip)
        case "parent's key":
            table.keys.words[rows[0], 0] ^= np.uint64(flip)
        case "checks":
            layout.checks[1, 1] ^= np.uint64(flip)
        case "layout":
            layout.word ^= flip
        case "tenant":
            word ^= np.uint64(flip)
        case _:
            getattr(table.many, name)[rows[1]] ^= flip
    assert seals(table, rows[1:], layout, word)[0] != before


def test_priority_and_parent_are_covered() -> None:
    table, layout, rows = table_of_two()
    before = seals(table, rows[1:], layout, WORD)[0]
    table.priority[int(rows[1])] = 51
    other = seals(table, rows[1:], layout, WORD)[0]
    table.parent[int(rows[1])] = -1
    assert len({before, other, seals(table, rows[1:], layout, WORD)[0]}) == 3


def test_words_that_change_places_are_seen() -> None:
    table, layout, rows = table_of_two()
    before = seals(table, rows, layout, WORD)
    layout.checks[:2] = layout.checks[:2, ::-1].copy()
    assert (seals(table, rows, layout, WORD) != before).all()
    table.many.slot[rows] |= np.int64(-(2**63))
    table.keys.words[rows] ^= np.uint64(1 << 63)
    assert (seals(table, rows, layout, WORD) != before).all(), (
        "the highest bits of two words do not cancel out"
    )
