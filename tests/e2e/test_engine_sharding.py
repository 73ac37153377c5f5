"""Engines of several ranks: which ranks store and load which bytes, and what the server counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import (
    GQA,
    KEY,
    MLA,
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

from kvkeep.client.worker import WorkerAdapter
from kvkeep.engine.llm import LLM
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.testing.process import ServerProcess


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
    store_all, waiting = WorkerAdapter.store_all, list[Any]()

    def store_later(worker: WorkerAdapter, jobs: Any) -> None:
        waiting.append((worker, jobs)) if worker.strategy.rank else store_all(worker, jobs)

    with ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB") as small:
        with engine(small, model, tensor_parallel_size=2) as llm:
            since = Since(small)
            monkeypatch.setattr(WorkerAdapter, "store_all", store_later)
            for first in range(0, len(prompts), 3):
                llm.generate(prompts[first : first + 3], SamplingParams(max_tokens=1))
                assert eventually(
                    lambda ahead=first + 3: since("stored_blocks") == 5 * (2 * ahead - 3)
                )
                for worker, jobs in waiting:
                    store_all(worker, jobs)
                waiting.clear()
                assert llm.engine.flush()
            assert status(small)["counters"]["evictions"] > 0
            monkeypatch.undo()
            zero(llm)
            last = prompts[-8:]
            warm = serve(llm, [counting(tokens) for tokens in last], max_tokens=1)
        assert [answer.kv_transfer_params for answer in warm] == [{KEY: 20}] * len(last)
        assert [answer.token_ids for answer in warm] == without_cache(model, last, max_tokens=1)


@pytest.mark.parametrize(
    ("model", "tp", "pp", "shards", "token_bytes"),
    [
        # An oracle's head has a key and a value of one word in each of two layers.
        *(
            (oracle(num_kv_heads=heads), tp, pp, shards, heads * 2 * 2 * 8)
            for heads, tp, pp, shards in (
                (8, 8, 1, 8),
                (2, 8, 1, 2),
                (1, 4, 1, 1),
                (2, 2, 2, 4),
                (2, 4, 2, 4),
                (4, 4, 2, 8),
            )
        ),
        (oracle(use_mla=True), 8, 1, 1, 2 * 2 * 8),
        (oracle(use_mla=True), 4, 2, 2, 2 * 2 * 8),
        (replace(MLA, num_heads=8), 8, 1, 1, 2 * (8 + 4) * 8),  # layers, latent and key, float64
        (replace(GQA, num_kv_heads=2), 4, 1, 2, 2 * 2 * 2 * 8 * 8),  # K and V, heads, head_dim
    ],
)
def test_each_distinct_shard_is_stored_once_and_every_rank_loads_its_own(
    server: ServerProcess, model: Any, tp: int, pp: int, shards: int, token_bytes: int
) -> None:
    own: dict[str, Any] = {}
    if isinstance(model, ModelSettings):
        own = {"seed": seed(), "dtype": torch.float64}
    tokens = prompt(22)
    with engine(server, model, tensor_parallel_size=tp, pipeline_parallel_size=pp, **own) as llm:
        assert len(llm.engine.workers.shape.shard_bytes) == shards
        since, ready = Since(server), status(server)["pool"]["blocks"]["ready"]
        serve(llm, [tokens], max_tokens=1)
        assert since.requests("PrepareStore") == since.requests("CompleteStore") == shards
        assert since("stored_blocks") == 5 * shards
        assert since("stored_bytes") == 5 * 4 * token_bytes
        assert status(server)["pool"]["blocks"]["ready"] == ready + 5
        zero(llm)
        since = Since(server)
        [warm] = serve(llm, [counting(tokens)], max_tokens=1)
        assert since.requests("Lookup") == 1, "the scheduler asks, not the ranks"
        assert since.requests("PrepareStore") == 0
        shard_of = [rank.strategy.kv_rank for rank in llm.engine.workers.ranks]
        for block in local_blocks(llm, tokens):
            held = {(shard, content(llm, block, rank)) for rank, shard in enumerate(shard_of)}
            assert len(held) == shards and all(any(copy) for _, copy in held)
    assert warm.kv_transfer_params == {KEY: 20}
    assert [warm.token_ids] == without_cache(model, [tokens], max_tokens=1, **own)
    assert at_rest(server)


@pytest.mark.parametrize("kind", ["oracle", "gqa", "mla"])
def test_an_engine_that_is_cut_otherwise_never_hits(server: ServerProcess, kind: str) -> None:
    """The oracle raises for a byte of another cut."""
    model: Any = {"oracle": oracle(num_kv_heads=4), "gqa": GQA, "mla": MLA}[kind]
    own = {} if kind == "oracle" else {"seed": seed(), "dtype": torch.float64}
    tokens, cuts = prompt(22), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]
    expected = without_cache(model, [tokens], **own)
    for again in (False, True):
        for tp, pp in cuts:
            cut = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
            with engine(server, model, **cut, **own) as llm:
                [answer] = serve(llm, [counting(tokens)])
            # All ranks of a stage hold the same MLA blocks: one shard at every size.
            hits = again or (kind == "mla" and tp > 1)
            assert answer.kv_transfer_params == {KEY: 20 if hits else 0}, (tp, pp)
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
