"""A model that computes nothing and knows everything: what each byte of its KV must be.

    prefix     tokens[0..p], salt, seed, revision
                  │ keyed hash
    state      one 64-bit word for each position p                  known from the prefix alone: no KV is read
                  │ keyed again by layer, global KV head, word
    KV         `words` 64-bit words in each head of each layer      written, and at every later step read and compared

So it is the strictest test of an engine and its cache. KV that was lost, stale, torn, moved, or
another tenant's differs from what must be there, and the first step that reads it raises
WrongBytes. The logits come from the words that were read, each logical head once: they depend on
the prefix, and not on how ranks cut the heads, on blocks, or on the pieces in which it was
computed. All of it is the same in every process.

A hash here is splitmix64's finaliser over numpy arrays: good enough against accidents, useless
against attackers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.engine.models.model import Rank, Segment
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import ModelIdentity, tenant_of
from kvkeep.kv.parallel import ParallelStrategy

Words = NDArray[np.uint64]

# What is known of this many requests is kept, as long as it is not more than this: 64 MiB.
MAX_KNOWN_REQUESTS = 1024
MAX_KNOWN_WORDS = 8 << 20

MAX_FLIPPED_BITS = 8  # more different bits than that are not called flipped ones

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class WrongBytes(AssertionError):
    """KV that was read is not what it must be. Says where, what, and whose bytes they are if that
    is known."""


class OracleModel:
    """Checks all KV that it is asked to read; see the module's text.

    `checked_bytes` and `checked_segments` count what was read and found right. With `use_mla` one
    latent takes the place of the heads. Seed and revision both change all bytes. Not for two
    threads at once."""

    def __init__(
        self,
        seed: int = 0,
        *,
        vocab_size: int = 257,
        num_layers: int = 2,
        num_kv_heads: int = 4,
        use_mla: bool = False,
        words: int = 2,
        revision: str | None = None,
    ) -> None:
        if min(vocab_size, num_layers, num_kv_heads, words) < 1:
            raise SettingsError(
                "oracle: vocab_size, num_layers, num_kv_heads and words must be at least 1"
            )
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self.num_kv_heads = 1 if use_mla else num_kv_heads
        self.use_mla = use_mla
        self.words = words
        self.revision = f"seed-{seed}" if revision is None else revision
        self.checked_bytes = 0
        self.checked_segments = 0
        secret = f"{seed}/{self.revision}".encode("utf-8", "surrogatepass")
        self._key = blake2b(secret, digest_size=32, person=b"kvkeep.oracle").digest()
        key = np.frombuffer(self._key, dtype="<u8").astype(np.uint64)
        lanes = (num_layers, self.num_kv_heads, words)
        self._lanes = _series(key[:1], 0, num_layers * self.num_kv_heads * words).reshape(lanes)
        # Odd weights, so that no change of a single word is lost in the digest.
        self._weights = _mix(self._lanes ^ key[1]) | np.uint64(1)
        self._vocab_lanes = _series(key[2:3], 0, vocab_size)
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by request id, the latest last
        self._known_words = 0

    def strategy(self, tp_size: int, pp_size: int, rank: int) -> ParallelStrategy:
        heads = None if self.use_mla else self.num_kv_heads
        strategy = ParallelStrategy.of(
            tp_size=tp_size, pp_size=pp_size, rank=rank, use_mla=self.use_mla, num_kv_heads=heads
        )
        shards = tp_size // strategy.replicas
        if self.num_kv_heads % shards:
            raise SettingsError(
                f"oracle: {self.num_kv_heads} KV heads do not spread evenly over {shards} shards"
            )
        if self.num_layers < pp_size:
            raise SettingsError(
                f"oracle: {self.num_layers} layers are too few for {pp_size} pipeline stages"
            )
        return strategy

    def identity(self, block_tokens: int) -> ModelIdentity:
        shape = f"layers={self.num_layers} heads={self.num_kv_heads} words={self.words} mla={self.use_mla}"
        return ModelIdentity(
            model="oracle",
            revision=self.revision,
            kv_dtype="int64",
            block_tokens=block_tokens,
            content=shape,
        )

    def allocate_kv(
        self, strategy: ParallelStrategy, num_blocks: int, block_tokens: int
    ) -> dict[str, torch.Tensor]:
        heads = self._heads(strategy)
        shape = (num_blocks, block_tokens, heads.stop - heads.start, self.words)
        return {
            f"layers.{layer}": torch.zeros(shape, dtype=torch.int64)
            for layer in self._layers(strategy)
        }

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        """Writes, then checks all KV of all segments up to their ends, rank by rank, layer by
        layer.

        Raises WrongBytes at the first difference, ValueError for segments or tensors that make no
        sense."""
        if not segments:
            return torch.zeros((0, self.vocab_size), dtype=torch.float64)
        parts = list(self._parts(ranks, block_tokens))
        batch = self._batch(segments, block_tokens, min(part.kv.shape[0] for part in parts))
        new = torch.from_numpy(batch.slots[batch.new])
        for part in parts:
            words = np.ascontiguousarray(batch.words[part.layer, batch.new, part.heads])
            device = part.kv.device
            part.kv.index_copy_(
                0, new.to(device), torch.from_numpy(words.view(np.int64)).to(device)
            )
        slots = torch.from_numpy(batch.slots)
        digests = np.zeros(len(batch.slots), dtype=np.uint64)
        for part in parts:
            found = part.kv.index_select(0, slots.to(part.kv.device)).cpu().numpy().view(np.uint64)
            if not np.array_equal(found, batch.words[part.layer, :, part.heads]):
                raise WrongBytes(self._report(batch, part, found, block_tokens))
            self.checked_bytes += found.nbytes
            if part.strategy.stores:  # replicas are checked, but count once
                digests += (
                    found.reshape(len(found), -1) @ self._weights[part.layer, part.heads].ravel()
                )
        self.checked_segments += len(segments)
        by_position = digests * (_mix(batch.positions) | np.uint64(1))
        seeds = _mix(np.add.reduceat(by_position, batch.begins))
        draws = _mix(seeds[:, None] ^ self._vocab_lanes) >> np.uint64(11)
        return torch.from_numpy(draws.astype(np.float64) * 2.0**-53)

    def _layers(self, strategy: ParallelStrategy) -> range:
        first, end = (
            self.num_layers * stage // strategy.pp_size
            for stage in (strategy.pp_rank, strategy.pp_rank + 1)
        )
        return range(first, end)

    def _heads(self, strategy: ParallelStrategy) -> slice:
        count = self.num_kv_heads // (strategy.tp_size // strategy.replicas)
        first = strategy.tp_rank // strategy.replicas * count
        return slice(first, first + count)

    def _parts(self, ranks: Sequence[Rank], block_tokens: int) -> Iterator[_Part]:
        """Every layer of every rank, checked to be all there are."""
        if sorted(rank.strategy.rank for rank in ranks) != list(
            range(ranks[0].strategy.world_size if ranks else 1)
        ):
            raise ValueError("oracle: forward needs each rank of the engine once")
        for rank in ranks:
            heads, layers = self._heads(rank.strategy), self._layers(rank.strategy)
            if set(rank.kv) != {f"layers.{layer}" for layer in layers}:
                raise ValueError(
                    f"oracle: rank {rank.strategy.rank} holds layers {list(layers)}, not {list(rank.kv)}"
                )
            for layer in layers:
                kv = rank.kv[f"layers.{layer}"]
                shape = (block_tokens, heads.stop - heads.start, self.words)
                if kv.shape[1:] != shape or kv.dtype != torch.int64:
                    raise ValueError(
                        f"oracle: KV of blocks of {shape} int64, not {tuple(kv.shape[1:])} {kv.dtype}"
                    )
                yield _Part(rank.strategy, layer, heads, kv.view(-1, *shape[1:]))

    def _batch(self, segments: Sequence[Segment], block_tokens: int, num_slots: int) -> _Batch:
        """Positions of all segments one after the other: where they lie, what they must be, which
        are new."""
        slots, positions, new, words, ends = [], [], [], [], []
        for segment in segments:
            end = segment.start + segment.count
            blocks = np.asarray(segment.block_ids[: -(-end // block_tokens)], dtype=np.int64)
            if (
                segment.start < 0
                or segment.count < 1
                or end > min(len(segment.tokens), len(blocks) * block_tokens)
            ):
                raise ValueError(
                    f"oracle: request {segment.request_id!r} has no tokens or blocks up to {end}"
                )
            if blocks.min() < 0 or blocks.max() >= num_slots // block_tokens:
                raise ValueError(
                    f"oracle: request {segment.request_id!r} has a block that is not there"
                )
            slots.append((blocks[:, None] * block_tokens + np.arange(block_tokens)).ravel()[:end])
            positions.append(np.arange(end, dtype=np.uint64))
            new.append(positions[-1] >= segment.start)
            words.append(self._know(segment, end).words[:, :end])
            ends.append(end)
        return _Batch(
            segments=segments,
            begins=np.cumsum([0, *ends[:-1]]),
            slots=np.concatenate(slots),
            positions=np.concatenate(positions),
            new=np.flatnonzero(np.concatenate(new)),
            words=np.concatenate(words, axis=1),
        )

    def _know(self, segment: Segment, end: int) -> _Known:
        """What KV of the segment's request must be, up to `end` at least: remembered, and grown by
        what is missing."""
        known, salt = self._known.pop(segment.request_id, None), segment.salt or ""
        self._known_words -= known.words.size if known else 0
        same = min(end, len(known.tokens)) if known else 0
        if (
            known is None
            or known.salt != salt
            or known.tokens[:same] != list(segment.tokens[:same])
        ):
            key = blake2b(
                salt.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key
            ).digest()
            known = _Known(
                segment.request_id,
                salt,
                np.frombuffer(key, dtype="<u8").astype(np.uint64),
                self._lanes,
            )
        known.grow(list(segment.tokens[len(known.tokens) : end]), self._lanes)
        self._known[segment.request_id] = known
        self._known_words += known.words.size
        while len(self._known) > MAX_KNOWN_REQUESTS or (
            self._known_words > MAX_KNOWN_WORDS and len(self._known) > 1
        ):
            self._known_words -= self._known.popitem(last=False)[1].words.size
        return known

    def _report(self, batch: _Batch, part: _Part, found: Words, block_tokens: int) -> str:
        expected = batch.words[part.layer, :, part.heads]
        row, head, _ = (int(place) for place in np.argwhere(found != expected)[0])
        segment = batch.segments[int(np.searchsorted(batch.begins, row, side="right")) - 1]
        block, offset = divmod(int(batch.slots[row]), block_tokens)
        strategy = part.strategy
        return (
            f"wrong KV bytes: request {segment.request_id!r} of tenant {tenant_of(segment.salt)}, "
            f"position {batch.positions[row]}, block {block}, offset {offset}, layers.{part.layer}, "
            f"rank {strategy.rank} (TP {strategy.tp_rank}, PP {strategy.pp_rank}), KV head {part.heads.start + head}: "
            f"expected {_hex(expected[row, head])}, found {_hex(found[row, head])}: "
            f"{self._diagnosis(segment, expected[row, head], found[row, head])}"
        )

    def _diagnosis(self, segment: Segment, expected: Words, found: Words) -> str:
        if not found.any():
            return "all zero, so never written"
        latest_first = list(self._known.values())[::-1]
        for known in sorted(latest_first, key=lambda known: known.request_id != segment.request_id):
            places = np.argwhere((known.words[:, : len(known.tokens)] == found).all(axis=-1))
            if len(places):
                layer, position, head = places[0]
                place = f"position {position}, layers.{layer}, KV head {head}"
                if known.salt != (segment.salt or ""):
                    return f"bytes of another tenant, {tenant_of(known.salt)}: request {known.request_id!r}, {place}"
                if known.request_id != segment.request_id:
                    return f"stale or swapped, bytes of request {known.request_id!r}, {place}"
                return f"swapped, bytes of the same request, {place}"
        flipped = sum(int(word).bit_count() for word in expected ^ found)
        return f"{flipped} flipped bits" if flipped <= MAX_FLIPPED_BITS else "unknown bytes"


class _Known:
    """What one request's KV must be: `words` [layers, positions, heads, words], right for the first
    len(tokens)."""

    def __init__(self, request_id: str, salt: str, key: Words, lanes: Words) -> None:
        self.request_id = request_id
        self.salt = salt
        self.tokens: list[int] = []
        self.words: Words = np.empty((lanes.shape[0], 0, *lanes.shape[1:]), dtype=np.uint64)
        self._key = key
        self._sum: Words = np.zeros(1, dtype=np.uint64)

    def grow(self, tokens: list[int], lanes: Words) -> None:
        """By the next tokens. A state is a hash of a sum of hashes, one for each position and token
        so far."""
        if not tokens:
            return
        first, end = len(self.tokens), len(self.tokens) + len(tokens)
        if end > self.words.shape[1]:
            grown = np.empty(
                (lanes.shape[0], max(end, 2 * first, 16), *lanes.shape[1:]), dtype=np.uint64
            )
            grown[:, :first] = self.words[:, :first]
            self.words = grown
        hashes = _mix(
            _series(self._key[:1], first, end) ^ np.asarray(tokens, dtype=np.int64).view(np.uint64)
        )
        sums = self._sum + np.cumsum(hashes, dtype=np.uint64)
        states = _mix(sums ^ self._key[1:])
        self.words[:, first:end] = _mix(states[None, :, None, None] ^ lanes[:, None])
        self._sum = sums[-1:].copy()
        self.tokens += tokens


@dataclass(frozen=True)
class _Part:
    """One layer of one rank; `kv` [slots, heads, words] is the rank's tensor, seen flat."""

    strategy: ParallelStrategy
    layer: int
    heads: slice
    kv: torch.Tensor


@dataclass(frozen=True)
class _Batch:
    """A step's positions, one after the other; segment i's begin at `begins[i]`, `new` are the rows
    to be written."""

    segments: Sequence[Segment]
    begins: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: Words
    new: NDArray[np.int64]
    words: Words


def _mix(values: Words) -> Words:
    """splitmix64's finaliser: a bijection in which each bit of the input moves half of the
    output's."""
    values = values + _GAMMA
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _series(key: Words, first: int, end: int) -> Words:
    """Members first..end-1 of the sequence that belongs to `key`."""
    return _mix(key + np.arange(first, end, dtype=np.uint64) * _GAMMA)


def _hex(words: Words) -> str:
    return "[" + " ".join(f"{int(word):016x}" for word in words) + "]"
