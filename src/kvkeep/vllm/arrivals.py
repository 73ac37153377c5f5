"""Requests as vLLM tells of them, until all their keys are known and the server is asked.

    arrive ──► the first block's key ─┬─► the server may have it: all keys, and the lookup goes out at once
                                      └─► it surely has not: both are left until the step has begun
    grow       they are needed, or nobody waits any more

Of a prompt that nobody has stored yet there is nothing to wait for, so it begins as soon as without a cache. The server
hears of it all the same, a step later: a miss counts, and what it has by then need not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.connector.scheduler import SchedulerSide
from kvkeep.kv.identity import ModelIdentity
from kvkeep.vllm import versions
from kvkeep.vllm.adapters import Adapters
from kvkeep.vllm.keys import EngineKeys, OwnKeys, RequestKeys, TokensChanged, can_be_keyed, counts_media, root_of


@dataclass
class Known:
    """A request that vLLM has told us of."""

    request: Any
    keys: RequestKeys
    first_key: bytes = b""  # of one that the server is still to be asked for
    local_tokens: int = 0  # what the prefix cache had when it was last asked
    asked_in: int = -1  # the step that vLLM was scheduling then
    held_blocks: int = 0  # its first blocks that it has had at some time, found by vLLM or computed
    in_step: bool = False  # what is found of it is loaded before the step that computes the rest
    next_store: int = 0  # with so many tokens computed there may be something to store; most steps end here


class Arrivals:
    """Those of one engine, which are `known` until they are over. With `may_leave`, somebody grows those that are
    `left` once a step has begun."""

    def __init__(
        self,
        vllm_config: Any,
        identity: ModelIdentity,
        hash_tokens: int,
        side: SchedulerSide,
        adapter: SchedulerAdapter,
        known: dict[str, Known],
    ) -> None:
        self._hash_tokens = hash_tokens
        self._counts_media = counts_media(vllm_config)
        self._identity, self._side, self._adapter, self._known = identity, side, adapter, known
        self._adapters = Adapters()
        self._left: list[Known] = []  # and some that have been asked for or are over
        self.uses_hashes = versions.hashes_are_stable(vllm_config.cache_config.prefix_caching_hash_algo)
        self.generation = b""
        self.may_leave = False
        self.lookups = 0  # for whoever counts

    def arrive(self, request: Any) -> None:
        adapter = "" if request.lora_request is None else self._adapters.name_of(request.lora_request)
        if adapter is None or not can_be_keyed(request, self._counts_media):
            return
        about = root_of(self._identity, request, self.generation, adapter), request, self._identity.block_tokens
        keys: RequestKeys = EngineKeys(*about, self._hash_tokens) if self.uses_hashes else OwnKeys(*about)
        known = Known(request, keys, keys.first() if self.may_leave else b"")
        if self.is_missing(known):
            self._left.append(known)
        else:
            self._ask_for(known, keys.grow())
        self._known[request.request_id] = known

    def is_missing(self, known: Known) -> bool:
        """Whether the server need not be asked yet: it still has nothing of this prompt."""
        return bool(known.first_key) and self._adapter.lacks(known.first_key)

    def grow(self, known: Known) -> bool:
        """Takes in the keys of new blocks. False if the request has become another one, and is not cached any more."""
        try:
            keys = known.keys.grow()
        except TokensChanged:
            self.forget(known.request.request_id)
            return False
        if known.first_key:
            self._ask_for(known, keys)
        elif keys:
            self._side.extend(known.request.request_id, keys)
        return True

    @property
    def left(self) -> Sequence[Known]:
        """Those that the server is still to be asked for."""
        self._left = [each for each in self._left if each.first_key and self.has(each)]
        return self._left

    def has(self, known: Known) -> bool:
        """Whether that request is not over, nor another one of the same name has come."""
        return self._known.get(known.request.request_id) is known

    def hold(self, known: Known, tokens: int) -> None:
        """The request has the KV of so many tokens, found by vLLM or computed, also if the server is still to be asked
        for it."""
        known.held_blocks = max(known.held_blocks, tokens // self._identity.block_tokens)
        self._side.hold(known.request.request_id, known.held_blocks)

    def forget(self, request_id: str) -> None:
        """It is not cached any more."""
        self._known.pop(request_id, None)
        self._side.forget(request_id)

    def _ask_for(self, known: Known, keys: bytes) -> None:
        request, known.first_key = known.request, b""
        reads = not getattr(request, "skip_reading_prefix_cache", False)
        about = request.request_id, request.cache_salt, request.kv_transfer_params, keys
        prompt_blocks = (request.num_prompt_tokens - 1) // self._identity.block_tokens  # of which all may be given
        self._side.arrive(*about, reads=reads, prompt_blocks=prompt_blocks)
        self._side.hold(request.request_id, known.held_blocks)
        self.lookups += reads
