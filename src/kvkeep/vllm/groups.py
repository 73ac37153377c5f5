"""A model's KV as vLLM describes it, in our words: which cache groups it has, and where their
blocks lie.

Raises SettingsError, with a hint, for what would not be right: such an engine is served without the
cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.v1 import kv_cache_interface as kvi

import vllm
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.errors import SettingsError
from kvkeep.kv.runs import BlockRuns, cut_heads
from kvkeep.vllm import versions
from kvkeep.vllm.releases import SUPPORTED

_HEAD_DIM = -3  # of a layer's tensor: blocks, then heads, tokens and numbers, however they lie

# By exact type: a subclass that vLLM adds may mean anything.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")


def layout_of(vllm_config: Any, kv_cache_config: Any) -> GroupLayout:
    """The model's groups; SettingsError if blocks of this engine cannot be cached."""
    _check_engine(vllm_config)
    if not kv_cache_config.kv_cache_groups:
        raise SettingsError("this model keeps no KV", "serve it without kvkeep")
    dcp_size, _ = versions.context_parallel(vllm_config.parallel_config)
    pieces = GroupLayout(
        [_group(group.kv_cache_spec, dcp_size) for group in kv_cache_config.kv_cache_groups]
    )
    if not pieces.whole and not versions.names_failed_requests():
        raise SettingsError(
            "this model keeps layers of several kinds, and this release of vLLM cannot recover a"
            " failed load of one",
            "vLLM 0.30 or later can",
        )
    if (
        getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
        and vllm_config.use_v2_model_runner
    ):
        raise SettingsError(
            "vLLM's second model runner writes into blocks of this model before it tells of a step",
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        )
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise SettingsError(
                "this model has KV that vLLM does not let out", "serve it without kvkeep"
            )
    return pieces


def _check_engine(vllm_config: Any) -> None:
    if vllm_config.model_config.is_encoder_decoder:
        raise SettingsError(
            "encoder-decoder models keep KV that no prefix of tokens determines",
            "serve it as it is",
        )
    _check_sleep(vllm_config.model_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise SettingsError(
            "calculate_kv_scales makes scales of the first requests, so KV of one process means"
            " nothing to another",
            "take scales from the checkpoint",
        )


def _check_sleep(model: Any) -> None:
    if not (
        getattr(model, "enable_sleep_mode", False)
        or getattr(model, "enable_cumem_allocator", False)
    ):
        return
    if not versions.tells_of_sleep():
        raise SettingsError(
            f"sleep mode of vLLM {vllm.__version__} takes the KV's memory away and does not tell"
            " connectors before",
            "vLLM 0.33 or later does; otherwise leave out --enable-sleep-mode, or serve without"
            " kvkeep",
        )
    backend = getattr(model, "sleep_mode_backend", "cumem")
    # others may take more than memory: streams, or registrations of host memory
    if backend != "cumem":
        raise SettingsError(
            f"kvkeep does not know what sleep-mode backend {backend!r} takes away",
            "set --sleep-mode-backend cumem, or serve without kvkeep",
        )


def _group(spec: Any, dcp_size: int) -> CacheGroup:
    """With decode context parallelism a block of the scheduler's spans the tokens of `dcp_size`
    ranks' blocks."""
    kinds = {_kind(each) for each in members_of(spec)}
    if len(kinds) != 1:
        raise SettingsError(
            f"a cache group mixes layers: {sorted(kinds)}", "serve this model without kvkeep"
        )
    (kind,) = kinds
    if dcp_size > 1 and (kind != "full" or not getattr(spec, "dcp_sharded", True)):
        raise SettingsError(
            "with decode_context_parallel_size > 1 every layer must be full attention; this model"
            f" has {kind} layers",
            "set decode_context_parallel_size to 1",
        )
    if kind == "full":
        return CacheGroup("full", spec.block_size * dcp_size)
    if kind == "state":
        return CacheGroup("state", spec.block_size)
    reach = max(
        each.sliding_window + getattr(each, "extra_retained_tokens", 0) for each in members_of(spec)
    )
    return CacheGroup("window", spec.block_size, reach)


def members_of(spec: Any) -> Iterator[Any]:
    """What the layers of a cache group keep: one for all, or one of each."""
    if isinstance(spec, kvi.UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _kind(spec: Any) -> str:
    name = type(spec).__name__
    if name in _FULL and not getattr(spec, "non_causal", False):
        return "full"
    if name in _WINDOW:
        return "window"
    if name == "MambaSpec":
        if spec.mamba_cache_mode == "align" and not getattr(spec, "num_speculative_blocks", 0):
            return "state"
        raise SettingsError(
            f"recurrent states are kept in mode {spec.mamba_cache_mode!r}, in which they belong to"
            " no prefix",
            "set enable_prefix_caching and mamba_cache_mode='align', without speculative decoding",
        )
    raise SettingsError(
        f"kvkeep does not know how {name} keeps KV", "serve this model without kvkeep"
    )


def locate(
    pieces: GroupLayout, kv_cache_config: Any, kv_caches: Mapping[str, Any], shards: int = 1
) -> list[GroupMemory]:
    """Where each piece lies in this rank's memory, or each of its `shards`. Raises RequestError for
    memory that blocks cannot be copied from."""
    located = []
    for number in range(len(pieces)):
        group = kv_cache_config.kv_cache_groups[pieces.group_of(number)]
        layers = _layers(group.layer_names, kv_caches, kv_cache_config.num_blocks)
        each = [layers]
        if shards > 1:
            _check_heads(group.kv_cache_spec, layers)
            each = cut_heads(layers, _HEAD_DIM, shards)
        may_lack = pieces.may_lack(number)
        located += [GroupMemory(BlockRuns.of(views), may_lack) for views in each]
    return located


def _check_heads(spec: Any, layers: Mapping[str, Any]) -> None:
    """SettingsError unless the dim that should count KV heads does so in every layer."""
    heads = {int(getattr(each, "num_kv_heads", 0)) for each in members_of(spec)}
    for name, tensor in layers.items():
        shape = tuple(tensor.shape)
        if len(shape) < 4 or shape[_HEAD_DIM] not in heads:
            raise SettingsError(
                f"the KV of layer {name}, of shape {shape}, cannot be cut by KV heads",
                "leave out kvkeep.tp_shards, and run all engines that share with one"
                " tensor-parallel size",
            )


def _layers(names: Sequence[str], kv_caches: Mapping[str, Any], num_blocks: int) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    seen = set()
    for name in names:
        found = kv_caches.get(name)  # a layer of another pipeline stage has none here
        if found is None:
            continue
        tensors = found if isinstance(found, list | tuple) else [found]
        for at, tensor in enumerate(tensors):
            if tensor.data_ptr() not in seen:  # layers that share their KV
                seen.add(tensor.data_ptr())
                layers[f"{name}.{at}" if len(tensors) > 1 else name] = _by_block(
                    name, tensor, num_blocks
                )
    return layers


def _by_block(name: str, tensor: Any, num_blocks: int) -> Any:
    """The tensor with a row for each block of the scheduler's: kernels may cut those into smaller
    ones."""
    rows = tensor.shape[0]
    if rows == num_blocks:
        return tensor
    if rows % num_blocks or not rows:
        problem = f"the KV of layer {name} has {rows} rows for {num_blocks} blocks"
        raise SettingsError(problem, f"kvkeep knows the layouts of vLLM {SUPPORTED}")
    return tensor.unflatten(0, (num_blocks, rows // num_blocks))
