"""The index of a tenant: a dictionary to whoever uses it, and none of its parts is large."""

from __future__ import annotations

import gc

import pytest

from kvkeep.store.key_index import KEYS_IN_ONE, PARTS, KeyIndex
from kvkeep.store.table import NO_ROW


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(count)]


def test_no_part_of_a_large_index_takes_long_to_grow() -> None:
    index, some = KeyIndex(), keys(8 * KEYS_IN_ONE)
    for at in range(0, len(some), 512):
        index.put(some[at : at + 512], list(range(at, at + 512)))
    assert len(index) == len(some) and len(index.whole) == KEYS_IN_ONE
    assert max(map(len, index.parts)) < 2 * len(some) // PARTS


@pytest.mark.parametrize("count", [10, KEYS_IN_ONE + 4096, 2 * KEYS_IN_ONE])
def test_an_index_is_a_dictionary_before_while_and_after_it_gets_parts(count: int) -> None:
    index, some = KeyIndex(), keys(count)
    for at in range(0, count, 512):
        index.put(some[at : at + 512], list(range(at, min(at + 512, count))))
    assert dict(index.items()) == dict(zip(some, range(count), strict=True)) and len(index) == count
    assert [index.get(key) for key in some[::7]] == list(range(0, count, 7)) and index.get(
        b"none"
    ) == NO_ROW
    index.remove(some[1::2])
    assert index.get(some[1]) == NO_ROW and index.get(some[2]) == 2 and len(index) == count // 2
    assert index.has_any([b"none", some[4]]) and not index.has_any([b"none", some[3]])
    assert index.has_any([some[count - 2]]) and not index.has_any([some[count - 1]])
    popped = [pair for size in (3, count) for pair in index.pop_some(size)]
    assert dict(popped) == {some[row]: row for row in range(0, count, 2)} and not index


def test_the_youngest_keys_of_a_small_index_come_out_first() -> None:
    index, some = KeyIndex(), keys(5)
    index.put(some, list(range(5)))
    assert index.pop_some(2) == [(some[4], 4), (some[3], 3)]


def test_the_garbage_collector_has_nothing_to_look_at() -> None:
    index = KeyIndex()
    index.put(keys(10), list(range(10)))
    assert not gc.is_tracked(index) and not gc.is_tracked(index.whole)
