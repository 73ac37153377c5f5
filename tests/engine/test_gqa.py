from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.model import Segment
from kvkeep.engine.models.settings import ModelSettings, read_settings
from kvkeep.engine.models.weights import load_weights, random_weights
from kvkeep.engine.workers import shape_of
from kvkeep.errors import SettingsError

sys.path.insert(0, str(Path(__file__).parent))
from references import BLOCK_TOKENS, NUM_BLOCKS, InDouble, every_row, ranks_of, save, some_tokens

SETTINGS = ModelSettings(
    kind="gqa",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
)
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "initializer_range": 0.3,
}


def reference_of(architecture: str, **config: object) -> Any:
    """A random model of the transformers library, none of whose parameters is a constant."""
    import transformers

    torch.manual_seed(1)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**{**TINY, **config})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-multi-head": ("LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": 10}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    tokens = some_tokens(30)
    with InDouble():
        reference = reference_of(architecture, **config)
        expected = reference(torch.tensor([tokens])).logits[0].detach()
    settings = read_settings(save(reference, tmp_path))
    model = GQAModel(settings, load_weights(tmp_path, settings, torch.float64))
    assert model.vocab_size == SETTINGS.vocab_size
    for prefill in (1, 17, 30):
        actual = every_row(model, tokens, ranks_of(model), prefill)
        torch.testing.assert_close(actual, expected[prefill - 1 :], rtol=1e-10, atol=1e-10)
    assert (
        expected.std(0).min() > 0.1
    )  # tokens and their contexts matter, so the comparison could fail


def test_logits_in_float32_are_those_of_transformers_as_it_is(tmp_path: Path) -> None:
    tokens = some_tokens(30)
    reference = reference_of("Qwen3ForCausalLM", head_dim=12).float()
    expected = reference(torch.tensor([tokens])).logits[0].detach()
    settings = read_settings(save(reference, tmp_path))
    model = GQAModel(settings, load_weights(tmp_path, settings, torch.float32))
    actual = every_row(model, tokens, ranks_of(model), 17)
    torch.testing.assert_close(actual, expected[16:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "family", [{}, {"qkv_bias": True}, {"qk_norm": True}], ids=["llama", "qwen2", "qwen3"]
)
def test_every_cut_computes_the_same(family: dict[str, bool], tp_size: int, pp_size: int) -> None:
    settings = replace(SETTINGS, **family)  # type: ignore[arg-type]
    model = GQAModel(settings, random_weights(settings, 5, torch.float64))
    tokens = some_tokens(23)
    expected = every_row(model, tokens, ranks_of(model), 18)
    actual = every_row(model, tokens, ranks_of(model, tp_size, pp_size), 18)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_ranks_hold_their_own_layers_and_heads() -> None:
    model = GQAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64))
    whole, ranks = ranks_of(model), ranks_of(model, 2, 2)
    assert [list(rank.kv) for rank in ranks] == [
        ["layers.0"],
        ["layers.0"],
        *[["layers.1", "layers.2"]] * 2,
    ]
    every_row(model, some_tokens(20), whole, 20)
    every_row(model, some_tokens(20), ranks, 20)
    for rank in ranks:
        for name, kv in rank.kv.items():
            assert kv.shape == (NUM_BLOCKS, 2, BLOCK_TOKENS, 2, SETTINGS.head_dim)
            heads = slice(2 * rank.strategy.tp_rank, 2 * rank.strategy.tp_rank + 2)
            torch.testing.assert_close(
                kv, whole[0].kv[name][:, :, :, heads], rtol=1e-10, atol=1e-10
            )
    assert not torch.equal(ranks[0].kv["layers.0"], ranks[1].kv["layers.0"])


def test_ranks_that_share_a_head_hold_the_same_bytes_in_tensors_of_their_own() -> None:
    model = GQAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64))
    ranks = ranks_of(model, tp_size=8)
    assert ranks[0].strategy.replicas == 2
    every_row(model, some_tokens(20), ranks, 20)
    first, same, other = (ranks[number].kv["layers.1"] for number in (0, 1, 2))
    assert torch.equal(first, same) and first.data_ptr() != same.data_ptr()
    assert not torch.equal(first, other)


def test_each_rank_reads_its_own_kv() -> None:
    model = GQAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64))
    tokens = some_tokens(20)
    expected = every_row(model, tokens, ranks_of(model, tp_size=8), 19)[-1]
    for damaged in range(8):
        ranks = ranks_of(model, tp_size=8)
        every_row(model, tokens[:19], ranks, 19)
        ranks[damaged].kv["layers.1"].zero_()
        block_ids = random.Random(7).sample(range(NUM_BLOCKS), 5)
        actual = model.forward([Segment("r", None, tokens, 19, 1, block_ids)], ranks, BLOCK_TOKENS)
        assert (actual - expected).abs().max() > 1e-3


def test_shapes_differ_by_cut_weights_and_blocks_and_identities_by_weights_and_blocks() -> None:
    model = GQAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64), name="tiny")
    cuts = [(tp_size, pp_size) for tp_size in (1, 2, 4, 8) for pp_size in (1, 2)]
    shapes = [shape_of(model, ranks_of(model, *cut), NUM_BLOCKS, BLOCK_TOKENS) for cut in cuts]
    assert len({shape.fingerprint for shape in shapes}) == 6, (
        "four KV heads are four shards, on four ranks or on eight"
    )
    seen = {shape.identity for shape in shapes}
    assert len(seen) == 1
    others = [
        GQAModel(SETTINGS, random_weights(SETTINGS, 6, torch.float64), name="tiny"),
        GQAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float32), name="tiny"),
        GQAModel(
            replace(SETTINGS, rope_theta=7.0),
            random_weights(replace(SETTINGS, rope_theta=7.0), 5),
            name="tiny",
        ),
    ]
    seen |= {other.identity(16) for other in others} | {model.identity(32)}
    assert len(seen) == 1 + 4
    identity = model.identity(16)
    assert (identity.model, identity.kv_dtype, identity.block_tokens) == ("tiny", "float64", 16)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(3, 1), (16, 1), (1, 4)])
def test_cuts_that_do_not_come_out_even_are_refused(tp_size: int, pp_size: int) -> None:
    model = GQAModel(SETTINGS, random_weights(SETTINGS, 5))
    with pytest.raises(SettingsError, match="tp_size" if tp_size > 1 else "pp_size"):
        model.strategy(tp_size, pp_size, 0)


def test_kv_heads_that_do_not_divide_are_refused() -> None:
    settings = replace(SETTINGS, num_heads=12, num_kv_heads=6)
    with pytest.raises(SettingsError, match="KV: 6"):
        GQAModel(settings, random_weights(settings, 5)).strategy(4, 1, 0)


def test_settings_of_the_other_family_are_refused() -> None:
    settings = replace(
        SETTINGS,
        kind="mla",
        num_kv_heads=0,
        head_dim=0,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    )
    with pytest.raises(SettingsError, match="other family"):
        GQAModel(settings, random_weights(settings, 5))
