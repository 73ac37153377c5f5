"""Stands for vLLM in the benchmark's engine processes, where the folder it was copied to is in
PYTHONPATH as `vllm`.

It knows prompts as a whole: those in `local` until they are dropped, and for ever where there is a
connector. An argument `behaviour` says what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

__version__ = "0.0.stub"

_COLD_S, _EXTERNAL_S, _LOCAL_S = 0.02, 0.004, 0.001


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.max_tokens: int = options["max_tokens"]
        self.counting = [*options.get("extra_args", {}).get("kv_transfer_params", {})]


class LLM:
    def __init__(
        self, block_size: int, behaviour: str = "", external: bool = False, **options: Any
    ) -> None:
        print("a greeting on stdout, where answers are expected")
        self._block_tokens, self._behaviour, self._external = block_size, behaviour, external
        self._local: set[tuple[int, ...]] = set()
        self._stored: set[tuple[int, ...]] = set()
        self._refusals = 2
        if behaviour == "no start":
            raise RuntimeError("this engine cannot start")
        if behaviour == "ready later":
            words = (
                "import time; time.sleep(0.3); print('all is ready', flush=True); time.sleep(600)"
            )
            subprocess.Popen([sys.executable, "-c", words])
        if behaviour == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(f"child {child.pid}", file=sys.stderr, flush=True)

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling: SamplingParams, use_tqdm: bool
    ) -> list[Any]:
        [prompt] = [tuple(each["prompt_token_ids"]) for each in prompts]
        if self._behaviour == "dies":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(7)
        if self._behaviour == "silent":
            time.sleep(600)
        local, found = prompt in self._local, self._external and prompt in self._stored
        time.sleep(_LOCAL_S if local else _EXTERNAL_S if found else _COLD_S)
        full = (len(prompt) - 1) // self._block_tokens * self._block_tokens
        external = full if found and not local else 0
        cached = full if local else external
        if self._behaviour == "finds all":
            cached = external = full
        self._local.add(prompt)
        self._stored.add(prompt)
        wrong = self._behaviour == "wrong" and bool(external)
        tokens = [sum(prompt) + at + wrong for at in range(sampling.max_tokens)]
        params = dict.fromkeys(sampling.counting, external) or None
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=tokens)],
                num_cached_tokens=cached,
                kv_transfer_params=params,
            )
        ]

    @property
    def llm_engine(self) -> Any:
        return _Engine(self)

    def reset_prefix_cache(self) -> bool:
        """Refused now and then, as while blocks are being stored."""
        self._refusals = 2 if self._refusals == 0 else self._refusals - 1
        if self._refusals or self._behaviour == "busy":
            return False
        self._local.clear()
        return True


class _Engine:
    """Last come first served: a step computes one prompt, and gives each request under way one more
    token."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._waiting: list[tuple[str, Any, SamplingParams]] = []
        self._running: dict[str, Any] = {}

    def add_request(self, request_id: str, prompt: Any, sampling: SamplingParams) -> None:
        self._waiting.append((request_id, prompt, sampling))

    def abort_request(self, request_ids: list[str]) -> None:
        known = {*self._running, *(each[0] for each in self._waiting)}
        assert request_ids and set(request_ids) == known, (request_ids, known)

    def step(self) -> list[Any]:
        if self._waiting:
            request_id, prompt, sampling = self._waiting.pop()
            [answer] = self._llm.generate([prompt], sampling, use_tqdm=False)
            reason = "abort" if prompt["prompt_token_ids"][0] == 13 else "length"
            self._running[request_id] = SimpleNamespace(answer=answer, reason=reason, shown=0)
        else:
            time.sleep(_LOCAL_S)
        return [self._output(request_id) for request_id in [*self._running]]

    def _output(self, request_id: str) -> Any:
        running = self._running[request_id]
        running.shown += 1
        tokens = running.answer.outputs[0].token_ids
        finished = running.shown == len(tokens)
        if finished:
            del self._running[request_id]
        return SimpleNamespace(
            finished=finished,
            request_id=f"{request_id}-0a1b",
            num_cached_tokens=running.answer.num_cached_tokens,
            outputs=[
                SimpleNamespace(token_ids=tokens[: running.shown], finish_reason=running.reason)
            ],
        )
