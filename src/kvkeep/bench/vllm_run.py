"""One vLLM engine in a process of its own, for the benchmark: prompts go in as lines of JSON, answers come out.

    parent                                     engine process: python -m kvkeep.bench.vllm_run
    start of the block                    ───► makes the engine                {"arguments": …}
                                          ◄─── {"vllm": "0.32.0"}              ready, after some 25 s
    ask(prompt, max_tokens)               ───► {"prompt": […], "max_tokens": 1, "counting": "…"}
                                          ◄─── {"ms": …, "tokens": […], "cached_tokens": …}
    serve(prompts, 8, 5.0, 16)            ───► {"prompts": [[…], …], "at_a_time": 8, "seconds": 5.0, …}
                                          ◄─── {"answers": {"0": […], …}, "tokens": …, …}
    drop_local_cache()                    ───► {"drop_within_s": 60}
                                          ◄─── {"dropped": true}
    end of the block                      ───► (no more input) ends; whoever is left of its group is killed

vLLM is imported in the engine process alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvkeep.errors import KVKeepError

_START_WITHIN_S = 600.0
_ANSWER_WITHIN_S = 300.0
_DROP_WITHIN_S = 60.0  # blocks that a connector still stores cannot be dropped
_END_WITHIN_S, _GIVE_UP_WITHIN_S = 30.0, 3.0  # when all went well, and when not
_SHOWN_LINES = 30

# -- the parent's end


@dataclass(frozen=True)
class Answer:
    """What came back for a prompt. `cached_tokens` were not computed."""

    ms: float
    tokens: list[int]
    cached_tokens: int


class EngineProcess:
    """Ready where the block begins, gone with all that it started where it ends. `counting` names what vLLM returns in
    kv_transfer_params for tokens found; without it vLLM's own count is taken. KVKeepError, with what it wrote to
    stderr, if it ends or falls silent."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        counting: str = "",
    ) -> None:
        self.name = name
        self.vllm = ""
        self._arguments = dict(arguments)
        self._environment = dict(environment)
        self._counting = counting

    def __enter__(self) -> EngineProcess:
        self._stderr = tempfile.TemporaryFile("w+")  # not a pipe: unread, it would block the engine
        # A session of its own: what the engine starts is in it too, and Ctrl-C is ours to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvkeep.bench.vllm_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment,
            text=True,
            start_new_session=True,
        )
        try:
            self._send({"arguments": self._arguments})
            self.vllm = self._receive(_START_WITHIN_S)["vllm"]
        except BaseException as error:  # guard: nobody else would end the process; raised again
            self.__exit__(type(error), error, None)
            raise
        return self

    def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        """Time is that until the last token, so with one token it is the time to the first."""
        self._send({"prompt": list(prompt), "max_tokens": max_tokens, "counting": self._counting})
        return Answer(**self._receive(_ANSWER_WITHIN_S))

    def serve(self, prompts: Sequence[list[int]], at_a_time: int, seconds: float, max_tokens: int) -> dict[str, Any]:
        """Serves prompts, so many at a time, until the time is over and those under way are done. `answers` by the
        prompt's place, `begun` prompts, `tokens` in the time, `failed` requests, and `seconds` that it took."""
        asked = {"prompts": list(prompts), "at_a_time": at_a_time, "seconds": seconds, "max_tokens": max_tokens}
        self._send(asked)
        return self._receive(seconds + _ANSWER_WITHIN_S)

    def drop_local_cache(self) -> None:
        """Drops the engine's own prefix cache; what its connector keeps stays."""
        self._send({"drop_within_s": _DROP_WITHIN_S})
        if not self._receive(_DROP_WITHIN_S + _ANSWER_WITHIN_S)["dropped"]:
            raise self._failure(f"could not drop its prefix cache within {_DROP_WITHIN_S:g} s: blocks are still in use")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with self._stderr, self._process as process:
            try:
                with contextlib.suppress(OSError):  # it may be gone already
                    self._process.stdin.close()
                self._wait(_END_WITHIN_S if kind is None else _GIVE_UP_WITHIN_S)
            finally:
                # Not reaped yet, so the number is still its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        until = time.monotonic() + seconds
        while not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except OSError:
            raise self._failure("ended") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next line. There is never more than one on the way."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while not select.select([self._process.stdout], [], [], 1.0)[0]:
            if self._wait(0):  # what it started may hold the pipe open
                raise self._failure("ended")
            if time.monotonic() > until:
                raise self._failure(f"said nothing for {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended")
        said: dict[str, Any] = json.loads(line)
        return said

    def _failure(self, what: str) -> KVKeepError:
        if what == "ended":
            self._wait(_GIVE_UP_WITHIN_S)  # pipes close before the last word is said
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()[-_SHOWN_LINES:]
        return KVKeepError(f"vLLM with connector {self.name} {what}. It said:\n" + ("\n".join(lines) or "(nothing)"))


# -- what the process does


def _main() -> None:
    line = sys.stdin.readline()
    if not line:  # whoever started us is gone
        return
    # Stdout is for answers; vLLM and what it starts write theirs to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        vllm = importlib.import_module("vllm")
        llm = vllm.LLM(**json.loads(line)["arguments"])
        print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_serve(vllm, llm, json.loads(line))), file=answers, flush=True)


def _serve(vllm: Any, llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if "drop_within_s" in asked:
        return {"dropped": _drop(llm, asked["drop_within_s"])}
    if "prompts" in asked:
        return _load(vllm, llm.llm_engine, asked)
    counting = asked["counting"]
    extra = {"extra_args": {"kv_transfer_params": {counting: 0}}} if counting else {}
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False, **extra
    )
    started = time.perf_counter()
    [answer] = llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
    ms = (time.perf_counter() - started) * 1e3
    cached = (answer.kv_transfer_params or {}).get(counting) if counting else answer.num_cached_tokens
    return {"ms": ms, "tokens": list(answer.outputs[0].token_ids), "cached_tokens": cached or 0}


def _load(vllm: Any, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    answers: dict[str, list[int]] = {}
    begun = under_way = failed = 0
    started = time.perf_counter()
    more = True
    while under_way or more:
        more = begun < len(asked["prompts"]) and time.perf_counter() - started < asked["seconds"]
        if more and under_way < asked["at_a_time"]:
            engine.add_request(f"{begun}", {"prompt_token_ids": asked["prompts"][begun]}, sampling)
            begun, under_way = begun + 1, under_way + 1
            continue
        for output in engine.step():
            if output.finished:
                under_way -= 1
                failed += output.outputs[0].finish_reason != "length"
                answers[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
    tokens, took = sum(map(len, answers.values())), time.perf_counter() - started
    return {"answers": answers, "begun": begun, "tokens": tokens, "failed": failed, "seconds": took}


def _drop(llm: Any, seconds: float) -> bool:
    """vLLM refuses while a connector holds blocks, as it does until they are stored."""
    until = time.monotonic() + seconds
    while llm.reset_prefix_cache() is False:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


if __name__ == "__main__":
    _main()
