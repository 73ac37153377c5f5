"""What a cache costs an engine that never finds anything in it, and what it saves one that does. On
the demo's model.

Without reuse the same fresh prompts go through an engine without any cache and through one with a
server, one after the other, in changing order, so that noise of the machine meets both. Ratios are
medians of the rounds' ratios. The time with a cache ends when the last block is stored. The floor
is one copy of the KV out of the engine: `copy_floor_ms`, 8 KiB a token at memcpy's bandwidth (some
10 GB/s: 1 µs) against 0.4 ms to compute it, so far below 1 %. Copies run in a thread beside the
computation; what they can take from it is the interpreter's lock and memory bandwidth.

With reuse a follow-up (the first prompt again and a few tokens more) is asked of both. Neither
engine has a prefix cache of its own here, so whatever is not computed came from the server. The
floor of warm TTFT is one copy of the prompt's KV into the engine, and computing the last tokens:
those after the last full block.

With many requests at once, of short prompts and longer answers, blocks become full one by one, in
different steps, and most are stored when all requests have ended: `many_requests_ratio` is the time
with a cache, those stores included, to that without. Here, too, none is found."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.engine.demo_model import (
    BLOCK_TOKENS,
    MODEL,
    compute_threads,
    demo_model,
    describe,
    kv_token_bytes,
    make_llm,
)
from kvkeep.engine.llm import LLM, Completion
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess

if TYPE_CHECKING:
    from kvkeep.engine.models.model import Model

_ANSWER_TOKENS = 32
_FOLLOW_UP_TOKENS = 24
_WARM_UP = 1  # a round in which code is run for the first time
_ROUNDS_IN_POOL = 3  # then blocks are evicted, as in a server that has been running for a while
_MANY, _MANY_PROMPT_TOKENS, _MANY_ANSWER_TOKENS = 32, 16, 48
_MANY_BLOCKS = _MANY * ((_MANY_PROMPT_TOKENS + _MANY_ANSWER_TOKENS) // BLOCK_TOKENS + 1)

TARGETS = {"overhead_ratio": 1.03, "speedup": 3.0}  # at most and at least; of the default options


def run(
    rounds: int = 9,
    prompts: int = 2,
    prompt_tokens: int = 1536,
    threads: int = 1,
    layers: int = MODEL.num_layers,
) -> dict[str, Any]:
    """Starts a server and serves fresh prompts, with it and without; then one of them with a few
    tokens more; then many short ones."""
    settings = replace(MODEL, num_layers=layers)
    longest = prompt_tokens + _FOLLOW_UP_TOKENS + _ANSWER_TOKENS
    num_blocks = prompts * (longest // BLOCK_TOKENS + 2) + 1
    block_bytes = BLOCK_TOKENS * kv_token_bytes(settings)
    pool_mib = _ROUNDS_IN_POOL * ((num_blocks + _MANY_BLOCKS) * block_bytes >> 20) + 64
    samples: dict[str, list[float]] = {}
    same_tokens = True
    with (
        compute_threads(threads),
        ServerProcess("--pool-size", f"{pool_mib}MiB", "--slab-size", "8MiB") as server,
    ):
        bench = _Bench(demo_model(settings), server.address, max(num_blocks, _MANY_BLOCKS + 1))
        for turn in range(_WARM_UP + rounds):
            sample, same = bench.round(turn, prompts, prompt_tokens)
            sample["copy_floor_ms"] = _copy_ms(
                prompts * (prompt_tokens + _ANSWER_TOKENS) * kv_token_bytes(settings)
            )
            same_tokens &= same
            for name, value in sample.items() if turn >= _WARM_UP else ():
                samples.setdefault(name, []).append(value)

    def ratio(above: str, below: str) -> float:
        return round(float(np.median(np.divide(samples[above], samples[below]))), 3)

    return {
        "model": describe(settings),
        "rounds": rounds,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "threads": threads,
        "layers": layers,
        **{name: round(float(np.median(values)), 2) for name, values in sorted(samples.items())},
        "overhead_ratio": ratio("with_cache_ms", "no_cache_ms"),
        "ttft_overhead_ratio": ratio("with_cache_ttft_ms", "no_cache_ttft_ms"),
        "many_requests_ratio": ratio("many_with_cache_ms", "many_no_cache_ms"),
        "speedup": ratio("cold_ttft_ms", "warm_ttft_ms"),
        "same_tokens": same_tokens,
        "targets": dict(TARGETS),
    }


@dataclass(frozen=True)
class _Asked:
    """What both engines are asked in a round."""

    fresh: list[list[int]]
    follow_up: list[int]
    many: list[list[int]]

    @classmethod
    def draw(cls, seed: int, prompts: int, prompt_tokens: int) -> _Asked:
        rng = np.random.default_rng(seed)
        fresh = [_tokens(rng, prompt_tokens) for _ in range(prompts)]
        # Of different lengths, so that their blocks become full in different steps.
        many = [_tokens(rng, _MANY_PROMPT_TOKENS - at % BLOCK_TOKENS) for at in range(_MANY)]
        return cls(fresh, [*fresh[0], *_tokens(rng, _FOLLOW_UP_TOKENS)], many)


@dataclass(frozen=True)
class _Served:
    """What one engine did in a round: the fresh prompts, the follow-up, and the many short ones."""

    fresh_ms: float
    fresh: list[Completion]
    follow_up: list[Completion]
    many_ms: float
    many: list[Completion]

    @property
    def tokens(self) -> list[list[int]]:
        return [each.token_ids for each in (*self.fresh, *self.follow_up, *self.many)]


@dataclass(frozen=True)
class _Bench:
    """The parts that all rounds share. Engines are made anew: the one without a cache must not have
    the threads of the other beside it."""

    model: Model
    address: str
    num_blocks: int

    def round(self, turn: int, prompts: int, prompt_tokens: int) -> tuple[dict[str, float], bool]:
        """What it took, in milliseconds, and whether both engines gave the same tokens."""
        asked = _Asked.draw(turn, prompts, prompt_tokens)
        if turn % 2:
            without, cached = self._serve(None, asked), self._serve(self.address, asked)
        else:
            cached, without = self._serve(self.address, asked), self._serve(None, asked)
        _check_reuse(cached)
        sample = {
            "no_cache_ms": without.fresh_ms,
            "with_cache_ms": cached.fresh_ms,
            "no_cache_ttft_ms": _ttft_ms(without.fresh),
            "with_cache_ttft_ms": _ttft_ms(cached.fresh),
            "cold_ttft_ms": _ttft_ms(without.follow_up),
            "warm_ttft_ms": _ttft_ms(cached.follow_up),
            "many_no_cache_ms": without.many_ms,
            "many_with_cache_ms": cached.many_ms,
        }
        return sample, without.tokens == cached.tokens

    def _serve(self, address: str | None, asked: _Asked) -> _Served:
        with make_llm(self.model, address, self.num_blocks, prefix_caching=False) as llm:
            # Shorter than a block, so nothing of it is stored: meanwhile the pool is mapped, as in
            # an engine that runs.
            llm.generate([asked.fresh[0][: BLOCK_TOKENS - 1]], SamplingParams(max_tokens=1))
            llm.generate([asked.fresh[0][:1]], SamplingParams(max_tokens=BLOCK_TOKENS - 1))
            fresh_ms, fresh = _timed(llm, asked.fresh, _ANSWER_TOKENS)
            _, follow_up = _timed(llm, [asked.follow_up], _ANSWER_TOKENS)
            many_ms, many = _timed(llm, asked.many, _MANY_ANSWER_TOKENS)
            return _Served(fresh_ms, fresh, follow_up, many_ms, many)


def _timed(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Completion]]:
    """Until the last block is stored."""
    started = time.perf_counter()
    answers = llm.generate(prompts, SamplingParams(max_tokens=max_tokens))
    llm.engine.flush()
    return (time.perf_counter() - started) * 1e3, answers


def _check_reuse(cached: _Served) -> None:
    """Only the follow-up may find something, and it must."""
    if hits := _external_tokens([*cached.fresh, *cached.many]):
        raise AssertionError(
            f"{hits} tokens of prompts that nobody sent before came from the cache"
        )
    if not _external_tokens(cached.follow_up):
        raise Unavailable(
            "a prompt that was just served is not in the cache", "the machine may be too busy"
        )


def _external_tokens(answers: list[Completion]) -> int:
    return sum(each.metrics.external_cached_tokens for each in answers)


def _ttft_ms(answers: list[Completion]) -> float:
    return float(
        np.median([each.metrics.ttft_ms for each in answers if each.metrics.ttft_ms is not None])
    )


def _copy_ms(nbytes: int) -> float:
    """One copy, between memory that was touched before."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
    started = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - started) * 1e3


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, MODEL.vocab_size, count).tolist()
    return tokens
