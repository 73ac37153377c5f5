"""Slots in and out: sizes on demand, neighbours together, and no slot in two places."""

from __future__ import annotations

from array import array

import pytest

from kvkeep.store.slabs import Slabs


@pytest.fixture
def slabs() -> Slabs:
    """Three slabs of 12 bytes."""
    made = Slabs(12)
    made.add(0, 3)
    return made


def test_an_unused_slab_counts_for_every_size(slabs: Slabs) -> None:
    assert (slabs.available(4), slabs.available(6), slabs.available(5)) == (9, 6, 6)
    assert (slabs.slabs, slabs.unused_slabs, slabs.capacity_bytes) == (3, 3, 36)


def test_a_slab_takes_its_size_with_the_first_slot_and_loses_it_with_the_last(slabs: Slabs) -> None:
    (offset,) = slabs.take(4, 1)
    assert slabs.sizes() == {4: 1} and slabs.unused_slabs == 2
    assert (slabs.available(4), slabs.available(6)) == (8, 4)
    slabs.give([offset])
    assert slabs.sizes() == {} and slabs.available(6) == 6
    slabs.check_integrity({})


def test_slots_are_neighbours_in_ascending_order(slabs: Slabs) -> None:
    assert slabs.take(4, 5) == [0, 4, 8, 12, 16]


def test_sizes_do_not_mix_in_a_slab(slabs: Slabs) -> None:
    handed_out = dict.fromkeys(slabs.take(4, 1), 4) | dict.fromkeys(slabs.take(6, 3), 6)
    assert slabs.sizes() == {4: 1, 6: 2} and slabs.slabs_of_other_sizes(4) == {1: 6, 2: 6}
    assert (slabs.size_of(0), slabs.size_of(2), slabs.size_of(3)) == (4, 6, None)
    assert (slabs.available(4), slabs.available(6)) == (2, 1)
    slabs.check_integrity(handed_out)


def test_a_size_that_does_not_divide_the_slab_leaves_the_rest_unused(slabs: Slabs) -> None:
    handed_out = dict.fromkeys(slabs.take(5, 6), 5)
    assert sorted(handed_out) == [0, 5, 12, 17, 24, 29] and slabs.available(5) == 0
    slabs.check_integrity(handed_out)


def test_slabs_added_later_are_used_last(slabs: Slabs) -> None:
    slabs.add(3, 2)
    assert slabs.take(12, 5) == [0, 12, 24, 36, 48]


def test_a_slot_given_back_is_taken_before_a_new_slab_is_cut(slabs: Slabs) -> None:
    taken = slabs.take(4, 3)
    slabs.give([taken[1]])
    assert slabs.take(4, 1) == [taken[1]] and slabs.unused_slabs == 2


def test_taking_more_than_there_is_is_our_bug(slabs: Slabs) -> None:
    with pytest.raises(AssertionError):
        slabs.take(4, 10)


def test_integrity_finds_lost_slots_and_slots_in_two_places(slabs: Slabs) -> None:
    first, second = slabs.take(4, 2)
    for handed_out in ({first: 4}, {first: 4, second: 4, 8: 4}, {first: 4, second: 6}):
        with pytest.raises(AssertionError):
            slabs.check_integrity(handed_out)


def test_slots_that_come_back_are_noted_for_a_tier_that_logs_them(slabs: Slabs) -> None:
    taken = slabs.take(4, 3)
    slabs.given = array("q")
    slabs.give(taken[:2])
    assert slabs.given.tolist() == taken[:2]


def test_a_closed_slab_takes_slots_back_and_gives_none(slabs: Slabs) -> None:
    taken = slabs.take(4, 5)
    slabs.close(0)
    slabs.give(taken[:1] + taken[3:4])
    assert slabs.available(4) == 5 and slabs.take(4, 2) == [12, 20]
    slabs.check_integrity(dict.fromkeys([4, 8, 16, 12, 20], 4))
    slabs.open(0)
    assert slabs.take(4, 1) == [0]
    slabs.close(0)
    slabs.give([0, 4, 8])
    slabs.open(0)
    assert slabs.sizes() == {4: 1} and slabs.unused_slabs == 2
    slabs.check_integrity(dict.fromkeys([16, 12, 20], 4))
