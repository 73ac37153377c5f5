"""Which engines share blocks: everything about model, weights, attention and memory that decides
what bytes mean.

Every rank knows its own memory; all of them together are one block. So the ranks tell each other at
start-up how their parts lie and how their layers write KV, and each comes to the same shape, which
the scheduler then hears from every one. docs/concepts/identity.md lists the parts and the reason of
each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvkeep.client.rank_memory import GroupMemory
from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.options import revision, tp_shards
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm import versions
from kvkeep.vllm.attention import summary_of
from kvkeep.vllm.groups import members_of

log = logging.getLogger(__name__)

# Position embeddings that compute the same whatever max_model_len is; it only sizes their tables.
_POSITIONS_OF_ANY_LENGTH = (
    "default",
    "linear",
    "llama3",
    "ntk",
    "proportional",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
    "mrope",
    "mllama4",
    "openpangu",
)
_LLAMA4_TUNED_FROM = 32_768  # Llama 4 scales queries where an engine takes longer prompts than that
_GUESSES_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Part(NamedTuple):
    """What one rank tells the others: for each piece, or each shard of it, how it lies in memory
    and its bytes; how each layer writes KV."""

    layouts: list[str]
    sizes: list[int]
    encodings: dict[str, str]


# --- ranks


def strategy_of(vllm_config: Any, kv_cache_config: Any, pieces: GroupLayout) -> ParallelStrategy:
    """This rank's place in the engine, and the shards that it holds. Ranks that divide the context
    hold different tokens: none is a replica."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    dcp_size, pcp_size = versions.context_parallel(parallel)
    tp_size, pp_size = parallel.tensor_parallel_size * pcp_size, parallel.pipeline_parallel_size
    pcp_rank = parallel_state.get_pcp_group().rank_in_group if pcp_size > 1 else 0
    tp_rank = pcp_rank * parallel.tensor_parallel_size + get_tp_group().rank_in_group
    rank = get_pp_group().rank_in_group * tp_size + tp_rank
    replicas = versions.kv_tp_replicas(kv_cache_config)
    if dcp_size > 1 or pcp_size > 1:
        replicas = 1
    elif replicas is None and not (pieces.whole and _is_of_one_kind(kv_cache_config)):
        # Of several kinds of layers some may be replicated while others are not: each rank for
        # itself is always right.
        replicas = 1
    heads = None if model.use_mla or replicas is not None else model.get_total_num_kv_heads()
    strategy = ParallelStrategy.of(
        tp_size=tp_size,
        pp_size=pp_size,
        rank=rank,
        use_mla=model.use_mla,
        num_kv_heads=heads,
        kv_tp_replicas=replicas,
    )
    count = tp_shards(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if count is None or model.use_mla:
        return strategy
    if dcp_size > 1 or pcp_size > 1:
        raise SettingsError(
            "kvkeep.tp_shards cuts KV by heads, but ranks of this engine divide the context",
            "leave out kvkeep.tp_shards, or set decode_context_parallel_size and"
            " prefill_context_parallel_size to 1",
        )
    return strategy.cut_into(count, model.get_total_num_kv_heads())


def _is_of_one_kind(kv_cache_config: Any) -> bool:
    """Whether all layers keep KV alike. A draft model with KV heads beside a target with MLA does
    not."""
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    kinds = {
        (type(each).__name__, getattr(each, "num_kv_heads", 0))
        for group in groups
        for each in members_of(group.kv_cache_spec)
    }
    return len(kinds) <= 1


def parts_of_all_ranks(
    located: tuple[Sequence[GroupMemory], dict[str, str]] | KVKeepError,
) -> list[Part]:
    """What every rank of this engine tells, in the order of ranks. All ranks must call this, also
    one that cannot be cached: then SettingsError is raised on every rank."""
    own: Part | str
    if isinstance(located, KVKeepError):
        own = f"{located.message} ({located.hint})" if located.hint else located.message
    else:
        runs, encodings = [piece.runs for piece in located[0]], located[1]
        own = Part([each.fingerprint for each in runs], [each.nbytes for each in runs], encodings)
    every: list[Any] = [own]
    for group in _groups():
        every = [part for some in _gather(group, every) for part in some]
    refusals = sorted({part for part in every if isinstance(part, str)})
    if refusals:
        raise SettingsError("; ".join(refusals))
    return every


def _groups() -> list[Any]:
    """The groups of ranks, the one whose ranks are neighbours first."""
    has_pcp = getattr(parallel_state, "_PCP", None) is not None
    return [get_tp_group(), *([parallel_state.get_pcp_group()] if has_pcp else []), get_pp_group()]


def _gather(group: Any, own: Any) -> list[Any]:
    if group.world_size == 1:
        return [own]
    every: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(every, own, group=group.cpu_group)
    return every


# --- weights


class Weights:
    """Which weights an engine computes with: those of the model and of a draft model that keeps KV.
    `pending` while files that were never seen on this host are hashed; blocks have no name until
    then."""

    def __init__(self, vllm_config: Any) -> None:
        self._model, self._load = vllm_config.model_config, vllm_config.load_config
        self._said = revision(vllm_config.kv_transfer_config.kv_connector_extra_config)
        draft = _draft_model(vllm_config.speculative_config)
        models = [self._model, *([] if draft is None else [draft])]
        is_looked_at = self._said is None and not self._is_made_up
        self._digests = (
            [(model, _digest_of(model, self._load)) for model in models] if is_looked_at else []
        )

    @property
    def _is_made_up(self) -> bool:
        return str(self._load.load_format) == "dummy"

    @property
    def pending(self) -> bool:
        return any(digest.pending for _, digest in self._digests)

    def wait(self, timeout_s: float) -> None:
        """Until nothing is pending, or this long for each checkpoint."""
        for _, digest in self._digests:
            digest.wait(timeout_s)

    @property
    def revision(self) -> str:
        """What stands for the weights in the identity. SettingsError if nothing on this host tells
        them apart."""
        if self._said is not None:
            return self._said
        if self._is_made_up:
            return f"made up from seed {self._model.seed}"
        return " ".join(_named(model, digest) for model, digest in self._digests)


def _digest_of(model: Any, load: Any) -> CheckpointDigest:
    return CheckpointDigest.of(
        str(model.model),
        model.revision,
        remote_code=bool(getattr(model, "trust_remote_code", False)),
        code_revision=getattr(model, "code_revision", None),
        download_dir=getattr(load, "download_dir", None),
    )


def _named(model: Any, digest: CheckpointDigest) -> str:
    if digest.value is not None:
        return digest.value
    is_elsewhere = not digest.found and not os.path.exists(str(model.model))
    if is_elsewhere and model.revision and _COMMIT.fullmatch(str(model.revision)):
        # a commit of the hub never changes its files; those here may
        return f"{model.model}@{model.revision}"
    raise SettingsError(
        f"nothing tells the weights of {model.model} from others of that name: {digest.problem}",
        "set kvkeep.revision in kv_connector_extra_config to a name that changes with the weights",
    )


def _draft_model(speculative: Any) -> Any | None:
    """The config of the model that guesses tokens, if it keeps KV of its own."""
    if speculative is None or speculative.method in _GUESSES_WITHOUT_MODEL:
        return None
    return getattr(speculative, "draft_model_config", None)


# --- the identity


def shape_of(
    vllm_config: Any,
    pieces: GroupLayout,
    strategy: ParallelStrategy,
    parts: Sequence[Part],
    weights: str,
) -> BlockShape:
    """What all ranks, and every other engine that may share blocks with this one, agree on."""
    model = vllm_config.model_config
    identity = ModelIdentity(
        model=_name_of(model),
        revision=weights,
        kv_dtype=f"{vllm_config.cache_config.cache_dtype} of {model.dtype}".replace("torch.", ""),
        block_tokens=pieces.block_tokens,
        content="; ".join(
            f"{group.kind} {group.block_tokens} {group.reach}" for group in pieces.groups
        ),
        details=tuple(_details(vllm_config, _encodings(parts)).items()),
    )
    count = strategy.shards_per_rank
    shards = [
        (part.layouts[shard::count], part.sizes[shard::count])
        for part in parts[:: strategy.replicas]
        for shard in range(count)
    ]
    dcp_size, pcp_size = versions.context_parallel(vllm_config.parallel_config)
    cut = f"{strategy.cut}, memory {_digest(shards)}"
    if dcp_size > 1 or pcp_size > 1:
        interleave = versions.context_interleave(vllm_config.parallel_config)
        cut += f", tokens in {dcp_size} (DCP, {interleave} together), prompts in {pcp_size} (PCP)"
    sizes = tuple(nbytes for _, of_shard in shards for nbytes in of_shard)
    return BlockShape(identity, sizes, len(pieces), cut)


def _name_of(model: Any) -> str:
    """The last part of the path: where a checkpoint lies is no property of its KV."""
    return str(model.model).rstrip("/").rpartition("/")[2] or str(model.model)


def _encodings(parts: Sequence[Part]) -> dict[str, str]:
    """How each layer of the engine writes KV, whichever rank has it."""
    every: dict[str, str] = {}
    for part in parts:
        for layer, encoding in part.encodings.items():
            if every.setdefault(layer, encoding) != encoding:
                raise SettingsError(
                    f"ranks of this engine write KV in different ways: layer {layer} as"
                    f" {every[layer]} and {encoding}",
                    "run all ranks on processors of one kind, with the same environment",
                )
    return every


def _details(vllm_config: Any, encodings: dict[str, str]) -> dict[str, str]:
    """What changes how KV is computed or written and is not in the checkpoint, by name."""
    model, load, lora = vllm_config.model_config, vllm_config.load_config, vllm_config.lora_config
    speculative = vllm_config.speculative_config
    draft = _draft_model(speculative)
    config = model.hf_config.to_dict()
    # max_model_len counts as a position
    for name in ("_name_or_path", "transformers_version", "max_model_len"):
        config.pop(name, None)
    return {
        "attention": summary_of(encodings),
        "positions": _positions(model, config),
        "config": _digest(config),
        "quantization": " ".join(
            (str(model.quantization), _digest(getattr(model, "quantization_config", None)))
        ),
        "implementation": " ".join(
            str(getattr(model, name, None)) for name in ("model_impl", "model_class_overrides")
        ),
        "loading": f"{load.load_format} {_digest(load.model_loader_extra_config)}",
        "lora": str(getattr(lora, "lora_dtype", None)),
        "media": _digest(getattr(model.multimodal_config, "mm_processor_kwargs", None)),
        "draft": "none"
        if draft is None
        else f"{speculative.method} {_name_of(draft)} {_digest(_config_of(draft))}",
    }


def _config_of(model: Any) -> Any:
    hf_config = getattr(model, "hf_config", None)
    config = {} if hf_config is None else hf_config.to_dict()
    return {
        name: value
        for name, value in config.items()
        if name not in ("_name_or_path", "transformers_version")
    }


def _positions(model: Any, config: Mapping[str, Any]) -> str:
    """What max_model_len changes in the numbers: mostly nothing. It picks one of two tables of
    LongRoPE and the attention temperature of Llama 4; where that is not known it counts as it
    is."""
    length, kinds = int(model.max_model_len), sorted(set(_position_kinds(config)))
    facts = kinds or ["default"]
    if any(kind == "longrope" for kind in kinds):
        trained = max(_numbers(config, "original_max_position_embeddings"), default=0)
        facts = [*facts, "long" if length > trained else "short"]
    if str(config.get("model_type", "")).startswith("llama4"):
        facts = [*facts, "tuned" if length > _LLAMA4_TUNED_FROM else "not tuned"]
    is_known = all(kind in (*_POSITIONS_OF_ANY_LENGTH, "longrope") for kind in kinds)
    if not (is_known and versions.is_own_model(model)):
        facts = [*facts, f"max_model_len={length}"]
    return " ".join(facts)


def _position_kinds(config: Any) -> Iterator[str]:
    """Every kind of rotary embedding that a config names, however deep."""
    for settings in _dicts(config):
        for name in ("rope_parameters", "rope_scaling"):
            found = settings.get(name)
            for each in _dicts(found):
                kind = each.get("rope_type") or each.get("type")
                if isinstance(kind, str):
                    yield "longrope" if kind == "su" else kind


def _numbers(config: Any, name: str) -> Iterator[int]:
    for settings in _dicts(config):
        if isinstance(settings.get(name), int):
            yield settings[name]


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    """A config and every one inside it."""
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from _dicts(each)


def _digest(facts: Any) -> str:
    return hashlib.blake2b(
        json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=8
    ).hexdigest()
