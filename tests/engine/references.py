"""What tests of both families of models share: transformers' models to compare with, and a way to
run ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvkeep.engine.models.decoder import Decoder
from kvkeep.engine.models.model import Rank, Segment

BLOCK_TOKENS = 4
NUM_BLOCKS = 32
VOCAB_SIZE = 61


class InDouble(TorchFunctionMode):
    """transformers computes norms, angles and softmax in float32 even of a float64 model; here it
    does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wider = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(
            *map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()}
        )


def save(reference: Any, directory: Path) -> Path:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reference.save_pretrained(directory)
    return directory


def ranks_of(model: Decoder, tp_size: int = 1, pp_size: int = 1) -> list[Rank]:
    strategies = [model.strategy(tp_size, pp_size, rank) for rank in range(tp_size * pp_size)]
    return [
        Rank(strategy, model.allocate_kv(strategy, NUM_BLOCKS, BLOCK_TOKENS))
        for strategy in strategies
    ]


def every_row(model: Decoder, tokens: list[int], ranks: list[Rank], prefill: int) -> torch.Tensor:
    """The logits after the first `prefill` tokens, and after each that follows, from blocks
    scattered over the KV."""
    block_ids = random.Random(7).sample(range(NUM_BLOCKS), -(-len(tokens) // BLOCK_TOKENS))
    steps = [(0, prefill), *((start, 1) for start in range(prefill, len(tokens)))]
    segments = [Segment("r", None, tokens, start, count, block_ids) for start, count in steps]
    return torch.cat([model.forward([segment], ranks, BLOCK_TOKENS) for segment in segments])


def some_tokens(count: int) -> list[int]:
    return random.Random(3).choices(range(VOCAB_SIZE), k=count)
