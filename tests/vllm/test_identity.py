"""Which engines share blocks: those that agree on everything that changes a block's bytes, and no
others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import torch
from engine_parts import full, mla, model_config, uniform
from vllm.distributed import parallel_state

from kvkeep.client.rank_memory import GroupMemory
from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import differing_parts
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm import identity, versions

ONE = GroupLayout([CacheGroup("full", 16)])
TWO = GroupLayout([CacheGroup("full", 16), CacheGroup("window", 16, 64)])


ENCODINGS = {"layer.0": "fused-kv"}


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_own_model", lambda model: getattr(model, "is_own", True))


class Digest:
    """A CheckpointDigest that is known."""

    pending = found = False

    def __init__(self, value: str | None, problem: str = "") -> None:
        self.value, self.problem = value, problem


def config(extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    facts: dict[str, Any] = {
        "cache_dtype": "auto", "load_format": "auto", "draft": None, "tp_size": 1, "pp_size": 1, "hf": {"rope": 1.0},
        "loader": {}, "dcp_size": 1, "pcp_size": 1, "interleave": 1,
    }  # fmt: skip
    own = {name: changes.pop(name, value) for name, value in facts.items()}
    method = "ngram" if own["draft"] == "ngram" else "eagle"
    draft_model = SimpleNamespace(model=own["draft"], revision=None, hf_config=None)
    draft = (
        None
        if own["draft"] is None
        else SimpleNamespace(draft_model_config=draft_model, method=method)
    )
    return SimpleNamespace(
        model_config=model_config(
            hf_config=SimpleNamespace(to_dict=lambda: dict(own["hf"])), **changes
        ),
        cache_config=SimpleNamespace(cache_dtype=own["cache_dtype"]),
        load_config=SimpleNamespace(
            load_format=own["load_format"], model_loader_extra_config=own["loader"]
        ),
        lora_config=None,
        speculative_config=draft,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=own["tp_size"],
            pipeline_parallel_size=own["pp_size"],
            decode_context_parallel_size=own["dcp_size"],
            prefill_context_parallel_size=own["pcp_size"],
            cp_kv_cache_interleave_size=own["interleave"],
        ),
    )


def shape(
    vllm_config: Any | None = None,
    pieces: GroupLayout = ONE,
    layout: str = "x",
    nbytes: int = 64,
    tp_size: int = 1,
    encodings: dict[str, str] | None = None,
    weights: str = "w1",
) -> BlockShape:
    strategy = ParallelStrategy.of(tp_size=tp_size)
    part = identity.Part([layout] * len(pieces), [nbytes] * len(pieces), encodings or ENCODINGS)
    return identity.shape_of(vllm_config or config(), pieces, strategy, [part] * tp_size, weights)


def test_equal_engines_have_equal_shapes() -> None:
    assert shape().fingerprint == shape().fingerprint
    moved = config(model="/somewhere/else/tiny/")
    assert shape(moved).fingerprint == shape(config(model="tiny")).fingerprint, (
        "a path is no property of KV"
    )
    told = config(hf={"rope": 1.0, "_name_or_path": "/x", "transformers_version": "5"})
    assert shape(told).fingerprint == shape().fingerprint
    assert shape(config(draft="ngram")).fingerprint == shape().fingerprint, (
        "guesses without a model keep no KV"
    )
    assert shape(config(seed=1)).fingerprint == shape().fingerprint, "a seed is for made-up weights"


DIFFERENT: dict[str, BlockShape | Any] = {
    "another model": lambda: shape(config(model="other")),
    "an override": lambda: shape(config(hf={"rope": 2.0})),
    "quantized": lambda: shape(config(quantization="fp8")),
    "another type of KV": lambda: shape(config(cache_dtype="fp8")),
    "another type of model": lambda: shape(config(dtype=torch.bfloat16)),
    "quantized in another way": lambda: shape(
        config(quantization="fp8", quantization_config={"ignore": ["qkv"]})
    ),
    "another implementation": lambda: shape(config(model_impl="transformers")),
    "loaded from elsewhere": lambda: shape(config(loader={"uri": "elsewhere"})),
    "positions of which nothing is known": lambda: shape(
        config(hf={"rope_scaling": {"type": "odd"}})
    ),
    "the same with another length": lambda: shape(
        config(hf={"rope_scaling": {"type": "odd"}}, max_model_len=77)
    ),
    "a model of a plugin": lambda: shape(config(is_own=False)),
    "the same with another length, too": lambda: shape(config(is_own=False, max_model_len=77)),
    "keys and values packed otherwise": lambda: shape(encodings={"layer.0": "cpu-columns"}),
    "one layer of two packed otherwise": lambda: shape(
        encodings={"layer.0": "fused-kv", "layer.1": "mla"}
    ),
    "the other layer": lambda: shape(encodings={"layer.0": "mla", "layer.1": "fused-kv"}),
    "other weights": lambda: shape(weights="w2"),
    "tokens of a block spread over ranks": lambda: shape(config(dcp_size=2)),
    "in other runs": lambda: shape(config(dcp_size=2, interleave=16)),
    "prompts spread over ranks": lambda: shape(config(pcp_size=2)),
    "made-up weights": lambda: shape(config(load_format="dummy")),
    "a draft model": lambda: shape(config(draft="somebody/eagle")),
    "another draft model": lambda: shape(config(draft="somebody/eagle-2")),
    "other blocks": lambda: shape(pieces=GroupLayout([CacheGroup("full", 32)])),
    "a window besides": lambda: shape(pieces=TWO),
    "a wider window": lambda: shape(
        pieces=GroupLayout([CacheGroup("full", 16), CacheGroup("window", 16, 128)])
    ),
    "another layout": lambda: shape(layout="y"),
    "other sizes": lambda: shape(nbytes=128),
    "two ranks": lambda: shape(tp_size=2),
}


def test_whatever_changes_bytes_makes_another_shape() -> None:
    seen = {shape().fingerprint: "plain"}
    for what, make in DIFFERENT.items():
        found = make().fingerprint
        assert found not in seen, f"{what} is like {seen.get(found)}"
        seen[found] = what


def weights_of(vllm_config: Any, *digests: Digest) -> str:
    """What stands for the weights, where these are the digests of target and draft."""
    waiting = list(digests)
    with mock.patch.object(CheckpointDigest, "of", side_effect=waiting):
        weights = identity.Weights(vllm_config)
        assert not weights.pending
        return weights.revision


def test_the_weights_of_target_and_draft_are_in_the_identity() -> None:
    assert weights_of(config(), Digest("t")) == "t"
    assert weights_of(config(draft="somebody/eagle"), Digest("t"), Digest("d")) == "t d"
    assert weights_of(config(draft="ngram"), Digest("t")) == "t"
    assert weights_of(config(load_format="dummy", seed=7)) == "made up from seed 7"


def test_what_the_user_calls_the_weights_counts_and_nothing_is_looked_at() -> None:
    assert weights_of(config({"kvkeep.revision": "mine"})) == "mine"


def test_weights_that_nothing_tells_apart_are_refused_unless_a_commit_names_them() -> None:
    with pytest.raises(SettingsError, match=r"somebody/tiny.*no weights found") as caught:
        weights_of(config(revision="main"), Digest(None, "no weights found"))
    assert "kvkeep.revision" in caught.value.hint
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert (
        weights_of(config(revision=commit), Digest(None, "no weights found"))
        == f"somebody/tiny@{commit}"
    )
    changed = Digest(None, "a file has changed")
    changed.found = True
    with pytest.raises(SettingsError, match="a file has changed"):
        weights_of(config(revision=commit), changed)
    with pytest.raises(
        SettingsError, match="somebody/eagle"
    ):  # the target's commit says nothing of the draft
        weights_of(
            config(revision=commit, draft="somebody/eagle"), Digest("t"), Digest(None, "none found")
        )


# --- positions ------------------------------------------------------------------------------------

LONG = {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096}}


@pytest.mark.parametrize(
    ("hf", "one", "other", "is_shared"),
    [
        ({}, 2048, 1536, True),
        ({"rope_parameters": {"rope_type": "llama3"}}, 2048, 131072, True),
        (
            {
                "rope_parameters": {
                    "full": {"rope_type": "yarn"},
                    "sliding": {"rope_type": "default"},
                }
            },
            64,
            128,
            True,
        ),
        ({"text_config": {"rope_scaling": {"type": "linear"}}}, 64, 128, True),
        (LONG, 4096, 2048, True),
        (LONG, 8192, 16384, True),
        (LONG, 4096, 4097, False),
        ({"rope_scaling": {"type": "su", "original_max_position_embeddings": 64}}, 64, 65, False),
        ({"model_type": "llama4"}, 32768, 1024, True),
        ({"model_type": "llama4"}, 32768, 32769, False),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64, 128, False),
        ({"max_model_len": 2048}, 64, 128, True),
    ],
)
def test_engines_that_differ_in_max_model_len_share_unless_their_positions_do(
    hf: dict[str, Any], one: int, other: int, is_shared: bool
) -> None:
    first = shape(config(hf=hf, max_model_len=one))
    second = shape(
        config(
            hf={**hf, "max_model_len": other} if "max_model_len" in hf else hf, max_model_len=other
        )
    )
    assert (first.fingerprint == second.fingerprint) == is_shared
    if not is_shared:
        assert differing_parts(first.parts, second.parts) == ["positions"], (
            "and that is what is said to differ"
        )


# --- several ranks --------------------------------------------------------------------------------


def test_ranks_that_write_kv_in_different_ways_are_refused() -> None:
    parts = [
        identity.Part(["x"], [64], {"layer.0": isa})
        for isa in ("cpu-columns", "cpu-amx of vLLM 0.32")
    ]
    with pytest.raises(SettingsError, match=r"layer\.0 as cpu-columns and cpu-amx"):
        identity.shape_of(config(), ONE, ParallelStrategy.of(tp_size=2), parts, "w")


def test_mla_is_shared_by_engines_of_every_tensor_parallel_size() -> None:
    part = identity.Part(["x"], [64], ENCODINGS)
    sizes = (1, 2, 8)
    shapes = [
        identity.shape_of(
            config(), ONE, ParallelStrategy.of(tp_size=size, use_mla=True), [part] * size, "w"
        )
        for size in sizes
    ]
    assert len({shape.fingerprint for shape in shapes}) == 1


def test_stages_of_a_pipeline_have_one_identity_whatever_layers_they_hold() -> None:
    whole = identity.Part(["x"], [64], {"layer.0": "fused-kv", "layer.1": "mla"})
    halves = [
        identity.Part(["x"], [32], {"layer.0": "fused-kv"}),
        identity.Part(["x"], [32], {"layer.1": "mla"}),
    ]
    one = identity.shape_of(config(), ONE, ParallelStrategy.of(), [whole], "w")
    two = identity.shape_of(config(), ONE, ParallelStrategy.of(pp_size=2), halves, "w")
    assert one.identity == two.identity and one.fingerprint != two.fingerprint


def test_a_shape_has_the_bytes_of_every_shard() -> None:
    first, second = (
        identity.Part(["x", "w"], [64, 8], ENCODINGS),
        identity.Part(["y", "w"], [32, 8], ENCODINGS),
    )
    parts = [first, first, second, second]
    found = identity.shape_of(
        config(), TWO, ParallelStrategy.of(tp_size=4, kv_tp_replicas=2), parts, "w"
    )
    assert (found.shard_bytes, found.pieces, found.kv_shards) == ((64, 8, 32, 8), 2, 2)
    assert found.identity.block_tokens == 16


# --- this rank's place ----------------------------------------------------------------------------


def place(
    monkeypatch: pytest.MonkeyPatch,
    tp_rank: int = 0,
    pp_rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    pcp_rank: int = 0,
    pcp: int = 1,
) -> None:
    def group(name: str, rank: int, size: int) -> Any:
        return SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=name)

    monkeypatch.setattr(identity, "get_tp_group", lambda: group("tp", tp_rank, tp))
    monkeypatch.setattr(identity, "get_pp_group", lambda: group("pp", pp_rank, pp))
    pcp_group = group("pcp", pcp_rank, pcp)
    monkeypatch.setattr(parallel_state, "_PCP", pcp_group if pcp > 1 else None)
    monkeypatch.setattr(parallel_state, "get_pcp_group", lambda: pcp_group)


@pytest.mark.parametrize(("tp_rank", "pp_rank"), [(0, 0), (3, 0), (0, 1), (2, 1)])
def test_ranks_are_counted_by_stage(
    monkeypatch: pytest.MonkeyPatch, tp_rank: int, pp_rank: int
) -> None:
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
    monkeypatch: pytest.MonkeyPatch, cache: Any, pieces: GroupLayout, mla: bool, replicas: int
) -> None:
    place(monkeypatch, tp_rank=1, tp=4)
    assert identity.strategy_of(config(tp_size=4, use_mla=mla), cache, pieces).replicas == replicas


def specs(*each: Any) -> Any:
    """A cache config that says nothing of replicas, as before vLLM 0.31."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in each])


