from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.server.setting_kinds import AUTO_SIZE, DIRECTORY, DURATION, QUOTA, SIZE, SWITCH, USERS
from kvkeep.units import MIB


@given(st.integers(0, 1 << 46))
def test_a_size_is_shown_as_text_that_sets_it_again(size_bytes: int) -> None:
    assert SIZE.parse(SIZE.show(size_bytes)) == size_bytes


@given(st.integers(0, 10**11))
def test_a_duration_is_shown_as_text_that_sets_it_again(duration_us: int) -> None:
    seconds = DURATION.parse(f"{duration_us}us")
    assert DURATION.parse(DURATION.show(seconds)) == seconds


def test_words_stand_for_no_size() -> None:
    assert AUTO_SIZE.parse("Auto") is None
    assert QUOTA.parse("none") is None
    assert QUOTA.show(None) == "none"
    assert QUOTA.show(5844 * MIB) == "5844MiB"
    with pytest.raises(ValueError):
        AUTO_SIZE.parse("none")


@pytest.mark.parametrize(
    ("text", "on"), [("true", True), ("YES", True), ("1", True), ("off", False), ("0", False)]
)
def test_switches(text: str, on: bool) -> None:
    assert SWITCH.parse(text) is on
    assert SWITCH.parse(SWITCH.show(on)) is on


def test_a_home_is_expanded_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert DIRECTORY.parse("~/state") == Path("/somewhere/state")
    with pytest.raises(ValueError):
        DIRECTORY.parse("~nobody-of-this-name/state")


@pytest.mark.parametrize(("text", "users"), [("none", ()), ("7", (7,)), ("root, 7", (0, 7))])
def test_users(text: str, users: tuple[int, ...]) -> None:
    assert USERS.parse(text) == users
    assert USERS.parse(USERS.show(users)) == users
