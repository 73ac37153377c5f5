"""Tokens with the cache are the tokens without it: real models in float64, cut in every way, with
servers that fail.

In float64 the order of additions does not decide between two tokens, so all engines must give the
answers of one engine without a cache."""

from __future__ import annotations

import functools
import itertools
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import (
    BRISK,
    GQA,
    KEY,
    MLA,
    POOL,
    Since,
    at_rest,
    counting,
    engine,
    eventually,
    forget_local,
    prompt,
    seed,
    serve,
    tokens_of,
    without_cache,
)
from engines import run as run_process

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.testing.process import ServerProcess

SETTINGS = {"gqa": GQA, "mla": MLA}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
GREEDY = SamplingParams(max_tokens=7)
SEEDED = SamplingParams(max_tokens=7, temperature=1.0, seed=11, top_k=20)
kinds = pytest.mark.parametrize("kind", SETTINGS)


def extras(answers: Any) -> list[int]:
    return [answer.kv_transfer_params[KEY] for answer in answers]


SHARED = prompt(12)
PROMPTS = [prompt(22), [*SHARED, *prompt(9)], [*SHARED, *prompt(6)], prompt(3), prompt(33)]


def mixed(salt: str) -> list[Prompt]:
    """Short and long, with a common beginning, greedy and drawn."""
    how = [GREEDY, SEEDED, GREEDY, SEEDED, SEEDED]
    return [
        replace(counting(each, salt), sampling=own) for each, own in zip(PROMPTS, how, strict=True)
    ]


@functools.cache
def expected_of(kind: str) -> list[list[int]]:
    return without_cache(SETTINGS[kind], mixed(""), **DOUBLE)


@kinds
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("cut", [True, False], ids=["chunked", "whole"])
def test_tokens_are_the_same_however_the_engine_is_cut(
    server: ServerProcess, kind: str, tp: int, pp: int, cut: bool
) -> None:
    salt, mode = f"{kind}-{tp}-{pp}-{cut}", "sync" if (tp + pp + cut) % 2 else "async"
    with engine(
        server,
        SETTINGS[kind],
        extra={"kvkeep.load": mode},
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_chunked_prefill=cut,
        max_num_batched_tokens=10 if cut else 64,
        **DOUBLE,
    ) as llm:
        cold = serve(llm, mixed(salt))
        forget_local(llm)
        warm = serve(llm, mixed(salt))
        local = serve(llm, mixed(salt))
    assert tokens_of(cold) == tokens_of(warm) == tokens_of(local) == expected_of(kind)
    assert extras(cold) == [0] * 5 and extras(local) == [0] * 5
    total = [
        answer.metrics.local_cached_tokens + extra
        for answer, extra in zip(warm, extras(warm), strict=True)
    ]
    assert total == [20, 20, 16, 0, 32] and sum(extras(warm)) >= 20 + 16 + 4 + 32, (
        "all full blocks came back"
    )
    assert at_rest(server)


@kinds
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_tiny_pool_preempts_and_changes_nothing(
    server: ServerProcess, kind: str, mode: str
) -> None:
    own = {"seed": seed(), **DOUBLE}
    prompts = [counting(prompt(18)) for _ in range(6)]
    expected = without_cache(SETTINGS[kind], prompts, max_tokens=16, **own)
    with engine(server, SETTINGS[kind], num_blocks=24, extra={"kvkeep.load": mode}, **own) as llm:
        since = Since(server)
        cold = serve(llm, prompts, max_tokens=16)
        assert sum(answer.metrics.preemptions for answer in cold) > 0
        assert tokens_of(cold) == expected
        forget_local(llm)
        warm = serve(llm, prompts, max_tokens=16)
        assert sum(answer.metrics.preemptions for answer in warm) > 0
        assert tokens_of(warm) == expected
        assert since("hit_blocks") > 0
    assert at_rest(server)


