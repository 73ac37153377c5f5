"""What both families of models share: everything but how queries, keys and values are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvkeep.engine.models.attention import Batch, Rotary, rms_norm
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import Weights
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy

# Not cuDNN's: it plans anew for every length of context, which takes longer than the step itself.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Decoder(ABC):
    """A stack of layers, each attention and then a perceptron. A family adds its attention and its
    form of KV.

    Embeddings, perceptrons and projections are computed once; each rank computes its heads'
    attention, from its own KV."""

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
    def attention(
        self, layer: int, hidden: torch.Tensor, batch: Batch, ranks: Sequence[Rank]
    ) -> torch.Tensor:
        """Writes the batch's KV of this layer on all ranks, then attends: [tokens, hidden_size] to
        the same."""

    @abstractmethod
    def block_shape(self, strategy: ParallelStrategy, block_tokens: int) -> tuple[int, ...]:
        """The shape of one block of one layer, as a rank holds it."""

    def strategy(self, tp_size: int, pp_size: int, rank: int) -> ParallelStrategy:
        """How this model's KV is spread. SettingsError if it cannot be."""
        mla = self.settings.kind == "mla"
        kv_heads = self.num_kv_heads
        strategy = ParallelStrategy.of(
            tp_size=tp_size,
            pp_size=pp_size,
            rank=rank,
            use_mla=mla,
            num_kv_heads=None if mla else kv_heads,
        )
        if self.settings.num_heads % tp_size or (kv_heads > tp_size and kv_heads % tp_size):
            problem = (
                f"{self.settings.num_heads} heads (of KV: {kv_heads}) do not spread evenly over"
                f" tp_size {tp_size}"
            )
            raise SettingsError(f"model settings: {problem}", "choose a tp_size that divides them")
        if pp_size > self.settings.num_layers:
            problem = (
                f"pp_size {pp_size} is more than the model's {self.settings.num_layers} layers"
            )
            raise SettingsError(
                f"model settings: {problem}", "each pipeline stage holds a layer at least"
            )
        return strategy

    def identity(self, block_tokens: int) -> ModelIdentity:
        """What the numbers of a block mean. The same for every rank, however ranks divide them."""
        whole = self.block_shape(
            ParallelStrategy.of(use_mla=self.settings.kind == "mla"), block_tokens
        )
        block = "x".join(map(str, whole))
        return ModelIdentity(
            model=self.name,
            revision=self.weights.fingerprint,
            kv_dtype=str(self._embeddings.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            content=f"{self.settings.kind} layers={self.settings.num_layers} block={block}",
        )

    def allocate_kv(
        self, strategy: ParallelStrategy, num_blocks: int, block_tokens: int
    ) -> dict[str, torch.Tensor]:
        """Zeroed KV tensors of one rank: its layers, its heads."""
        layers, stage = self.settings.num_layers, strategy.pp_rank
        shape = (num_blocks, *self.block_shape(strategy, block_tokens))
        return {
            f"layers.{layer}": torch.zeros(
                shape, dtype=self._embeddings.dtype, device=self._embeddings.device
            )
            for layer in range(
                layers * stage // strategy.pp_size, layers * (stage + 1) // strategy.pp_size
            )
        }

    @torch.no_grad()
    @sdpa_kernel(KERNELS)
    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        """Writes and reads KV; the logits [len(segments), vocab_size] after each segment's last
        token."""
        batch = Batch.of(segments, block_tokens, self.planes, self.rotary, self._embeddings)
        hidden = F.embedding(batch.tokens, self._embeddings)
        for layer in range(self.settings.num_layers):
            stage = [rank for rank in ranks if f"layers.{layer}" in rank.kv]
            assert len(stage) == ranks[0].strategy.tp_size, f"{len(stage)} ranks hold layer {layer}"
            hidden = hidden + self.attention(
                layer, self.norm(layer, "input_layernorm", hidden), batch, stage
            )
            wide = self.norm(layer, "post_attention_layernorm", hidden)
            gate = F.silu(self.linear(layer, "mlp.gate_proj", wide))
            hidden = hidden + self.linear(
                layer, "mlp.down_proj", gate * self.linear(layer, "mlp.up_proj", wide)
            )
        last = rms_norm(
            hidden[batch.last], self.weights["model.norm.weight"], self.settings.rms_norm_eps
        )
        return F.linear(last, self._head)

    def weight(self, layer: int, name: str) -> torch.Tensor:
        """A layer's tensor."""
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def linear(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's projection `name`, with its bias where it has one."""
        return F.linear(
            hidden,
            self.weight(layer, name),
            self.weights.tensors.get(f"model.layers.{layer}.{name}.bias"),
        )

    def norm(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's norm `name`."""
        return rms_norm(hidden, self.weight(layer, name), self.settings.rms_norm_eps)