def test_a_draft_with_kv_heads_beside_a_target_with_mla_has_no_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before vLLM 0.31: the target's ranks hold the same KV, those of the draft different heads of
    it."""
    place(monkeypatch, tp_rank=1, tp=4)
    target, draft = mla(), full()
    alone = identity.strategy_of(config(tp_size=4, use_mla=True), specs(target), ONE)
    together = identity.strategy_of(
        config(tp_size=4, use_mla=True), specs(uniform(target, draft)), ONE
    )
    assert (alone.replicas, together.replicas) == (4, 1)


@pytest.mark.parametrize(("dcp", "pcp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_divide_the_context_have_no_replicas(
    monkeypatch: pytest.MonkeyPatch, dcp: int, pcp: int
) -> None:
    place(monkeypatch, tp_rank=1, pp_rank=1, tp=4, pp=2, pcp_rank=pcp - 1, pcp=pcp)
    spread = config(tp_size=4, pp_size=2, dcp_size=dcp, pcp_size=pcp, use_mla=True)
    found = identity.strategy_of(spread, SimpleNamespace(kv_tp_replicas=4), ONE)
    assert (found.replicas, found.world_size) == (1, 8 * pcp)
    assert found.rank == (1 * pcp + pcp - 1) * 4 + 1, (
        "as vLLM counts: stage, part of the prompt, tensor rank"
    )


def test_all_ranks_hear_how_every_rank_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    located = [GroupMemory(BlockRuns.of({"a": torch.zeros(4, 8)}))]
    own = identity.Part([located[0].runs.fingerprint], [32], {"a": "mla"})
    place(monkeypatch)
    assert identity.parts_of_all_ranks((located, {"a": "mla"})) == [own]

    def gather(every: list[Any], mine: list[Any], group: str) -> None:
        every[:] = [mine, [f"{group} {at}" for at in range(len(mine))]]

    place(monkeypatch, tp=2, pp=2, pcp=2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(identity, "Part", lambda *facts: ("own", *facts))
    with pytest.raises(SettingsError) as caught:
        identity.parts_of_all_ranks((located, {"a": "mla"}))
    assert caught.value.message == "pcp 0; pcp 1; pp 0; pp 1; pp 2; pp 3; tp 0", (
        "neighbours first, stages last"
    )


def test_a_rank_that_cannot_be_cached_is_heard_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch)
    with pytest.raises(SettingsError, match=r"not like this \(but like that\)"):
        identity.parts_of_all_ranks(SettingsError("not like this", "but like that"))


# --- shards of several heads ----------------------------------------------------------------------


def test_one_rank_with_both_shards_has_the_shape_of_two_with_one_each() -> None:
    both = identity.Part(["x", "x", "w", "w"], [64, 64, 8, 8], ENCODINGS)
    each = identity.Part(["x", "w"], [64, 8], ENCODINGS)
    alone = ParallelStrategy.of().cut_into(2, 2)
    one = identity.shape_of(config(), TWO, alone, [both], "w")
    two = identity.shape_of(config(), TWO, ParallelStrategy.of(tp_size=2), [each] * 2, "w")
    assert one == two and one.shard_bytes == (64, 8, 64, 8)
    uncut = identity.Part(["y", "z"], [128, 16], ENCODINGS)
    assert identity.shape_of(config(), TWO, ParallelStrategy.of(), [uncut], "w") != one


@pytest.mark.parametrize(("tp", "mla", "held"), [(1, False, 2), (2, False, 1), (2, True, 1)])
def test_a_rank_holds_as_many_shards_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tp: int, mla: bool, held: int
) -> None:
    place(monkeypatch, tp=tp)
    told = config({"kvkeep.tp_shards": 2}, tp_size=tp, use_mla=mla)
    found = identity.strategy_of(told, SimpleNamespace(), ONE)
    assert found.shards_per_rank == held


@pytest.mark.parametrize("sizes", [{"dcp_size": 2}, {"pcp_size": 2}])
def test_ranks_that_divide_the_context_hold_no_shards_of_heads(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    place(monkeypatch, tp=2, pcp=sizes.get("pcp_size", 1))
    told = config({"kvkeep.tp_shards": 2}, tp_size=2, **sizes)
    with pytest.raises(SettingsError, match="divide the context"):
        identity.strategy_of(told, SimpleNamespace(), ONE)
