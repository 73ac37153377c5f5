"""Requests that arrive before the workers have spoken."""

from __future__ import annotations

from types import SimpleNamespace

from kvkeep.client.options import CONNECT_PATIENCE_MS
from kvkeep.vllm.early import EarlyRequests


def test_they_wait_for_a_moment_and_are_given_back_once() -> None:
    now_s = [100.0]
    early = EarlyRequests(lambda: now_s[0])
    assert not early
    for name in "abc":
        early.hold(SimpleNamespace(request_id=name))
    early.drop("b")
    early.drop("never held")
    now_s[0] += 3600
    assert early and early.may_wait(), "the moment begins when the first of them could be scheduled"
    now_s[0] += CONNECT_PATIENCE_MS / 1000
    assert not early.may_wait()
    assert [each.request_id for each in early.end()] == ["a", "c"]
    early.hold(SimpleNamespace(request_id="d"))
    assert not early and early.end() == []
