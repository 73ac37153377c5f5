"""Every byte string is some series of choices."""

from __future__ import annotations

import pytest

from kvkeep_lab.fuzz.choices import NUMBERS, Choices, random_inputs


def test_an_empty_input_makes_every_first_choice() -> None:
    choices = Choices(b"")
    assert (choices.byte(), choices.below(1 << 20), choices.pick("abc"), choices.number()) == (
        0,
        0,
        "a",
        0,
    )
    assert (choices.text(), choices.value(), choices.seldom(), choices.rest(), choices.left) == (
        "",
        0,
        False,
        b"",
        0,
    )


def test_choices_take_from_the_front_and_no_more_than_they_need() -> None:
    choices = Choices(bytes([7, 1, 2, 250, 9]))
    assert choices.byte() == 7
    assert choices.below(65_536) == 0x0201
    assert choices.seldom()
    assert choices.rest() == b"\x09" and not choices.left


@pytest.mark.parametrize("data", [bytes([first, *range(40)]) for first in range(0, 256, 5)])
def test_choices_stay_within_their_bounds(data: bytes) -> None:
    assert 0 <= Choices(data).below(3) < 3
    assert -(1 << 63) <= Choices(data).number() < 1 << 64
    assert len(Choices(data).text()) <= 300


def test_all_kinds_of_values_come_up() -> None:
    values = [Choices(data).value() for data in random_inputs(1, 400)]
    assert {type(value) for value in values} == {
        int,
        str,
        type(None),
        bool,
        float,
        bytes,
        list,
        dict,
    }
    assert len({Choices(data).number() for data in random_inputs(2, 4000)} & set(NUMBERS)) == len(
        NUMBERS
    )


def test_random_inputs_follow_from_their_seed() -> None:
    assert list(random_inputs(3, 20)) == list(random_inputs(3, 20)) != list(random_inputs(4, 20))
