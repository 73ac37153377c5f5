"""CopyStreams take turns on two streams, of so many bytes, and each turn begins when the one before is
over."""

from __future__ import annotations

from typing import Any

import pytest
from pretend import Stream

from kvkeep.gpu.driver import Rows
from kvkeep.gpu.streams import CopySizes, CopyStreams, Slice

MIB = 1 << 20


class Noted:
    """A device, and its batch: what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def stream(self) -> Stream:
        return Stream("ours")

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any) -> tuple[Any, ...]:
            self.asked.append((name, *given))
            return self.asked[-1]

        return note


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def copies(noted: Noted) -> CopyStreams:
    return CopyStreams(noted)  # type: ignore[arg-type]


def rows_of(noted: Noted, copies: CopyStreams) -> list[tuple[int, int]]:
    """Which stream each copy goes to, and how many rows it has."""
    return [
        (copies.streams.index(asked[1]), asked[-1].number)
        for asked in noted.asked
        if asked[0].startswith("to_")
    ]


@pytest.mark.parametrize(("engine_busy", "rows"), [(True, [8, 8, 8, 8, 8, 8, 2]), (False, [48, 2])])
def test_an_engine_that_computes_waits_for_less(
    noted: Noted, copies: CopyStreams, engine_busy: bool, rows: list[int]
) -> None:
    copies.engine_busy = engine_busy
    copies.to_host(noted, Rows(0, 2 * MIB, 0, 2 * MIB, 2 * MIB, 50))
    assert rows_of(noted, copies) == [(at % 2, count) for at, count in enumerate(rows)]


def test_a_turn_goes_on_until_it_is_full(noted: Noted, copies: CopyStreams) -> None:
    for mebibytes in (5, 10, 3, 20, 1):
        copies.to_device(noted, Rows(0, MIB, 0, MIB, MIB, mebibytes))
    assert rows_of(noted, copies) == [(0, 5), (0, 10), (0, 1), (1, 2), (1, 14), (0, 6), (0, 1)]
    assert copies.slice == Slice(2, 7 * MIB)


def test_a_block_larger_than_a_turn_is_one_copy(noted: Noted, copies: CopyStreams) -> None:
    copies.to_host(noted, Rows(0, 40 * MIB, 0, 40 * MIB, 40 * MIB, 3))
    assert rows_of(noted, copies) == [(0, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_parts_begin_where_the_one_before_ends(noted: Noted, way: str) -> None:
    copies = CopyStreams(noted, CopySizes(small_slice_bytes=200))  # type: ignore[arg-type]
    getattr(copies, way)(noted, Rows(1000, 110, 9000, 130, 100, 5))
    first, second = copies.streams
    assert [asked for asked in noted.asked if asked[0] == way] == [
        (way, first, Rows(1000, 110, 9000, 130, 100, 2)),
        (way, second, Rows(1220, 110, 9260, 130, 100, 2)),
        (way, first, Rows(1440, 110, 9520, 130, 100, 1)),
    ]


def test_each_turn_begins_when_the_one_before_is_over(noted: Noted, copies: CopyStreams) -> None:
    copies.to_host(noted, Rows(0, 16 * MIB, 0, 16 * MIB, 16 * MIB, 3))
    over = copies.mark(noted)
    first, second = copies.streams
    what = [asked[:2] for asked in noted.asked]
    to_host = [("to_host", first), ("to_host", second), ("to_host", first)]
    assert what[::3] == to_host and over == ("mark", first)
    assert noted.asked[1:3] == [("mark", first), ("after", second, ("mark", first))]
    assert noted.asked[4:6] == [("mark", second), ("after", first, ("mark", second))]
    assert what[7:] == [("mark", first)], "it covers those before, which had to be over"


def test_what_the_present_stream_waits_for_later_turns_wait_for_too(
    noted: Noted, copies: CopyStreams
) -> None:
    """A full turn is left when the next copy is asked for, by a mark behind whatever the stream was
    told meanwhile."""
    copies.to_host(noted, Rows(0, 16 * MIB, 0, 16 * MIB, 16 * MIB, 1))
    noted.after(copies.stream, "a buffer is free")
    copies.to_host(noted, Rows(0, MIB, 0, MIB, MIB, 1))
    first, second = copies.streams
    assert noted.asked[1:4] == [
        ("after", first, "a buffer is free"),
        ("mark", first),
        ("after", second, ("mark", first)),
    ]
