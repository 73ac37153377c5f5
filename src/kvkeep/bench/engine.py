"""What a cache costs an engine that never finds anything in it, and what it saves one that does. On the demo's model.

Without reuse the same fresh prompts go through an engine without any cache and through one with a server, one after the
other, in changing order, so that noise of the machine meets both. Ratios are medians of the rounds' ratios. The time
with a cache ends when the last block is stored. The floor is one copy of the KV out of the engine: `copy_floor_ms`,
8 KiB a token at memcpy's bandwidth (some 10 GB/s: 1 µs) against 0.4 ms to compute it, so far below 1 %. Copies run in
a thread beside the computation; what they can take from it is the interpreter's lock and memory bandwidth.

With reuse a follow-up (the first prompt again and a few tokens more) is asked of both. Neither engine has a prefix cache
of its own here, so whatever is not computed came from the server. The floor of warm TTFT is one copy of the prompt's KV
into the engine, and computing the last tokens: those after the last full block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
_ANSWER_TOKENS = 32
_FOLLOW_UP_TOKENS = 24
_WARM_UP = 2  # rounds that touch every part of KV memory and pool once
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
    """Starts a server and serves fresh prompts, with it and without; then the same ones with a few tokens more."""
    longest = prompt_tokens + _FOLLOW_UP_TOKENS + _ANSWER_TOKENS
    num_blocks = prompts * (longest // BLOCK_TOKENS + 2) + 1
    pool_mib = _ROUNDS_IN_POOL * (num_blocks * BLOCK_TOKENS * KV_TOKEN_BYTES >> 20) + 64
    model = demo_model()
    with (
        compute_threads(threads),
        ServerProcess("--pool-size", f"{pool_mib}MiB", "--slab-size", "8MiB") as server,
        make_llm(model, None, num_blocks, prefix_caching=False) as without,
        make_llm(model, server.address, num_blocks, prefix_caching=False) as cached,
    ):
        bench = _Bench(without, cached, prompts, prompt_tokens)
        for turn in range(_WARM_UP + rounds):
            bench.round(turn, count=turn >= _WARM_UP)
    return {
        "model": f"{MODEL.kind}, {MODEL.num_layers} layers, hidden size {MODEL.hidden_size}, "
        f"{KV_TOKEN_BYTES // 1024} KiB of KV a token, float64",
        "rounds": rounds,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "threads": threads,
        **bench.result(),
    }


@dataclass
class _Bench:
    """Two engines, and what each round took them, in milliseconds."""

    without: LLM
    cached: LLM
    prompts: int
    prompt_tokens: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    same_tokens: bool = True

    def round(self, turn: int, *, count: bool) -> None:
        rng = np.random.default_rng(turn)
        fresh = [_tokens(rng, self.prompt_tokens) for _ in range(self.prompts)]
        engines = {"no_cache": self.without, "with_cache": self.cached}
        order = list(engines) if turn % 2 else list(reversed(engines))
        answers: dict[str, list[Completion]] = {}
        sample: dict[str, float] = {}
        for name in order:
            sample[f"{name}_ms"], answers[name] = _timed(engines[name], fresh)
            sample[f"{name}_ttft_ms"] = _ttft_ms(answers[name])
        if hits := sum(each.metrics.external_cached_tokens for each in answers["with_cache"]):
            raise AssertionError(f"{hits} tokens of prompts that nobody sent before came from the cache")
        follow_up = [[*fresh[0], *_tokens(rng, _FOLLOW_UP_TOKENS)]]
        _, cold = _timed(self.without, follow_up)
        _, warm = _timed(self.cached, follow_up)
        if not warm[0].metrics.external_cached_tokens:
            raise Unavailable("a prompt that was just served is not in the cache", "see the server's log")
        self.same_tokens &= _same(answers["no_cache"], answers["with_cache"]) and _same(cold, warm)
        sample |= {"cold_ttft_ms": _ttft_ms(cold), "warm_ttft_ms": _ttft_ms(warm), "copy_floor_ms": self._floor_ms()}
        for name, value in sample.items() if count else ():
            self.samples.setdefault(name, []).append(value)

    def _floor_ms(self) -> float:
        """One copy of the KV of a round."""
        nbytes = self.prompts * (self.prompt_tokens + _ANSWER_TOKENS) * KV_TOKEN_BYTES
        source, target = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
        started = time.perf_counter()
        np.copyto(target, source)
        return (time.perf_counter() - started) * 1e3

    def result(self) -> dict[str, Any]:
        medians = {name: round(float(np.median(values)), 2) for name, values in self.samples.items()}
        return {
            **medians,
            "overhead_ratio": self._ratio("with_cache_ms", "no_cache_ms"),
            "ttft_overhead_ratio": self._ratio("with_cache_ttft_ms", "no_cache_ttft_ms"),
            "speedup": self._ratio("cold_ttft_ms", "warm_ttft_ms"),
            "same_tokens": self.same_tokens,
        }

    def _ratio(self, above: str, below: str) -> float:
        return round(float(np.median(np.divide(self.samples[above], self.samples[below]))), 3)


def _timed(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[Completion]]:
    """Milliseconds until all is answered, and stored where there is a cache."""
    started = time.perf_counter()
    answers = llm.generate(prompts, SamplingParams(max_tokens=_ANSWER_TOKENS))
    llm.engine.flush()
    return (time.perf_counter() - started) * 1e3, answers


def _ttft_ms(answers: list[Completion]) -> float:
    return float(np.median([each.metrics.ttft_ms for each in answers if each.metrics.ttft_ms is not None]))


def _same(left: list[Completion], right: list[Completion]) -> bool:
    return [each.token_ids for each in left] == [each.token_ids for each in right]


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, MODEL.vocab_size, count).tolist()
    return tokens
