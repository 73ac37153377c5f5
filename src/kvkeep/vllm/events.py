"""KV events for routers: which blocks the pool of this host has for this engine, whichever engine
stored them. Only if vLLM was told to publish events.

    a job ends ─► describe ──► server, which tells all engines ─► place ─► take ─► vLLM

An event names blocks exactly as the events of vLLM's own prefix cache do
(`vllm/v1/core/block_pool.py`): each cache group by itself, in blocks of that group, with the same
hashes, tokens and extra keys. Only the medium differs. The server knows none of that, so the engine
that has a block's request describes the block for all others.

    vLLM's hashes        |h0|h1|h2|h3|h4|h5|h6|h7|
    blocks of a group    | h1  | h3  | h5  | h7  |    published
    blocks of kvkeep     |     0     |     1     |    stored, described

What routers make of the fields, and what therefore must hold:

- `medium`: `CPU` is host memory to all of them, `STORAGE` a disk. Dynamo drops a name that it does
  not know, or takes it for GPU memory.
- `block_size`, `block_hashes`: Dynamo drops blocks of another size than the engine's; llm-d drops
  an event that does not have `block_size` tokens for each hash.
- `parent_block_hash`: llm-d drops an event whose parent was not published. A block whose parent is
  not described waits for it.
- `group_idx`, `kv_cache_spec_kind`: llm-d and Dynamo count groups of full attention only, and llm-d
  drops an event that names a group without its kind. Other groups are not published from here.
- `locality`: Dynamo drops `REMOTE`. Unset means local, and the server's memory is.
- llm-d and Dynamo count how often a block was stored and wait for as many removals, so each block
  is published once for each medium, until it is removed.
- `AllBlocksCleared` makes llm-d and Dynamo forget the engine's GPU blocks too, so it is never sent
  from here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from kvkeep.client.pool_events import Descriptions, PoolFeed
from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.step import Completed, Job
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, addresses
from kvkeep.vllm import versions
from kvkeep.vllm.keys import has_extras
from kvkeep.wire.messages import IN_MEMORY, MAX_DESCRIPTION_BYTES, ON_DISK

MEDIUM = "CPU"  # of memory
DISK_MEDIUM = "STORAGE"
MEDIA = {IN_MEMORY: MEDIUM, ON_DISK: DISK_MEDIUM}

MOST_BYTES = 256 << 20  # of what is published; more blocks than fit are not
_ENTRY_BYTES = 512  # what a block takes besides its description
_MOST_NOTED_TOKENS = 1 << 22  # of jobs whose blocks are not described yet
_MOST_WAITING = 4_096  # events that vLLM has not taken; an idle engine takes none
_GONE_A_TURN = 1_024
_BYTES_A_MESSAGE = 1 << 18
_MOST_UNDESCRIBED = 1 << 17
_BLOCKS_A_SLICE = 64  # then the engine's thread may run


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


class GroupBlocks(msgspec.Struct, array_like=True, frozen=True):
    """The blocks of one group in a block of kvkeep."""

    parent: bytes | None
    hashes: list[bytes]
    extra_keys: list[tuple[Any, ...] | None]


class Description(msgspec.Struct, array_like=True, frozen=True):
    """All that is published of a block of kvkeep.

    scope    engines name blocks by the same hashes, and find this block, if theirs is equal
    parent   the address of the block before it, empty at a root
    tokens   little-endian words
    """

    scope: bytes
    tenant: str
    parent: bytes
    tokens: bytes
    groups: list[GroupBlocks]
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


_decoder = msgspec.msgpack.Decoder(Description)
_encoder = msgspec.msgpack.Encoder()


class NotedRequest(Protocol):
    """A request of the connector's (`kvkeep.vllm.scheduler.VllmRequest`)."""

    salt: str | None
    keys: bytearray
    request: Any  # vLLM's
    noted_blocks: int  # leading blocks that are described, or will be


@dataclass(eq=False)
class _Note:
    """Blocks of a request that are described when their job has ended: by then the request may be
    gone."""

    tenant: str
    request: Any
    first: int  # block
    keys: bytes  # with that of the block before the first, if there is one
    tokens: list[int]
    hashes: list[tuple[bytes | None, Sequence[bytes]]]  # of each group, and the one before them
    scope: bytes
    described: int = 0  # blocks, so far


@dataclass(eq=False, slots=True)
class _Block:
    """A block that the server has. `told`: the media that it was published on."""

    text: bytes
    scope: bytes
    parent: bytes
    media: int = 0
    told: int = 0


