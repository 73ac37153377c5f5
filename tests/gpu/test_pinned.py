"""Areas in registered memory are moved by few copies, of which none leaves its range."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvkeep.gpu.pinned import Pinned

NBYTES = 10


def runs(pinned: Pinned, places: list[int], at_a_time: int = 100) -> list[object]:
    return list(pinned.runs(np.array(places, dtype=np.uint64), NBYTES, at_a_time))


@pytest.fixture
def pinned() -> Pinned:
    made = Pinned()
    made.add(1000, 1000)
    made.add(2000, 1000)
    return made


def test_what_is_equally_far_apart_is_one_run(pinned: Pinned) -> None:
    assert runs(pinned, [1000, 1010, 1020]) == [[(1000, 10, 0, 3)]]
    assert runs(pinned, [1000, 1050, 1100, 1110, 1120]) == [[(1000, 50, 0, 3), (1110, 10, 3, 2)]]
    assert runs(pinned, [1500]) == [[(1500, NBYTES, 0, 1)]]
    assert runs(pinned, []) == []


def test_what_lies_backwards_or_one_over_the_other_goes_one_by_one(pinned: Pinned) -> None:
    assert runs(pinned, [1100, 1000]) == [[(1100, NBYTES, 0, 1), (1000, NBYTES, 1, 1)]]
    assert runs(pinned, [1100, 1105]) == [[(1100, NBYTES, 0, 1), (1105, NBYTES, 1, 1)]]


def test_no_run_goes_from_one_range_into_the_next(pinned: Pinned) -> None:
    assert runs(pinned, [1980, 1990, 2000, 2010]) == [[(1980, 10, 0, 2), (2000, 10, 2, 2)]]


def test_so_many_at_a_time(pinned: Pinned) -> None:
    assert runs(pinned, [1000, 1010, 1020], 2) == [[(1000, 10, 0, 2)], [(1020, NBYTES, 0, 1)]]


@pytest.mark.parametrize("place", [990, 995, 2991, 5000])
def test_what_is_not_registered_is_none_and_the_others_are_not(pinned: Pinned, place: int) -> None:
    assert runs(pinned, [1000, place, 2000], 1) == [
        [(1000, NBYTES, 0, 1)],
        None,
        [(2000, NBYTES, 0, 1)],
    ]


def test_what_lies_across_the_end_of_a_range_is_not_registered(pinned: Pinned) -> None:
    assert runs(pinned, [1995]) == [None], "though the next one begins there"


def test_a_range_that_was_taken_back_is_not_registered(pinned: Pinned) -> None:
    assert pinned.remove(1000) and not pinned.remove(1000)
    assert runs(pinned, [1000]) == [None]
    assert runs(pinned, [2000]) == [[(2000, NBYTES, 0, 1)]]


@pytest.mark.parametrize("seed", range(20))
def test_every_area_is_in_its_run_and_in_one_only(pinned: Pinned, seed: int) -> None:
    dice = random.Random(seed)
    places = [
        dice.choice([1000, 1010, 1020, 1040, 1980, 1990, 2000, 2010, 2030]) for _ in range(40)
    ]
    found, at_a_time = [], dice.choice([1, 3, 7, 40])
    for number, some in enumerate(
        pinned.runs(np.array(places, dtype=np.uint64), NBYTES, at_a_time)
    ):
        assert some is not None
        for address, step, at, count in some:
            assert step >= NBYTES and at == len(found) - number * at_a_time
            assert (address < 2000) == (address + (count - 1) * step + NBYTES <= 2000), (
                "within one range"
            )
            found += [address + each * step for each in range(count)]
    assert found == places
