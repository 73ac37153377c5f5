"""Whose blocks an engine's are: everything about model, weights and layout that changes the bytes of a block.

Every rank knows its own memory; all of them together are one block. So the ranks tell each other at start-up how their
parts lie, and each comes to the same shape, which the scheduler then hears from one of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvkeep.client.sources import Piece
from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.connector.options import revision
from kvkeep.connector.pieces import Pieces
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm import versions

log = logging.getLogger(__name__)

Part = tuple[list[str], list[int]]  # of one rank, for each piece: how it lies in memory, and its bytes


def strategy_of(vllm_config: Any, kv_cache_config: Any, pieces: Pieces) -> ParallelStrategy:
    """This rank's place in the engine."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    rank = get_pp_group().rank_in_group * tp_size + get_tp_group().rank_in_group
    replicas = versions.kv_tp_replicas(kv_cache_config)
    if replicas is None and not pieces.whole:
        replicas = 1  # attention may be replicated while states are not: each rank for itself is always right
    if replicas is not None:
        return ParallelStrategy.of(
            tp_size=tp_size, pp_size=pp_size, rank=rank, use_mla=model.use_mla, kv_tp_replicas=replicas
        )
    return ParallelStrategy.of(
        tp_size=tp_size,
        pp_size=pp_size,
        rank=rank,
        use_mla=model.use_mla,
        num_kv_heads=None if model.use_mla else model.get_total_num_kv_heads(),
    )


def parts_of_all_ranks(located: Sequence[Piece] | KVKeepError) -> list[Part]:
    """How the block lies in memory on every rank of this engine, in the order of ranks. All ranks must call this, also
    one that cannot be cached: then SettingsError is raised on every rank."""
    own: Part | str
    if isinstance(located, KVKeepError):
        own = f"{located.message} ({located.hint})" if located.hint else located.message
    else:
        own = ([piece.runs.fingerprint for piece in located], [piece.runs.nbytes for piece in located])
    every = [part for stage in _gather(get_pp_group(), _gather(get_tp_group(), own)) for part in stage]
    refusals = sorted({part for part in every if isinstance(part, str)})
    if refusals:
        raise SettingsError("; ".join(refusals))
    return every


def _gather(group: Any, own: Any) -> list[Any]:
    if group.world_size == 1:
        return [own]
    every: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(every, own, group=group.cpu_group)
    return every


def shape_of(vllm_config: Any, pieces: Pieces, strategy: ParallelStrategy, parts: Sequence[Part]) -> BlockShape:
    """What all ranks, and every other engine that may share blocks with this one, agree on."""
    shards = parts[:: strategy.replicas]
    model, extra = vllm_config.model_config, vllm_config.kv_transfer_config.kv_connector_extra_config
    layout = json.dumps([[str(group) for group in pieces.groups], shards])
    identity = ModelIdentity(
        model=str(model.model).rstrip("/").rpartition("/")[2] or str(model.model),
        revision=f"{_revision(model, extra)} {_config_digest(vllm_config)}",
        kv_dtype=f"{vllm_config.cache_config.cache_dtype} of {model.dtype}".removeprefix("torch."),
        block_tokens=pieces.block_tokens,
        layout=hashlib.blake2b(layout.encode(), digest_size=16).hexdigest(),
        kv_world_size=strategy.kv_world_size,
    )
    return BlockShape(identity, tuple(nbytes for _, sizes in shards for nbytes in sizes), len(pieces))


def _revision(model: Any, extra: Mapping[str, Any]) -> str:
    said = revision(extra)
    if said is not None:
        return said
    digest = CheckpointDigest.of(
        str(model.model),
        model.revision,
        remote_code=bool(getattr(model, "trust_remote_code", False)),
        code_revision=getattr(model, "code_revision", None),
    )
    digest.wait(None)
    if digest.value is not None:
        return digest.value
    log.warning(
        "kvkeep: the weights of %s were not found on this host, so its name and revision (%s) stand for them. "
        "If they can change under that name, set kvkeep.revision in kv_connector_extra_config.",
        model.model,
        model.revision,
    )
    return f"{model.model}@{model.revision}"


def _draft(speculative: Any) -> str | None:
    """The model that guesses tokens, if it keeps KV of its own."""
    if speculative is None or speculative.method in ("ngram", "ngram_gpu", "suffix"):
        return None
    return f"{speculative.method} {speculative.model}"


def _config_digest(vllm_config: Any) -> str:
    """What changes how KV is computed and is not in the checkpoint: overrides, quantization, made-up weights."""
    model, load = vllm_config.model_config, vllm_config.load_config
    facts = {
        "config": model.hf_config.to_dict(),
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        "implementation": [getattr(model, name, None) for name in ("model_impl", "model_class_overrides")],
        "load_format": str(load.load_format),
        "loader": load.model_loader_extra_config,
        "lora_dtype": getattr(vllm_config.lora_config, "lora_dtype", None),
        "max_model_len": model.max_model_len,  # some kinds of position embedding depend on it
        "mm_processor_kwargs": getattr(model.multimodal_config, "mm_processor_kwargs", None),
        "seed": model.seed if str(load.load_format) == "dummy" else None,
        "draft": _draft(vllm_config.speculative_config),
    }
    facts["config"].pop("_name_or_path", None)
    facts["config"].pop("transformers_version", None)
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