class CacheEvents:
    """Events that wait to be taken. `prepared`, `completed`, `reset` and `take` are for the
    scheduler's thread, what BlockReader has for that of the Heartbeat."""

    def __init__(
        self,
        vllm_config: Any,
        groups: Sequence[EventGroup],
        block_tokens: int,
        fingerprint: bytes,
        scope: bytes,
    ) -> None:
        config = getattr(vllm_config, "kv_events_config", None)
        is_on = config is not None and config.enable_kv_cache_events
        self.enabled = bool(is_on and groups)
        self.feed = PoolFeed(self)
        self._groups = groups
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._scope = self._next_scope = scope
        self._jobs: dict[int, _Note] = {}
        self._notes: deque[_Note] = deque()
        self._noted_tokens = 0  # of all notes so far; only the scheduler's thread adds to it
        self._described_tokens = 0  # of those that have left; only the Heartbeat adds to it
        self._blocks: dict[bytes, _Block] = {}
        self._stale: dict[bytes, _Block] = {}  # of before `begin_content`, not seen since
        self._has_ended = True  # the content: what is stale is gone
        self._bytes = 0
        # Blocks that the server has no description of, and this engine has.
        self._undescribed: deque[bytes] = deque(maxlen=_MOST_UNDESCRIBED)
        self._orphans: dict[bytes, dict[bytes, None]] = {}  # parent -> blocks that wait for it
        self._building = _EventsOfATurn(groups)
        self._waiting: deque[KVCacheEvent] = deque()

    def __repr__(self) -> str:
        return f"CacheEvents(jobs={len(self._jobs)}, blocks={len(self._blocks)})"

    # -- the scheduler's thread

    def prepared(self, job: Job, state: NotedRequest) -> None:
        """Notes what a job stores or loads, and what the request has before that. Without a prefix
        cache of its own, vLLM has no hashes to name blocks by, and publishes nothing either."""
        request = state.request
        if not (self.enabled and self.feed.is_allowed and request.block_hashes):
            return
        first, stop = min(state.noted_blocks, job.first_block), job.first_block + job.blocks
        state.noted_blocks = max(state.noted_blocks, stop)
        hashes = []
        for group in self._groups:
            every = versions.hashes_of_blocks(
                request.block_hashes, group.hash_tokens, group.block_tokens
            )
            start = first * group.blocks_each
            some = every[start : stop * group.blocks_each]
            hashes.append((every[start - 1] if start else None, some))
        tokens = request.all_token_ids[first * self._block_tokens : stop * self._block_tokens]
        keys = bytes(state.keys[max(0, first - 1) * KEY_BYTES : stop * KEY_BYTES])
        tenant = tenant_of(state.salt)
        scope = self._next_scope
        self._jobs[job.number] = _Note(tenant, request, first, keys, list(tokens), hashes, scope)

    def completed(self, completed: Completed) -> None:
        """The server discards descriptions of blocks that it does not have. Beyond a limit, jobs are
        not described: their blocks are when they are used again."""
        if not self._jobs:
            return
        most = _MOST_NOTED_TOKENS + self._described_tokens
        for job in (*completed.stores, *completed.loads):
            note = self._jobs.pop(job.number, None)
            if note is not None and self._noted_tokens + len(note.tokens) <= most:
                self._noted_tokens += len(note.tokens)
                self._notes.append(note)

    def reset(self, scope: bytes) -> None:
        """Nothing that was stored before is found again by this engine."""
        self._next_scope = scope
        self.feed.must_restart = True

    def take(self) -> Sequence[KVCacheEvent]:
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    # -- what the server is told

    def describe(self, most: int) -> Descriptions | None:
        while self._notes:
            note = self._notes[0]
            found = self._texts_of(note, most)
            if note.described == len(note.tokens) // self._block_tokens:
                self._forget_note()
            if found.texts:
                return found
        return self._describe_again(most) if self._undescribed else None

    def forget_notes(self) -> None:
        """No server is there: blocks are described when they are used again."""
        while self._notes:
            self._forget_note()

    def _forget_note(self) -> None:
        self._described_tokens += len(self._notes.popleft().tokens)

    def _texts_of(self, note: _Note, most: int) -> Descriptions:
        """Of the next blocks of a note that are not described. Describes some, and notes how far it
        has come."""
        keys, texts, nbytes = bytearray(), list[bytes](), 0
        count = len(note.tokens) // self._block_tokens
        before = KEY_BYTES if note.first else 0
        while note.described < count and len(texts) < most and nbytes < _BYTES_A_MESSAGE:
            at = note.described
            note.described += 1
            start = before + at * KEY_BYTES
            key = note.keys[start : start + KEY_BYTES]
            known = self._blocks.get(addresses(key, self._fingerprint))
            if known is not None and known.scope == note.scope:
                continue
            above = note.keys[start - KEY_BYTES : start] if start else b""
            try:
                text = _encoder.encode(self._description(note, at, above))
            except (TypeError, ValueError, OverflowError):
                continue  # its extra keys or tokens are of no kind that an event can have
            if not len(texts) % _BLOCKS_A_SLICE:
                time.sleep(0)
            if len(text) <= MAX_DESCRIPTION_BYTES:
                keys += key
                texts.append(text)
                nbytes += len(text)
        return Descriptions(note.tenant, bytes(keys), texts)

    def _description(self, note: _Note, at: int, above: bytes) -> Description:
        request, groups = note.request, []
        tokens = note.tokens[at * self._block_tokens : (at + 1) * self._block_tokens]
        for group, (before, hashes) in zip(self._groups, note.hashes, strict=True):
            start, stop = at * group.blocks_each, (at + 1) * group.blocks_each
            parent = hashes[start - 1] if start else before
            first = (note.first + at) * group.blocks_each
            extra_keys = _extra_keys(request, first, first + group.blocks_each, group.block_tokens)
            groups.append(GroupBlocks(parent, list(hashes[start:stop]), extra_keys))
        lora = request.lora_request
        return Description(
            note.scope,
            note.tenant,
            addresses(above, self._fingerprint) if above else b"",
            np.array(tokens, dtype="<u4").tobytes(),
            groups,
            None if lora is None else lora.adapter_id,
            None if lora is None else lora.name,
            getattr(request, "session_id", None),
        )

    def _describe_again(self, most: int) -> Descriptions | None:
        """For a server that was restarted, and has the blocks but not what was said of them."""
        tenant, found, texts, nbytes = "", bytearray(), list[bytes](), 0
        while self._undescribed and len(texts) < most and nbytes < _BYTES_A_MESSAGE:
            address = self._undescribed[0]
            block = self._blocks.get(address)
            description = None if block is None else self._read(block.text)
            if block is not None and description is not None:
                if tenant not in ("", description.tenant):
                    break
                tenant = description.tenant
                found += address
                texts.append(block.text)
                nbytes += len(block.text)
            self._undescribed.popleft()
        keys = addresses(bytes(found), self._fingerprint)
        return Descriptions(tenant, keys, texts) if texts else None

    # -- what the server tells

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= _MOST_WAITING

    def begin_content(self) -> None:
        self._scope = self._next_scope
        self._stale = self._stale | self._blocks if self._stale else self._blocks
        self._blocks = {}
        self._has_ended = False

    def end_content(self) -> None:
        self._has_ended = True

    def tidy(self) -> None:
        if self._has_ended and self._stale:
            for _ in range(min(_GONE_A_TURN, len(self._stale))):
                address, block = self._stale.popitem()
                block.media = 0
                self._tell_gone(block)
                self._drop(address, block)
        self._waiting.extend(self._building.take())

    def place(self, address: bytes, media: int, text: bytes) -> None:
        block, description = self._blocks.get(address) or self._stale.pop(address, None), None
        if block is not None and block.scope != self._scope:
            media = 0
        if block is None:
            description = self._read(text) if media and text else None
            nbytes = len(text) + _ENTRY_BYTES
            if description is None or self._bytes + nbytes > MOST_BYTES:
                return
            if description.scope != self._scope:
                return
            block = _Block(text, self._scope, description.parent)
            self._bytes += nbytes
        elif media and not text:
            self._undescribed.append(address)
        block.media = media
        self._tell_gone(block)
        if not media:
            self._blocks.pop(address, None)
            self._drop(address, block)
            return
        self._blocks[address] = block
        self._tell_there(address, block, description)

    def _drop(self, address: bytes, block: _Block) -> None:
        self._bytes -= len(block.text) + _ENTRY_BYTES
        if siblings := self._orphans.get(block.parent):
            siblings.pop(address, None)
            if not siblings:
                del self._orphans[block.parent]

    def _read(self, text: bytes) -> Description | None:
        """Another engine has written it: None unless it describes a block of ours."""
        try:
            description = _decoder.decode(text)
        except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors, too
            return None
        if len(description.tokens) != self._block_tokens * 4 or len(description.parent) not in (
            0,
            KEY_BYTES,
        ):
            return None
        if len(description.groups) != len(self._groups):
            return None
        for group, blocks in zip(self._groups, description.groups, strict=True):
            if not len(blocks.hashes) == len(blocks.extra_keys) == group.blocks_each:
                return None
        return description

    def _tell_gone(self, block: _Block) -> None:
        """Takes back what was published of media where the block is no longer."""
        gone = block.told & ~block.media
        block.told &= block.media
        if gone:
            description = self._read(block.text)
            assert description is not None, "it was read before"
            for medium in _media_in(gone):
                self._building.remove(description, medium)

    def _tell_there(
        self, address: bytes, block: _Block, description: Description | None = None
    ) -> None:
        """Publishes a block, and then those that have waited for it. It waits itself unless its
        parent is published on that medium."""
        to_tell = [(address, block, description)]
        while to_tell:
            address, block, description = to_tell.pop()
            wanted, may = block.media & ~block.told, IN_MEMORY | ON_DISK
            if block.parent:
                above = self._blocks.get(block.parent) or self._stale.get(block.parent)
                may = above.told if above is not None else 0
            if wanted & ~may:
                self._orphans.setdefault(block.parent, {})[address] = None
            news = wanted & may
            if not news:
                continue
            description = description or self._read(block.text)
            assert description is not None, "it was read before"
            for medium in _media_in(news):
                self._building.store(description, medium)
            block.told |= news
            for child in reversed(self._orphans.pop(address, {})):
                if (waiting := self._blocks.get(child)) is not None:
                    to_tell.append((child, waiting, None))


