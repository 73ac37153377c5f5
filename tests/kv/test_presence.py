"""Counts of blocks by their keys: what is 0 is not there."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.presence import Presence


def heads(keys: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(keys, dtype=np.uint64)[::2]


def test_what_was_added_is_not_lacking_until_the_last_of_it_is_removed() -> None:
    server, key = Presence(), os.urandom(16)
    assert server.lacks(key)
    server.add(heads(key + key))
    server.remove(heads(key))
    assert not server.lacks(key)
    server.remove(heads(key))
    assert server.lacks(key)


def test_keys_that_share_a_cell_are_counted_together() -> None:
    server = Presence()
    one, other = bytes(8) + os.urandom(8), bytes(8) + os.urandom(8)
    server.add(heads(one))
    server.add(heads(other))
    server.remove(heads(one))
    assert not server.lacks(one), "which of the two is gone only the server can tell"


def test_two_stores_are_counted_together() -> None:
    server = Presence()
    memory, disk = heads(os.urandom(16 * 50)), heads(os.urandom(16 * 70))
    server.add(memory)
    assert server.holds_exactly(memory) and not server.holds_exactly(disk)
    server.add(disk)
    assert server.holds_exactly(np.concatenate((memory, disk)))
    server.remove(memory)
    assert server.holds_exactly(disk) and not server.holds_exactly(disk[1:])
