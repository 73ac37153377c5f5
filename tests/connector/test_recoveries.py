"""After loads have failed the log has one line: how many, of how many requests, and what had to be
computed."""

from __future__ import annotations

import logging

import pytest

from kvkeep.client.hints import Hints
from kvkeep.client.requests import LoadOutcome
from kvkeep.connector.recoveries import Recoveries, log_policy
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "kvkeep")
    return caplog


def failed(request_id: str, good: int, blocks: int = 8) -> Job:
    ids = list(range(100, 100 + blocks))
    return Job(
        1,
        RequestState(request_id, None, Hints(), bytearray(), 0),
        0,
        ids,
        is_load=True,
        outcome=LoadOutcome(frozenset(ids[good:])),
    )


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_loads_that_fail_together_are_one_line(said: pytest.LogCaptureFixture) -> None:
    recoveries = Recoveries("recompute", block_tokens=64, clock=Clock())
    recoveries.tell(more_to_come=False)
    for job in (failed("a", 0), failed("b", 3), failed("b", 5)):
        recoveries.add(job)
        recoveries.tell(more_to_come=True)
    assert said.messages == []
    recoveries.tell(more_to_come=False)
    recoveries.tell(more_to_come=False)
    assert said.messages == ["kvkeep: 3 loads failed; 2 requests recomputed 1,024 tokens"]


def test_an_engine_that_is_never_without_loads_says_it_all_the_same(
    said: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    recoveries = Recoveries("recompute", block_tokens=16, clock=clock)
    recoveries.add(failed("a", 7))
    clock.now_s += 2
    recoveries.tell(more_to_come=True)
    assert said.messages == ["kvkeep: 1 load failed; 1 request recomputed 16 tokens"]
    recoveries.add(failed("b", 7))
    recoveries.tell(more_to_come=True)
    assert len(said.messages) == 1, "the next ones have a moment of their own"


def test_where_a_failed_load_ends_its_request_the_line_says_so(
    said: pytest.LogCaptureFixture,
) -> None:
    recoveries = Recoveries("fail", block_tokens=16, clock=Clock())
    recoveries.add(failed("a", 7))
    recoveries.tell(more_to_come=False)
    [line] = said.messages
    assert (
        line
        == "kvkeep: 1 load failed; 1 request ended with an error (kv_load_failure_policy is fail)"
    )


def test_the_policy_in_force_is_logged(said: pytest.LogCaptureFixture) -> None:
    log_policy("recompute", "the default")
    assert said.messages == ["kvkeep: kv_load_failure_policy is recompute (the default)"]
