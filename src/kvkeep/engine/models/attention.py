"""What both families of models share: everything but how queries, keys and values are made.

A step computes several segments at once. Their tokens lie one after the other in one batch, so that each projection
is a single multiplication; only attention looks at segments one by one, each at its own context:

    batch      |segment 0|segment 1      |segment 2|            a row per token of this step
                             ╲ span.tokens
    KV         |block 7  |block 2  |block 5  |block 0  | …      a row per token and plane, anywhere in memory
                 span.read: the rows of segment 1's context, from its position 0 on

A block's KV of one layer is one or two planes of block_tokens rows: keys and values with GQA, latents with MLA.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import Weights
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy

# Not cuDNN's: it plans anew for every length of context, which takes longer than the step itself.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Span:
    """One segment: its rows in the batch; the KV rows of its context, by plane; and what its tokens may see.

    No mask means that everything is seen (a single token), or what lies before (`causal`).
    """

    tokens: slice
    read: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True)
class Batch:
    """A step's tokens and every index into the KV that its layers need. Built once, used by all layers and ranks."""

    tokens: torch.Tensor
    last: torch.Tensor
    write: tuple[torch.Tensor, ...]
    spans: tuple[Span, ...]
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(
        cls, segments: Sequence[Segment], block_tokens: int, planes: int, rotary: Rotary, weight: torch.Tensor
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

    Needed where tokens lie before the segment: torch's own causal mask would align the two at their beginnings.
    """
    shape = (segment.count, segment.start + segment.count)
    hidden = torch.full(shape, float("-inf"), dtype=weight.dtype, device=weight.device)
    return hidden.triu_(segment.start + 1)


def write_rows(kv: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values [tokens, width], one to a row of one plane of the layer's KV."""
    kv.view(-1, values.shape[-1]).index_copy_(0, rows, values)


def read_rows(kv: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """A copy [len(rows), width], in the order of `rows`."""
    return kv.view(-1, width).index_select(0, rows)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scale: float) -> torch.Tensor:
    """What one segment's tokens take from their context: query [heads, tokens, size] to the same shape.

    Key and value are [kv_heads, context, size]; neighbouring query heads share one of theirs.
    """
    heads, tokens, size = query.shape
    kv_heads = key.shape[0]
    if tokens == 1:  # the heads of a group all see everything, so they can be asked as if they were tokens
        query = query.reshape(kv_heads, 1, heads // kv_heads, size)
        return F.scaled_dot_product_attention(query, key[:, None], value[:, None], scale=scale).view(heads, 1, -1)
    query = query.reshape(kv_heads, heads // kv_heads, tokens, size)
    key, value = (shared[:, None].expand(-1, query.shape[1], -1, -1) for shared in (key, value))
    taken = F.scaled_dot_product_attention(query, key, value, attn_mask=span.mask, is_causal=span.causal, scale=scale)
    return taken.flatten(0, 1)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each row to a mean square of 1, then by the weight. Squares of half-precision numbers need float32."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype) * weight


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: pairs of numbers of a head are turned by an angle that grows with the token's position.

    Pairs are neighbours (x0 x1) (x2 x3) … where `interleaved`, else from both halves: (x0 x4) (x1 x5) … of 8.
    """

    size: int
    theta: float
    interleaved: bool

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, 1, size / 2], in float64: float32 angles grow coarse at large positions."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float64, device=positions.device) / self.size
        angles = positions[:, None, None] * self.theta**-exponents
        return angles.cos(), angles.sin()

    def rotate(self, heads: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Heads [tokens, any, size], turned."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        cos, sin = batch.cos.to(wide.dtype), batch.sin.to(wide.dtype)
        if self.interleaved:
            left, right = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)
        else:
            left, right = wide[..., : self.size // 2], wide[..., self.size // 2 :]
            turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return turned.to(heads.dtype)


class Decoder(ABC):
    """A stack of layers, each attention and then a perceptron. A family adds its attention and its form of KV.

    Embeddings, perceptrons and projections are computed once; each rank computes its heads' attention, from its own KV.
    """

    kind: ClassVar[Literal["gqa", "mla"]]
    planes: ClassVar[int]

    def __init__(self, settings: ModelSettings, weights: Weights, name: str = "reference") -> None:
        if settings.kind != self.kind:
            problem = f"kind is {settings.kind}, but {type(self).__name__} computes {self.kind}"
            raise SettingsError(f"model settings: {problem}", "build the model of the other family")
        self.settings = settings
        self.weights = weights
        self.name = name
        self.vocab_size = settings.vocab_size
        self.num_kv_heads = settings.num_kv_heads or 1
        rotated = settings.head_dim or settings.qk_rope_head_dim
        self.rotary = Rotary(rotated, settings.rope_theta, settings.rope_interleaved)
        self._embeddings = weights["model.embed_tokens.weight"]
        self._head = self._embeddings if settings.tie_word_embeddings else weights["lm_head.weight"]

    @abstractmethod
    def attention(self, layer: int, hidden: torch.Tensor, batch: Batch, ranks: Sequence[Rank]) -> torch.Tensor:
        """Writes the batch's KV of this layer on all ranks, then attends: [tokens, hidden_size] to the same."""

    @abstractmethod
    def block_shape(self, strategy: ParallelStrategy, block_tokens: int) -> tuple[int, ...]:
        """The shape of one block of one layer, as a rank holds it."""

    def strategy(self, tp_size: int, pp_size: int, rank: int) -> ParallelStrategy:
        """How this model's KV is spread. SettingsError if it cannot be."""
        mla = self.settings.kind == "mla"
        kv_heads = self.num_kv_heads
        strategy = ParallelStrategy.of(
            tp_size=tp_size, pp_size=pp_size, rank=rank, use_mla=mla, num_kv_heads=None if mla else kv_heads
        )
        if self.settings.num_heads % tp_size or (kv_heads > tp_size and kv_heads % tp_size):
            problem = f"{self.settings.num_heads} heads (of KV: {kv_heads}) do not spread evenly over tp_size {tp_size}"
            raise SettingsError(f"model settings: {problem}", "choose a tp_size that divides them")
        if pp_size > self.settings.num_layers:
            problem = f"pp_size {pp_size} is more than the model's {self.settings.num_layers} layers"
            raise SettingsError(f"model settings: {problem}", "each pipeline stage holds a layer at least")
        return strategy

    def identity(self, strategy: ParallelStrategy, block_tokens: int) -> ModelIdentity:
        """What has to be equal for KV to be exchanged. The same for every rank."""
        shape = "x".join(str(size) for size in self.block_shape(strategy, block_tokens))
        layout = (
            f"{self.settings.kind} layers={self.settings.num_layers} kv_heads={self.num_kv_heads} block={shape} "
            f"tp={strategy.tp_size} pp={strategy.pp_size} replicas={strategy.replicas}"
        )
        return ModelIdentity(
            model=self.name,
            revision=self.weights.fingerprint,
            kv_dtype=str(self._embeddings.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            layout=layout,
            kv_world_size=strategy.kv_world_size,
        )

    def allocate_kv(self, strategy: ParallelStrategy, num_blocks: int, block_tokens: int) -> dict[str, torch.Tensor]:
        """Zeroed KV tensors of one rank: its layers, its heads."""
        layers, stage = self.settings.num_layers, strategy.pp_rank
        shape = (num_blocks, *self.block_shape(strategy, block_tokens))
        return {
            f"layers.{layer}": torch.zeros(shape, dtype=self._embeddings.dtype, device=self._embeddings.device)
            for layer in range(layers * stage // strategy.pp_size, layers * (stage + 1) // strategy.pp_size)
        }

    @torch.no_grad()
    @sdpa_kernel(KERNELS)
    def forward(self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int) -> torch.Tensor:
        """Writes and reads KV; the logits [len(segments), vocab_size] after each segment's last token."""
        batch = Batch.of(segments, block_tokens, self.planes, self.rotary, self._embeddings)
        hidden = F.embedding(batch.tokens, self._embeddings)
        for layer in range(self.settings.num_layers):
            stage = [rank for rank in ranks if f"layers.{layer}" in rank.kv]
            assert len(stage) == ranks[0].strategy.tp_size, f"{len(stage)} ranks hold layer {layer}"
            hidden = hidden + self.attention(layer, self.norm(layer, "input_layernorm", hidden), batch, stage)
            wide = self.norm(layer, "post_attention_layernorm", hidden)
            gate = F.silu(self.linear(layer, "mlp.gate_proj", wide))
            hidden = hidden + self.linear(layer, "mlp.down_proj", gate * self.linear(layer, "mlp.up_proj", wide))
        last = rms_norm(hidden[batch.last], self.weights["model.norm.weight"], self.settings.rms_norm_eps)
        return F.linear(last, self._head)

    def weight(self, layer: int, name: str) -> torch.Tensor:
        """A layer's tensor."""
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def linear(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's projection `name`, with its bias where it has one."""
        return F.linear(hidden, self.weight(layer, name), self.weights.tensors.get(f"model.layers.{layer}.{name}.bias"))

    def norm(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's norm `name`."""
        return rms_norm(hidden, self.weight(layer, name), self.settings.rms_norm_eps)
