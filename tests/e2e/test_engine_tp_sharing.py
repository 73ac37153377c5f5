"""Engines of several tensor-parallel sizes that cut KV heads into the same shards: each finds what
the others stored, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import (
    GQA,
    KEY,
    Since,
    at_rest,
    counting,
    engine,
    local_blocks,
    oracle,
    prompt,
    seed,
    serve,
    without_cache,
)

from kvkeep.engine.llm import LLM
from kvkeep.errors import SettingsError
from kvkeep.testing.process import ServerProcess

SHARDS = {"kvkeep.tp_shards": 4}


def whole_blocks(llm: LLM, tokens: list[int], layer: int = 0) -> list[torch.Tensor]:
    """The blocks of a prompt with the heads of all ranks together, the last dim but one."""
    ranks = [rank for rank in llm.engine.workers.ranks if rank.strategy.stores]
    return [
        torch.cat([list(rank.kv.values())[layer][block] for rank in ranks], dim=-2)
        for block in local_blocks(llm, tokens)
    ]


@pytest.mark.parametrize(("stores", "hits"), [(2, 4), (4, 2), (1, 4), (4, 1), (2, 1)])
@pytest.mark.parametrize("kind", ["oracle", "gqa"])
def test_what_one_size_stored_another_hits(
    server: ServerProcess, kind: str, stores: int, hits: int
) -> None:
    model: Any = oracle(num_kv_heads=4) if kind == "oracle" else GQA
    own = {} if kind == "oracle" else {"seed": seed(), "dtype": torch.float64}
    tokens = prompt(22)
    expected = without_cache(model, [tokens], max_tokens=1, **own)
    with engine(server, model, tensor_parallel_size=stores, extra=SHARDS, **own) as llm:
        since = Since(server)
        [cold] = serve(llm, [counting(tokens)], max_tokens=1)
        assert since.requests("PrepareStore") == since.requests("CompleteStore") == stores
        written = whole_blocks(llm, tokens)
    with engine(server, model, tensor_parallel_size=hits, extra=SHARDS, **own) as llm:
        since = Since(server)
        [warm] = serve(llm, [counting(tokens)], max_tokens=1)
        assert since("stored_blocks") == 0
        read = whole_blocks(llm, tokens)
    assert (cold.kv_transfer_params, warm.kv_transfer_params) == ({KEY: 0}, {KEY: 20})
    assert [cold.token_ids] == [warm.token_ids] == expected
    assert len(written) == 5 and all(map(torch.equal, written, read))
    assert at_rest(server)


def test_grouped_heads_and_replicas_are_cut_alike(server: ServerProcess) -> None:
    """Two KV heads: at TP=4 two ranks hold each. More shards than heads are a shard for each."""
    model, tokens = oracle(num_kv_heads=2), prompt(22)
    expected = without_cache(model, [tokens])
    for size in (4, 1, 2):
        with engine(server, model, tensor_parallel_size=size, extra=SHARDS) as llm:
            [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: 0 if size == 4 else 20}
        assert [answer.token_ids] == expected


def test_stages_of_a_pipeline_are_cut_by_heads_too(server: ServerProcess) -> None:
    model, tokens = oracle(num_kv_heads=4), prompt(22)
    expected = without_cache(model, [tokens])
    for size, hit in ((2, 0), (4, 20), (1, 20)):
        cut = {"tensor_parallel_size": size, "pipeline_parallel_size": 2}
        with engine(server, model, **cut, extra=SHARDS) as llm:
            [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: hit}
        assert [answer.token_ids] == expected


def test_generated_blocks_and_the_next_turn_are_shared(server: ServerProcess) -> None:
    """Both sizes store, into one conversation."""
    model, turn = oracle(num_kv_heads=4), prompt(9)
    hit = 0
    for size in (2, 4, 1, 2):
        with engine(server, model, tensor_parallel_size=size, extra=SHARDS) as llm:
            [answer] = serve(llm, [counting(turn)], max_tokens=12)
        assert [answer.token_ids] == without_cache(model, [turn], max_tokens=12)
        assert answer.kv_transfer_params == {KEY: hit}
        turn = [*turn, *answer.token_ids]
        hit = (len(turn) - 1) // 4 * 4  # the last token's KV is not computed


def test_the_largest_size_shares_without_being_told(server: ServerProcess) -> None:
    """Its ranks hold one shard each: the same cut."""
    model, tokens = oracle(num_kv_heads=4), prompt(22)
    with engine(server, model, tensor_parallel_size=4) as llm:
        serve(llm, [tokens])
    with engine(server, model, tensor_parallel_size=2, extra=SHARDS) as llm:
        [answer] = serve(llm, [counting(tokens)])
    assert answer.kv_transfer_params == {KEY: 20}
    with engine(server, model, tensor_parallel_size=2) as llm:
        [alone] = serve(llm, [counting(tokens)])
    assert alone.kv_transfer_params == {KEY: 0}
    assert [answer.token_ids] == [alone.token_ids] == without_cache(model, [tokens])


def test_over_a_network_the_bytes_are_the_same(server: ServerProcess) -> None:
    model, tokens = oracle(num_kv_heads=4), prompt(22)
    far = {**SHARDS, "kvkeep.shared_memory": False}
    for size, hit in ((1, 0), (4, 20), (2, 20)):
        with engine(server, model, tensor_parallel_size=size, extra=far) as llm:
            [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: hit}
        assert [answer.token_ids] == without_cache(model, [tokens])


@pytest.mark.parametrize("shards", [2, 3])
def test_a_cut_that_does_not_fit_is_refused_by_name(server: ServerProcess, shards: int) -> None:
    with (
        pytest.raises(SettingsError, match=r"kvkeep\.tp_shards"),
        engine(
            server,
            oracle(num_kv_heads=4),
            tensor_parallel_size=4,
            extra={"kvkeep.tp_shards": shards},
        ),
    ):
        pass
