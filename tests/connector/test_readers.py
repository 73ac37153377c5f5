"""Blocks that stores read: several stores of one block, stores that end, ids in any order and of
any size."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvkeep.connector.readers import Readers


def test_a_block_is_read_until_the_last_of_its_stores_has_ended() -> None:
    readers = Readers()
    assert readers.among({1, 2}) == []
    readers.add(1, [5, 3])
    readers.add(2, [5])
    assert readers.among({7, 5, 3, 10**6, -1, -2}) == [3, 5]
    readers.remove(1)
    readers.remove(1)
    assert readers.among({5, 3}) == [5]
    readers.remove(2)
    assert readers.among({5, 3}) == []


def test_a_store_that_was_never_added_reads_nothing_and_takes_nothing_away() -> None:
    readers = Readers()
    readers.add(1, [0, 9])
    readers.remove(2)
    readers.add(3, [])
    readers.remove(3)
    assert readers.among([9, 0, 9]) == [0, 9]


def test_it_counts_as_a_counter_would() -> None:
    rng = np.random.default_rng(0)
    readers, stores = Readers(), dict[int, list[int]]()
    for number in range(400):
        ids = rng.integers(
            0, 1 + number * number // 40, rng.integers(0, 60)
        ).tolist()  # the same block twice, too
        stores[number] = ids
        readers.add(number, ids)
        for ended in rng.choice(list(stores), min(len(stores), 2), replace=False).tolist():
            if rng.random() < 0.6:
                readers.remove(ended)
                del stores[ended]
        counted = Counter(block for each in stores.values() for block in each)
        asked = set(rng.integers(0, 4_000, 300).tolist())
        assert readers.among(asked) == sorted(asked & counted.keys())
