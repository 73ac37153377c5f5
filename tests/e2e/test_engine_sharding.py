"""M2: engines of several ranks. Who stores, who loads, and what the server counts of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.engine.llm import LLM
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))
from engines import (
    GQA,
    KEY,
    MLA,
    POOL,
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
    seed,
    serve,
    status,
    without_cache,
)

WORDS = 8  # bytes


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL) as running:
        yield running


def zero(llm: LLM) -> None:
    """Every rank loses its KV, so that what it has later was loaded."""
    forget_local(llm)
    for rank in llm.engine.workers.ranks:
        for kv in rank.kv.values():
            kv.zero_()


def test_what_two_ranks_store_last_is_whole_in_a_pool_that_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank is always three stores behind the other."""
    model, prompts = oracle(), [prompt(22) for _ in range(60)]
    with ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB") as small:
        with engine(small, model, tensor_parallel_size=2) as llm:
            since, late, waiting = Since(small), llm.engine.workers._caches[1], list[Any]()
            store_all = late.store_all
            monkeypatch.setattr(late, "store_all", waiting.append)
            for first in range(0, len(prompts), 3):
                llm.generate(prompts[first : first + 3], SamplingParams(max_tokens=1))
                assert eventually(
                    lambda ahead=first + 3: since("stored_blocks") == 5 * (2 * ahead - 3)
                )
                for jobs in waiting:
                    store_all(jobs)
                waiting.clear()
                assert llm.engine.flush()
            counted = status(small)
            assert counted["counters"]["evictions"] > 0, "more than there is room for"
            monkeypatch.undo()
            zero(llm)
            last = prompts[-8:]
            warm = serve(llm, [counting(tokens) for tokens in last], max_tokens=1)
        assert [answer.kv_transfer_params for answer in warm] == [{KEY: 20}] * len(last)
        assert [answer.token_ids for answer in warm] == without_cache(model, last, max_tokens=1)


