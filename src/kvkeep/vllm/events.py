"""KV events for routers: which blocks this engine stored in the server, and which of them turned
out to be gone. Only if vLLM was told to publish events.

An event names blocks exactly as the events of vLLM's own prefix cache do
(`vllm/v1/core/block_pool.py`): each cache group by itself, in blocks of that group, with the same
hashes, tokens and extra keys. Only the medium differs.

    vLLM's hashes        |h0|h1|h2|h3|h4|h5|h6|h7|
    blocks of a group    | h1  | h3  | h5  | h7  |    published
    blocks of kvkeep     |     0     |     1     |    stored, loaded

What routers make of the fields, and what therefore must hold:

- `medium`: `CPU` is host memory to all of them. Dynamo drops a name that it does not know, or takes
  it for GPU memory.
- `block_size`, `block_hashes`: Dynamo drops blocks of another size than the engine's; llm-d drops
  an event that does not have `block_size` tokens for each hash.
- `parent_block_hash`: llm-d drops an event whose parent was not published.
- `group_idx`, `kv_cache_spec_kind`: llm-d and Dynamo count groups of full attention only, and llm-d
  drops an event that names a group without its kind. Other groups are not published from here.
- `locality`: Dynamo drops `REMOTE`. Unset means local, and the server's memory is.
- llm-d and Dynamo count how often a block was stored and wait for as many removals, so each block
  is published once, until it is removed.
- `AllBlocksCleared` makes llm-d and Dynamo forget the engine's GPU blocks too, so it is never sent
  from here.

The server does not tell what it evicts. A block counts as stored until a load of it fails, the
cache is reset, or this engine has stored or loaded `_REMEMBERED_BLOCKS` others since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.step import Completed, Job
from kvkeep.vllm import versions

MEDIUM = "CPU"

_REMEMBERED_BLOCKS = 1 << 18


@dataclass(frozen=True)
class EventGroup:
    """A cache group of full attention."""

    number: int
    block_tokens: int
    hash_tokens: int  # of each of vLLM's hashes
    blocks_each: int  # of this group in one block of kvkeep
    spec_fields: dict[str, Any]  # what vLLM's own events say about the group


def event_groups(
    kv_cache_config: Any, pieces: GroupLayout, hash_tokens: int
) -> tuple[EventGroup, ...]:
    """The groups that events are published for."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(
        EventGroup(
            number,
            group.block_tokens,
            hash_tokens,
            pieces.block_tokens // group.block_tokens,
            {"group_idx": number, **versions.event_spec_fields(spec)},
        )
        for number, (group, spec) in enumerate(zip(pieces.groups, specs, strict=True))
        if group.kind == "full"
    )


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one group that a job stores or loads."""

    group: EventGroup
    hashes: Sequence[bytes]
    fields: dict[str, Any]  # of BlockStored; a load has none

    def stored(self, start: int, stop: int) -> BlockStored:
        """The event of blocks start..stop-1 of these."""
        fields, tokens = self.fields, self.group.block_tokens
        parent = (
            fields["parent_block_hash"]
            if start == 0
            else maybe_convert_block_hash(self.hashes[start - 1])
        )
        return BlockStored(
            **fields
            | {
                "block_hashes": _external(self.hashes[start:stop]),
                "parent_block_hash": parent,
                "token_ids": fields["token_ids"][start * tokens : stop * tokens],
            }
            | ({"extra_keys": fields["extra_keys"][start:stop]} if "extra_keys" in fields else {})
        )


class CacheEvents:
    """Events that wait to be taken."""

    def __init__(self, vllm_config: Any) -> None:
        config = getattr(vllm_config, "kv_events_config", None)
        self._enabled = bool(config is not None and config.enable_kv_cache_events)
        self._jobs: dict[int, list[_Blocks]] = {}
        # Blocks that were published and not removed, by group and hash, the longest unused first.
        self._published: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._waiting: list[KVCacheEvent] = []

    def __repr__(self) -> str:
        return f"CacheEvents(jobs={len(self._jobs)}, published={len(self._published)})"

    def prepared(self, job: Job, request: Any, groups: Sequence[EventGroup]) -> None:
        """Notes what a job will have stored or loaded: by its end the request may be gone. Without
        a prefix cache of its own, vLLM has no hashes to name blocks by, and publishes nothing
        either."""
        if self._enabled and request.block_hashes:
            self._jobs[job.number] = [_blocks(job, request, group) for group in groups]

    def completed(self, completed: Completed) -> None:
        for job in completed.stores:
            for blocks in self._jobs.pop(job.number, ()):
                if not job.incomplete:
                    self._publish(blocks)
        for job in completed.loads:
            for blocks in self._jobs.pop(job.number, ()):
                good = job.good_blocks() * blocks.group.blocks_each
                self._touch(blocks.group, blocks.hashes[:good])
                self._remove((blocks.group.number, each) for each in blocks.hashes[good:])
        excess = len(self._published) - _REMEMBERED_BLOCKS
        if excess > 0:
            self._remove([key for key, _ in zip(self._published, range(excess), strict=False)])

    def reset(self) -> None:
        """Nothing that was stored is found again."""
        self._remove(list(self._published))

    def take(self) -> Sequence[KVCacheEvent]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _publish(self, blocks: _Blocks) -> None:
        keys = [(blocks.group.number, each) for each in blocks.hashes]
        for is_new, run in groupby(range(len(keys)), lambda at: keys[at] not in self._published):
            if is_new:
                places = list(run)
                self._waiting.append(blocks.stored(places[0], places[-1] + 1))
        for key in keys:
            self._published[key] = None
            self._published.move_to_end(key)

    def _touch(self, group: EventGroup, hashes: Sequence[bytes]) -> None:
        for each in hashes:
            if (group.number, each) in self._published:
                self._published.move_to_end((group.number, each))

    def _remove(self, keys: Iterable[tuple[int, bytes]]) -> None:
        gone: dict[int, list[bytes]] = {}
        for number, each in keys:
            if (number, each) in self._published:
                del self._published[number, each]
                gone.setdefault(number, []).append(each)
        for number, hashes in gone.items():
            group = versions.event_fields(BlockRemoved, {"group_idx": number})
            self._waiting.append(
                BlockRemoved(block_hashes=_external(hashes), medium=MEDIUM, **group)
            )


def _blocks(job: Job, request: Any, group: EventGroup) -> _Blocks:
    first, stop = (
        job.first_block * group.blocks_each,
        (job.first_block + job.blocks) * group.blocks_each,
    )
    every = versions.hashes_of_blocks(request.block_hashes, group.hash_tokens, group.block_tokens)
    hashes = every[first:stop]
    if job.is_load:
        return _Blocks(group, hashes, {})
    lora = request.lora_request
    fields = {
        "parent_block_hash": maybe_convert_block_hash(every[first - 1]) if first else None,
        "token_ids": request.all_token_ids[first * group.block_tokens : stop * group.block_tokens],
        "block_size": group.block_tokens,
        "lora_id": None if lora is None else lora.adapter_id,
        "medium": MEDIUM,
        "lora_name": None if lora is None else lora.name,
        "extra_keys": _extra_keys(request, first, stop, group.block_tokens),
        "session_id": getattr(request, "session_id", None),
        **group.spec_fields,
    }
    return _Blocks(group, hashes, versions.event_fields(BlockStored, fields))


def _extra_keys(
    request: Any, first: int, stop: int, block_tokens: int
) -> list[tuple[Any, ...] | None]:
    """What vLLM hashed into each block besides tokens: adapter, images, salt, embeddings. The salt
    is in block 0 only; later blocks are bound to it by their parent."""
    keys: list[tuple[Any, ...] | None] = [None] * (stop - first)
    is_in_all = (
        bool(request.mm_features or request.lora_request)
        or getattr(request, "prompt_embeds", None) is not None
    )
    next_media = 0
    for block in range(first, stop if is_in_all else min(stop, 1)):
        start = block * block_tokens
        keys[block - first], next_media = generate_block_hash_extra_keys(
            request, start, start + block_tokens, next_media
        )
    return versions.event_extra_keys(keys)


def _external(hashes: Sequence[Any]) -> list[Any]:
    return [maybe_convert_block_hash(each) for each in hashes]
