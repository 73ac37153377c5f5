"""What the engine asks of a model, and what it hands to it.

    request's tokens   |■■■■■■■■■■■■■■■■|□□□□□□□□|          ■ computed before, its KV lies in the request's blocks
                       0            start      start+count   □ this step's segment

A model writes the KV of a segment's tokens into the request's blocks, reads the KV of everything
before, and returns the logits after each segment's last token. Position p of a request lies in
block_ids[p // block_tokens], at offset p % block_tokens. Segments of one step may share blocks: a
block that one of them fills may be read by another, so in each layer all KV is written before any
is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy


@dataclass(frozen=True)
class Segment:
    """The part of one request that a step computes. `tokens` are all of the request's, not a
    copy."""

    request_id: str
    salt: str | None
    tokens: Sequence[int]
    start: int
    count: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class Rank:
    """One worker's place, and its KV: a tensor for each layer that it holds, whose first dim counts
    blocks. Where KV has heads, the last dim but one counts them."""

    strategy: ParallelStrategy
    kv: Mapping[str, torch.Tensor]


class Model(Protocol):
    """Ranks live in one process and share the weights. What is really spread over them is the
    KV."""

    vocab_size: int
    num_kv_heads: int  # 1 with MLA

    def strategy(self, tp_size: int, pp_size: int, rank: int) -> ParallelStrategy:
        """How this model's KV is spread. SettingsError if it cannot be."""

    def identity(self, block_tokens: int) -> ModelIdentity:
        """What the numbers of a block mean. The same for every rank, however ranks divide them."""

    def allocate_kv(
        self, strategy: ParallelStrategy, num_blocks: int, block_tokens: int
    ) -> dict[str, torch.Tensor]:
        """Zeroed KV tensors of one rank: its layers, its heads."""

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        """Writes and reads KV; the logits [len(segments), vocab_size] after each segment's last
        token."""