def test_mla_on_eight_ranks_stores_each_block_once_and_all_ranks_load_it(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(use_mla=True), prompt(22)
    with engine(server, model, tensor_parallel_size=8) as llm:
        since = Since(server)
        [cold] = serve(llm, [tokens], max_tokens=1)
        assert since.requests("PrepareStore") == 1, "one request for five blocks, not eight"
        assert since.requests("CompleteStore") == 1
        assert since("stored_blocks") == 5
        assert since("stored_bytes") == 5 * 4 * 2 * 2 * WORDS, "blocks, tokens, layers, words"
        zero(llm)
        since = Since(server)
        [warm] = serve(llm, [counting(tokens)], max_tokens=1)
        assert since("stored_blocks") == 0 and since.requests("PrepareStore") == 0
        assert since.requests("Lookup") == 1, "the scheduler asks, not the ranks"
        blocks = local_blocks(llm, tokens)
        assert len(blocks) == 5
        for block in blocks:
            copies = {content(llm, block, rank) for rank in range(8)}
            assert len(copies) == 1 and any(copies.pop()), "all ranks have the one copy"
    assert warm.kv_transfer_params == {KEY: 20}
    assert [cold.token_ids] == [warm.token_ids] == without_cache(model, [tokens], max_tokens=1)
    assert at_rest(server)


def test_a_real_mla_model_on_eight_ranks_stores_each_block_once(server: ServerProcess) -> None:
    settings = replace(MLA, num_heads=8)
    own: dict[str, Any] = {"seed": seed(), "dtype": torch.float64}
    tokens = prompt(22)
    with engine(server, settings, tensor_parallel_size=8, **own) as llm:
        since = Since(server)
        serve(llm, [tokens], max_tokens=1)
        assert (since.requests("PrepareStore"), since.requests("CompleteStore")) == (1, 1)
        assert since("stored_blocks") == 5
        assert since("stored_bytes") == 5 * 4 * 2 * (8 + 4) * 8, (
            "blocks, tokens, layers, latent and key, float64"
        )
        zero(llm)
        [warm] = serve(llm, [counting(tokens)], max_tokens=4)
    assert warm.kv_transfer_params == {KEY: 20}
    assert [warm.token_ids] == without_cache(settings, [tokens], max_tokens=4, **own)


def test_eight_kv_heads_on_eight_ranks_are_eight_shards(server: ServerProcess) -> None:
    model, tokens = oracle(num_kv_heads=8), prompt(22)
    with engine(server, model, tensor_parallel_size=8) as llm:
        since, ready = Since(server), status(server)["pool"]["blocks"]["ready"]
        serve(llm, [tokens], max_tokens=1)
        assert since.requests("PrepareStore") == since.requests("CompleteStore") == 8
        assert since("stored_blocks") == 5 * 8, "shards"
        assert since("stored_bytes") == 5 * 4 * 2 * 8 * 2 * WORDS, (
            "blocks, tokens, layers, heads, words: each once"
        )
        assert status(server)["pool"]["blocks"]["ready"] == ready + 5, "of five blocks"
        zero(llm)
        [warm] = serve(llm, [counting(tokens)])
    assert warm.kv_transfer_params == {KEY: 20}
    assert [warm.token_ids] == without_cache(model, [tokens])


@pytest.mark.parametrize(
    ("heads", "tp", "pp", "shards"), [(2, 8, 1, 2), (1, 4, 1, 1), (2, 4, 2, 4), (4, 4, 2, 8)]
)
def test_fewer_kv_heads_than_ranks_are_stored_once_for_each_distinct_shard(
    server: ServerProcess, heads: int, tp: int, pp: int, shards: int
) -> None:
    model, tokens = oracle(num_kv_heads=heads), prompt(22)
    with engine(server, model, tensor_parallel_size=tp, pipeline_parallel_size=pp) as llm:
        assert len(llm.engine.workers.shape.shard_bytes) == shards
        since = Since(server)
        serve(llm, [tokens], max_tokens=1)
        assert since.requests("PrepareStore") == since.requests("CompleteStore") == shards
        assert since("stored_blocks") == 5 * shards
        assert since("stored_bytes") == 5 * 4 * 2 * heads * 2 * WORDS
        zero(llm)
        [warm] = serve(llm, [counting(tokens)])
    assert warm.kv_transfer_params == {KEY: 20}
    assert [warm.token_ids] == without_cache(model, [tokens])


def test_a_real_model_with_replicated_heads_stores_each_once(server: ServerProcess) -> None:
    settings = replace(GQA, num_kv_heads=2)
    own: dict[str, Any] = {"seed": seed(), "dtype": torch.float64}
    tokens = prompt(22)
    with engine(server, settings, tensor_parallel_size=4, **own) as llm:
        since = Since(server)
        serve(llm, [tokens], max_tokens=1)
        assert since.requests("PrepareStore") == 2
        assert since("stored_bytes") == 5 * 4 * 2 * 2 * 2 * 8 * 8, (
            "blocks, tokens, layers, K and V, heads, size, f64"
        )
        zero(llm)
        [warm] = serve(llm, [counting(tokens)])
    assert warm.kv_transfer_params == {KEY: 20}
    assert [warm.token_ids] == without_cache(settings, [tokens], **own)


@pytest.mark.parametrize(
    ("sizes", "kv_ranks", "storing"),
    [
        ({"num_kv_heads": 4}, [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"use_mla": True}, [0, 0, 0, 0, 1, 1, 1, 1], [0, 4]),
        ({"num_kv_heads": 2}, [0, 0, 1, 1, 2, 2, 3, 3], [0, 2, 4, 6]),
    ],
    ids=["gqa", "mla", "replicas"],
)
def test_ranks_of_four_by_two_are_numbered_as_vllm_does(
    server: ServerProcess, sizes: dict[str, Any], kv_ranks: list[int], storing: list[int]
) -> None:
    model, tokens = oracle(**sizes), prompt(22)
    with engine(server, model, tensor_parallel_size=4, pipeline_parallel_size=2) as llm:
        ranks = llm.engine.workers.ranks
        assert [rank.strategy.kv_rank for rank in ranks] == kv_ranks
        assert [at for at, rank in enumerate(ranks) if rank.strategy.stores] == storing
        assert [list(rank.kv) for rank in ranks] == [["layers.0"]] * 4 + [["layers.1"]] * 4, (
            "TP groups are neighbours"
        )
        since = Since(server)
        serve(llm, [tokens], max_tokens=1)
        assert since.requests("PrepareStore") == len(storing)
        assert since("stored_blocks") == 5 * len(storing)
        zero(llm)
        [warm] = serve(llm, [counting(tokens)])
    assert warm.kv_transfer_params == {KEY: 20}
    assert [warm.token_ids] == without_cache(model, [tokens])


def test_an_engine_that_is_cut_otherwise_never_hits(server: ServerProcess) -> None:
    """The oracle would raise for a byte of another cut; real bytes would be as many and mean
    something else."""
    model, tokens = oracle(num_kv_heads=4), prompt(22)
    cuts = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
    expected = without_cache(model, [tokens])
    for tp, pp in cuts:
        with engine(server, model, tensor_parallel_size=tp, pipeline_parallel_size=pp) as llm:
            [answer] = serve(llm, [counting(tokens)])
            assert answer.kv_transfer_params == {KEY: 0}, (
                f"TP {tp} PP {pp} hit what another cut stored"
            )
            assert [answer.token_ids] == expected
    for tp, pp in cuts:
        with engine(server, model, tensor_parallel_size=tp, pipeline_parallel_size=pp) as llm:
            [answer] = serve(llm, [counting(tokens)])
            assert answer.kv_transfer_params == {KEY: 20}, "an engine of the same cut hits"
            assert [answer.token_ids] == expected


@pytest.mark.parametrize("settings", [GQA, MLA], ids=["gqa", "mla"])
def test_a_real_model_that_is_cut_otherwise_never_hits(
    server: ServerProcess, settings: Any
) -> None:
    own: dict[str, Any] = {"seed": seed(), "dtype": torch.float64}
    tokens = prompt(22)
    expected = without_cache(settings, [tokens], **own)
    for tp, pp in [(1, 1), (2, 1), (1, 2)]:
        with engine(
            server, settings, tensor_parallel_size=tp, pipeline_parallel_size=pp, **own
        ) as llm:
            [answer] = serve(llm, [counting(tokens)])
        # all ranks of a stage hold the same: one shard at every size
        is_same = settings is MLA and tp == 2
        assert answer.kv_transfer_params == {KEY: 20 if is_same else 0}
        assert [answer.token_ids] == expected


def test_generated_blocks_of_many_ranks_come_back(server: ServerProcess) -> None:
    model, tokens = oracle(num_kv_heads=8), prompt(6)
    with engine(server, model, tensor_parallel_size=8) as llm:
        [first] = serve(llm, [tokens], max_tokens=20)
        zero(llm)
        turn = [*tokens, *first.token_ids, 1]
        [second] = serve(llm, [counting(turn)])
    assert second.kv_transfer_params == {KEY: 24}
    assert [second.token_ids] == without_cache(model, [turn])


def test_every_rank_says_goodbye(server: ServerProcess) -> None:
    since = Since(server)
    with engine(server, oracle(use_mla=True), tensor_parallel_size=8):
        assert since("sessions_opened") == 9, "eight ranks and the scheduler"
    assert eventually(lambda: since("sessions_ended") == 9)
    assert since("sessions_died") == 0
