"""What differs between the releases of vLLM that one connector serves: 0.26 to 0.33.

since   what                                      before
0.30    a failed load can name its request        only blocks can be named, and of one group of full attention only:
                                                  models with more are served without the cache
0.30    the connector is given the cache manager  block tables are kept here, from what the scheduler hands out
0.29    hashes start from the same root           the root is random in every process, unless PYTHONHASHSEED is set:
        everywhere                                keys are hashed here
0.31    kv_cache_config says how many ranks hold  taken from the number of KV heads; not for models with several
        the same KV                               groups
0.32    kv_cache_config says how many tokens      what divides all blocks, and each request's hashes are
        a hash covers                             counted to make sure
0.32    waiting requests that hold blocks are     a waiting request that finds too few blocks hides all behind
        scheduled before those that do not        it, also those that hold the blocks (SchedulerConnector._build_step)
0.32    extra keys of hashes say what they are,   the same in both
        and those of KV events do not
0.33    connectors are told before sleep mode     engines with sleep mode are served without the cache
        takes the KV's memory away, and when it
        is there again; handshakes are handed
        over once more then

What 0.33 moved besides, and why nothing here has to follow it: block hashes can cover tokens after
their block, but not beside a connector; a step's results can be collected before `wait_for_save`,
which we do not rely on; an external hit can be refused as a whole for want of routed experts, which
is a hit that is not loaded, as before; loads are put off for caches in host memory only, which we
refuse; groups and tensors of the KV are planned in other modules."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.core import kv_cache_utils

import vllm
from kvkeep.vllm.releases import release_of

# Both have 256 bits and cannot be made to collide. The others are fast and neither.
_SOUND_HASHES = ("sha256", "sha256_cbor")


def release() -> tuple[int, int]:
    """The release that runs here; (0, 0) for a build without a number."""
    return release_of(vllm.__version__) or (0, 0)


def conv_state_layout() -> str:
    """Which dimension comes first in the states of convolutions, which an environment variable
    decides."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def names_failed_requests() -> bool:
    """Whether a worker can say that a request's load failed as a whole."""
    return hasattr(base, "KVConnectorTransferResults")


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """What such a worker says."""
    return base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)


def tells_of_sleep() -> bool:
    """Whether connectors hear of it before the KV's memory is taken away."""
    return hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


def hashes_are_stable(algorithm: str) -> bool:
    """Whether block hashes are the same in every process, and are sound keys."""
    has_fixed_root = (
        hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and "PYTHONHASHSEED" not in os.environ
    )
    return has_fixed_root and algorithm in _SOUND_HASHES


def hash_tokens(kv_cache_config: Any, block_tokens: Sequence[int]) -> int:
    """How many tokens one of vLLM's hashes covers; `block_tokens` are those of each group."""
    said = getattr(kv_cache_config, "hash_block_size", None)
    return int(said) if said else math.gcd(*block_tokens)


def context_parallel(parallel_config: Any) -> tuple[int, int]:
    """Over how many ranks the tokens of a block are spread when decoding (DCP), and prompts when
    computing (PCP)."""
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    dcp_size, pcp_size = (int(getattr(parallel_config, name, 1)) for name in names)
    return dcp_size, pcp_size


def context_interleave(parallel_config: Any) -> int:
    """How many neighbouring tokens of a block one of those ranks keeps before the next one's
    turn."""
    names = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
    return max(int(getattr(parallel_config, name, None) or 1) for name in names)


def is_own_model(model_config: Any) -> bool:
    """Whether the model's code is vLLM's own, and not a plugin's, the checkpoint's or
    transformers'."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    module = get_model_architecture(model_config)[0].__module__
    return (
        module.startswith(("vllm.model_executor.models.", "vllm.models."))
        and ".transformers" not in module
    )


def kv_tp_replicas(kv_cache_config: Any) -> int | None:
    """How many neighbouring ranks hold the same KV, where vLLM says so."""
    said = getattr(kv_cache_config, "kv_tp_replicas", None)
    return None if said is None else int(said)


def hashes_of_blocks(hashes: Any, hash_tokens: int, block_tokens: int) -> Any:
    """A request's hashes at the granularity of a group's blocks."""
    if block_tokens == hash_tokens:
        return hashes
    return kv_cache_utils.BlockHashListWithBlockSize(hashes, hash_tokens, block_tokens)


def event_fields(event: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of the fields that this release's events have."""
    return {name: value for name, value in fields.items() if name in event.__struct_fields__}


def event_spec_fields(spec: Any) -> dict[str, Any]:
    """What vLLM's events say about a cache group."""
    if not hasattr(kvi, "get_kv_cache_spec_kind"):
        return {}
    return {
        "kv_cache_spec_kind": kvi.get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": kvi.get_kv_cache_spec_sliding_window(spec),
    }


def event_extra_keys(keys: list[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None]:
    """Extra keys of hashes as events have them."""
    if not hasattr(kv_cache_utils, "to_event_extra_keys"):
        return keys
    return kv_cache_utils.to_event_extra_keys(keys) or []


class BlockTables:
    """Which blocks a request has, a list for each group."""

    def __init__(self) -> None:
        self.manager: Any = None  # from 0.30 on
        self._own: dict[str, list[list[int]]] = {}

    def __repr__(self) -> str:
        return f"BlockTables({sorted(self._own)})"

    def of(self, request_id: str) -> Sequence[Sequence[int]]:
        if self.manager is not None:
            return self.manager.get_block_ids(request_id)  # type: ignore[no-any-return]
        return self._own.get(request_id, ())

    def allocated(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """All blocks of a request that is admitted, anew or again."""
        if self.manager is None:
            self._own[request_id] = [list(table) for table in tables]

    def grown(self, request_id: str, more: Sequence[Sequence[int]]) -> None:
        """Blocks that a running request was given besides."""
        for table, ids in zip(self._own.get(request_id, ()), more, strict=False):
            table.extend(ids)

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)


def correct_cached_tokens(request: Any, tokens: int) -> None:
    """Of a request that is being scheduled for the first time only these tokens are cached, and not
    all that vLLM has counted as such: `usage.prompt_tokens_details.cached_tokens` and vLLM's
    metrics of prompt tokens come from here."""
    stats = getattr(request, "prefill_stats", None)
    if stats is not None:
        local = min(tokens, stats.num_local_cached_tokens)
        stats.set(
            request.num_prompt_tokens,
            num_local_cached_tokens=local,
            num_external_cached_tokens=tokens - local,
        )
    counted = getattr(request, "num_cached_tokens", None)  # in releases without such an object
    if counted is not None and counted > tokens:
        request.num_cached_tokens = tokens
        external = getattr(request, "num_external_computed_tokens", 0)
        request.num_external_computed_tokens = max(0, external - (counted - tokens))
