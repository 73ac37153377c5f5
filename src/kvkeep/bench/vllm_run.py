"""One vLLM engine in a process of its own, for the benchmark: prompts go in as lines of JSON,
answers come out.

    parent                                     engine process: python -m kvkeep.bench.vllm_run
    ImportingProcess()                         imports vLLM
    start of the block                    ───► makes the engine                {"arguments": …}
                                          ◄─── {"vllm": "0.32.0"}              ready, after some 25 s
    ask(prompt, max_tokens)               ───► {"prompt": […], "max_tokens": 1, "counting": "…"}
                                          ◄─── {"ms": …, "tokens": […], "cached_tokens": …}
    load([lane, …], 5.0)                  ───► {"lanes": [{"prompts": [[…], …], …}, …], "seconds": 5.0, …}
                                          ◄─── {"lanes": [{"answers": {"0": "…", …}, …}, …],
                                          "seconds": …}
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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from kvkeep.bench.vllm_lanes import Lane, serve_conversations, serve_lanes
from kvkeep.errors import KVKeepError
from kvkeep.testing.process import wait_for

_START_WITHIN_S = 600.0
_ANSWER_WITHIN_S = _READY_WITHIN_S = 300.0
_CONVERSATIONS_WITHIN_S = 1800.0
_DROP_WITHIN_S = 60.0  # blocks that a connector still stores cannot be dropped
_END_WITHIN_S, _GIVE_UP_WITHIN_S = 30.0, 3.0  # when all went well, and when not
_SHOWN_LINES = 30

Engine = TypeVar("Engine", bound=Hashable)  # what engines are called

# -- the parent's end


@dataclass(frozen=True)
class Answer:
    """What came back for a prompt. `cached_tokens` were not computed."""

    ms: float
    tokens: list[int]
    cached_tokens: int


class ImportingProcess:
    """Imports vLLM, which takes a while, and then waits to be told which engine to make. Several
    may do so together, before any engine is there to be disturbed. A session of its own: what the
    engine starts is in it too, and Ctrl-C is ours to handle."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (not a pipe: unread, it would block the engine)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "kvkeep.bench.vllm_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        until = time.monotonic() + seconds
        while not os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def end(self, within_s: float = 0.0) -> None:
        """Gone with all that it started, in order if that takes no longer. A second time does
        nothing."""
        if self.popen.returncode is not None:
            return
        assert self.popen.stdin is not None
        with self.stderr, self.popen:
            try:
                with contextlib.suppress(OSError):  # it may be gone already
                    self.popen.stdin.close()
                self.wait(within_s)
            finally:
                # Not reaped yet, so the number is still its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.popen.pid, signal.SIGKILL)


@contextlib.contextmanager
def importing(
    engines: Iterable[Engine], environment: Mapping[str, str]
) -> Iterator[dict[Engine, ImportingProcess]]:
    """A process for each. All of them import vLLM together, before anything is measured: that is
    half of an engine's start."""
    spares: dict[Engine, ImportingProcess] = {}
    try:
        for engine in engines:
            spares[engine] = ImportingProcess(environment)
        yield spares
    finally:
        for spare in spares.values():
            spare.end()


