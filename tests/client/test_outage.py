from __future__ import annotations

import gc
import logging

import pytest

from kvkeep.client.outage import UNTRUSTED, Outage


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_several_connections_of_a_process_say_it_once(said: pytest.LogCaptureFixture) -> None:
    outages = [Outage("tcp://a:1") for _ in range(5)]
    for outage in outages:
        outage.begin("nobody listens there", "")
        outage.begin("nobody listens there", "")
    assert (
        len(said.messages) == 1
        and "tcp://a:1" in said.messages[0]
        and "kvkeep serve" in said.messages[0]
    )
    for outage in outages:
        outage.end()
    assert said.messages[1:] == ["kvkeep: connected to tcp://a:1"]


def test_another_address_and_another_refusal_are_other_troubles(
    said: pytest.LogCaptureFixture,
) -> None:
    outages = [Outage("tcp://a:1"), Outage("tcp://b:1"), Outage("tcp://a:1")]
    for outage, refusal in zip(outages, ("", "", "too many sessions"), strict=True):
        outage.begin("it does not answer", refusal)
    assert len(said.messages) == 3


def test_what_the_server_says_itself_is_told_once_after_a_guess(
    said: pytest.LogCaptureFixture,
) -> None:
    outages = [Outage("tcp://a:1") for _ in range(3)]
    for refusal in (
        "",
        "its keys and ours do not fit",
        "its keys and ours do not fit",
        "too many sessions",
        "",
    ):
        for outage in outages:
            outage.begin("no connection could be made", refusal)
    assert len(said.messages) == 2, "the guess, and why it really is"
    assert "kvkeep serve" in said.messages[0] and "its keys and ours do not fit" in said.messages[1]
    for outage in outages:
        outage.end()
    assert said.messages[2:] == ["kvkeep: connected to tcp://a:1"]


def test_the_next_outage_is_told_again(said: pytest.LogCaptureFixture) -> None:
    outage = Outage("tcp://a:1")
    for _ in range(2):
        outage.begin("it does not answer", "")
        outage.end()
    assert len(said.messages) == 4


def test_who_is_gone_keeps_nobody_from_speaking(said: pytest.LogCaptureFixture) -> None:
    gone = Outage("tcp://a:1")
    gone.begin("it does not answer", "")
    del gone
    gc.collect()
    Outage("tcp://a:1").begin("it does not answer", "")
    assert len(said.messages) == 2


def test_a_rank_that_does_not_speak_keeps_its_trouble_for_whoever_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    rank = Outage("tcp://a:1")
    rank.speaks = False
    assert rank.trouble is None
    rank.begin("it does not answer", "")
    assert rank.told and rank.trouble == ("it does not answer", "")
    rank.begin("it does not answer", "too many sessions")
    assert rank.trouble == ("it does not answer", "too many sessions")
    rank.end()
    assert rank.trouble is None
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_a_rank_that_does_not_speak_keeps_the_scheduler_from_nothing(
    said: pytest.LogCaptureFixture,
) -> None:
    rank, scheduler = Outage("tcp://a:1"), Outage("tcp://a:1")
    rank.speaks = False
    rank.begin("it does not answer", "")
    scheduler.begin("it does not answer", "")
    scheduler.end()
    rank.end()
    assert len(said.messages) == 2, "once when it began, once when it was over"


def test_a_server_that_is_not_trusted_is_called_that(said: pytest.LogCaptureFixture) -> None:
    outage = Outage("tcp://a:1")
    outage.begin(UNTRUSTED, "its pool belongs to another user")
    assert (
        "the server at tcp://a:1 is not trusted: its pool belongs to another user. Serving"
        in said.messages[0]
    )
