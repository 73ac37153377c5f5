"""Real vLLM while the server hangs: what that costs, and whether caching comes back.

    server     │ serves │ SIGSTOP ───────────────────────────────────────── SIGCONT │ serves │
    none               │ load │      │ load │      │ load │      …                  │
    kvkeep              pause ↓ load │      │ load │      │ load │                   │ answers, and a hit
                              └ in the middle of the first window

Both engines serve the same stream of requests, in windows that take turns, so that noise of the
machine meets both, one at work while the other is silent: a few conversations that begin alike,
always several under way. Of requests that both finished, the tokens are compared."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.bench.vllm_session import Choice, Turns, signals_end_the_block
from kvkeep.bench.vllm_setup import (
    ServedModel,
    Stored,
    arguments,
    environment,
    kvkeep_arguments,
    own_model,
)
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.bench.vllm_lanes import LoadedEngine

TARGETS = {"ratio": 0.9}

OPTIONS = {
    "seconds": "How long the server is paused under load; other engines' turns come on top.",
    "requests": "How many requests are under way at a time.",
}

_WINDOW_S = 5.0
_PAUSES_AFTER_S = 1.0
_PREFIX_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 512, 64, 16
_PREFIXES = 4
_STREAM = 4096  # more than anybody serves in that time
_RESUMES_WITHIN_S = 30.0


def run(seconds: int = 30, requests: int = 8) -> dict[str, Any]:
    Choice.make("cpu", "none,kvkeep")  # refuses without vLLM
    with (
        signals_end_the_block(),
        tempfile.TemporaryDirectory(prefix="kvkeep-vllm-") as folder,
        ExitStack() as stack,
    ):
        model = own_model(Path(folder), "cpu")
        server = stack.enter_context(ServerProcess("--pool-size", "2GiB"))
        engines = {}
        for name, extra in (("none", {}), ("kvkeep", kvkeep_arguments(server.address))):
            say(f"starting vLLM, connector: {name}")
            longest = _PREFIX_TOKENS + _OWN_TOKENS
            made = arguments(model, longest, 2, extra)
            engines[name] = stack.enter_context(
                LoadedEngine(name, made, environment(model, 2048), _counting(name))
            )
        return _measure(server, engines, _stream(model), seconds, requests)


def _counting(name: str) -> str:
    return "num_kvkeep_extra_cached_tokens" if name == "kvkeep" else ""


def _stream(model: ServedModel) -> list[list[int]]:
    rng = np.random.default_rng(7)
    prefixes = rng.integers(0, model.vocab_size, (_PREFIXES, _PREFIX_TOKENS)).tolist()
    own = rng.integers(0, model.vocab_size, (_STREAM, _OWN_TOKENS)).tolist()
    return [prefixes[at % _PREFIXES] + tail for at, tail in enumerate(own)]


def _measure(
    server: ServerProcess,
    engines: dict[str, LoadedEngine],
    stream: Sequence[list[int]],
    seconds: int,
    requests: int,
) -> dict[str, Any]:
    totals = {name: {"tokens": 0, "seconds": 0.0, "failed": 0} for name in engines}
    answers: dict[str, dict[str, list[int]]] = {name: {} for name in engines}
    turns = Turns.on("cpu")
    for name, engine in engines.items():  # warm, and for kvkeep with stores under way
        with turns.turn(name):
            engine.serve(stream[:requests], requests, _WINDOW_S, _ANSWER_TOKENS)
    began, paused = dict.fromkeys(engines, requests), False
    while totals["kvkeep"]["seconds"] < seconds:
        for name, engine in engines.items():
            rest = stream[began[name] :]
            pause = (
                _pause(server, _PAUSES_AFTER_S)
                if name == "kvkeep" and not paused
                else nullcontext()
            )
            with turns.turn(name), pause:
                served = engine.serve(rest, requests, _WINDOW_S, _ANSWER_TOKENS)
            paused = paused or name == "kvkeep"
            for at, tokens in served["answers"].items():
                answers[name][str(began[name] + int(at))] = tokens
            began[name] += served["begun"]
            for key in totals[name]:
                totals[name][key] += served[key]
        say("; ".join(f"{name} {_rate(total):,.0f} tokens/s" for name, total in totals.items()))
    server.send(signal.SIGCONT)
    resumed = _resumes(server, engines, stream)
    both = answers["none"].keys() & answers["kvkeep"].keys()
    return {
        "paused_seconds": round(totals["kvkeep"]["seconds"], 1),
        "requests": {name: len(each) for name, each in answers.items()},
        "failed_requests": sum(int(total["failed"]) for total in totals.values()),
        "tokens_per_s": {name: round(_rate(total), 1) for name, total in totals.items()},
        "ratio": round(_rate(totals["kvkeep"]) / _rate(totals["none"]), 3),
        "compared_requests": len(both),
        "same_tokens": all(answers["none"][at] == answers["kvkeep"][at] for at in both)
        and resumed["same_tokens"],
        "cached_tokens_after": resumed["cached_tokens"],
        "resumed_after_ms": resumed["ms"],
        "targets": dict(TARGETS),
    }


def _rate(total: dict[str, Any]) -> float:
    return float(total["tokens"] / total["seconds"])


@contextmanager
def _pause(server: ServerProcess, after_s: float) -> Iterator[None]:
    """Pauses it a little after the block has begun, and leaves it so."""
    timer = threading.Timer(after_s, server.send, [signal.SIGSTOP])
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _resumes(
    server: ServerProcess, engines: dict[str, LoadedEngine], stream: Sequence[list[int]]
) -> dict[str, Any]:
    """Asks for prompts that nobody has sent until one is stored, and then loaded."""
    started = time.monotonic()
    engine, same = engines["kvkeep"], True
    for prompt in reversed(stream):
        prompt = prompt[::-1]  # nothing of it is known
        before = Stored(server).count()
        cold = engine.ask(prompt, _ANSWER_TOKENS)
        engine.drop_local_cache()
        engines["none"].drop_local_cache()
        time.sleep(0.2)
        hit = engine.ask(prompt, _ANSWER_TOKENS)
        same = (
            same and cold.tokens == hit.tokens == engines["none"].ask(prompt, _ANSWER_TOKENS).tokens
        )
        if hit.cached_tokens:
            ms = round((time.monotonic() - started) * 1e3)
            return {"same_tokens": same, "cached_tokens": hit.cached_tokens, "ms": ms}
        if time.monotonic() - started > _RESUMES_WITHIN_S:
            break
    raise Unavailable(f"caching did not resume; the server has {before:,} blocks")
