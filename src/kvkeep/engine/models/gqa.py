"""Grouped-query attention, as in Llama, Mistral, Qwen2 and Qwen3.

Query heads share KV heads in equal groups, and ranks take neighbouring query heads together with
the KV heads that these need. With more ranks than KV heads, neighbours hold the same one, each in
its own tensor:

    8 query heads, 2 KV heads      q0 q1 q2 q3 │ q4 q5 q6 q7
                                   k0          │ k1
    TP = 4                         rank 0: q0 q1 k0   rank 1: q2 q3 k0   rank 2: q4 q5 k1   rank 3: q6 q7 k1
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch.nn import functional as F

from kvkeep.engine.models.attention import Batch, attend, read_rows, write_rows
from kvkeep.engine.models.decoder import Decoder
from kvkeep.engine.models.model import Rank
from kvkeep.kv.parallel import ParallelStrategy


class GQAModel(Decoder):
    """A block of one layer is [2, block_tokens, kv_heads_of_rank, head_dim]: rotated keys, then
    values."""

    kind = "gqa"
    planes = 2

    def block_shape(self, strategy: ParallelStrategy, block_tokens: int) -> tuple[int, ...]:
        """The shape of one block of one layer, as a rank holds it."""
        return (2, block_tokens, self._kv_heads_of_rank(strategy), self.settings.head_dim)

    def _kv_heads_of_rank(self, strategy: ParallelStrategy) -> int:
        return self.num_kv_heads * strategy.replicas // strategy.tp_size

    def attention(
        self, layer: int, hidden: torch.Tensor, batch: Batch, ranks: Sequence[Rank]
    ) -> torch.Tensor:
        """Writes the batch's KV of this layer on all ranks, then attends: [tokens, hidden_size] to
        the same."""
        query, key, value = (
            self.linear(layer, f"self_attn.{part}_proj", hidden).view(
                len(hidden), -1, self.settings.head_dim
            )
            for part in "qkv"
        )
        if self.settings.qk_norm:
            query, key = (
                self.norm(layer, "self_attn.q_norm", query),
                self.norm(layer, "self_attn.k_norm", key),
            )
        query, key = self.rotary.rotate(query, batch), self.rotary.rotate(key, batch)
        for rank in ranks:
            count = self._kv_heads_of_rank(rank.strategy)
            first = rank.strategy.tp_rank // rank.strategy.replicas * count
            for plane, heads in enumerate((key, value)):
                mine = heads[:, first : first + count].flatten(1)
                write_rows(rank.kv[f"layers.{layer}"], batch.write[plane], mine)
        # A projection of all heads is the sum of its parts: each rank brings its heads' columns.
        return reduce(torch.add, (self._of_rank(layer, query, batch, rank) for rank in ranks))

    def _of_rank(self, layer: int, query: torch.Tensor, batch: Batch, rank: Rank) -> torch.Tensor:
        size = self.settings.head_dim
        count = self.settings.num_heads // rank.strategy.tp_size
        first = rank.strategy.tp_rank * count
        width = self._kv_heads_of_rank(rank.strategy) * size
        kv = rank.kv[f"layers.{layer}"]
        taken = torch.empty_like(query[:, :count])
        for span in batch.spans:
            key, value = (
                read_rows(kv, rows, width).view(len(rows), -1, size).transpose(0, 1)
                for rows in span.read
            )
            mine = query[span.tokens, first : first + count].transpose(0, 1)
            taken[span.tokens] = attend(mine, key, value, span, size**-0.5).transpose(0, 1)
        columns = self.weight(layer, "self_attn.o_proj")[:, first * size : (first + count) * size]
        return F.linear(taken.flatten(1), columns)
