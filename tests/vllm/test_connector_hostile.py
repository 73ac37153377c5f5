"""Bad kv_transfer_params of every type, and aborts at random moments: the engine lives, and nothing
is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from replicas import KEY, EngineFailed, Replica, at_rest, counting, prompt, request, tokens_of

from kvkeep.testing.process import ServerProcess

BAD: list[Any] = [
    [1, 2],
    "num_kvkeep_extra_cached_tokens",
    7,
    1.5,
    True,
    False,
    "",
    [],
    {"kvkeep_priority": "high"},
    {"kvkeep_priority": 101},
    {"kvkeep_priority": True},
    {"kvkeep_priority": -(2**62)},
    {"kvkeep_ttl_ms": -1},
    {"kvkeep_ttl_ms": 1.5},
    {"kvkeep_ttl_ms": None},
    {"kvkeep_session_finished": "yes"},
    {"kvkeep_prefetch": ["a prompt"]},
    {"kvkeep_priority": {"deep": [{}]}},
    {KEY: {"a": [{"b": None}]}, "x" * 10_000: [[[]]], "": "\ud800"},
    {"do_remote_prefill": True, "do_remote_decode": True, "remote_block_ids": [1, 2, 3]},
    {"num_computed_tokens": -5, "block_ids": [[0]], "request_id": "r0"},
]


@pytest.fixture
def engine(one: Replica, server: ServerProcess) -> Replica:
    return one.use("llama", server)


@pytest.mark.parametrize("params", BAD, ids=lambda params: str(params)[:60])
def test_bad_params_end_nothing(
    plain: Replica, engine: Replica, server: ServerProcess, params: Any
) -> None:
    tokens = prompt(70)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    try:
        [answer] = engine.serve([request(tokens, params=params)])
    except EngineFailed as error:
        if isinstance(params, dict) or not str(error).startswith("submit: "):
            raise
        refused = True  # by vLLM, before the request was there
    else:
        refused = False
        assert [answer.tokens] == expected
        counted = {KEY: 0} if isinstance(params, dict) and KEY in params else {}
        assert answer.params == (counted if isinstance(params, dict) else None)
    engine.use("llama", server)
    [again] = engine.fresh().serve([counting(tokens)])
    assert [again.tokens] == expected
    assert again.params == {KEY: 0 if refused else 64}, (
        "what is stored is found, whatever the request carried"
    )
    assert at_rest(server)


def test_a_hundred_aborts_at_random_moments_leave_nothing_behind(
    plain: Replica, engine: Replica, server: ServerProcess
) -> None:
    chance = random.Random(20261)
    known = [prompt(length) for length in (40, 200, 500, 900)]
    engine.serve([request(tokens) for tokens in known])
    free = engine.fresh().state()["free_blocks"]
    living: list[str] = []
    aborted = 0
    while aborted < 100:
        for _ in range(chance.randint(1, 4)):
            tokens = chance.choice([*known, prompt(chance.randint(1, 300))])
            tokens = [*tokens[: chance.randint(1, len(tokens))], *prompt(chance.randint(0, 50))]
            salt = chance.choice([None, "a", "b"])
            living += engine.submit([counting(tokens, salt, max_tokens=chance.randint(1, 40))])
        ended = engine.step(chance.choice([0, 0, 1, 1, 2, 3, 7])) if living else []
        living = [name for name in living if name not in ended]
        if chance.random() < 0.2:
            engine.call("forget_hashes")
        chosen = chance.sample(living, min(len(living), chance.randint(0, 4)))
        engine.abort(chosen)
        aborted += len(chosen)
        living = [name for name in living if name not in chosen]
    answers = engine.run(living)
    assert all(answer.reason == "length" for answer in answers)
    assert engine.settle()["requests"] == {}
    assert engine.fresh().state()["free_blocks"] == free
    assert at_rest(server), "leases and writes"
    asked = [counting(tokens) for tokens in known]
    assert tokens_of(engine.serve(asked)) == tokens_of(plain.use("llama").serve(asked))


def test_aborts_of_a_model_with_windows_leave_nothing_behind(
    plain: Replica, one: Replica, server: ServerProcess
) -> None:
    chance = random.Random(7)
    engine = one.use("gemma3", server)
    known = [prompt(length) for length in (100, 300, 700)]
    engine.serve([request(tokens) for tokens in known])
    free = engine.fresh().state()["free_blocks"]
    for _ in range(20):
        names = engine.submit([counting(chance.choice(known), max_tokens=20), counting(prompt(80))])
        engine.step(chance.randint(0, 4))
        engine.abort(names[: chance.randint(1, 2)])
        engine.run(names)
        engine.fresh()
    assert engine.fresh().state()["free_blocks"] == free
    assert at_rest(server)
    asked = [counting(tokens) for tokens in known]
    assert tokens_of(engine.serve(asked)) == tokens_of(plain.use("gemma3").serve(asked))
