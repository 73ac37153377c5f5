"""A request's own arithmetic: tokens, keys, order, when it ends, what it cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request, RequestMetrics, Status
from kvkeep.kv.keys import KEY_BYTES, KeyChain

ROOT = b"r" * 16


def request_of(
    tokens: Sequence[int], max_tokens: int = 3, stop: Sequence[int] = (), **options: int
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, seed=0)
    chain = KeyChain(ROOT, 4)
    return Request(request_id="a", tokens=list(tokens), sampling=sampling, chain=chain, **options)


def test_a_new_request_waits_with_nothing() -> None:
    request = request_of([1, 2, 3, 4, 5])
    assert request.status is Status.WAITING
    assert request.block_ids == [] and request.num_computed_tokens == 0
    assert request.prompt_tokens == request.num_tokens == 5 and request.output_tokens == []
    assert len(request.chain) == 1 and request.finish_reason == request.error == ""


def test_generated_tokens_extend_tokens_and_keys() -> None:
    request = request_of([1, 2, 3, 4, 5])
    keys = [request.append(token) for token in (6, 7, 8, 9)]
    assert request.output_tokens == [6, 7, 8, 9]
    assert (request.prompt_tokens, request.num_tokens) == (5, 9)
    assert [len(key) for key in keys] == [0, 0, KEY_BYTES, 0]
    assert keys[2] == request_of([1, 2, 3, 4, 5, 6, 7, 8]).chain.key(1) == request.chain.key(1)


@pytest.mark.parametrize(
    ("tokens", "reason"), [([8], ""), ([8, 8], "length"), ([8, 9], "stop"), ([9], "stop")]
)
def test_it_ends_at_its_length_or_a_stop_token(tokens: list[int], reason: str) -> None:
    request = request_of([9, 9], max_tokens=2, stop=[9])
    for token in tokens:
        request.append(token)
    assert request.stop_reason() == reason


def test_order_is_priority_then_arrival() -> None:
    ranks = [(1, 0), (0, 2), (0, 1)]
    requests = [request_of([1], priority=priority, number=number) for priority, number in ranks]
    assert [each.number for each in sorted(requests, key=lambda each: each.order)] == [1, 2, 0]


def test_requests_are_equal_only_to_themselves() -> None:
    first, second = request_of([1]), request_of([1])
    assert first != second and len({first, second}) == 2


def test_time_to_the_first_token() -> None:
    metrics = RequestMetrics(arrived_s=10.0)
    assert metrics.ttft_ms is None
    metrics.first_token_s = 10.25
    assert metrics.ttft_ms == 250.0
