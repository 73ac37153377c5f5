from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.engine.models.mla import MLAModel
from kvkeep.engine.models.model import Segment
from kvkeep.engine.models.settings import ModelSettings, read_settings
from kvkeep.engine.models.weights import load_weights, random_weights
from kvkeep.engine.workers import shape_of
from kvkeep.errors import SettingsError

sys.path.insert(0, str(Path(__file__).parent))
from references import BLOCK_TOKENS, NUM_BLOCKS, InDouble, every_row, ranks_of, save, some_tokens

SETTINGS = ModelSettings(
    kind="mla",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=8,
    rope_interleaved=True,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=5,
)
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "rms_norm_eps": 1e-2,  # far from that of the latents' norms
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "initializer_range": 0.3,
}


def reference_of(q_lora_rank: int | None) -> Any:
    """A random model of the transformers library, none of whose parameters is a constant."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(1)
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**TINY, q_lora_rank=q_lora_rank)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_logits_are_those_of_transformers(q_lora_rank: int | None, tmp_path: Path) -> None:
    tokens = some_tokens(30)
    with InDouble():
        reference = reference_of(q_lora_rank)
        expected = reference(torch.tensor([tokens])).logits[0].detach()
    settings = read_settings(save(reference, tmp_path))
    assert settings.q_lora_rank == q_lora_rank
    model = MLAModel(settings, load_weights(tmp_path, settings, torch.float64))
    for prefill in (1, 17, 30):
        actual = every_row(model, tokens, ranks_of(model), prefill)
        torch.testing.assert_close(actual, expected[prefill - 1 :], rtol=1e-10, atol=1e-10)
    assert (
        expected.std(0).min() > 0.1
    )  # tokens and their contexts matter, so the comparison could fail


def test_logits_in_float32_are_those_of_transformers_as_it_is(tmp_path: Path) -> None:
    tokens = some_tokens(30)
    reference = reference_of(24).float()
    expected = reference(torch.tensor([tokens])).logits[0].detach()
    settings = read_settings(save(reference, tmp_path))
    model = MLAModel(settings, load_weights(tmp_path, settings, torch.float32))
    actual = every_row(model, tokens, ranks_of(model), 17)
    torch.testing.assert_close(actual, expected[16:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_cut_computes_the_same(tp_size: int, pp_size: int, interleaved: bool) -> None:
    settings = replace(SETTINGS, rope_interleaved=interleaved)
    model = MLAModel(settings, random_weights(settings, 5, torch.float64))
    tokens = some_tokens(23)
    expected = every_row(model, tokens, ranks_of(model), 18)
    actual = every_row(model, tokens, ranks_of(model, tp_size, pp_size), 18)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_ranks_of_a_stage_hold_the_same_bytes_in_tensors_of_their_own() -> None:
    model = MLAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64))
    ranks = ranks_of(model, 4, 2)
    assert {rank.strategy.replicas for rank in ranks} == {4} and ranks[0].strategy.use_mla
    every_row(model, some_tokens(20), ranks, 12)
    for stage, layers in ((ranks[:4], ["layers.0"]), (ranks[4:], ["layers.1", "layers.2"])):
        assert [list(rank.kv) for rank in stage] == [layers] * 4
        for layer in layers:
            tensors = [rank.kv[layer] for rank in stage]
            assert tensors[0].shape == (NUM_BLOCKS, BLOCK_TOKENS, 24) and tensors[0].any()
            assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
            assert len({tensor.data_ptr() for tensor in tensors}) == 4


def test_each_rank_reads_its_own_kv() -> None:
    model = MLAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64))
    tokens = some_tokens(20)
    expected = every_row(model, tokens, ranks_of(model, tp_size=4), 19)[-1]
    for damaged in range(4):
        ranks = ranks_of(model, tp_size=4)
        every_row(model, tokens[:19], ranks, 19)
        ranks[damaged].kv["layers.1"].zero_()
        block_ids = random.Random(7).sample(range(NUM_BLOCKS), 5)
        actual = model.forward([Segment("r", None, tokens, 19, 1, block_ids)], ranks, BLOCK_TOKENS)
        assert (actual - expected).abs().max() > 1e-3


def test_shapes_differ_by_stages_alone_and_the_identity_does_not() -> None:
    model = MLAModel(SETTINGS, random_weights(SETTINGS, 5, torch.float64))
    cuts = [(tp_size, pp_size) for tp_size in (1, 2, 4) for pp_size in (1, 2)]
    shapes = [shape_of(model, ranks_of(model, *cut), NUM_BLOCKS, BLOCK_TOKENS) for cut in cuts]
    assert len({shape.fingerprint for shape in shapes}) == 2, (
        "one for each number of stages: TP ranks hold the same"
    )
    assert [shape.kv_world_size for shape in shapes] == [pp_size for _, pp_size in cuts]
    assert len({shape.identity for shape in shapes}) == 1


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(SettingsError, match="tp_size 16"):
        MLAModel(SETTINGS, random_weights(SETTINGS, 5)).strategy(16, 1, 0)


def test_settings_of_the_other_family_are_refused() -> None:
    sizes = dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    settings = replace(SETTINGS, kind="gqa", num_kv_heads=4, head_dim=6, **sizes)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="other family"):
        MLAModel(settings, random_weights(settings, 5))
