from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from kvkeep.engine.models.settings import ModelSettings, read_settings, settings_of
from kvkeep.errors import SettingsError

Words = dict[str, Any]
SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
OURS: Words = {**SIZES, "num_layers": 2, "num_heads": 4}
GQA: Words = {"kind": "gqa", **OURS, "num_kv_heads": 2, "head_dim": 8}
MLA: Words = {"kind": "mla", **OURS, **LATENT}
COMMON: Words = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: Words = {"architectures": ["LlamaForCausalLM"], **COMMON, "num_key_value_heads": 2}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
DENSE = {"num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": None}
DEEPSEEK: Words = {"architectures": ["DeepseekV2ForCausalLM"], **COMMON, **DENSE, **LATENT}


def one_by_one(*cases: tuple[Words, dict[str, list[Any]]]) -> list[tuple[Words, str, Any]]:
    """Each bad value of each field, with the good settings that it is put into."""
    return [
        (good, field, value)
        for good, fields in cases
        for field, values in fields.items()
        for value in values
    ]


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelSettings(**GQA).num_layers = 3  # type: ignore[misc]


BAD_GQA: dict[str, list[Any]] = {
    "kind": ["mha"],
    "vocab_size": [0],
    "num_layers": [True],
    "hidden_size": [32.0],
    "num_kv_heads": [3],
    "head_dim": [7, 0],
    "rope_theta": [float("inf")],
    "rms_norm_eps": [0, "1e-6"],
    "tie_word_embeddings": [1],
    "kv_lora_rank": [16],
    "q_lora_rank": [16],
}
BAD_MLA: dict[str, list[Any]] = {
    "num_kv_heads": [4],
    "qk_rope_head_dim": [3],
    "kv_lora_rank": [0],
    "q_lora_rank": [0],
    "qkv_bias": [True],
    "qk_norm": [True],
}


@pytest.mark.parametrize(("good", "field", "value"), one_by_one((GQA, BAD_GQA), (MLA, BAD_MLA)))
def test_a_bad_setting_is_named(good: dict[str, Any], field: str, value: object) -> None:
    ModelSettings(**good)
    with pytest.raises(SettingsError, match=f"model settings: {field} ") as caught:
        ModelSettings(**{**good, field: value})
    assert caught.value.hint


def test_llama() -> None:
    assert settings_of(LLAMA) == ModelSettings(**GQA)
    alone = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert settings_of(alone).num_kv_heads == 4
    assert settings_of({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4
    full = settings_of({**LLAMA, "head_dim": 10, "tie_word_embeddings": True, "rms_norm_eps": 1e-5})
    assert (full.head_dim, full.tie_word_embeddings, full.rms_norm_eps) == (10, True, 1e-5)


def test_mistral_and_qwen() -> None:
    assert settings_of(MISTRAL) == settings_of(LLAMA)
    assert settings_of(QWEN2) == ModelSettings(**GQA, qkv_bias=True)
    assert settings_of(QWEN3) == ModelSettings(**{**GQA, "head_dim": 128, "qk_norm": True})
    unused_window = {"use_sliding_window": False, "sliding_window": 4096}
    assert settings_of({**QWEN2, **unused_window}) == settings_of(QWEN2)
    assert settings_of({**QWEN3, "layer_types": ["full_attention"] * 2}) == settings_of(QWEN3)


def test_deepseek() -> None:
    assert settings_of(DEEPSEEK) == ModelSettings(**MLA, rope_interleaved=True)
    assert settings_of({**DEEPSEEK, "q_lora_rank": 24}).q_lora_rank == 24
    none = {"n_routed_experts": None, "num_key_value_heads": None}
    no_experts = {**DEEPSEEK, "first_k_dense_replace": 0, **none}
    assert settings_of(no_experts) == settings_of(DEEPSEEK)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 500_000, "partial_rotary_factor": 1.0}},
    ],
)
def test_rope_theta_is_read_from_old_and_new_configs(rope: dict[str, object]) -> None:
    assert settings_of({**LLAMA, **rope}).rope_theta == 5e5


ROPES = [
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_theta": 1e4}},
]
LINEAR = {"type": "linear", "factor": 2.0}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0}
TWO_ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM"]
REFUSED_LLAMA: dict[str, list[Any]] = {
    "architectures": [["GPT2LMHeadModel"], None, TWO_ARCHITECTURES],
    "attention_bias": [True],
    "mlp_bias": [True],
    "hidden_act": ["gelu"],
    "quantization_config": [{"quant_method": "fp8"}],
    "sliding_window": [4096],
    "rope_scaling": [LINEAR, LLAMA_3, {"factor": 8.0}, "linear"],
    "rope_parameters": [*ROPES],
    "partial_rotary_factor": [0.5],
    "rope_theta": ["10000"],
    "rms_norm_eps": [None],
    "tie_word_embeddings": [None],
    "num_hidden_layers": [None],
    "num_attention_heads": [0],
    "vocab_size": ["100"],
}
MIXED_LAYERS = ["full_attention", "sliding_attention"]
REFUSED_QWEN3 = {"attention_bias": [True], "layer_types": [MIXED_LAYERS, "full_attention"]}
REFUSED_DEEPSEEK: dict[str, list[Any]] = {
    "attention_bias": [True],
    "first_k_dense_replace": [1, None],
    "num_key_value_heads": [2],
    "kv_lora_rank": [None],
    "q_lora_rank": [0],
}
REFUSED = one_by_one(
    (LLAMA, REFUSED_LLAMA),
    (MISTRAL, {"sliding_window": [4096]}),
    (QWEN2, {"use_sliding_window": [True]}),
    (QWEN3, REFUSED_QWEN3),
    (DEEPSEEK, REFUSED_DEEPSEEK),
)


@pytest.mark.parametrize(("config", "field", "value"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], field: str, value: object
) -> None:
    settings_of(config)
    with pytest.raises(SettingsError, match=f"model settings: {field} ") as caught:
        settings_of({**config, field: value})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LLAMA, "vocab_size"),
        (LLAMA, "architectures"),
        (MISTRAL, "sliding_window"),
        (QWEN2, "num_key_value_heads"),
        (DEEPSEEK, "q_lora_rank"),
        (DEEPSEEK, "first_k_dense_replace"),
    ],
)
def test_what_may_not_be_left_out_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=f"model settings: {field} "):
        settings_of({name: value for name, value in config.items() if name != field})


def test_a_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_settings(tmp_path) == settings_of(LLAMA)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"config\.json") as caught:
        read_settings(tmp_path)
    assert caught.value.hint
