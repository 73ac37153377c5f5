"""The sizes of a model, checked, and how they are read from a Hugging Face config.json.

Two families of attention decide what a KV cache holds:

    gqa   Llama, Mistral, Qwen2, Qwen3: keys and values of a few heads, each shared by a group of query heads
    mla   DeepSeek-V2: one compressed vector per token (the latent) and one rotated key that all heads share

A config that asks for something the reference engine does not compute is refused, and the refusal
names the field: computing nearly the right model would give fluent, wrong answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from kvkeep.errors import SettingsError

GQA_SIZES = ("num_kv_heads", "head_dim")
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ARCHITECTURES: dict[str, Literal["gqa", "mla"]] = {
    "LlamaForCausalLM": "gqa",
    "MistralForCausalLM": "gqa",
    "Qwen2ForCausalLM": "gqa",
    "Qwen3ForCausalLM": "gqa",
    "DeepseekV2ForCausalLM": "mla",
}
QWEN3_HEAD_DIM = (
    128  # what Qwen3 assumes where its config is silent; the others divide the hidden size
)
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_RMS_NORM_EPS = 1e-6
MAX_SIZE = 2**24  # of any dimension; a config that asks for more is damaged
MAX_LAYERS = 10_000
MAX_NUMBER = 1e18


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
    rope_interleaved: bool = (
        False  # which two numbers of a head turn together: neighbours (DeepSeek), or halves
    )

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
        if self.kind not in ("gqa", "mla"):
            raise _refusal("kind", f"is {self.kind!r}", "choose gqa or mla")
        own, other = (GQA_SIZES, MLA_SIZES) if self.kind == "gqa" else (MLA_SIZES, GQA_SIZES)
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            *own,
        ):
            _check_size(field, getattr(self, field))
        if self.num_layers > MAX_LAYERS:
            raise _refusal("num_layers", f"is {self.num_layers}", f"the limit is {MAX_LAYERS}")
        for field in other:
            if getattr(self, field) != 0:
                raise _refusal(
                    field, f"is {getattr(self, field)!r}, but kind is {self.kind}", "leave it out"
                )
        for field in ("rope_theta", "rms_norm_eps"):
            _check_positive(field, getattr(self, field))
        for field in ("tie_word_embeddings", "rope_interleaved", "qkv_bias", "qk_norm"):
            if type(getattr(self, field)) is not bool:
                raise _refusal(field, f"is {getattr(self, field)!r}", "set it to true or false")
        self._check_family()

    def _check_family(self) -> None:
        rotated = "head_dim" if self.kind == "gqa" else "qk_rope_head_dim"
        if getattr(self, rotated) % 2:
            raise _refusal(
                rotated,
                f"is {getattr(self, rotated)}, but rotation pairs numbers",
                "choose an even size",
            )
        if self.kind == "gqa":
            if self.num_heads % self.num_kv_heads:
                problem = f"is {self.num_kv_heads} and does not divide num_heads {self.num_heads}"
                raise _refusal(
                    "num_kv_heads", problem, "each KV head serves equally many query heads"
                )
            if self.q_lora_rank is not None:
                raise _refusal(
                    "q_lora_rank", f"is {self.q_lora_rank}, but kind is gqa", "leave it out"
                )
            return
        if self.q_lora_rank is not None:
            _check_size("q_lora_rank", self.q_lora_rank)
        for field in ("qkv_bias", "qk_norm"):
            if getattr(self, field):
                raise _refusal(field, "is true, but kind is mla", "leave it out")


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
        if "q_lora_rank" not in config:
            raise _refusal("q_lora_rank", "is missing", "set it to null for uncompressed queries")
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
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise _refusal(
            "architectures",
            f"is {names!r}",
            "the reference engine knows " + ", ".join(ARCHITECTURES),
        )
    return name


def _refuse_unsupported(config: Mapping[str, object], architecture: str) -> None:
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            raise _refusal(field, f"is {config[field]!r}", "only models without it are supported")
    for field in ("quantization_config", "compression_config"):
        if config.get(field) is not None:
            raise _refusal(
                field,
                "asks for quantized weights",
                "use a checkpoint in bfloat16, float16 or float32",
            )
    if config.get("hidden_act", "silu") != "silu":
        raise _refusal("hidden_act", f"is {config['hidden_act']!r}", "only silu is supported")
    _refuse_windows(config, architecture)
    if architecture == "DeepseekV2ForCausalLM":
        _refuse_experts(config)
        heads = config.get("num_attention_heads")
        if config.get("num_key_value_heads") not in (None, heads):
            raise _refusal(
                "num_key_value_heads",
                f"differs from num_attention_heads {heads}",
                "MLA has no KV heads",
            )


def _refuse_windows(config: Mapping[str, object], architecture: str) -> None:
    """A window limits how far back a token sees. Mistral assumes one of 4,096 where its config is
    silent."""
    hint = "only full attention is supported"
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        raise _refusal("layer_types", f"is {kinds!r}", hint)
    if config.get("use_sliding_window"):
        raise _refusal("use_sliding_window", "is true", hint)
    if architecture == "MistralForCausalLM" and "sliding_window" not in config:
        raise _refusal(
            "sliding_window", "is missing, which means 4096", "set it to null where there is none"
        )
    # Qwen configs carry a window that use_sliding_window switches off.
    if config.get("sliding_window") is not None and not architecture.startswith("Qwen"):
        raise _refusal("sliding_window", f"is {config['sliding_window']!r}", hint)


def _refuse_experts(config: Mapping[str, object]) -> None:
    if config.get("n_routed_experts", 1) in (None, 0):
        return
    dense, layers = config.get("first_k_dense_replace", 0), _int(config, "num_hidden_layers")
    if not isinstance(dense, int) or dense < layers:
        problem = f"leaves mixture-of-experts layers: {dense!r} of {layers} layers are dense"
        raise _refusal("first_k_dense_replace", problem, "only dense models are supported")


def _rope_theta(config: Mapping[str, object]) -> float:
    """Reads both forms: `rope_parameters` of transformers 5, and `rope_theta` beside `rope_scaling`
    of older ones."""
    theta = config.get("rope_theta", DEFAULT_ROPE_THETA)
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _refusal(field, f"is {rope!r}", "it is an object, or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise _refusal(
                field,
                f"asks for scaling of type {kind!r}",
                "only unscaled rotary embeddings are supported",
            )
        unknown = set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if unknown:
            raise _refusal(
                field, f"holds {sorted(unknown)}", "only unscaled rotary embeddings are supported"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refusal(
                field, "rotates a part of each head (partial_rotary_factor)", "it must be 1.0"
            )
        theta = rope.get("rope_theta", theta)
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise _refusal(
            "partial_rotary_factor", f"is {config['partial_rotary_factor']!r}", "it must be 1.0"
        )
    _check_positive("rope_theta", theta)
    return float(cast(float, theta))


def _int(config: Mapping[str, object], field: str, default: int | None = None) -> int:
    """A size in the config, under its name there; null stands for the default."""
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise _refusal(field, "is missing", "the config must name it")
    _check_size(field, value)
    return cast(int, value)


def _check_size(field: str, value: object) -> None:
    if (
        type(value) is not int or not 1 <= value <= MAX_SIZE
    ):  # a bool is an int to isinstance, and a mistake here
        raise _refusal(field, f"is {_short(value)}", f"it must be an integer from 1 to {MAX_SIZE}")


def _check_positive(field: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 < cast(float, value) <= MAX_NUMBER:
        raise _refusal(field, f"is {_short(value)}", "it must be a number above 0")


def _short(value: object) -> str:
    """For a message; an integer can have more digits than Python prints."""
    return (
        repr(value)[:80] if not isinstance(value, int) or abs(value) <= MAX_NUMBER else "too large"
    )


def _refusal(field: str, problem: str, hint: str) -> SettingsError:
    return SettingsError(f"model settings: {field} {problem}", hint)