class EngineProcess:
    """Ready where the block begins, gone with all that it started where it ends. `counting` names
    what vLLM returns in kv_transfer_params for tokens found; without it vLLM's own count is taken.
    `spare` is a process to take, or else it is started here. `ready_when` is what it says in its
    log when what goes on behind its start is over. KVKeepError, with what it wrote to stderr, if it
    ends or falls silent."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        counting: str = "",
        spare: ImportingProcess | None = None,
        ready_when: str = "",
    ) -> None:
        self.name = name
        self.vllm = ""
        self._arguments = dict(arguments)
        self._environment = dict(environment)
        self._counting = counting
        self._spare = spare
        self._ready_when = ready_when.encode()

    def __enter__(self) -> EngineProcess:
        self._process = self._spare or ImportingProcess(self._environment)
        try:
            self._send({"arguments": self._arguments})
            self.vllm = self._receive(_START_WITHIN_S)["vllm"]
        except BaseException as error:  # guard: nobody else would end the process; raised again
            self.__exit__(type(error), error, None)
            raise
        return self

    def wait_until_ready(self) -> None:
        until, log = time.monotonic() + _READY_WITHIN_S, self._process.stderr.fileno()
        # Not by reading on: the engine writes where the file was read last.
        while self._ready_when not in os.pread(log, os.fstat(log).st_size, 0):
            if self._process.wait(0):
                raise self._failure("ended")
            if time.monotonic() > until:
                raise self._failure(f"is not ready after {_READY_WITHIN_S:g} s")
            time.sleep(0.05)

    def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        """Time is that until the last token, so with one token it is the time to the first."""
        self._send({"prompt": list(prompt), "max_tokens": max_tokens, "counting": self._counting})
        return Answer(**self._receive(_ANSWER_WITHIN_S))

    def serve(
        self, prompts: Sequence[list[int]], at_a_time: int, seconds: float, max_tokens: int
    ) -> dict[str, Any]:
        """Serves prompts, so many at a time, until the time is over and those under way are done.
        `answers` by the prompt's place, `begun` prompts, `tokens` in the time, `failed` requests,
        and `seconds` that it took."""
        said = self.load([Lane(list(prompts), [max_tokens] * len(prompts), at_a_time)], seconds)
        [served] = said["lanes"]
        return {**served, "seconds": said["seconds"]}

    def load(self, lanes: Sequence[Lane], seconds: float, *, finish: bool = True) -> dict[str, Any]:
        """All lanes together, until the time is over and those under way are done, or with `finish`
        off are aborted: what came of each lane, and `seconds` that it took."""
        self._send({"lanes": [vars(lane) for lane in lanes], "seconds": seconds, "finish": finish})
        return self._receive(seconds + _ANSWER_WITHIN_S)

    def converse(
        self, questions: Sequence[Sequence[list[int]]], answer_tokens: int, at_a_time: int
    ) -> dict[str, Any]:
        """Serves whole conversations in waves: see `serve_conversations`."""
        asked = {"questions": questions, "answer_tokens": answer_tokens, "at_a_time": at_a_time}
        self._send({"conversations": asked})
        return self._receive(_CONVERSATIONS_WITHIN_S)

    def drop_local_cache(self) -> None:
        """Drops the engine's own prefix cache; what its connector keeps stays."""
        self._send({"drop_within_s": _DROP_WITHIN_S})
        if not self._receive(_DROP_WITHIN_S + _ANSWER_WITHIN_S)["dropped"]:
            raise self._failure(
                f"could not drop its prefix cache within {_DROP_WITHIN_S:g} s: blocks are still in use"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.end(_END_WITHIN_S if kind is None else _GIVE_UP_WITHIN_S)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.popen.stdin is not None
        try:
            print(json.dumps(message), file=self._process.popen.stdin, flush=True)
        except OSError:
            raise self._failure("ended") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next line. There is never more than one on the way."""
        assert self._process.popen.stdout is not None
        until = time.monotonic() + seconds
        while not wait_for(self._process.popen.stdout, 1_000):
            if self._process.wait(0):  # what it started may hold the pipe open
                raise self._failure("ended")
            if time.monotonic() > until:
                raise self._failure(f"said nothing for {seconds:g} s")
        line = self._process.popen.stdout.readline()
        if not line:
            raise self._failure("ended")
        said: dict[str, Any] = json.loads(line)
        return said

    def _failure(self, what: str) -> KVKeepError:
        if what == "ended":
            self._process.wait(_GIVE_UP_WITHIN_S)  # pipes close before the last word is said
        self._process.stderr.seek(0)
        lines = self._process.stderr.read().strip().splitlines()[-_SHOWN_LINES:]
        return KVKeepError(
            f"vLLM with connector {self.name} {what}. It said:\n"
            + ("\n".join(lines) or "(nothing)")
        )


# -- what the process does


def _main() -> None:
    # Stdout is for answers; vLLM and what it starts write theirs to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        vllm = importlib.import_module("vllm")
        make = vllm.LLM  # most of it is imported only now
        line = sys.stdin.readline()
        if not line:  # whoever started us is gone, or has no use for us
            return
        llm = make(**json.loads(line)["arguments"])
        print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_serve(vllm, llm, json.loads(line))), file=answers, flush=True)


def _serve(vllm: Any, llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if "drop_within_s" in asked:
        return {"dropped": _drop(llm, asked["drop_within_s"])}
    if "conversations" in asked:
        return serve_conversations(
            llm.llm_engine, partial(_sampling, vllm), **asked["conversations"]
        )
    if "lanes" in asked:
        lanes = [Lane(**lane) for lane in asked["lanes"]]
        return serve_lanes(
            llm.llm_engine,
            partial(_sampling, vllm),
            lanes,
            asked["seconds"],
            finish=asked["finish"],
        )
    counting = asked["counting"]
    extra = {"extra_args": {"kv_transfer_params": {counting: 0}}} if counting else {}
    sampling = _sampling(vllm, asked["max_tokens"], **extra)
    started = time.perf_counter()
    [answer] = llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
    ms = (time.perf_counter() - started) * 1e3
    cached = (
        (answer.kv_transfer_params or {}).get(counting) if counting else answer.num_cached_tokens
    )
    return {"ms": ms, "tokens": list(answer.outputs[0].token_ids), "cached_tokens": cached or 0}


def _sampling(vllm: Any, max_tokens: int, **extra: Any) -> Any:
    return vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **extra
    )


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