class _EventsOfATurn:
    """Events, with blocks that follow each other in one."""

    def __init__(self, groups: Sequence[EventGroup]) -> None:
        self._groups = groups
        self._events: list[KVCacheEvent] = []
        # The events that more blocks may be added to. A store and a removal keep their order.
        self._stores: dict[tuple[int, str], BlockStored] = {}
        self._removals: dict[tuple[int, str], BlockRemoved] = {}

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        self._stores.clear()
        self._removals.clear()
        return events

    def store(self, description: Description, medium: str) -> None:
        self._removals.clear()
        tokens = np.frombuffer(description.tokens, dtype="<u4").tolist()
        for group, blocks in zip(self._groups, description.groups, strict=True):
            fields = {
                "block_hashes": _external(blocks.hashes),
                "parent_block_hash": _external([blocks.parent])[0] if blocks.parent else None,
                "token_ids": tokens,
                "block_size": group.block_tokens,
                "lora_id": description.lora_id,
                "medium": medium,
                "lora_name": description.lora_name,
                "extra_keys": [_tuples(keys) for keys in blocks.extra_keys],
                "session_id": description.session_id,
                **group.spec_fields,
            }
            event = BlockStored(**versions.event_fields(BlockStored, fields))
            last = self._stores.get((group.number, medium))
            if last is not None and _follows(last, event):
                last.block_hashes += event.block_hashes
                last.token_ids += event.token_ids
                if hasattr(event, "extra_keys"):
                    last.extra_keys += event.extra_keys
            else:
                self._events.append(event)
                self._stores[group.number, medium] = event

    def remove(self, description: Description, medium: str) -> None:
        self._stores.clear()
        for group, blocks in zip(self._groups, description.groups, strict=True):
            last = self._removals.get((group.number, medium))
            if last is not None:
                last.block_hashes += _external(blocks.hashes)
                continue
            fields = {"group_idx": group.number}
            event = BlockRemoved(
                block_hashes=_external(blocks.hashes),
                medium=medium,
                **versions.event_fields(BlockRemoved, fields),
            )
            self._events.append(event)
            self._removals[group.number, medium] = event


