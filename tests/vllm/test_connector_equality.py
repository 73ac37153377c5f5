"""The same tokens and the same logprobs with and without kvkeep, for each family of models that
vLLM runs on a CPU.

prompt of 100 tokens, blocks of 32:  |0 … 31|32 … 63|64 … 95|96 … 99      3 full blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from replicas import (
    BLOCK,
    PoolMemory,
    Replica,
    Server,
    Since,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    status,
    tokens_of,
)

from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")

MODELS = [
    "llama",
    "gemma3",
    "lfm2",
    "gptoss",
]  # vLLM's LFM2 answers otherwise in a batch, on a CPU and by itself
LENGTHS = [5, 31, 32, 33, 64, 65, 100, 257, 500]


def loadable(length: int) -> int:
    """Tokens of full blocks that count. The last token is always computed, so its block does
    not."""
    return (length - 1) // BLOCK * BLOCK


def both(plain: Replica, prompts: Sequence[list[int]], **more: Any) -> tuple[list[Any], list[Any]]:
    """What vLLM answers by itself: all computed, and with what its own prefix cache has."""
    requests = [request(tokens, **more) for tokens in prompts]
    return plain.serve(requests), plain.serve(requests)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    """Of module scope, so that all tests of one model come together and its engines start once."""
    name: str = request.param
    return name


@pytest.fixture
def engine(model: str, one: Replica, server: ServerProcess) -> Replica:
    return one.use(model, server)


@pytest.fixture
def bare(model: str, plain: Replica) -> Replica:
    """Without a cache but its own."""
    return plain.use(model)


def test_tokens_and_logprobs_are_those_without_a_cache(
    model: str, bare: Replica, engine: Replica, server: ServerProcess
) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    computed, local = both(bare, prompts)
    since = Since(server)
    cold = engine.serve([counting(tokens) for tokens in prompts])
    assert [answer.extra for answer in cold] == [0] * len(prompts)
    assert [(a.tokens, a.logprobs) for a in cold] == [(a.tokens, a.logprobs) for a in computed]
    assert eventually(lambda: since("stored_blocks") > 0) and at_rest(server)
    warm = engine.fresh().serve([counting(tokens) for tokens in prompts])
    expected = [loadable(length) for length in LENGTHS]
    assert [answer.extra for answer in warm] == expected
    for answer, tokens, length in zip(warm, expected, LENGTHS, strict=True):
        # A prompt that is there as a whole: its last token is computed again, and vLLM counts it or
        # does not.
        assert answer.cached in (tokens, length // BLOCK * BLOCK, length - 1), (
            "and vLLM says so too"
        )
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in computed]
    assert [answer.logprobs for answer in warm] == [answer.logprobs for answer in local]


def test_a_second_turn_begins_where_the_first_ended(
    bare: Replica, engine: Replica, model: str
) -> None:
    if model == "lfm2":
        pytest.skip(
            "vLLM's LFM2 answers otherwise by itself where states of generated tokens are used again"
        )
    first, more = prompt(70), prompt(19)
    [answer] = engine.serve([request(first, max_tokens=60)])
    second = [*first, *answer.tokens, *more]
    [computed], _ = both(bare, [second], max_tokens=8)
    [warm] = engine.fresh().serve([counting(second, max_tokens=8)])
    assert warm.tokens == computed.tokens
    assert warm.extra == (70 + 60 - 1) // BLOCK * BLOCK, "its last token has no KV yet"
    third = [*second, *warm.tokens, 5, 6, 7]
    [last] = engine.fresh().serve([counting(third)])
    [expected], _ = both(bare, [third])
    assert last.tokens == expected.tokens
    assert last.extra >= 128


def test_many_together_that_share_a_prefix(model: str, bare: Replica, engine: Replica) -> None:
    if model == "lfm2":
        pytest.skip(
            "vLLM's LFM2 answers otherwise by itself, in a batch and after a hit where two prompts part"
        )
    prefix = prompt(96)
    prompts = [[*prefix, *prompt(10 + 25 * number)] for number in range(6)] + [
        prefix[:64],
        prompt(40),
    ]
    expected = [bare.serve([request(tokens)])[0].tokens for tokens in prompts]
    cold = engine.serve([counting(tokens) for tokens in prompts], together=True)
    assert tokens_of(cold) == expected
    warm = engine.fresh().serve([counting(tokens) for tokens in prompts], together=True)
    assert tokens_of(warm) == expected
    assert sum(answer.extra for answer in warm) >= 96 + 2 * BLOCK


def test_wrong_bytes_would_change_the_answer(bare: Replica) -> None:
    """These tests can fail: zeros where KV should be, which the prefix cache does not notice, give
    other tokens."""
    tokens = prompt(300)
    [right] = bare.serve([request(tokens, max_tokens=8)])
    bare.call("zero")
    [wrong] = bare.serve([request(tokens, max_tokens=8)])
    assert wrong.cached == 288
    # Half of LFM2's layers keep no KV: its first tokens may come out the same, but not as likely.
    off = max(abs(a - b) for a, b in zip(wrong.logprobs, right.logprobs, strict=True))
    assert wrong.tokens != right.tokens or off > 0.05


def test_wrong_bytes_in_the_pool_would_change_the_answer(plain: Replica, two: Replica) -> None:
    with Server("--pool-size", "64MiB", "--slab-size", "1MiB", "--no-verify") as careless:
        tokens = prompt(300)
        [computed], _ = both(plain.use("llama"), [tokens], max_tokens=8)
        two.use("llama", careless, extra={"kvkeep.verify": False})
        assert tokens_of(two.serve([request(tokens, max_tokens=8)])) == [computed.tokens]
        assert eventually(lambda: status(careless)["counters"]["stored_blocks"] >= 9) and at_rest(
            careless
        )
        PoolMemory(careless).zero()
        [wrong] = two.fresh().serve([counting(tokens, max_tokens=8)])
        assert wrong.extra == 288
        assert wrong.tokens != computed.tokens
        two.close_engine()


def test_a_second_process_finds_what_the_first_has_stored(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    expected = tokens_of(plain.use("llama").serve([request(tokens) for tokens in prompts]))
    since = Since(server)
    one.use("llama", server).serve([request(tokens) for tokens in prompts])
    assert eventually(lambda: since("stored_blocks") >= sum(length // BLOCK for length in LENGTHS))
    warm = two.use("llama", server).serve([counting(tokens) for tokens in prompts])
    assert [answer.extra for answer in warm] == [loadable(length) for length in LENGTHS]
    assert tokens_of(warm) == expected


def test_a_prompt_computed_in_several_steps_is_stored_and_found(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    tokens = prompt(700)
    [computed], _ = both(plain.use("llama"), [tokens])
    options: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 8}
    since = Since(server)
    cold = one.use("llama", server, **options).serve([counting(tokens)])
    assert eventually(lambda: since("stored_blocks") >= 21)
    warm = two.use("llama", server).serve([counting(tokens)])
    assert tokens_of(cold) == tokens_of(warm) == [computed.tokens]
    assert (cold[0].extra, warm[0].extra) == (0, loadable(700))


def test_engines_of_another_model_share_nothing(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    tokens = prompt(200)
    since = Since(server)
    one.use("llama", server).serve([request(tokens)])
    assert eventually(lambda: since("stored_blocks") >= 6)
    [other] = two.use("gemma3", server).serve([counting(tokens)])
    assert other.extra == 0
    assert [other.tokens] == tokens_of(plain.use("gemma3").serve([request(tokens)]))


def test_after_a_crash_in_the_middle_the_next_engine_finds_what_was_stored(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    tokens = prompt(400)
    since = Since(server)
    one.use("llama", server).serve([request(tokens)])
    assert eventually(lambda: since("stored_blocks") >= 12)
    two.use("llama", server).fresh()
    two.submit([request(tokens), request(prompt(400), max_tokens=50)])
    two.step(3)
    two.kill()
    assert at_rest(server), "what the dead one held is free"
    [warm] = two.use("llama", server).serve([counting(tokens)])
    assert warm.extra == loadable(400)
    assert [warm.tokens] == tokens_of(plain.use("llama").serve([request(tokens)]))


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
def test_each_hash_that_vllm_offers_is_shared_between_processes(
    algorithm: str, plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    tokens = prompt(150)
    options = {"prefix_caching_hash_algo": algorithm}
    since = Since(server)
    one.use("llama", server, **options).serve([request(tokens)])
    assert eventually(lambda: since("stored_blocks") >= 4)
    [warm] = two.use("llama", server, **options).serve([counting(tokens)])
    assert warm.extra == loadable(150)
    assert [warm.tokens] == tokens_of(plain.use("llama").serve([request(tokens)]))
