"""How vLLM's attention backends write KV: shapes, strides and types do not tell it, the class of
the backend does.

An *encoding* names one arrangement of keys and values within a block's memory. Backends that write
the same bytes share one; a backend that is not listed here is refused by name, because its bytes
may mean anything. Entries were read in the sources of vLLM 0.28 to 0.33; those of the CPU were
checked by running its kernels on an ARM host, see docs/concepts/identity.md."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from kvkeep.errors import SettingsError
from kvkeep.vllm import versions

# Keys and values of a token and head lie side by side: [head][token][K ‖ V], or with heads and
# tokens exchanged, which strides show.
_FUSED = (
    "FlashAttentionBackend",
    "FlashAttentionDiffKVBackend",
    "TritonAttentionBackend",
    "TritonAttentionDiffKVBackend",
    "TritonFlashAttentionBackend",
    "TritonFlashInferBackend",
    "FlashInferBackend",
    "FlexAttentionBackend",
)
# The compressed vector of a token and its rotary part, side by side.
_MLA = (
    "CPUMLABackend",
    "CutlassMLABackend",
    "FlashAttnMLABackend",
    "FlashInferMLABackend",
    "FlashMLABackend",
    "TokenspeedMLABackend",
    "TritonMLABackend",
)
# States of layers that are not attention: the tensors of their spec, in the order of the
# convolution's layout.
_STATES = (
    "BailingLinearAttentionBackend",
    "GDNAttentionBackend",
    "LinearAttentionBackend",
    "Mamba1AttentionBackend",
    "Mamba2AttentionBackend",
    "ShortConvAttentionBackend",
)
# Packed in ways that vLLM has changed between releases: engines of one release share.
_BY_RELEASE = (
    "AMXMLABackend",
    "B12xPagedAttentionBackend",
    "DeepseekV32IndexerBackend",
    "FlashAttnMLASparseBackend",
    "FlashInferMLASparseSM120Backend",
    "FlashInferMLASparseSM90Backend",
    "FlashInferMLASparseTRTLLMBackend",
    "FlashMLASparseBackend",
    "HpcAttentionBackend",
    "TurboQuantAttentionBackend",
)
# Numbers that are stored one by one. Every other cache type packs several, or keeps scales beside
# them.
_PLAIN_TYPES = (
    "auto",
    "float16",
    "half",
    "bfloat16",
    "float32",
    "float",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
)

# The CPU's kernels keep keys column by column and values row by row, whatever instructions they
# use: checked for these.
_CPU_COLUMNS = ("vec", "vec16")
# ARM's kernels pack bfloat16, and the order of values has moved once. What was not run is shared
# within a release.
_NEON_BFLOAT16 = {
    (0, 28): "cpu-neon-bf16-v1",
    (0, 30): "cpu-neon-bf16-v1",
    (0, 32): "cpu-neon-bf16-v2",
}


# A head's keys and values are a region of their own, whichever rank has the head.
_HEADS_APART = ("fused-kv", "cpu-columns")


def encodings_of(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, str]:
    """How each of these layers writes its KV. SettingsError, naming the backend, if that is not
    known."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: _encoding(name, layers.get(name), vllm_config) for name in layer_names}


def check_heads_apart(encodings: dict[str, str]) -> None:
    """SettingsError, naming the layer, unless each head's keys and values lie by themselves: then
    a block can be cut by heads."""
    for name, encoding in encodings.items():
        if encoding not in _HEADS_APART and not encoding.startswith("fused-kv fp8 "):
            raise SettingsError(
                f"kvkeep does not know whether the KV of layer {name}, written as {encoding}, can be"
                " cut by heads",
                "leave out kvkeep.tp_shards, and run all engines that share with one"
                " tensor-parallel size",
            )


def summary_of(encodings: dict[str, str]) -> str:
    """What goes into the identity: the encoding of all layers, or if they differ a digest of which
    has which."""
    distinct = sorted(set(encodings.values()))
    if len(distinct) == 1:
        return distinct[0]
    by_layer = blake2b(repr(sorted(encodings.items())).encode(), digest_size=8).hexdigest()
    return f"{', '.join(distinct)}, by layer {by_layer}"


def _encoding(name: str, layer: Any, vllm_config: Any) -> str:
    if layer is None or not hasattr(layer, "get_attn_backend"):
        raise _unknown(name, "an attention backend that vLLM does not name")
    backend = layer.get_attn_backend()
    kind = backend.__qualname__
    if not backend.__module__.startswith("vllm."):  # a plugin may give its own class any name
        raise _unknown(name, f"{backend.__module__}.{kind}")
    cache_type = str(getattr(layer, "kv_cache_dtype", "auto"))
    if kind in _STATES:
        return f"states {versions.conv_state_layout()}"
    if kind == "CPUAttentionBackend":
        encoding = _cpu_encoding(name, layer, vllm_config.model_config.dtype, cache_type)
    elif kind in _FUSED:
        encoding = "fused-kv"
    elif kind in _MLA:
        encoding = "mla"
    elif kind in _BY_RELEASE:
        encoding = _of_this_release(kind)
    else:
        raise _unknown(name, kind)
    if cache_type not in _PLAIN_TYPES:
        return _of_this_release(f"{encoding} {cache_type}")
    return f"{encoding} {_number_type(cache_type)}".strip()


def _cpu_encoding(name: str, layer: Any, dtype: Any, cache_type: str) -> str:
    isa = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    if isa is None:
        raise _unknown(name, "CPUAttentionBackend, without saying for which instructions,")
    is_bfloat16 = "bfloat16" in str(dtype)
    if "fp8" in cache_type:
        return _of_this_release(f"cpu-{isa}")
    if isa in _CPU_COLUMNS or (isa == "neon" and not is_bfloat16):
        return "cpu-columns"
    if isa == "neon":
        return _NEON_BFLOAT16.get(versions.release(), _of_this_release("cpu-neon-bf16"))
    return _of_this_release(f"cpu-{isa}")


def _number_type(cache_type: str) -> str:
    """Which kind of fp8 a platform means: there are several, and the name of the cache's type is
    one."""
    if "fp8" not in cache_type:
        return ""
    from vllm.platforms import current_platform

    kind = (
        "e5m2"
        if cache_type.endswith("e5m2")
        else str(current_platform.fp8_dtype()).removeprefix("torch.")
    )
    return f"fp8 {kind}"


def _of_this_release(encoding: str) -> str:
    return f"{encoding} of vLLM {'.'.join(map(str, versions.release()))}"


def _unknown(layer: str, backend: str) -> SettingsError:
    return SettingsError(
        f"kvkeep does not know how {backend} writes the KV of layer {layer}",
        "choose another with --attention-backend, or serve this model without kvkeep",
    )
