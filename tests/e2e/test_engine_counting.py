"""How much the cache gave a request, counted by hand, by the engine and by the server.

prompt of 22 tokens, blocks of 4:  |0123|4567|89ab|cdef|ghij|kl    5 full blocks; the engine always
                                                                   computes the rest
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from engines import (
    KEY,
    PoolMemory,
    Since,
    at_rest,
    content,
    counting,
    engine,
    eventually,
    forget_local,
    local_blocks,
    oracle,
    prompt,
    serve,
    tokens_of,
    without_cache,
)

from kvkeep.cli.remote import ask
from kvkeep.engine.llm import LLM, Prompt
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.testing.process import ServerProcess

OTHER = "num_lmcache_extra_cached_tokens"


@pytest.fixture(autouse=True)
def _nothing_is_left(server: ServerProcess) -> Iterator[None]:
    yield
    assert at_rest(server), "a lease or a write outlived its request"


@pytest.mark.parametrize("names", [[KEY], [OTHER], [KEY, OTHER]], ids=["ours", "theirs", "both"])
def test_the_number_comes_back_under_each_name_that_was_sent(
    server: ServerProcess, names: list[str]
) -> None:
    model, tokens = oracle(), prompt(22)
    params: dict[str, Any] = dict.fromkeys(names)
    with engine(server, model) as llm:
        [cold] = serve(llm, [Prompt(tokens, kv_transfer_params=params)])
        forget_local(llm)
        [warm] = serve(llm, [Prompt(tokens, kv_transfer_params=params)])
    assert cold.kv_transfer_params == dict.fromkeys(names, 0)
    assert warm.kv_transfer_params == dict.fromkeys(names, 20)
    assert params == dict.fromkeys(names), "what the caller sent is the caller's"


@pytest.mark.parametrize(
    ("length", "first", "local_tokens", "expected", "hits"),
    [
        (22, 0, 0, 20, 5),  # nothing local: all five full blocks
        (20, 0, 0, 16, 5),  # the last token is computed always, so its block is not loaded
        (21, 0, 0, 20, 5),
        (4, 0, 0, 0, 1),
        (5, 0, 0, 4, 1),
        (22, 9, 8, 12, 5),  # two blocks local, the server's five less two
        (22, 17, 16, 4, 5),
        (22, 22, 20, 0, 0),  # all local
    ],
)
def test_the_number_is_the_servers_blocks_less_the_engines_own(
    server: ServerProcess, length: int, first: int, local_tokens: int, expected: int, hits: int
) -> None:
    model, tokens = oracle(), prompt(length)
    with engine(server, model) as one:
        serve(one, [tokens])
    with engine(server, model) as two:
        if first:
            serve(two, [tokens[:first]])
        since = Since(server)
        [answer] = serve(two, [counting(tokens)])
    assert answer.kv_transfer_params == {KEY: expected}
    assert answer.metrics.external_cached_tokens == expected
    assert answer.metrics.local_cached_tokens == local_tokens
    assert since("hit_blocks") == hits
    assert eventually(lambda: since("loaded_tokens") == expected)


def test_the_server_counts_the_same_hits(server: ServerProcess) -> None:
    tokens = prompt(22)
    with engine(server, oracle()) as llm:
        for hits, stored in ((0, 6), (5, 0)):  # 22 tokens and two generated ones; then nothing new
            since = Since(server)
            [answer] = serve(llm, [counting(tokens)])
            assert (since("lookups"), since("lookup_blocks"), since("hit_blocks")) == (1, 5, hits)
            assert since("stored_blocks") == stored
            assert answer.kv_transfer_params == {KEY: hits * 4}
            forget_local(llm)


def test_a_server_that_has_less_than_the_engine_never_makes_it_negative(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(22)
    with engine(server, model) as one, engine(server, model) as two:
        serve(one, [tokens])
        ask(server.http, "/v1/blocks?confirm=everything", "DELETE")
        serve(two, [tokens[:9]])
        since = Since(server)
        [answer] = serve(one, [counting([*tokens, *prompt(5)])])
        assert since("hit_blocks") == 2, "the server has two blocks, the engine five"
        assert since("stored_blocks") == 7 - 2, "of 29 tokens, what the server lacks"
    assert answer.metrics.local_cached_tokens == 20
    assert answer.kv_transfer_params == {KEY: 0}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {}),
        ({"mine": 1}, {}),
        ({"kvkeep_priority": 80}, {}),
        (None, None),
        ({KEY: {"a": [{"b": None}]}, "x" * 10_000: [[[]]], "": "\ud800"}, {KEY: 0}),
    ],
)
def test_the_reply_has_only_what_was_asked_for(
    server: ServerProcess, params: Any, expected: Any
) -> None:
    with engine(server, oracle()) as llm:
        [answer] = serve(llm, [Prompt(prompt(9), kv_transfer_params=params)])
    assert answer.kv_transfer_params == expected


@pytest.mark.parametrize(
    "params",
    [
        [1, 2],
        "num_kvkeep_extra_cached_tokens",
        7,
        True,
        object(),
        {"kvkeep_priority": "high"},
        {"kvkeep_priority": 101},
        {"kvkeep_priority": True},
        {"kvkeep_ttl_ms": -1},
        {"kvkeep_ttl_ms": 1.5},
        {"kvkeep_ttl_ms": None},
        {"kvkeep_session_finished": "yes"},
        {"kvkeep_session_finished": 3},
        {"kvkeep_priority": {"deep": [{}]}},
    ],
    ids=str,
)
def test_bad_params_warn_and_the_request_is_served(
    server: ServerProcess, params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = oracle(), prompt(9)
    with engine(server, model) as llm, caplog.at_level(logging.WARNING):
        [answer] = serve(llm, [Prompt(tokens, kv_transfer_params=params)])
        forget_local(llm)
        [again] = serve(llm, [counting(tokens)])
    assert [answer.token_ids] == without_cache(model, [tokens])
    assert answer.kv_transfer_params == ({} if isinstance(params, dict) else None)
    assert [record for record in caplog.records if "kv_transfer_params" in record.getMessage()]
    assert again.kv_transfer_params == {KEY: 8}, "it was stored all the same"


def test_a_request_aborted_before_it_was_ever_scheduled_is_a_zero(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(22)
    with engine(server, model) as llm:
        serve(llm, [tokens])
        forget_local(llm)
        for _ in range(20):
            request = llm.engine.add(tokens, kv_transfer_params={KEY: None, OTHER: None})
            llm.engine.abort(request.request_id)
            assert (request.finish_reason, request.reply_params) == ("abort", {KEY: 0, OTHER: 0})
            assert llm.engine.step() == [request] and not llm.engine.busy
        llm.engine.check_integrity()
        assert at_rest(server), "the leases of the lookups were given back"
        [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: 20}
        assert [answer.token_ids] == without_cache(model, [tokens])


def test_a_request_aborted_while_its_blocks_come_counts_nothing_that_it_did_not_use(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(22)
    with engine(server, model) as llm:
        serve(llm, [tokens])
        forget_local(llm)
        request = llm.engine.add(tokens, kv_transfer_params={KEY: None})
        while not llm.engine.scheduler.loading:
            llm.engine.step()
        llm.engine.abort(request.request_id)
        assert request.reply_params == {KEY: 0}
        assert request.metrics.external_cached_tokens == 0
        assert llm.engine.flush()
        llm.engine.check_integrity()
        assert at_rest(server)


@pytest.mark.parametrize(
    ("bad", "extra"),
    [
        *((bad, {"kvkeep.load": mode}) for bad in (0, 2, 4) for mode in ("async", "sync")),
        (2, {"kvkeep.shared_memory": False}),
    ],
    ids=str,
)
def test_a_failed_load_counts_only_what_came_and_was_used(
    server: ServerProcess, bad: int, extra: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of a block in the pool flips."""
    model, tokens = oracle(), prompt(22)
    with engine(server, model) as one, engine(server, model, extra=extra) as two:
        [expected] = tokens_of(serve(one, [tokens]))
        PoolMemory(server).flip(content(one, local_blocks(one, tokens)[bad]))
        since = Since(server)
        [answer] = serve(two, [counting(tokens)])
        assert eventually(lambda: since("bad_blocks") == 1)
        assert answer.token_ids == expected
        assert answer.kv_transfer_params == {KEY: bad * 4}
        assert answer.metrics.external_cached_tokens == bad * 4
        assert answer.metrics.failed_loads == 1
        assert [line for line in caplog.messages if "recomputed" in line] == [
            f"kvkeep: 1 load failed; 1 request recomputed {(5 - bad) * 4} tokens"
        ]
        forget_local(two)
        [again] = serve(two, [counting(tokens)])
        assert again.kv_transfer_params == {KEY: 20}, "the recomputed block replaced the bad one"
        assert again.token_ids == expected


