"""The sizes of a model, checked, and how they are read from a Hugging Face config.json.

Two families of attention decide what a KV cache holds:

    gqa   Llama, Mistral, Qwen2, Qwen3: keys and values of a few heads, each shared by a group of
          query heads
    mla   DeepSeek-V2: one compressed vector per token (the latent) and one rotated key that all
          heads share

A config that asks for something the reference engine does not compute is refused, and the refusal
names the field: computing nearly the right model would give fluent, wrong answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from kvkeep.errors import SettingsError

COMMON_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
GQA_SIZES = ("num_kv_heads", "head_dim")
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ARCHITECTURES: dict[str, Literal["gqa", "mla"]] = {
    "LlamaForCausalLM": "gqa",
    "MistralForCausalLM": "gqa",
    "Qwen2ForCausalLM": "gqa",
    "Qwen3ForCausalLM": "gqa",
    "DeepseekV2ForCausalLM": "mla",
}
# What Qwen3 assumes where its config names no size; the others divide the hidden size.
QWEN3_HEAD_DIM = 128
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_RMS_NORM_EPS = 1e-6
MAX_SIZE = 2**24  # of any dimension; a config that asks for more is damaged
MAX_LAYERS = 10_000
MAX_NUMBER = 1e18

FULL_ATTENTION = "only full attention is supported"
# What a config may say, by field; the first value stands for a field that is missing.
SUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "attention_bias": ((False, None), "only models without it are supported"),
    "mlp_bias": ((False, None), "only models without it are supported"),
    "quantization_config": ((None,), "use a checkpoint in bfloat16, float16 or float32"),
    "compression_config": ((None,), "use a checkpoint in bfloat16, float16 or float32"),
    "hidden_act": (("silu",), "only silu is supported"),
    "use_sliding_window": ((False, None), FULL_ATTENTION),
    "partial_rotary_factor": ((1.0, None), "it must be 1.0"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Everything that decides what a model computes, but for its weights. A contradiction raises
    SettingsError.

    Sizes of the other family stay 0. `num_heads` counts query heads. `head_dim` need not be
    hidden_size / num_heads."""

    kind: Literal["gqa", "mla"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    rope_theta: float = DEFAULT_ROPE_THETA
    rms_norm_eps: float = DEFAULT_RMS_NORM_EPS
    tie_word_embeddings: bool = False
    # which two numbers of a head turn together: neighbours (DeepSeek), or halves
    rope_interleaved: bool = False

    num_kv_heads: int = 0
    head_dim: int = 0
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3

    q_lora_rank: int | None = None  # queries are compressed too, or not
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        _expect(self.kind in ("gqa", "mla"), "kind", self.kind, "choose gqa or mla")
        own, other = (GQA_SIZES, MLA_SIZES) if self.kind == "gqa" else (MLA_SIZES, GQA_SIZES)
        for field in (*COMMON_SIZES, *own):
            _check_size(field, getattr(self, field))
        _expect(
            self.num_layers <= MAX_LAYERS, "num_layers", self.num_layers, f"at most {MAX_LAYERS}"
        )
        for field in ("rope_theta", "rms_norm_eps"):
            _check_positive(field, getattr(self, field))
        for field in ("tie_word_embeddings", "rope_interleaved", "qkv_bias", "qk_norm"):
            value = getattr(self, field)
            _expect(type(value) is bool, field, value, "set it to true or false")
        flags = ("q_lora_rank",) if self.kind == "gqa" else ("qkv_bias", "qk_norm")
        for field in (*other, *flags):
            value = getattr(self, field)
            _expect(value in (None, 0), field, value, f"leave it out, because kind is {self.kind}")
        if self.q_lora_rank is not None:
            _check_size("q_lora_rank", self.q_lora_rank)
        rotated = "head_dim" if self.kind == "gqa" else "qk_rope_head_dim"
        size = getattr(self, rotated)
        _expect(size % 2 == 0, rotated, size, "choose an even size: rotation pairs numbers")
        if self.kind == "gqa":
            even = self.num_heads % self.num_kv_heads == 0
            hint = f"choose one that divides num_heads, {self.num_heads}"
            _expect(even, "num_kv_heads", self.num_kv_heads, hint)


def read_settings(directory: Path) -> ModelSettings:
    """The settings in `directory`/config.json; SettingsError where they cannot be read or are not
    supported."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(
            f"cannot read {path}: {error.strerror}", "name a Hugging Face model directory"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path} is not JSON: {error}", "download the checkpoint again"
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"{path} holds no JSON object", "download the checkpoint again")
    return settings_of(config)


def settings_of(config: Mapping[str, object]) -> ModelSettings:
    """The settings that a Hugging Face config asks for; SettingsError, naming the field, for what
    is not supported."""
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    heads = _int(config, "num_attention_heads")
    sizes = {
        "vocab_size": _int(config, "vocab_size"),
        "hidden_size": _int(config, "hidden_size"),
        "intermediate_size": _int(config, "intermediate_size"),
        "num_layers": _int(config, "num_hidden_layers"),
        "num_heads": heads,
    }
    q_lora_rank: int | None = None
    if ARCHITECTURES[architecture] == "gqa":
        head_dim = (
            QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else sizes["hidden_size"] // heads
        )
        # Silent about KV heads, Llama has as many as query heads; the others would each assume
        # another number.
        kv_heads = (
            heads if architecture == "LlamaForCausalLM" or "num_key_value_heads" in config else None
        )
        sizes |= {
            "num_kv_heads": _int(config, "num_key_value_heads", kv_heads),
            "head_dim": _int(config, "head_dim", head_dim),
        }
    else:
        sizes |= {field: _int(config, field) for field in MLA_SIZES}
        hint = "set it to null for uncompressed queries"
        _expect("q_lora_rank" in config, "q_lora_rank", None, hint)
        q_lora_rank = None if config["q_lora_rank"] is None else _int(config, "q_lora_rank")
    return ModelSettings(
        kind=ARCHITECTURES[architecture],
        rope_theta=_rope_theta(config),
        rms_norm_eps=cast(float, config.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS)),
        tie_word_embeddings=cast(bool, config.get("tie_word_embeddings", False)),
        rope_interleaved=architecture == "DeepseekV2ForCausalLM",
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        q_lora_rank=q_lora_rank,
        **sizes,
    )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    hint = "the reference engine knows " + ", ".join(ARCHITECTURES)
    _expect(name in ARCHITECTURES, "architectures", names, hint)
    return str(name)


def _refuse_unsupported(config: Mapping[str, object], architecture: str) -> None:
    for field, (allowed, hint) in SUPPORTED.items():
        value = config.get(field, allowed[0])
        _expect(value in allowed, field, value, hint)
    kinds = config.get("layer_types")
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    _expect(kinds is None or full, "layer_types", kinds, FULL_ATTENTION)
    # Mistral assumes a window of 4,096 tokens where its config names none. Qwen configs name a
    # window that use_sliding_window switches off.
    if not architecture.startswith("Qwen"):
        silent = 4096 if architecture == "MistralForCausalLM" else None
        window = config.get("sliding_window", silent)
        _expect(window is None, "sliding_window", window, f"{FULL_ATTENTION}: set it to null")
    if architecture == "DeepseekV2ForCausalLM":
        _refuse_experts(config)
        heads, kv_heads = (config.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
        hint = "leave it out, because MLA has no KV heads"
        _expect(kv_heads in (None, heads), "num_key_value_heads", kv_heads, hint)


def _refuse_experts(config: Mapping[str, object]) -> None:
    if config.get("n_routed_experts", 1) in (None, 0):
        return
    dense, layers = config.get("first_k_dense_replace", 0), _int(config, "num_hidden_layers")
    all_dense = isinstance(dense, int) and dense >= layers
    hint = f"only dense models are supported: all {layers} layers must be dense"
    _expect(all_dense, "first_k_dense_replace", dense, hint)


def _rope_theta(config: Mapping[str, object]) -> float:
    """Reads both forms: `rope_parameters` of transformers 5, and `rope_theta` beside `rope_scaling`
    of older ones."""
    theta = config.get("rope_theta", DEFAULT_ROPE_THETA)
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        plain = isinstance(rope, dict) and (
            rope.get("rope_type", rope.get("type", "default")) == "default"
            and rope.get("partial_rotary_factor", 1.0) == 1.0
            and rope.keys() <= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        )
        _expect(plain, field, rope, "only unscaled rotary embeddings are supported")
        theta = cast("dict[str, object]", rope).get("rope_theta", theta)
    _check_positive("rope_theta", theta)
    return float(cast(float, theta))


def _int(config: Mapping[str, object], field: str, default: int | None = None) -> int:
    """A size in the config, under its name there; null stands for the default."""
    value = config.get(field)
    value = default if value is None else value
    _check_size(field, value)
    return cast(int, value)


def _check_size(field: str, value: object) -> None:
    # Not isinstance: a bool is an int to it, and a mistake here.
    good = type(value) is int and 1 <= value <= MAX_SIZE
    _expect(good, field, value, f"it must be an integer from 1 to {MAX_SIZE}")


def _check_positive(field: str, value: object) -> None:
    good = type(value) in (int, float) and 0 < cast(float, value) <= MAX_NUMBER
    _expect(good, field, value, "it must be a number above 0")


def _expect(good: bool, field: str, value: object, hint: str) -> None:
    """Raises SettingsError unless the value of this field is good."""
    if not good:
        # An integer can have more digits than Python prints.
        too_large = isinstance(value, int) and abs(value) > MAX_NUMBER
        said = "missing" if value is None else "too large" if too_large else repr(value)[:80]
        raise SettingsError(f"model settings: {field} is {said}", hint)
