"""Which engines share blocks: those that agree on everything that changes a block's bytes, and no others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it")

import torch
from engine_parts import model_config

from kvkeep.client.sources import Piece
from kvkeep.connector.pieces import CacheGroup, Pieces
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm import identity

ONE = Pieces([CacheGroup("full", 16)])
TWO = Pieces([CacheGroup("full", 16), CacheGroup("window", 16, 64)])


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is found of the weights."""
    found: dict[str, str | None] = {"fingerprint": "f1"}

    def digest(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(value=found["fingerprint"], wait=lambda timeout_s: True)

    monkeypatch.setattr(identity.CheckpointDigest, "of", digest)
    return found


def config(extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    facts: dict[str, Any] = {
        "cache_dtype": "auto", "load_format": "auto", "draft": None, "tp_size": 1, "pp_size": 1, "hf": {"rope": 1.0},
        "loader": {},
    }  # fmt: skip
    own = {name: changes.pop(name, value) for name, value in facts.items()}
    method = "ngram" if own["draft"] == "ngram" else "eagle"
    draft = None if own["draft"] is None else SimpleNamespace(model=own["draft"], method=method)
    return SimpleNamespace(
        model_config=model_config(hf_config=SimpleNamespace(to_dict=lambda: dict(own["hf"])), **changes),
        cache_config=SimpleNamespace(cache_dtype=own["cache_dtype"]),
        load_config=SimpleNamespace(load_format=own["load_format"], model_loader_extra_config=own["loader"]),
        lora_config=None,
        speculative_config=draft,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(tensor_parallel_size=own["tp_size"], pipeline_parallel_size=own["pp_size"]),
    )


def shape(
    vllm_config: Any | None = None, pieces: Pieces = ONE, layout: str = "x", nbytes: int = 64, tp_size: int = 1
) -> BlockShape:
    strategy = ParallelStrategy.of(tp_size=tp_size)
    part: identity.Part = ([layout] * len(pieces), [nbytes] * len(pieces))
    return identity.shape_of(vllm_config or config(), pieces, strategy, [part] * tp_size)


@pytest.mark.usefixtures("weights")
def test_equal_engines_have_equal_shapes() -> None:
    assert shape().fingerprint == shape().fingerprint
    moved = config(model="/somewhere/else/tiny/")
    assert shape(moved).fingerprint == shape(config(model="tiny")).fingerprint, "a path is no property of KV"
    told = config(hf={"rope": 1.0, "_name_or_path": "/x", "transformers_version": "5"})
    assert shape(told).fingerprint == shape().fingerprint
    assert shape(config(draft="ngram")).fingerprint == shape().fingerprint, "guesses without a model keep no KV"
    assert shape(config(seed=1)).fingerprint == shape().fingerprint, "a seed is for made-up weights"


DIFFERENT: dict[str, BlockShape | Any] = {
    "another model": lambda: shape(config(model="other")),
    "an override": lambda: shape(config(hf={"rope": 2.0})),
    "quantized": lambda: shape(config(quantization="fp8")),
    "another type of KV": lambda: shape(config(cache_dtype="fp8")),
    "another type of model": lambda: shape(config(dtype=torch.bfloat16)),
    "quantized in another way": lambda: shape(config(quantization="fp8", quantization_config={"ignore": ["qkv"]})),
    "another implementation": lambda: shape(config(model_impl="transformers")),
    "loaded from elsewhere": lambda: shape(config(loader={"uri": "elsewhere"})),
    "another length": lambda: shape(config(max_model_len=77)),
    "made-up weights": lambda: shape(config(load_format="dummy")),
    "other made-up weights": lambda: shape(config(load_format="dummy", seed=1)),
    "a draft model": lambda: shape(config(draft="somebody/eagle")),
    "another draft model": lambda: shape(config(draft="somebody/eagle-2")),
    "other blocks": lambda: shape(pieces=Pieces([CacheGroup("full", 32)])),
    "a window besides": lambda: shape(pieces=TWO),
    "a wider window": lambda: shape(pieces=Pieces([CacheGroup("full", 16), CacheGroup("window", 16, 128)])),
    "another layout": lambda: shape(layout="y"),
    "other sizes": lambda: shape(nbytes=128),
    "two ranks": lambda: shape(tp_size=2),
    "a revision that is said": lambda: shape(config({"kvkeep.revision": "mine"})),
}


@pytest.mark.usefixtures("weights")
def test_whatever_changes_bytes_makes_another_shape() -> None:
    seen = {shape().fingerprint: "plain"}
    for what, make in DIFFERENT.items():
        found = make().fingerprint
        assert found not in seen, f"{what} is like {seen.get(found)}"
        seen[found] = what


def test_other_weights_of_one_name_make_another_shape(weights: dict[str, str | None]) -> None:
    before = shape()
    weights["fingerprint"] = "f2"
    assert shape().fingerprint != before.fingerprint


def test_what_the_user_calls_the_weights_counts_and_nothing_is_looked_at(weights: dict[str, str | None]) -> None:
    named = shape(config({"kvkeep.revision": "mine"}))
    weights["fingerprint"] = "f2"
    assert shape(config({"kvkeep.revision": "mine"})) == named
    assert named.identity.revision.startswith("mine ")


def test_weights_that_are_not_found_are_their_name_with_a_warning(
    weights: dict[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    weights["fingerprint"] = None
    with caplog.at_level(logging.WARNING, logger=identity.log.name):
        found = shape(config(revision="v1"))
    assert "somebody/tiny@v1" in found.identity.revision
    assert len(caplog.records) == 1 and "kvkeep.revision" in caplog.text
    assert shape(config(revision="v2")).fingerprint != found.fingerprint


@pytest.mark.usefixtures("weights")
def test_a_shape_has_the_bytes_of_every_shard() -> None:
    parts: list[identity.Part] = [(["x", "w"], [64, 8]), (["x", "w"], [64, 8]), (["y", "w"], [32, 8])]
    parts.append(parts[-1])
    found = identity.shape_of(config(), TWO, ParallelStrategy.of(tp_size=4, kv_tp_replicas=2), parts)
    assert (found.shard_bytes, found.pieces, found.identity.kv_world_size) == ((64, 8, 32, 8), 2, 2)
    assert found.identity.block_tokens == 16


# --- this rank's place ------------------------------------------------------------------------------------------


def place(monkeypatch: pytest.MonkeyPatch, tp_rank: int = 0, pp_rank: int = 0, tp: int = 1, pp: int = 1) -> None:
    groups = {"get_tp_group": (tp_rank, tp), "get_pp_group": (pp_rank, pp)}
    for name, (rank, size) in groups.items():
        group = SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=name)
        monkeypatch.setattr(identity, name, lambda group=group: group)


@pytest.mark.parametrize(("tp_rank", "pp_rank"), [(0, 0), (3, 0), (0, 1), (2, 1)])
def test_ranks_are_counted_by_stage(monkeypatch: pytest.MonkeyPatch, tp_rank: int, pp_rank: int) -> None:
    place(monkeypatch, tp_rank, pp_rank, tp=4, pp=2)
    found = identity.strategy_of(config(tp_size=4, pp_size=2), SimpleNamespace(), ONE)
    assert (found.rank, found.tp_rank, found.pp_rank) == (pp_rank * 4 + tp_rank, tp_rank, pp_rank)
    assert (found.replicas, found.kv_world_size) == (2, 4), "two heads for four ranks"


@pytest.mark.parametrize(
    ("cache", "pieces", "mla", "replicas"),
    [
        (SimpleNamespace(kv_tp_replicas=4), ONE, False, 4),
        (SimpleNamespace(kv_tp_replicas=1), ONE, True, 1),
        (SimpleNamespace(kv_tp_replicas=2), TWO, False, 2),
        (SimpleNamespace(), ONE, True, 4),
        (SimpleNamespace(), ONE, False, 2),
        (SimpleNamespace(), TWO, False, 1),
        (SimpleNamespace(), TWO, True, 1),
    ],
)
def test_who_holds_the_same(
    monkeypatch: pytest.MonkeyPatch, cache: Any, pieces: Pieces, mla: bool, replicas: int
) -> None:
    place(monkeypatch, tp_rank=1, tp=4)
    assert identity.strategy_of(config(tp_size=4, use_mla=mla), cache, pieces).replicas == replicas


def test_all_ranks_hear_how_every_rank_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    located = [Piece(BlockRuns.of({"a": torch.zeros(4, 8)}))]
    own = ([located[0].runs.fingerprint], [32])
    place(monkeypatch)
    assert identity.parts_of_all_ranks(located) == [own]

    def gather(every: list[Any], mine: Any, group: str) -> None:
        other = (["other"], [16]) if group == "get_tp_group" else [(["stage"], [8]), (["stage"], [8])]
        every[:] = [mine, other]

    place(monkeypatch, tp=2, pp=2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert identity.parts_of_all_ranks(located) == [own, (["other"], [16]), (["stage"], [8]), (["stage"], [8])]