def served_after_preemption(llm: LLM, request: Request) -> None:
    """Takes the request's blocks away and serves it to its end with what the server has."""
    llm.engine.scheduler.preempt(request)
    forget_local(llm)
    while llm.engine.busy:
        llm.engine.step()
    assert llm.engine.flush()
    assert request.metrics.preemptions == 1


def preempted_once(llm: LLM, server: ServerProcess, tokens: list[int], blocks: int) -> Request:
    """Preempts a request when the server has this many of its blocks."""
    request = llm.engine.add(tokens, SamplingParams(max_tokens=400), kv_transfer_params={KEY: None})
    known = Since(server)
    while known("stored_blocks") < blocks:
        llm.engine.step()
    served_after_preemption(llm, request)
    return request


def test_preempted_and_loaded_again_counts_once(server: ServerProcess) -> None:
    tokens = prompt(22)
    with engine(server, oracle()) as llm:
        [expected] = tokens_of(serve(llm, [tokens], max_tokens=6))
        forget_local(llm)
        since = Since(server)
        sampling = SamplingParams(max_tokens=6)
        request = llm.engine.add(tokens, sampling, kv_transfer_params={KEY: None})
        while not request.output_tokens:
            llm.engine.step()
        served_after_preemption(llm, request)
        assert since("hit_blocks") == 10, "it was loaded twice"
    assert request.output_tokens == expected
    assert request.reply_params == {KEY: 20}
    assert request.metrics.external_cached_tokens == 20


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_cold_prompt_that_loads_back_what_it_generated_was_given_nothing(
    server: ServerProcess, mode: str
) -> None:
    model, tokens = oracle(), prompt(9)
    with engine(server, model, extra={"kvkeep.load": mode}) as llm:
        since = Since(server)
        request = preempted_once(llm, server, tokens, blocks=10)
        assert since("hit_blocks") >= 10, "after the preemption"
    assert [request.output_tokens] == without_cache(model, [tokens], max_tokens=400)
    assert request.reply_params == {KEY: 0}
    assert request.metrics.external_cached_tokens == 0


