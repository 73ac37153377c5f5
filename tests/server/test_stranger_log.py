"""One line for each stranger, and never too many."""

from __future__ import annotations

import logging

import pytest

from kvkeep.server.stranger_log import LINES_A_MINUTE, REMEMBERED, StrangerLog
from kvkeep.wire.peers import HTTP, ZMQ, Stranger


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


def test_lines_and_memory_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    strangers = StrangerLog(lambda: now_s[0])
    for number in range(1000):
        strangers.note("here", f"10.0.{number}", HTTP)
    assert len(caplog.records) == LINES_A_MINUTE
    now_s[0] += 60
    strangers.note("here", "10.0.999", HTTP)
    assert caplog.records[-1].getMessage().startswith("10.0.999 "), (
        "who was not said is said when it comes again"
    )
    for number in range(REMEMBERED + 50):
        now_s[0] += 60
        strangers.note("here", f"10.1.{number}", HTTP)
    assert len(strangers._said) == REMEMBERED


def test_an_address_is_short_and_is_never_missing(caplog: pytest.LogCaptureFixture) -> None:
    strangers = StrangerLog()
    strangers.note("here", "", Stranger("a thing", "do this"))
    strangers.note("here", "a" * 10_000, Stranger("a thing", "do this"))
    [first, second] = [each.getMessage() for each in caplog.records]
    assert first == "an unknown address talks to here and seems to be a thing: do this"
    assert len(second) < 200
