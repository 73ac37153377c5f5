"""One vLLM engine in a process of its own, for benchmarks: prompts go in as lines of JSON, answers
come out.

    parent                          engine process: python -m kvkeep.bench.vllm_run
    start_process()                 imports vLLM
    start of the block        ───►  {"arguments": …}                     makes the engine, in some 25 s
                              ◄───  {"vllm": "0.32.0"}
    ask(prompt, max_tokens)   ───►  {"ask": {"prompt": […], "max_tokens": 1, "counting": "…"}}
                              ◄───  {"ms": …, "tokens": […], "cached_tokens": …}
    drop_local_cache()        ───►  {"drop": {"within_s": 60}}
                              ◄───  {"dropped": true}
    end of the block          ───►  (no more input) ends; what is left of its process group is killed

vLLM is imported in the engine process alone. A message names its handler; the load benchmarks add
handlers of their own to `main`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from kvkeep.testing.process import JsonProcess

Key = TypeVar("Key", bound=Hashable)
Handler = Callable[..., dict[str, Any]]

# -- the parent's end


@dataclass(frozen=True)
class Answer:
    """What came back for a prompt. `cached_tokens` were not computed."""

    ms: float
    tokens: list[int]
    cached_tokens: int


@dataclass(frozen=True)
class Patience:
    """How long an engine may take, in seconds."""

    start_s: float = 600.0
    answer_s: float = 300.0
    ready_s: float = 300.0
    drop_s: float = 60.0  # blocks that a connector still stores cannot be dropped
    end_s: float = 30.0  # when all went well
    give_up_s: float = 3.0  # when not


class EngineProcess:
    """Ready where the block begins, gone with all that it started where it ends.

    counting      what vLLM returns in kv_transfer_params for tokens found; without it, vLLM's own
                  count is taken
    spare         a process of `start_process` to use; without it, one is started
    ready_when    what the engine writes to its log when its pool is as fast as it will be

    KVKeepError, with what it wrote to stderr, if it ends or falls silent."""

    module: ClassVar = "kvkeep.bench.vllm_run"

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        counting: str = "",
        spare: JsonProcess | None = None,
        ready_when: str = "",
    ) -> None:
        self.name = name
        self.arguments = dict(arguments)
        self.patience = Patience()
        self.vllm = ""
        self._environment = environment
        self._counting = counting
        self._spare = spare
        self._ready_when = ready_when

    @classmethod
    def start_process(cls, environment: Mapping[str, str]) -> JsonProcess:
        """Imports vLLM, which is half of an engine's start, and waits for an engine's arguments."""
        return JsonProcess("vLLM", ("-m", cls.module), environment)

    @classmethod
    @contextlib.contextmanager
    def importing(
        cls, engines: Iterable[Key], environment: Mapping[str, str]
    ) -> Iterator[dict[Key, JsonProcess]]:
        """A process for each of several engines. All import vLLM at the same time, before anything
        is measured."""
        spares: dict[Key, JsonProcess] = {}
        try:
            for engine in engines:
                spares[engine] = cls.start_process(environment)
            yield spares
        finally:
            for spare in spares.values():
                spare.end()

    def __enter__(self) -> Self:
        self.process = self._spare or self.start_process(self._environment)
        self.process.name = f"vLLM with connector {self.name}"
        try:
            self.process.send({"arguments": self.arguments})
            self.vllm = self.process.receive(self.patience.start_s)["vllm"]
        except BaseException:  # guard: nobody else would end the process; raised again
            self.process.end(self.patience.give_up_s)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.end(self.patience.end_s if kind is None else self.patience.give_up_s)

    def wait_until_ready(self) -> None:
        until = time.monotonic() + self.patience.ready_s
        while self._ready_when not in self.process.log():
            if self.process.exit_code() is not None:
                raise self.process.failure("ended")
            if time.monotonic() > until:
                raise self.process.failure(f"is not ready after {self.patience.ready_s:g} s")
            time.sleep(0.05)

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None) -> Answer:
        """Time is that until the last token, so with one token it is the time to the first."""
        asked = {"prompt": list(prompt), "max_tokens": max_tokens, "counting": self._counting}
        salted = {"salt": salt} if salt else {}
        return Answer(**self.call("ask", asked | salted, self.patience.answer_s))

    def drop_local_cache(self) -> None:
        """Drops the engine's own prefix cache; what its connector keeps stays."""
        drop_s = self.patience.drop_s
        answer = self.call("drop", {"within_s": drop_s}, drop_s + self.patience.answer_s)
        if not answer["dropped"]:
            raise self.process.failure(
                f"could not drop its prefix cache within {drop_s:g} s: blocks are still in use"
            )

    def call(self, handler: str, asked: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """Sends a message to a handler of the process and returns its answer."""
        self.process.send({handler: asked})
        return self.process.receive(within_s)


# -- what the process does


def main(handlers: Mapping[str, Handler] | None = None) -> None:
    """Makes the engine that the first line asks for, and answers the others."""
    known: dict[str, Handler] = {"ask": _ask, "drop": _drop, **(handlers or {})}
    # Stdout is for answers; vLLM and what it starts write theirs to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        vllm = importlib.import_module("vllm")
        make = vllm.LLM  # most of it is imported only now
        line = sys.stdin.readline()
        if not line:  # the parent is gone, or needs no engine
            return
        llm = make(**json.loads(line)["arguments"])
        print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            [(name, asked)] = json.loads(line).items()
            print(json.dumps(known[name](vllm, llm, **asked)), file=answers, flush=True)


def sampling(vllm: Any, max_tokens: int, **extra: Any) -> Any:
    """vLLM's parameters for an answer of exactly this many tokens."""
    return vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **extra
    )


def _ask(
    vllm: Any, llm: Any, prompt: list[int], max_tokens: int, counting: str, salt: str = ""
) -> dict[str, Any]:
    extra = {"extra_args": {"kv_transfer_params": {counting: 0}}} if counting else {}
    parameters = sampling(vllm, max_tokens, **extra)
    asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    started = time.perf_counter()
    [answer] = llm.generate([asked], parameters, use_tqdm=False)
    ms = (time.perf_counter() - started) * 1e3
    cached = answer.num_cached_tokens
    if counting:
        cached = (answer.kv_transfer_params or {}).get(counting)
    return {"ms": ms, "tokens": list(answer.outputs[0].token_ids), "cached_tokens": cached or 0}


def _drop(vllm: Any, llm: Any, within_s: float) -> dict[str, Any]:
    """vLLM refuses while a connector holds blocks, as it does until they are stored."""
    until = time.monotonic() + within_s
    while llm.reset_prefix_cache() is False:
        if time.monotonic() > until:
            return {"dropped": False}
        time.sleep(0.02)
    return {"dropped": True}


if __name__ == "__main__":
    main()
