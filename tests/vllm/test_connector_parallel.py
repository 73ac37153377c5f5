"""M2: engines of two ranks on real vLLM. Who stores, who loads, and what the server counts of it.

MLA's decode disagrees with its own prefill on a CPU, cache or no cache, so bytes are compared there
and not tokens. Pipelines are not here: vLLM 0.32.0 does not run them on a CPU, with or without a
connector."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from replicas import POOL, Replica, Server, Since, at_rest, counting, eventually, prompt, request

from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")

LENGTHS = [33, 100, 160]
MLA_BLOCK = 16  # what vLLM makes of any block size, for MLA on a CPU
LATENT_BYTES = MLA_BLOCK * 2 * (512 + 64) * 4  # tokens, layers, latent and key, float32


@pytest.fixture(scope="module", autouse=True)
def _ranks_end(ranks: Replica) -> Iterator[None]:
    """Two ranks would keep both cores warm for the tests that follow."""
    yield
    ranks.kill()


def digests(
    replica: Replica, tokens: list[int], full: int, what: str = "digests"
) -> tuple[Any, int | None]:
    """What every rank holds of this prompt's first blocks after its prefill, and how much of it was
    not computed."""
    [name] = replica.submit([request(tokens, max_tokens=2)])
    replica.step_until(lambda: bool(replica.answers([name])[0].tokens))
    held = replica.call(what, name=name, full=full)
    [answer] = replica.run([name])
    replica.settle()
    return held, answer.cached


def test_llama_on_two_ranks_answers_as_without_a_cache(
    ranks: Replica, server: ServerProcess
) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    ranks.use("llama", tensor_parallel_size=2)
    expected = ranks.serve([request(tokens) for tokens in prompts])
    ranks.use("llama", server, tensor_parallel_size=2)
    since = Since(server)
    cold = ranks.serve([counting(tokens) for tokens in prompts])
    assert eventually(lambda: since("stored_blocks") == 2 * (1 + 3 + 5)), (
        f"each rank stores its heads of each block: {since}\n{ranks.tail()}"
    )
    warm = ranks.fresh().serve([counting(tokens) for tokens in prompts])
    assert [answer.extra for answer in warm] == [32, 96, 128], f"{since}\n{ranks.tail()}"
    for answers in (cold, warm):
        assert [(a.tokens, a.logprobs) for a in answers] == [
            (a.tokens, a.logprobs) for a in expected
        ]
    assert since.requests("Lookup") == 6, "the scheduler asks, not the ranks"
    tokens = prompt(130)
    computed, nothing = digests(ranks, tokens, 4)
    assert eventually(lambda: since("stored_blocks") == 2 * (1 + 3 + 5 + 4)) and at_rest(server)
    loaded, cached = digests(ranks.fresh(), tokens, 4)
    assert (nothing, cached) == (0, 128)
    assert loaded == computed, "on both ranks, byte for byte"


def test_two_ranks_say_an_outage_once_and_once_that_it_is_over(ranks: Replica) -> None:
    with Server(*POOL) as server:
        # With patient deadlines: two ranks that compute leave a server on two cores without a turn
        # for seconds, and an outage of that kind is none of this test's. A server that is killed is
        # noticed by its socket.
        ranks.use(
            "llama", server, tensor_parallel_size=2, extra={"kvkeep.reconnect_interval_ms": 50}
        )
        tokens = prompt(100)
        expected = ranks.serve([request(tokens)])[0].tokens
        said = len(ranks.log())
        server.stop(signal.SIGKILL)

        def lines(words: str) -> list[str]:
            return [line for line in ranks.log()[said:].splitlines() if words in line]

        def served_until(words: str) -> bool:
            assert ranks.fresh().serve([request(tokens)])[0].tokens == expected
            return bool(lines(words))

        assert eventually(lambda: served_until("Serving without the cache")), ranks.tail()
        for _ in range(3):
            served_until("")
        server.start()
        assert eventually(lambda: served_until("kvkeep: connected to"))
        for _ in range(3):
            served_until("")
        assert len(lines("Serving without the cache")) == len(lines("kvkeep: connected to")) == 1, (
            ranks.tail()
        )
        ranks.close_engine()


@pytest.mark.parametrize("size", [1, 2])
def test_mla_is_stored_once_and_every_rank_gets_the_same_bytes(
    one: Replica, ranks: Replica, server: ServerProcess, size: int
) -> None:
    replica = (
        one.use("mla", server) if size == 1 else ranks.use("mla", server, tensor_parallel_size=2)
    )
    tokens = prompt(100)
    since = Since(server)
    computed, nothing = digests(replica, tokens, 6)
    assert eventually(lambda: since("stored_blocks") == 6), "of one rank, however many there are"
    assert at_rest(server)
    assert (since.requests("PrepareStore"), since.requests("CompleteStore")) == (1, 1)
    assert since("stored_bytes") == 6 * LATENT_BYTES
    replica.fresh()
    loaded, cached = digests(replica, tokens, 6)
    assert (nothing, cached) == (0, 96)
    assert loaded == computed
    assert len(computed) == size and len({str(rank) for rank in computed}) == 1, (
        "all ranks have the one copy"
    )
    assert since("stored_blocks") == 6, "what the server has is not stored again"
    [again] = replica.fresh().serve([counting(tokens)])
    assert again.extra == 96


def test_mla_that_was_stored_by_one_rank_is_found_by_another_process(
    one: Replica, two: Replica, server: ServerProcess
) -> None:
    tokens = prompt(90)
    since = Since(server)
    computed, _ = digests(one.use("mla", server), tokens, 5)
    assert eventually(lambda: since("stored_blocks") == 5) and at_rest(server)
    loaded, cached = digests(two.use("mla", server), tokens, 5)
    assert (loaded, cached) == (computed, 80)


def test_mla_that_was_stored_by_one_rank_is_found_by_an_engine_of_two(
    one: Replica, ranks: Replica, server: ServerProcess
) -> None:
    tokens = prompt(90)
    since = Since(server)
    computed, _ = digests(one.use("mla", server), tokens, 5)
    assert eventually(lambda: since("stored_blocks") == 5) and at_rest(server)
    loaded, cached = digests(ranks.use("mla", server, tensor_parallel_size=2), tokens, 5)
    assert (loaded, cached) == (computed * 2, 80)


def heads(replica: Replica, tokens: list[int], full: int) -> tuple[list[Any], int | None]:
    """What the whole engine holds of each KV head of this prompt's blocks, for each group."""
    held, cached = digests(replica, tokens, full, "head_digests")
    blocks = [
        [[digest for of_rank in same for digest in of_rank] for same in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*held, strict=True)
    ]
    return blocks, cached


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("stores", [1, 2])
def test_engines_of_one_and_two_ranks_share_what_they_cut_into_the_same_shards(
    one: Replica, ranks: Replica, server: ServerProcess, model: str, stores: int
) -> None:
    """One rank holds both shards, or each of two holds one."""

    def engine(size: int, **options: Any) -> Replica:
        replica = one if size == 1 else ranks
        return replica.use(model, tensor_parallel_size=size, **options)

    hits, tokens, shared = 3 - stores, prompt(150), {"kvkeep.tp_shards": 2}
    expected = engine(hits).serve([request(tokens)])
    since = Since(server)
    computed, nothing = heads(engine(stores, server=server, extra=shared), tokens, 4)
    assert eventually(lambda: since("stored_blocks") == 4 * stores * len(computed)), str(since)
    assert since.requests("PrepareStore") == stores * len(computed) and at_rest(server)
    replica = engine(hits, server=server, extra=shared)
    loaded, cached = heads(replica, tokens, 4)
    assert (nothing, cached) == (0, 128)
    # of a window the engine has the last blocks only
    assert [blocks[-1] for blocks in loaded] == [blocks[-1] for blocks in computed]
    assert loaded[-1 if model == "gemma3" else 0] == computed[-1 if model == "gemma3" else 0]
    [warm] = replica.fresh().serve([counting(tokens)])
    assert (warm.extra, warm.tokens) == (128, expected[0].tokens)
