"""What vLLM's scheduler does with requests of which a part is loaded: preempt, guess, reset,
skip."""

from __future__ import annotations

from typing import Any

import pytest
from replicas import Replica, Since, at_rest, counting, eventually, prompt, request, tokens_of

from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_preempted_requests_answer_the_same(
    plain: Replica, one: Replica, server: ServerProcess, model: str
) -> None:
    prompts = [prompt(40 + 3 * number) for number in range(6)]  # small at first, and then they grow
    expected = tokens_of(
        plain.use(model).serve([request(tokens, max_tokens=150) for tokens in prompts])
    )
    tight: dict[str, Any] = {
        "num_gpu_blocks_override": 22 if model == "llama" else 36,
        "max_model_len": 320,
    }
    one.use(model, server, **tight)
    free = one.state()["free_blocks"]
    for _ in range(2):
        names = one.submit([counting(tokens, max_tokens=150) for tokens in prompts])
        preempted = 0
        while len(set(one.step(5)) & set(names)) < len(names):
            preempted = max(preempted, one.state()["preemptions"])
        assert preempted, "this is a test of preemption"
        answers = one.answers(names)
        assert tokens_of(answers) == expected
        assert one.fresh().settle()["free_blocks"] == free
        assert at_rest(server)
    assert sum(answer.extra for answer in answers) > 0, "the second time from the cache"


def test_blocks_that_vllm_zeroes_for_the_next_request_are_stored_as_they_were(
    plain: Replica, one: Replica, server: ServerProcess
) -> None:
    """With recurrent states vLLM zeroes new blocks before a step, and gives out first what was
    freed last."""
    prompts = [prompt(97 + 32 * (number % 3)) for number in range(12)]
    expected = tokens_of(plain.use("lfm2").serve([request(tokens) for tokens in prompts]))
    one.use("lfm2", server, num_gpu_blocks_override=14, max_model_len=320)
    names = one.submit([request(tokens) for tokens in prompts[:1]])
    for tokens in prompts[
        1:
    ]:  # the next one is there when the blocks of the last are freed, and still to be stored
        while not set(one.step(1)) & set(names):
            pass
        names = one.submit([request(tokens)])
    while not set(one.step(1)) & set(names):
        pass
    warm = one.fresh().serve([counting(tokens) for tokens in prompts])
    assert tokens_of(warm) == expected
    assert sum(answer.extra for answer in warm) > 0
    one.close_engine()


def test_a_reset_of_the_connector_makes_the_next_request_a_miss(
    plain: Replica, one: Replica, server: ServerProcess
) -> None:
    tokens = prompt(100)
    engine = one.use("llama", server)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    engine.serve([request(tokens)])
    engine.settle()
    assert engine.call("reset", connector=False)
    [kept] = engine.serve([counting(tokens)])
    assert kept.extra == 96, "vLLM's own prefix cache alone"
    assert engine.call("reset", connector=True)
    [missed] = engine.serve([counting(tokens)])
    assert (missed.extra, missed.cached, [missed.tokens]) == (0, 0, expected)
    [found] = engine.fresh().serve([counting(tokens)])
    assert (found.extra, [found.tokens]) == (96, expected), "and what it computed since is found"
    one.close_engine()


def test_a_request_that_does_not_want_to_read_does_not(
    plain: Replica, one: Replica, server: ServerProcess
) -> None:
    tokens = prompt(100)
    engine = one.use("llama", server)
    engine.serve([request(tokens)])
    engine.fresh()
    since = Since(server)
    [answer] = engine.serve([counting(tokens, sampling={"skip_reading_prefix_cache": True})])
    assert (answer.extra, answer.cached) == (0, 0)
    assert since("hit_blocks") == 0, "it did not even ask"
    assert [answer.tokens] == tokens_of(plain.use("llama").serve([request(tokens)]))
    [prompted] = engine.fresh().serve([counting(tokens, sampling={"prompt_logprobs": 1})])
    assert prompted.extra == 0, "logprobs of a prompt need its computation"


def test_guessed_tokens_are_stored_only_when_they_are_verified(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    loop = prompt(8)
    tokens = [*prompt(60), *(loop * 6)]  # repeats itself, so that guesses are made
    expected = tokens_of(plain.use("llama").serve([request(tokens, max_tokens=60)]))
    guessing = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    one.use("llama", server, speculative_config=guessing)
    since = Since(server)
    [answer] = one.serve([request(tokens, max_tokens=60)])
    assert [answer.tokens] == expected
    assert eventually(lambda: since("stored_blocks") == (108 + 60 - 1) // 32)
    turn = [*tokens, *answer.tokens, *prompt(5)]
    [later] = two.use("llama", server).serve([counting(turn)])
    assert later.extra == 160
    assert [later.tokens] == tokens_of(plain.serve([request(turn)]))
    [warm] = one.fresh().serve([counting(tokens, max_tokens=60)])
    assert ([warm.tokens], warm.extra) == (expected, 96)
    # what such an engine leaves in its process keeps vLLM from starting another one there
    one.reboot()


def test_an_engine_without_a_prefix_cache_of_its_own(
    plain: Replica, one: Replica, server: ServerProcess
) -> None:
    tokens = prompt(170)
    one.use("llama", server, enable_prefix_caching=False)
    since = Since(server)
    [cold] = one.serve([counting(tokens)])
    assert eventually(lambda: since("stored_blocks") == 5) and at_rest(server)
    [warm] = one.serve([counting(tokens)])
    assert (cold.extra, warm.extra) == (0, 160)
    assert cold.tokens == warm.tokens
    assert [warm.tokens] == tokens_of(plain.use("llama").serve([request(tokens)]))


def test_an_engine_that_schedules_ahead(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    """It hears of a load before it reads the results of the step in which that ended."""
    known, new = [prompt(100 + 32 * number) for number in range(6)], [prompt(100) for _ in range(6)]
    prompts = [tokens for pair in zip(known, new, strict=True) for tokens in pair]
    expected = tokens_of(
        plain.use("llama").serve([request(tokens, max_tokens=12) for tokens in prompts])
    )
    two.use("llama", server).serve([request(tokens) for tokens in known])
    engine = one.use("llama", server, schedules_ahead=True)
    alone = engine.serve([counting(known[0], max_tokens=12)])  # it has nothing else to do
    assert tokens_of(alone) == expected[:1] and alone[0].extra == 96
    together = engine.fresh().serve(
        [counting(tokens, max_tokens=12) for tokens in prompts], together=True
    )
    assert tokens_of(together) == expected
    assert [answer.extra for answer in together[::2]] == [96 + 32 * number for number in range(6)]
    names = engine.fresh().submit([counting(tokens, max_tokens=12) for tokens in prompts])
    engine.step(2)
    engine.abort(names[::3])
    left = [number for number in range(len(prompts)) if number % 3]
    answers = engine.run([names[number] for number in left])
    assert tokens_of(answers) == [expected[number] for number in left]
    engine.settle()
    engine.close_engine()
