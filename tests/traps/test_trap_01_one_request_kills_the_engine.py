"""Trap 1: one API request kills the engine: a salt with a slash, a wrongly typed parameter, an
abort before lookup."""

from __future__ import annotations

from typing import Any

import pytest
from engines import (
    KEY,
    at_rest,
    counting,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
    status,
    without_cache,
)
from patience import patient_engine

from kvkeep.engine.llm import Prompt
from kvkeep.testing.process import ServerProcess

SALTS = [
    "/",
    "../../etc/passwd",
    "a/b",
    "%s%n",
    "\n",
    "salt with blanks",
    "é\u2028",
    "x" * 2_000,
    "\0",
    "\ud800",
    "",
]
PARAMS: list[Any] = [
    {"kvkeep_priority": "high"},
    {"kvkeep_ttl_ms": {"a": [1]}},
    {"kvkeep_session_finished": 3},
    {"num_kvkeep_extra_cached_tokens": object()},
    ["no", "mapping"],
    "text",
    7,
]


@pytest.mark.parametrize("salt", SALTS, ids=ascii)
def test_a_request_with_an_odd_salt_is_served_and_cached(server: ServerProcess, salt: str) -> None:
    model, tokens, others = oracle(), prompt(22), prompt(22)
    with patient_engine(server, model) as llm:
        [answer] = serve(llm, [counting(tokens, salt)])
        assert [answer.token_ids] == without_cache(model, [Prompt(tokens, salt=salt)])
        forget_local(llm)
        [again] = serve(llm, [counting(tokens, salt)])
        assert again.token_ids == answer.token_ids and again.kv_transfer_params == {KEY: 20}, (
            "and it is cached"
        )
        [next_one] = serve(llm, [others])
    assert [next_one.token_ids] == without_cache(model, [others])
    assert at_rest(server)


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: ascii(params)[:40])
def test_a_wrongly_typed_parameter_changes_no_answer(server: ServerProcess, params: Any) -> None:
    model, tokens = oracle(), prompt(22)
    with patient_engine(server, model) as llm:
        answers = serve(llm, [Prompt(tokens, kv_transfer_params=params), prompt(9)])
    assert [answers[0].token_ids] == without_cache(model, [tokens])
    assert [answer.finish_reason for answer in answers] == ["length", "length"]


def test_an_abort_before_the_lookup_is_answered_leaves_an_engine_that_serves(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(22)
    with patient_engine(server, model) as llm:
        serve(llm, [tokens])
        for _ in range(20):
            request = llm.engine.add(tokens)
            llm.engine.abort(request.id)
            assert request.finish_reason == "abort"
        llm.engine.step()
        [answer] = serve(llm, [tokens])
        assert [answer.token_ids] == without_cache(model, [tokens])
    assert at_rest(server) and eventually(lambda: status(server)["sessions"] == [])
