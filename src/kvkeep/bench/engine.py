"""What a cache costs an engine that never finds anything in it, and what it saves one that does. On the demo's model.

Without reuse the same fresh prompts go through an engine without any cache and through one with a server, one after the
other, in changing order, so that noise of the machine meets both. Ratios are medians of the rounds' ratios. The time
with a cache ends when the last block is stored. The floor is one copy of the KV out of the engine: `copy_floor_ms`,
8 KiB a token at memcpy's bandwidth (some 10 GB/s: 1 µs) against 0.4 ms to compute it, so far below 1 %. Copies run in
a thread beside the computation; what they can take from it is the interpreter's lock and memory bandwidth.

With reuse a follow-up (the first prompt again and a few tokens more) is asked of both. Neither engine has a prefix
cache of its own here, so whatever is not computed came from the server. The floor of warm TTFT is one copy of the
prompt's KV into the engine, and computing the last tokens: those after the last full block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.engine.llm import LLM, Completion
from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import random_weights
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess

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
KV_TOKEN_BYTES = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 8
DESCRIPTION = (
    f"random weights, {MODEL.num_layers} layers, hidden size {MODEL.hidden_size}, "
    f"{KV_TOKEN_BYTES // 1024} KiB of KV a token, float64"
)
_ANSWER_TOKENS = 32
_FOLLOW_UP_TOKENS = 24
_WARM_UP = 1  # a round in which code is run for the first time
_ROUNDS_IN_POOL = 3  # then blocks are evicted, as in a server that has been running for a while


def demo_model() -> Model:
    """The model that demo and benchmark compute, with weights from a seed.

    In float64: how many tokens share a batch changes the order of sums, and so their last bits. In float32 that turns
    a near tie over about once in 100,000 tokens, and tokens are to be compared here.
    """
    import torch

    return GQAModel(MODEL, random_weights(MODEL, seed=0, dtype=torch.float64), "demo")


def make_llm(model: Model, address: str | None, num_blocks: int, *, prefix_caching: bool) -> LLM:
    """An engine with a server behind it, or without: then `address` is None."""
    cache = None
    if address is not None:
        cache = {"kv_connector": "KVKeepConnector", "kv_connector_extra_config": {"kvkeep.address": address}}
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


def run(rounds: int = 9, prompts: int = 2, prompt_tokens: int = 1536, threads: int = 1) -> dict[str, Any]:
    """Starts a server and serves fresh prompts, with it and without; then one of them with a few tokens more."""
    longest = prompt_tokens + _FOLLOW_UP_TOKENS + _ANSWER_TOKENS
    num_blocks = prompts * (longest // BLOCK_TOKENS + 2) + 1
    pool_mib = _ROUNDS_IN_POOL * (num_blocks * BLOCK_TOKENS * KV_TOKEN_BYTES >> 20) + 64
    samples: dict[str, list[float]] = {}
    same_tokens = True
    with (
        compute_threads(threads),
        ServerProcess("--pool-size", f"{pool_mib}MiB", "--slab-size", "8MiB") as server,
    ):
        bench = _Bench(demo_model(), server.address, num_blocks)
        for turn in range(_WARM_UP + rounds):
            sample, same = bench.round(turn, prompts, prompt_tokens)
            same_tokens &= same
            for name, value in sample.items() if turn >= _WARM_UP else ():
                samples.setdefault(name, []).append(value)

    def ratio(above: str, below: str) -> float:
        return round(float(np.median(np.divide(samples[above], samples[below]))), 3)

    return {
        "model": DESCRIPTION,
        "rounds": rounds,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "threads": threads,
        **{name: round(float(np.median(values)), 2) for name, values in sorted(samples.items())},
        "overhead_ratio": ratio("with_cache_ms", "no_cache_ms"),
        "ttft_overhead_ratio": ratio("with_cache_ttft_ms", "no_cache_ttft_ms"),
        "speedup": ratio("cold_ttft_ms", "warm_ttft_ms"),
        "same_tokens": same_tokens,
    }


@dataclass(frozen=True)
class _Served:
    """What one engine did in a round: the fresh prompts, and the follow-up."""

    total_ms: float
    fresh: list[Completion]
    follow_up: list[Completion]

    @property
    def tokens(self) -> list[list[int]]:
        return [each.token_ids for each in (*self.fresh, *self.follow_up)]


@dataclass(frozen=True)
class _Bench:
    """The parts that all rounds share. Engines are made anew: the one without a cache must not have the threads of the
    other beside it."""

    model: Model
    address: str
    num_blocks: int

    def round(self, turn: int, prompts: int, prompt_tokens: int) -> tuple[dict[str, float], bool]:
        """What it took, in milliseconds, and whether both engines gave the same tokens."""
        rng = np.random.default_rng(turn)
        fresh = [_tokens(rng, prompt_tokens) for _ in range(prompts)]
        follow_up = [*fresh[0], *_tokens(rng, _FOLLOW_UP_TOKENS)]
        if turn % 2:
            without, cached = self._serve(None, fresh, follow_up), self._serve(self.address, fresh, follow_up)
        else:
            cached, without = self._serve(self.address, fresh, follow_up), self._serve(None, fresh, follow_up)
        if hits := _external_tokens(cached.fresh):
            raise AssertionError(f"{hits} tokens of prompts that nobody sent before came from the cache")
        if not _external_tokens(cached.follow_up):
            raise Unavailable("a prompt that was just served is not in the cache", "the machine may be too busy")
        sample = {
            "no_cache_ms": without.total_ms,
            "with_cache_ms": cached.total_ms,
            "no_cache_ttft_ms": _ttft_ms(without.fresh),
            "with_cache_ttft_ms": _ttft_ms(cached.fresh),
            "cold_ttft_ms": _ttft_ms(without.follow_up),
            "warm_ttft_ms": _ttft_ms(cached.follow_up),
            "copy_floor_ms": _copy_ms(prompts * (prompt_tokens + _ANSWER_TOKENS) * KV_TOKEN_BYTES),
        }
        return sample, without.tokens == cached.tokens

    def _serve(self, address: str | None, fresh: list[list[int]], follow_up: list[int]) -> _Served:
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS)
        with make_llm(self.model, address, self.num_blocks, prefix_caching=False) as llm:
            # Shorter than a block, so nothing of it is stored: meanwhile the pool is mapped, as in an engine that runs.
            llm.generate([fresh[0][: BLOCK_TOKENS - 1]], SamplingParams(max_tokens=1))
            llm.generate([fresh[0][:1]], SamplingParams(max_tokens=BLOCK_TOKENS - 1))
            started = time.perf_counter()
            answers = llm.generate(fresh, sampling)
            llm.engine.flush()
            total_ms = (time.perf_counter() - started) * 1e3
            return _Served(total_ms, answers, llm.generate([follow_up], sampling))


def _external_tokens(answers: list[Completion]) -> int:
    return sum(each.metrics.external_cached_tokens for each in answers)


def _ttft_ms(answers: list[Completion]) -> float:
    return float(np.median([each.metrics.ttft_ms for each in answers if each.metrics.ttft_ms is not None]))


def _copy_ms(nbytes: int) -> float:
    """One copy, between memory that was touched before."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
    started = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - started) * 1e3


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, MODEL.vocab_size, count).tolist()
    return tokens
