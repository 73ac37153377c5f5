"""The keys of a vLLM request's blocks: from vLLM's own hashes where they are sound, otherwise
hashed here.

    vLLM's hashes   |h0|h1|h2|h3|h4|h5|h6|h7|    chained, each stands for all tokens up to its end
    our blocks      |    0    |    1    | …      key 0 from h3, key 1 from h7

vLLM's hashes cover tokens, salt, adapter, images and embeddings. What they leave out (model,
weights, type and layout of the KV) is in the root that every key is bound to, and so are salt and
adapter once more."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.errors import KVKeepError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KeyChain, keys_from_engine_hashes, root_key
from kvkeep.vllm import versions

MAX_ADAPTERS = 4096  # far more than vLLM keeps, so it reads one again that is forgotten here

log = logging.getLogger(__name__)


class TokensChanged(KVKeepError):
    """A request's earlier tokens are not what they were: its keys stand for something else."""


class RequestKeys(Protocol):
    def grow(self) -> bytes:
        """The keys of the blocks that have become full since the last call. Raises
        TokensChanged."""


class KeyMaker:
    """Makes the keys of one engine's requests. `generation` changes with each reset of the
    cache, so that nothing stored before is found again."""

    def __init__(self, vllm_config: Any, identity: ModelIdentity, hash_tokens: int) -> None:
        self._identity = identity
        self._hash_tokens = hash_tokens
        self._adapters = Adapters()
        self._counts_media = _counts_media(vllm_config)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        self.uses_hashes = versions.hashes_are_stable(algorithm)
        self._hashes_by = algorithm.encode() if self.uses_hashes else os.urandom(16)
        self.generation = b""

    @property
    def scope(self) -> bytes:
        """Equal for engines that have the same hashes of a block and the same key for it. Where
        hashes differ in every process, so does this."""
        return self._hashes_by + self.generation

    def keys_of(self, request: Any) -> RequestKeys | None:
        """None if vLLM's description of the request does not say all that its KV depends on."""
        # A session whose input still grows may take tokens back, which some releases keep in their
        # hashes.
        if getattr(request, "resumable", False) or (request.mm_features and self._counts_media):
            return None
        lora = request.lora_request
        adapter = "" if lora is None else self._adapters.name_of(lora)
        if adapter is None:
            return None
        root = root_key(self._identity, request.cache_salt, lora=adapter, extra=self.generation)
        tokens = self._identity.block_tokens
        if self.uses_hashes:
            return EngineKeys(root, request, tokens, self._hash_tokens)
        return OwnKeys(root, request, tokens)


def _counts_media(vllm_config: Any) -> bool:
    """Whether vLLM identifies images and the like by counting them, in every process from one,
    because nothing needs their hashes."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    is_hashed = vllm_config.cache_config.enable_prefix_caching or getattr(
        media, "mm_processor_cache_gb", 1
    )
    return media is not None and not is_hashed


def _has_content(request: Any) -> bool:
    """Whether a prompt has content that its tokens do not show."""
    return bool(request.mm_features) or getattr(request, "prompt_embeds", None) is not None


def has_extras(request: Any) -> bool:
    """Whether vLLM hashes more than tokens with blocks after the first one, which has the salt."""
    return bool(request.lora_request) or _has_content(request)


def tokens_that_say_all(request: Any) -> Sequence[int]:
    """The tokens of a prompt; none if it has content that they do not show."""
    return () if _has_content(request) else request.prompt_token_ids or ()


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
        blocks = range(
            known, stop // self._block_tokens if has_extras(self._request) else min(1, stop)
        )
        self._chain.extend(new, {block: extra for block in blocks if (extra := self._extra(block))})
        self._last = new[-self._block_tokens :]
        return self._chain.keys(known)

    def _extra(self, block: int) -> bytes:
        start = block * self._block_tokens
        keys, _ = generate_block_hash_extra_keys(
            self._request, start, start + self._block_tokens, 0
        )
        return repr(keys).encode("utf-8", "surrogatepass") if keys else b""


class Adapters:
    """The LoRA adapters that requests have used, by vLLM's numbers.

    vLLM reads an adapter when a request first uses its number, and again if a request says
    `load_inplace`. In between it keeps what it has, whatever happens to the files. So a request is
    not cached while the digest of its adapter is unknown, nor once the files differ from those that
    were first seen."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[str, CheckpointDigest]] = OrderedDict()
        self._warned: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"Adapters(seen={list(self._seen)}, warned={len(self._warned)})"

    def name_of(self, lora: Any) -> str | None:
        """The adapter's name, path and digest, for keys. None if the request cannot be cached; a
        later one may be, because new files are hashed in the background."""
        number, path = lora.lora_int_id, lora.lora_path
        seen = self._seen.get(number)
        if seen is None or not seen[1].found or self._is_read_again(lora, *seen):
            seen = path, CheckpointDigest.of(path, None)
            _put(self._seen, number, seen)
        self._seen.move_to_end(number)
        first_path, digest = seen
        if digest.pending:
            return None
        problem = digest.problem
        if first_path != path:
            problem = "another path had its number before, and vLLM may still use that"
        elif not problem and not digest.is_current():
            problem = (
                "its files have changed since it was first used, and vLLM may have read either"
            )
        if problem:
            self._warn(lora, problem)
            return None
        return repr((lora.lora_name, path, digest.value))

    @staticmethod
    def _is_read_again(lora: Any, path: str, digest: CheckpointDigest) -> bool:
        return getattr(lora, "load_inplace", False) and (
            lora.lora_path != path or not digest.is_current()
        )

    def _warn(self, lora: Any, problem: str) -> None:
        """Logs it once for each adapter."""
        if lora.lora_int_id not in self._warned:
            _put(self._warned, lora.lora_int_id, None)
            log.warning(
                "kvkeep: requests with the adapter %s are served without the cache: %s",
                lora.lora_name,
                problem,
            )


def _put(table: OrderedDict[int, Any], number: int, value: Any) -> None:
    table[number] = value
    while len(table) > MAX_ADAPTERS:
        table.popitem(last=False)
