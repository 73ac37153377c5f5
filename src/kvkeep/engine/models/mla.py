"""Multi-head latent attention, as in DeepSeek-V2, with dense perceptrons.

Of a token's keys and values of all heads, the cache holds what they are computed from: a latent,
and a rotated key that the heads share. A head's key is `up_key @ latent`, so its product with a
query is that of the latent with `query @ up_key`; and a weighted sum of values is `up_value` of the
weighted sum of latents. So attention runs over the latents themselves, and keys and values are
never made:

    one KV row     | latent (kv_lora_rank)   | rotated key (qk_rope_head_dim) |
    one query      | query @ up_key          | rotated query                  |

Every rank of a TP group needs all of a row, and holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch.nn import functional as F

from kvkeep.engine.models.attention import Batch, attend, read_rows, rms_norm, write_rows
from kvkeep.engine.models.decoder import Decoder
from kvkeep.engine.models.model import Rank
from kvkeep.kv.parallel import ParallelStrategy

LATENT_NORM_EPS = 1e-6  # DeepSeek's norms of latents take this, whatever rms_norm_eps says


class MLAModel(Decoder):
    """A block of one layer is [block_tokens, kv_lora_rank + qk_rope_head_dim]: normed latents,
    rotated keys."""

    kind = "mla"
    planes = 1

    def block_shape(self, strategy: ParallelStrategy, block_tokens: int) -> tuple[int, ...]:
        """The shape of one block of one layer, as a rank holds it."""
        return (block_tokens, self.settings.kv_lora_rank + self.settings.qk_rope_head_dim)

    def attention(
        self, layer: int, hidden: torch.Tensor, batch: Batch, ranks: Sequence[Rank]
    ) -> torch.Tensor:
        """Writes the batch's KV of this layer on all ranks, then attends: [tokens, hidden_size] to
        the same."""
        compressed = self.linear(layer, "self_attn.kv_a_proj_with_mqa", hidden)
        latent, key = (
            compressed[:, : self.settings.kv_lora_rank],
            compressed[:, self.settings.kv_lora_rank :],
        )
        latent = rms_norm(latent, self.weight(layer, "self_attn.kv_a_layernorm"), LATENT_NORM_EPS)
        rows = torch.cat((latent, self.rotary.rotate(key[:, None], batch)[:, 0]), dim=-1)
        for rank in ranks:
            write_rows(rank.kv[f"layers.{layer}"], batch.write[0], rows)
        query = self._query(layer, hidden, batch)
        # A projection of all heads is the sum of its parts: each rank brings its heads' columns.
        return reduce(torch.add, (self._of_rank(layer, query, batch, rank) for rank in ranks))

    def _query(self, layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[heads, tokens, row size]: the queries of all heads, as they meet KV rows."""
        nope, rope = self.settings.qk_nope_head_dim, self.settings.qk_rope_head_dim
        if self.settings.q_lora_rank is None:
            query = self.linear(layer, "self_attn.q_proj", hidden)
        else:
            latent = self.linear(layer, "self_attn.q_a_proj", hidden)
            latent = rms_norm(
                latent, self.weight(layer, "self_attn.q_a_layernorm"), LATENT_NORM_EPS
            )
            query = self.linear(layer, "self_attn.q_b_proj", latent)
        query = query.view(len(hidden), self.settings.num_heads, nope + rope)
        absorbed = torch.bmm(query[..., :nope].transpose(0, 1), self._up(layer)[:, :nope])
        return torch.cat(
            (absorbed, self.rotary.rotate(query[..., nope:], batch).transpose(0, 1)), dim=-1
        )

    def _up(self, layer: int) -> torch.Tensor:
        """[heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]: makes a head's key, then its value,
        of a latent."""
        return self.weight(layer, "self_attn.kv_b_proj").view(
            self.settings.num_heads, -1, self.settings.kv_lora_rank
        )

    def _of_rank(self, layer: int, query: torch.Tensor, batch: Batch, rank: Rank) -> torch.Tensor:
        settings = self.settings
        count = settings.num_heads // rank.strategy.tp_size
        mine = slice(rank.strategy.tp_rank * count, (rank.strategy.tp_rank + 1) * count)
        scale = (settings.qk_nope_head_dim + settings.qk_rope_head_dim) ** -0.5
        taken = torch.empty_like(query[mine])
        for span in batch.spans:
            rows = read_rows(rank.kv[f"layers.{layer}"], span.read[0], query.shape[-1])[None]
            # Whole rows stand in for values too: torch's fast kernel wants them of one size with
            # the keys.
            taken[:, span.tokens] = attend(query[mine, span.tokens], rows, rows, span, scale)
        up_value = self._up(layer)[mine, settings.qk_nope_head_dim :]
        values = (
            torch.bmm(taken[..., : settings.kv_lora_rank], up_value.transpose(1, 2))
            .transpose(0, 1)
            .flatten(1)
        )
        size = settings.v_head_dim
        return F.linear(
            values, self.weight(layer, "self_attn.o_proj")[:, mine.start * size : mine.stop * size]
        )
