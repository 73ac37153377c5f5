"""A subject causes a bounded number of log lines a minute."""

from __future__ import annotations

import logging

import pytest

from kvkeep.server.log_limits import (
    MOST_SUBJECTS,
    STRANGERS_A_MINUTE,
    STRANGERS_REMEMBERED,
    LineLimit,
    StrangerLog,
)
from kvkeep.wire.peers import HTTP, ZMQ, Stranger


def test_each_subject_has_its_lines_every_minute() -> None:
    limit = LineLimit(2)
    assert [limit.allows("a", 0.0) for _ in range(4)] == [True, True, False, False]
    assert limit.allows("b", 1.0), "another subject has lines of its own"
    assert not limit.allows("a", 59.0)
    assert [limit.allows("a", 60.0) for _ in range(3)] == [True, True, False]


def test_a_clock_that_was_set_back_begins_a_new_minute() -> None:
    limit = LineLimit(1)
    assert limit.allows("a", 1_000.0) and not limit.allows("a", 1_001.0)
    assert limit.allows("a", 5.0)


def test_ever_new_subjects_take_bounded_memory_and_lines() -> None:
    limit = LineLimit(1)
    assert sum(limit.allows(number, 0.0) for number in range(3 * MOST_SUBJECTS)) == MOST_SUBJECTS
    assert sum(limit.allows(number, 60.0) for number in range(3 * MOST_SUBJECTS)) == MOST_SUBJECTS


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_a_peer_is_told_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    strangers = StrangerLog(lambda: now_s[0])
    for _ in range(3):
        strangers.note("tcp://127.0.0.1:5555", "10.0.0.7", ZMQ)
        strangers.note("tcp://127.0.0.1:5555", "10.0.0.7", HTTP)
        strangers.note("tcp://127.0.0.1:5555", "10.0.0.8", HTTP)
        strangers.note("tcp://127.0.0.1:5555", "10.0.0.9", None)
        now_s[0] += 3600
    said = [each.getMessage() for each in caplog.records]
    assert [line.split(" talks")[0] for line in said] == ["10.0.0.7", "10.0.0.7", "10.0.0.8"]
    assert said[0].startswith(
        "10.0.0.7 talks to tcp://127.0.0.1:5555 and seems to be a ZMQ client: LMCache, or a kvkeep"
    )
    assert "install the same kvkeep release on both sides" in said[0]


def test_lines_and_memory_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    strangers = StrangerLog(lambda: now_s[0])
    for number in range(1000):
        strangers.note("here", f"10.0.{number}", HTTP)
    assert len(caplog.records) == STRANGERS_A_MINUTE
    now_s[0] += 60
    strangers.note("here", "10.0.999", HTTP)
    assert caplog.records[-1].getMessage().startswith("10.0.999 "), (
        "who was not said is said when it comes again"
    )
    for number in range(STRANGERS_REMEMBERED):
        now_s[0] += 60
        strangers.note("here", f"10.1.{number}", HTTP)
    lines = len(caplog.records)
    for number in (STRANGERS_REMEMBERED - 1, 1, 0):
        strangers.note("here", f"10.1.{number}", HTTP)
    assert len(caplog.records) == lines, "they are remembered"
    strangers.note("here", "10.0.999", HTTP)
    assert len(caplog.records) == lines + 1, "an older one is forgotten, and logged again"


def test_an_address_is_short_and_is_never_missing(caplog: pytest.LogCaptureFixture) -> None:
    strangers = StrangerLog()
    strangers.note("here", "", Stranger("a thing", "do this"))
    strangers.note("here", "a" * 10_000, Stranger("a thing", "do this"))
    [first, second] = [each.getMessage() for each in caplog.records]
    assert first == "an unknown address talks to here and seems to be a thing: do this"
    assert len(second) < 200
