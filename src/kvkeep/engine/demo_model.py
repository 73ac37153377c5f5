"""The model of `kvkeep demo` and of the engine benchmark, and the reference engine that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvkeep.engine.llm import LLM
from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import random_weights

if TYPE_CHECKING:
    from kvkeep.engine.models.model import Model

MODEL = ModelSettings(
    kind="gqa",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
)
BLOCK_TOKENS = 16


def kv_token_bytes(settings: ModelSettings = MODEL) -> int:
    return 2 * settings.num_layers * settings.num_kv_heads * settings.head_dim * 8


def describe(settings: ModelSettings = MODEL) -> str:
    """The model in a line."""
    return (
        f"random weights, {settings.num_layers} layers, hidden size {settings.hidden_size}, "
        f"{kv_token_bytes(settings) / 1024:g} KiB of KV a token, float64"
    )


def demo_model(settings: ModelSettings = MODEL) -> Model:
    """The model that demo and benchmark compute, with weights from a seed.

    In float64: how many tokens share a batch changes the order of sums, and so their last bits. In
    float32 that turns a near tie over about once in 100,000 tokens, and tokens are to be compared
    here."""
    import torch

    return GQAModel(settings, random_weights(settings, seed=0, dtype=torch.float64), "demo")


def make_llm(
    model: Model,
    address: str | None,
    num_blocks: int,
    *,
    prefix_caching: bool,
    extra: Mapping[str, Any] | None = None,
) -> LLM:
    """An engine with a server behind it, or without: then `address` is None. `extra` are options of
    the connector."""
    cache = None
    if address is not None:
        cache = {
            "kv_connector": "KVKeepConnector",
            "kv_connector_extra_config": {"kvkeep.address": address, **(extra or {})},
        }
    return LLM(
        model,
        kv_transfer_config=cache,
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_blocks,
        enable_prefix_caching=prefix_caching,
    )


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Torch computes with so many threads meanwhile."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