def _follows(last: BlockStored, event: BlockStored) -> bool:
    """Whether the blocks of both can be told in one event."""
    names = ("lora_id", "lora_name", "session_id")
    return last.block_hashes[-1] == event.parent_block_hash and all(
        getattr(last, name, None) == getattr(event, name, None) for name in names
    )


def _media_in(mask: int) -> Iterator[str]:
    return (name for bit, name in MEDIA.items() if mask & bit)


def _extra_keys(
    request: Any, first: int, stop: int, block_tokens: int
) -> list[tuple[Any, ...] | None]:
    """What vLLM hashed into each block besides tokens: adapter, images, salt, embeddings. The salt
    is in block 0 only; later blocks are bound to it by their parent."""
    keys: list[tuple[Any, ...] | None] = [None] * (stop - first)
    next_media = 0
    for block in range(first, stop if has_extras(request) else min(stop, 1)):
        start = block * block_tokens
        keys[block - first], next_media = generate_block_hash_extra_keys(
            request, start, start + block_tokens, next_media
        )
    return versions.event_extra_keys(keys)


def _tuples(keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """As vLLM has them: MessagePack knows lists only."""
    return keys and tuple(tuple(each) if isinstance(each, list) else each for each in keys)


def _external(hashes: Sequence[Any]) -> list[Any]:
    return [maybe_convert_block_hash(each) for each in hashes]
