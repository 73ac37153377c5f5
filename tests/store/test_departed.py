"""Tests for the memory of departures: bounded, exact for what it holds, and cheap in bulk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.store.departed import WAYS, Departed, UseTimes
from kvkeep.store.operators import set_limit

Hands = Callable[..., Any]


def words(count: int, seed: int = 0) -> NDArray[np.uint64]:
    chance = np.random.default_rng(seed)
    return chance.integers(0, 1 << 63, size=(count, 2), dtype=np.uint64)


def test_it_knows_what_left_why_for_whom_and_when() -> None:
    table = Departed()
    first, second = words(100, 1), words(50, 2)
    table.note(first, 3, "ann", 10)
    table.note(second, 4, "bob", 20)
    causes, by, when = table.find(np.concatenate((first, words(30, 3), second)))
    assert causes.tolist() == [3] * 100 + [0] * 30 + [4] * 50
    assert {table.name_of(int(each)) for each in by[:100]} == {"ann"}
    assert when[-50:].tolist() == [20] * 50


def test_the_last_departure_of_a_block_counts() -> None:
    table, block = Departed(), words(1)
    for cause, now_ms in ((3, 10), (4, 20), (5, 30)):
        table.note(block, cause, "ann", now_ms)
    causes, _, when = table.find(block)
    assert (causes.tolist(), when.tolist()) == ([5], [30])


def test_blocks_that_meet_in_a_bucket_take_places_beside_each_other() -> None:
    table = Departed(WAYS)  # one bucket
    blocks = words(WAYS)
    table.note(blocks, 3, "ann", 10)
    assert table.find(blocks)[0].tolist() == [3] * WAYS


def test_newer_departures_replace_the_oldest() -> None:
    table = Departed(1 << 10)
    for now_ms in range(1, 40):
        table.note(words(100, now_ms), 3, "ann", now_ms)
    youngest, oldest = (int((table.find(words(100, at))[0] > 0).sum()) for at in (39, 1))
    assert youngest > 95 and oldest < 20


def test_names_are_bounded() -> None:
    table = Departed(1 << 10)
    for number in range(10_000):
        table.note(words(1, number), 3, f"t{number}", number)
    _, by, _ = table.find(words(1, 9_999))
    assert table.name_of(int(by[0])) == ""


@pytest.mark.parametrize("every", [1, 7])
def test_times_of_uses_are_found_within_a_sample(every: int) -> None:
    times = UseTimes()
    for use in range(0, 20_000, every):
        times.note(use, use * 1_000)
    assert times.time_of(-1) is None
    for use in (19_000, 5_000, 20):
        found = times.time_of(use)
        assert found is not None and use * 1_000 - 40_000 <= found <= use * 1_000


def test_evictions_are_counted_by_reason_and_age(hand: Hands) -> None:
    h = hand(6)
    departures = h.store.remember_departures()
    h.put("abc", "ann")
    h.put("def", "bob")
    h.put("gh", "bob")
    h.put("ij", "bob")
    assert departures.counts["others"] == 3 and departures.counts["own"] == 1
    assert sum(departures.counts.values()) == h.store.eviction.evictions == sum(departures.ages)
    assert departures.age_s is not None


def test_a_limit_is_the_reason_if_it_evicts_or_refuses(hand: Hands) -> None:
    h = hand(8)
    departures = h.store.remember_departures()
    h.put("x", "ann")
    set_limit(h.store, "ann", 2 * 4096, 0)
    h.put("ab", "ann")
    h.put("cd", "ann")
    assert departures.counts["limit"] == 3 and departures.counts["own"] == 0
