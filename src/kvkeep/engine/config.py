"""What an engine can be told. Frozen, and checked once at the edge."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.identity import MAX_BLOCK_TOKENS


@dataclass(frozen=True)
class EngineConfig:
    """The defaults serve a small model on a laptop.

    block_tokens              tokens per KV block
    num_blocks                blocks in the engine's own KV memory, with block 0, which is reserved
    max_num_batched_tokens    tokens that one step computes at most, over all requests
    max_num_seqs              requests that run at the same time at most
    enable_chunked_prefill    a prompt that does not fit into one step is computed over several
    enable_prefix_caching     blocks of finished requests are found again by later ones
    tensor_parallel_size      ranks that share each layer's heads
    pipeline_parallel_size    groups of ranks that share the layers
    sync_loads                load from the external cache inside the step, not in the background
    kv_load_failure_policy    "recompute": what failed to load is computed; "fail": the request ends
    """

    block_tokens: int = 16
    num_blocks: int = 1024
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sync_loads: bool = False
    kv_load_failure_policy: str = "recompute"

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "int" and (type(value) is not int or value < 1):
                raise SettingsError(
                    f"{option.name} must be an integer of at least 1, not {value!r}"
                )
            if option.type == "bool" and type(value) is not bool:
                raise SettingsError(f"{option.name} must be true or false, not {value!r}")
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise SettingsError(
                f"block_tokens is {self.block_tokens}", f"{MAX_BLOCK_TOKENS} are the most"
            )
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise SettingsError(
                f"kv_load_failure_policy is {self.kv_load_failure_policy!r}",
                "allowed are recompute and fail",
            )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_tokens(self) -> int:
        """How long a request can get: it has to fit into the blocks and, if prompts are not cut,
        into one step."""
        in_blocks = (self.num_blocks - 1) * self.block_tokens
        return (
            in_blocks
            if self.enable_chunked_prefill
            else min(in_blocks, self.max_num_batched_tokens)
        )

    def check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        """RequestError for a request that could never be served."""
        if prompt_tokens + max_tokens <= self.max_tokens:
            return
        cut = (
            self.enable_chunked_prefill
            or self.max_num_batched_tokens >= (self.num_blocks - 1) * self.block_tokens
        )
        remedy = (
            "raise num_blocks" if cut else "raise max_num_batched_tokens or enable chunked prefill"
        )
        raise RequestError(
            "too_long",
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate, but a request has"
            f" {self.max_tokens} at most",
            field="prompt",
            hint=remedy,
        )