@kinds
def test_the_next_turn_finds_what_was_generated(server: ServerProcess, kind: str) -> None:
    own = {"seed": seed(), **DOUBLE}
    history, expected_extra = prompt(10), 0
    for _ in range(3):
        # A new engine each time has no blocks of its own.
        with engine(server, SETTINGS[kind], **own) as llm:
            since = Since(server)
            [answer] = serve(llm, [counting(history)], max_tokens=9)
            assert since("hit_blocks") == expected_extra // 4
        assert [answer.token_ids] == without_cache(SETTINGS[kind], [history], max_tokens=9, **own)
        assert extras([answer]) == [expected_extra]
        computed = len(history) + 9 - 1  # the last token was drawn, and nothing computed from it
        expected_extra = computed // 4 * 4
        assert expected_extra > len(history), "generated blocks are among them"
        history = [*history, *answer.token_ids, *prompt(2)]


def test_a_second_process_hits_what_the_first_stored(server: ServerProcess) -> None:
    kind, number, prompts = "gqa", seed(), [prompt(22), prompt(13)]
    expected = without_cache(SETTINGS[kind], prompts, seed=number, **DOUBLE)
    with engine(server, SETTINGS[kind], seed=number, **DOUBLE) as llm:
        assert tokens_of(serve(llm, prompts)) == expected
    since = Since(server)
    said = run_process(server.address, {"model": kind, "seed": number, "prompts": prompts})
    assert [each["tokens"] for each in said] == expected
    assert [each["extra"] for each in said] == [20, 12]
    assert since("hit_blocks") == 5 + 3 and since("sessions_died") == 0


def test_other_weights_or_types_under_the_same_name_are_another_model(
    server: ServerProcess,
) -> None:
    tokens = prompt(22)
    for dtype in (torch.float64, torch.float64, torch.float32):
        own = {"seed": seed(), "dtype": dtype}
        with engine(server, GQA, **own) as llm:
            [answer] = serve(llm, [counting(tokens)])
        assert extras([answer]) == [0]
        assert [answer.token_ids] == without_cache(GQA, [tokens], **own)


# -- trouble


TWELVE = SamplingParams(max_tokens=12)


def serve_until(llm: LLM, prompts: list[Prompt], step: int, happens: Any) -> list[list[int]]:
    """Serves, and something happens after so many steps."""
    steps = itertools.count(1)
    answers = llm.generate(prompts, TWELVE, lambda _: happens() if next(steps) == step else None)
    assert next(steps) > step, "it happened"
    return tokens_of(answers)


@pytest.mark.parametrize(
    ("end", "step", "mode"),
    [
        (signal.SIGKILL, 2, "async"),
        (signal.SIGKILL, 2, "sync"),
        (signal.SIGSTOP, 1, "async"),
        (signal.SIGSTOP, 3, "async"),
    ],
    ids=str,
)
def test_a_server_that_is_killed_or_paused_in_the_middle_changes_nothing(
    end: signal.Signals, step: int, mode: str
) -> None:
    own = {"seed": seed(), **DOUBLE}
    prompts = [counting(prompt(30)) for _ in range(8)]
    expected = without_cache(GQA, prompts, max_tokens=12, **own)
    with (
        ServerProcess(*POOL) as mortal,
        # Few run at a time, so that some have loaded, some are loading and some have not begun.
        engine(mortal, GQA, extra={**BRISK, "kvkeep.load": mode}, max_num_seqs=3, **own) as llm,
    ):
        assert tokens_of(serve(llm, prompts, max_tokens=12)) == expected
        forget_local(llm)
        assert serve_until(llm, prompts, step, lambda: mortal.send(end)) == expected
        forget_local(llm)
        assert tokens_of(llm.generate(prompts, TWELVE)) == expected
        assert llm.engine.flush()
        llm.engine.check_integrity()
        if end == signal.SIGSTOP:
            mortal.send(signal.SIGCONT)

            def hits_again() -> bool:
                forget_local(llm)
                [answer] = serve(llm, prompts[:1], max_tokens=1)
                return answer.metrics.external_cached_tokens == 28

            assert eventually(hits_again)
            assert at_rest(mortal)
