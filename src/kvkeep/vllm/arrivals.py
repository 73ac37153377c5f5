"""Requests as vLLM reports them: which of them are cached, and the keys of their blocks.

A request arrives with the keys of all its full blocks, and the server is asked for them at once.
Later blocks get their keys when they are full (`grow`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkeep.connector.planner import CachePlanner
from kvkeep.kv.identity import ModelIdentity
from kvkeep.vllm import versions
from kvkeep.vllm.adapters import Adapters
from kvkeep.vllm.keys import (
    EngineKeys,
    OwnKeys,
    RequestKeys,
    TokensChanged,
    can_be_keyed,
    counts_media,
    root_of,
)


@dataclass
class Known:
    """A request that vLLM has told us of."""

    request: Any
    keys: RequestKeys
    local_tokens: int = 0  # what the prefix cache had when it was last asked
    asked_in: int = -1  # the step that vLLM was scheduling then
    in_step: bool = False  # what is found of it is loaded before the step that computes the rest
    next_store: int = (
        0  # with so many tokens computed there may be something to store; most steps end here
    )


class Arrivals:
    """The requests of one engine, which are `known` until they are over."""

    def __init__(
        self,
        vllm_config: Any,
        identity: ModelIdentity,
        hash_tokens: int,
        side: CachePlanner,
        known: dict[str, Known],
    ) -> None:
        self._hash_tokens = hash_tokens
        self._counts_media = counts_media(vllm_config)
        self._identity, self._side, self._known = identity, side, known
        self._adapters = Adapters()
        self.uses_hashes = versions.hashes_are_stable(
            vllm_config.cache_config.prefix_caching_hash_algo
        )
        self.generation = b""
        self.lookups = 0  # for whoever counts

    def arrive(self, request: Any) -> None:
        adapter = (
            "" if request.lora_request is None else self._adapters.name_of(request.lora_request)
        )
        if adapter is None or not can_be_keyed(request, self._counts_media):
            return
        about = (
            root_of(self._identity, request, self.generation, adapter),
            request,
            self._identity.block_tokens,
        )
        keys: RequestKeys = (
            EngineKeys(*about, self._hash_tokens) if self.uses_hashes else OwnKeys(*about)
        )
        reads = not getattr(request, "skip_reading_prefix_cache", False)
        self._side.arrive(
            request.request_id,
            request.cache_salt,
            request.kv_transfer_params,
            keys.grow(),
            reads=reads,
            prompt_blocks=(request.num_prompt_tokens - 1)
            // self._identity.block_tokens,  # of which all may be given
        )
        self.lookups += reads
        self._known[request.request_id] = Known(request, keys)

    def grow(self, known: Known) -> bool:
        """Takes in the keys of new blocks. False if the request has become another one, and is not
        cached any more."""
        try:
            keys = known.keys.grow()
        except TokensChanged:
            self.forget(known.request.request_id)
            return False
        if keys:
            self._side.extend(known.request.request_id, keys)
        return True

    def hold(self, known: Known, tokens: int) -> None:
        """The request has the KV of so many tokens, found by vLLM or computed."""
        self._side.hold(known.request.request_id, tokens // self._identity.block_tokens)

    def forget(self, request_id: str) -> None:
        """It is not cached any more."""
        self._known.pop(request_id, None)
        self._side.forget(request_id)
