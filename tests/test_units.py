from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("1k", KIB),
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("512Mi", 512 * MIB),
        ("1.5g", 3 * GIB // 2),
        ("2TiB", 2 * TIB),
        ("1GB", 10**9),
        ("0.1KiB", 102),
        ("  64MiB ", 64 * MIB),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "+1",
        "1.5",
        "8XB",
        "1e9",
        "1_000",
        "1,5g",
        "0x10",
        "٣",
        "1" * 30,
        "8GiB 1MiB",
        "nan",
    ],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as 8GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (KIB, "1KiB"),
        (1536 * MIB, "1.5GiB"),
        (5 * TIB, "5TiB"),
        (-MIB, "-1MiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_fitting_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 1 << 60))
def test_a_shown_size_is_within_a_hundredth_of_the_true_one(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= size_bytes / 100


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("1.5h", 5400.0),
        ("1d", 86400.0),
        ("80us", 8e-5),
        ("0s", 0.0),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1m30s", "1 fortnight", "infs"])
def test_a_duration_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a duration such as 250ms"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (10, "10s"),
        (90, "1.5m"),
        (3600, "1h"),
        (1.2e-5, "12us"),
        (5e-8, "0.05us"),
    ],
)
def test_durations_are_shown_in_the_largest_fitting_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
