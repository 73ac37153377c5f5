"""KV events for routers that want to know which blocks are where: what this engine has stored in the server, and what
of it turned out to be gone. Only if vLLM was told to publish events.

What the server evicts it does not tell; a block that this engine stored counts as there until a load of it fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkeep.connector.step import Completed, Job

MEDIUM = "kvkeep"

_REMEMBERED_BLOCKS = 1 << 18


class CacheEvents:
    """Events that wait to be taken. Hashes are vLLM's, which is what its own events name blocks by."""

    def __init__(self, vllm_config: Any) -> None:
        config = getattr(vllm_config, "kv_events_config", None)
        self._enabled = bool(config is not None and config.enable_kv_cache_events)
        self._jobs: dict[int, tuple[list[bytes], BlockStored | None]] = {}
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: list[KVCacheEvent] = []

    def prepared(self, job: Job, request: Any, hash_tokens: int, block_tokens: int) -> None:
        """Notes what a job will have stored or loaded: by its end the request may be gone."""
        if not self._enabled:
            return
        each = block_tokens // hash_tokens
        first, stop = job.first_block, job.first_block + job.blocks
        parent = _external(request.block_hashes[first * each - 1 : first * each]) if first else [None]
        hashes = list(request.block_hashes[(first + 1) * each - 1 : stop * each : each])
        stored = None
        if not job.is_load:
            lora = request.lora_request
            stored = BlockStored(
                block_hashes=_external(hashes),
                parent_block_hash=parent[0],
                token_ids=list(request.all_token_ids[first * block_tokens : stop * block_tokens]),
                block_size=block_tokens,
                lora_id=None if lora is None else lora.adapter_id,
                medium=MEDIUM,
                lora_name=None if lora is None else lora.name,
            )
        self._jobs[job.number] = (hashes, stored)

    def completed(self, completed: Completed) -> None:
        for job in (*completed.stores, *completed.loads):
            hashes, stored = self._jobs.pop(job.number, ([], None))
            if stored is not None and not job.incomplete:
                self._waiting.append(stored)
                self._stored.update(dict.fromkeys(hashes))
            elif job.is_load:
                self._remove(hashes[job.good_blocks() :])
        while len(self._stored) > _REMEMBERED_BLOCKS:
            self._stored.popitem(last=False)

    def reset(self) -> None:
        """Nothing that was stored is found again."""
        self._remove(list(self._stored))

    def take(self) -> Sequence[KVCacheEvent]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _remove(self, hashes: Sequence[bytes]) -> None:
        gone = [each for each in hashes if each in self._stored]
        for each in gone:
            del self._stored[each]
        if gone:
            self._waiting.append(BlockRemoved(block_hashes=_external(gone), medium=MEDIUM))


def _external(hashes: Sequence[Any]) -> list[Any]:
    return [maybe_convert_block_hash(each) for each in hashes]