def test_a_prompt_that_was_all_local_before_a_preemption_was_given_nothing(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(41)
    with engine(server, model) as llm:
        serve(llm, [tokens])
        since = Since(server)
        request = preempted_once(llm, server, tokens, blocks=8)
        assert since("hit_blocks") >= 18, "after the preemption"
    assert request.metrics.local_cached_tokens == 40
    assert request.reply_params == {KEY: 0}


def test_preempted_in_its_prompt_it_counts_what_it_had_not_computed_by_then(
    server: ServerProcess,
) -> None:
    """The server has nothing when the request begins, and all of the prompt when it begins
    again."""
    model, tokens = oracle(), prompt(41)
    with engine(server, model) as one, engine(server, model, max_num_batched_tokens=8) as two:
        request = two.engine.add(
            tokens, SamplingParams(max_tokens=3), kv_transfer_params={KEY: None}
        )
        while request.num_computed_tokens < 16:
            two.engine.step()
        [expected] = tokens_of(serve(one, [tokens]))
        served_after_preemption(two, request)
    assert request.output_tokens == expected
    assert request.reply_params == {KEY: 40 - 16}


def test_of_two_that_share_a_prefix_one_loads_and_the_other_finds_it_local(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(20)
    prompts = [counting([*tokens, 1]), counting([*tokens, 2])]
    with engine(server, model) as one:
        serve(one, [tokens])
    with engine(server, model) as two:
        answers = serve(two, prompts)
    loading, waiting = sorted(answers, key=lambda answer: answer.metrics.local_cached_tokens)
    assert (loading.kv_transfer_params, waiting.kv_transfer_params) == ({KEY: 20}, {KEY: 0})
    assert (loading.metrics.local_cached_tokens, waiting.metrics.local_cached_tokens) == (0, 20)
    assert tokens_of(answers) == without_cache(model, prompts)


def test_generated_tokens_count_in_the_next_turn(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(10)
    with engine(server, model) as one:
        [answer] = serve(one, [tokens], max_tokens=11)
    with engine(server, model) as two:
        [later] = serve(two, [counting([*tokens, *answer.token_ids, 1, 2])])
    assert later.kv_transfer_params == {KEY: 20}, "the last token of the answer has no KV yet"


def test_the_planner_keeps_nothing_of_requests_that_are_over(server: ServerProcess) -> None:
    with engine(server, oracle()) as llm:
        for _ in range(3):
            serve(llm, [counting(prompt(9)), prompt(13)])
        planner = llm.engine.scheduler.planner
        assert planner is not None and planner.idle
