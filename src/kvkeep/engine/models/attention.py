"""Attention over KV that lies in blocks: indexes into it, rotary embedding, the attention itself.

A step computes several segments at once. Their tokens lie one after the other in one batch, so that
each projection is a single multiplication; only attention looks at segments one by one, each at its
own context:

    batch      |segment 0|segment 1      |segment 2|            a row per token of this step
                             ╲ span.tokens
    KV         |block 7  |block 2  |block 5  |block 0  | …      a row per token and plane, anywhere in memory
                 span.read: the rows of segment 1's context, from its position 0 on

A block's KV of one layer is one or two planes of block_tokens rows: keys and values with GQA,
latents with MLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kvkeep.engine.models.model import Segment


@dataclass(frozen=True)
class Span:
    """One segment: its rows in the batch; the KV rows of its context, by plane; and what its tokens
    may see.

    No mask means that everything is seen (a single token), or what lies before (`causal`).
    """

    tokens: slice
    read: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True)
class Batch:
    """A step's tokens and every index into the KV that its layers need. Built once, used by all
    layers and ranks."""

    tokens: torch.Tensor
    last: torch.Tensor
    write: tuple[torch.Tensor, ...]
    spans: tuple[Span, ...]
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        block_tokens: int,
        planes: int,
        rotary: Rotary,
        weight: torch.Tensor,
    ) -> Batch:
        """`weight` is any of the model's: the batch gets its device, and masks its dtype."""
        device = weight.device
        tokens: list[int] = []
        write: list[torch.Tensor] = []
        spans: list[Span] = []
        for segment in segments:
            end = segment.start + segment.count
            tokens_before = len(tokens)
            tokens.extend(segment.tokens[segment.start : end])
            rows = _rows(segment.block_ids, end, block_tokens, planes).to(device)
            write.append(rows[segment.start :])
            spans.append(
                Span(
                    tokens=slice(tokens_before, len(tokens)),
                    read=tuple(rows + plane * block_tokens for plane in range(planes)),
                    mask=_mask(segment, weight) if segment.start and segment.count > 1 else None,
                    causal=not segment.start and segment.count > 1,
                )
            )
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
        assert len(tokens) == len(positions), "a segment reaches beyond its request's tokens"
        cos, sin = rotary.angles(positions.to(device))
        first = torch.cat(write)
        return cls(
            tokens=torch.tensor(tokens, device=device),
            last=torch.tensor([span.tokens.stop - 1 for span in spans], device=device),
            write=tuple(first + plane * block_tokens for plane in range(planes)),
            spans=tuple(spans),
            cos=cos,
            sin=sin,
        )


def _rows(block_ids: Sequence[int], end: int, block_tokens: int, planes: int) -> torch.Tensor:
    """The rows, in the first plane, of a request's positions 0 to end - 1."""
    blocks = torch.tensor(block_ids[: -(-end // block_tokens)])
    assert 0 < end <= len(blocks) * block_tokens, "a segment reaches beyond its request's blocks"
    return (blocks[:, None] * (planes * block_tokens) + torch.arange(block_tokens)).flatten()[:end]


def _mask(segment: Segment, weight: torch.Tensor) -> torch.Tensor:
    """[count, start + count], to be added to scores: a token sees itself and what lies before.

    Needed where tokens lie before the segment: torch's own causal mask would align the two at their
    beginnings."""
    shape = (segment.count, segment.start + segment.count)
    hidden = torch.full(shape, float("-inf"), dtype=weight.dtype, device=weight.device)
    return hidden.triu_(segment.start + 1)


def write_rows(kv: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values [tokens, width], one to a row of one plane of the layer's KV."""
    kv.view(-1, values.shape[-1]).index_copy_(0, rows, values)


def read_rows(kv: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """A copy [len(rows), width], in the order of `rows`."""
    return kv.view(-1, width).index_select(0, rows)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scale: float
) -> torch.Tensor:
    """What one segment's tokens take from their context: query [heads, tokens, size] to the same
    shape.

    Key and value are [kv_heads, context, size]; neighbouring query heads share one of theirs.
    """
    heads, tokens, size = query.shape
    kv_heads = key.shape[0]
    # the heads of a group all see everything, so they can be asked as if they were tokens
    if tokens == 1:
        query = query.reshape(kv_heads, 1, heads // kv_heads, size)
        return F.scaled_dot_product_attention(
            query, key[:, None], value[:, None], scale=scale
        ).view(heads, 1, -1)
    query = query.reshape(kv_heads, heads // kv_heads, tokens, size)
    key, value = (shared[:, None].expand(-1, query.shape[1], -1, -1) for shared in (key, value))
    taken = F.scaled_dot_product_attention(
        query, key, value, attn_mask=span.mask, is_causal=span.causal, scale=scale
    )
    return taken.flatten(0, 1)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each row to a mean square of 1, then by the weight. Squares of half-precision numbers
    need float32."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(
        hidden.dtype
    ) * weight


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: pairs of numbers of a head are turned by an angle that grows with the
    token's position.

    Pairs are neighbours (x0 x1) (x2 x3) … where `interleaved`, else from both halves: (x0 x4) (x1
    x5) … of 8."""

    size: int
    theta: float
    interleaved: bool

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, 1, size / 2], in float64: float32 angles grow coarse at large
        positions."""
        exponents = (
            torch.arange(0, self.size, 2, dtype=torch.float64, device=positions.device) / self.size
        )
        angles = positions[:, None, None] * self.theta**-exponents
        return angles.cos(), angles.sin()

    def rotate(self, heads: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Heads [tokens, any, size], turned."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        cos, sin = batch.cos.to(wide.dtype), batch.sin.to(wide.dtype)
        if self.interleaved:
            left, right = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack(
                (left * cos - right * sin, right * cos + left * sin), dim=-1
            ).flatten(-2)
        else:
            left, right = wide[..., : self.size // 2], wide[..., self.size // 2 :]
            turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return turned.to(heads.dtype)
