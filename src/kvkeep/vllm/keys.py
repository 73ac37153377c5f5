"""The keys of a vLLM request's blocks: from vLLM's own hashes where those will do, otherwise hashed
here.

    vLLM's hashes   |h0|h1|h2|h3|h4|h5|h6|h7|    chained, each stands for all tokens up to its end
    our blocks      |    0    |    1    | …      key 0 from h3, key 1 from h7

vLLM's hashes hold tokens, salt, adapter, images and embeddings. What they leave out (model,
weights, type and layout of the KV) is in the root that every key is bound to; salt and adapter are
in there once more."""

from __future__ import annotations

from typing import Any, Protocol

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvkeep.errors import KVKeepError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KeyChain, keys_from_engine_hashes, root_key


class TokensChanged(KVKeepError):
    """A request's earlier tokens are not what they were: its keys stand for something else."""


class RequestKeys(Protocol):
    def grow(self) -> bytes:
        """The keys of the blocks that have become full since the last call. Raises
        TokensChanged."""


def counts_media(vllm_config: Any) -> bool:
    """Whether vLLM has no use for hashes of images and the like, and counts them instead, in every
    process from one."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    is_hashed = vllm_config.cache_config.enable_prefix_caching or getattr(
        media, "mm_processor_cache_gb", 1
    )
    return media is not None and not is_hashed


def can_be_keyed(request: Any, media_are_counted: bool) -> bool:
    """Whether vLLM's description of a request says all about it. A session whose input still grows
    may take tokens back, which some releases keep in their hashes."""
    return not getattr(request, "resumable", False) and not (
        request.mm_features and media_are_counted
    )


def root_of(identity: ModelIdentity, request: Any, generation: bytes, adapter: str) -> bytes:
    """What every key of a request is bound to. `generation` is another one after each reset of the
    cache, `adapter` is what stands for the request's LoRA adapter, or empty."""
    return root_key(identity, request.cache_salt, lora=adapter, extra=generation)


class EngineKeys:
    """Keys from vLLM's hashes."""

    def __init__(self, root: bytes, request: Any, block_tokens: int, hash_tokens: int) -> None:
        if (
            len(request.block_hashes) != request.num_tokens // hash_tokens
            or block_tokens % hash_tokens
        ):
            problem = (
                f"{len(request.block_hashes)} hashes of {hash_tokens} tokens "
                f"for a request of {request.num_tokens}"
            )
            raise KVKeepError(f"vLLM's block hashes are not what they were taken for: {problem}")
        self._request = request
        self._hash_tokens = hash_tokens
        self._root = root
        self._hashes = request.block_hashes
        self._each = block_tokens // hash_tokens
        self._known = 0  # hashes that are used up
        self._last = b""

    def grow(self) -> bytes:
        hashes, each = self._hashes, self._each
        if len(hashes) != self._request.num_tokens // self._hash_tokens:
            raise TokensChanged("a request has not as many hashes as its tokens make")
        if self._known and (len(hashes) < self._known or hashes[self._known - 1] != self._last):
            raise TokensChanged("the hashes of a request's first blocks have changed")
        stop = len(hashes) // each * each
        if stop == self._known:
            return b""
        new = hashes[self._known + each - 1 : stop : each]
        self._known, self._last = stop, new[-1]
        return keys_from_engine_hashes(self._root, new)


class OwnKeys:
    """Keys from tokens, and from what vLLM would hash with them."""

    def __init__(self, root: bytes, request: Any, block_tokens: int) -> None:
        self._chain = KeyChain(root, block_tokens)
        self._request = request
        self._block_tokens = block_tokens
        self._last: list[int] = []  # the tokens of the last block

    def grow(self) -> bytes:
        tokens, known = self._request.all_token_ids, len(self._chain)
        start, stop = (
            known * self._block_tokens,
            len(tokens) // self._block_tokens * self._block_tokens,
        )
        if known and (
            stop < start or list(tokens[start - self._block_tokens : start]) != self._last
        ):
            raise TokensChanged("the tokens of a request's first blocks have changed")
        if stop == start:
            return b""
        new = tokens[start:stop]  # a list of its own
        blocks = range(known, stop // self._block_tokens if self._has_extras() else min(1, stop))
        self._chain.extend(new, {block: extra for block in blocks if (extra := self._extra(block))})
        self._last = new[-self._block_tokens :]
        return self._chain.keys(known)

    def _has_extras(self) -> bool:
        """Whether vLLM would hash more than tokens with blocks after the first one, which has the
        salt."""
        request = self._request
        return (
            bool(request.mm_features or request.lora_request)
            or getattr(request, "prompt_embeds", None) is not None
        )

    def _extra(self, block: int) -> bytes:
        start = block * self._block_tokens
        keys, _ = generate_block_hash_extra_keys(
            self._request, start, start + self._block_tokens, 0
        )
        return repr(keys).encode("utf-8", "surrogatepass") if keys else b""
