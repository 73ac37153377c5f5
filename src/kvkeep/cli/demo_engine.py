"""The engine processes of `kvkeep demo`: prompts go in, answers come out."""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvkeep.testing.process import JsonProcess

_END_WITHIN_S = 30  # an engine whose server is gone waits for its last stores to time out


@dataclass(frozen=True)
class Question:
    """A prompt, the salt of its user, and the length of the answer."""

    salt: str
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Times are of the clock that all processes of this host share."""

    tokens: list[int]
    finish_reason: str
    ttft_ms: float
    arrived_s: float
    finished_s: float
    external_cached_tokens: int
    failed_loads: int


@dataclass(frozen=True)
class EngineProgress:
    """`answers` counts begun ones by their parts, `complete` only whole ones; `running` are the
    requests being computed."""

    answers: float
    complete: int
    running: int


class EngineProcess:
    """An engine in a process of its own; prompts go in as lines of JSON, answers come out. Without
    an address the engine has no cache at all, not even one of its own. `extra`: further options of
    the connector. `inside`: what goes before the command, to run it elsewhere.

        parent                        engine process: python -m kvkeep.cli.demo_engine
        EngineProcess(address)  ────► builds the model, connects       {"address": …, …}
                                ◄──── {"model": …}                     ready
        serve(questions)        ────► {"questions": […]}
                                ◄──── {"progress": {"answers": …}}     after each step
                                ◄──── {"answers": […]}
        end of the block        ────► (end of input) stores what is left, and ends"""

    def __init__(
        self,
        address: str | None,
        num_blocks: int,
        extra: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
        program: Sequence[str] = ("-m", "kvkeep.cli.demo_engine"),
    ) -> None:
        self._first = {"address": address, "num_blocks": num_blocks, "extra": dict(extra or {})}
        self.process = JsonProcess("the engine process", program, inside=inside)
        self.model = ""

    def __enter__(self) -> EngineProcess:
        try:
            self.process.send(self._first)
            self.model = self.process.receive()["model"]
        except BaseException:  # guard: the process would stay behind; raised again
            self.process.end()
            raise
        return self

    def serve(
        self,
        questions: Sequence[Question],
        on_progress: Callable[[EngineProgress], None] = lambda progress: None,
    ) -> list[Answer]:
        """Answers all questions together. KVKeepError, with what the process said, if it ends
        instead."""
        self.process.send({"questions": [dataclasses.asdict(each) for each in questions]})
        while "answers" not in (said := self.process.receive()):
            on_progress(EngineProgress(**said["progress"]))
        return [Answer(**each) for each in said["answers"]]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.process.end()
        elif code := self.process.end(_END_WITHIN_S):
            raise self.process.failure(f"ended with exit code {code}")


def same_tokens(answers: Sequence[Answer], reference: Sequence[Answer]) -> bool:
    """Whether every answer is complete and, token by token, the one without a cache."""
    return len(answers) == len(reference) > 0 and all(
        mine.tokens == other.tokens and mine.finish_reason == other.finish_reason == "length"
        for mine, other in zip(answers, reference, strict=True)
    )


# -- inside the engine process


def serve_engine() -> None:
    """What the process runs: answers what comes as lines on stdin."""
    line = sys.stdin.readline()
    if not line:  # the parent is gone
        return
    # Not at the top: the command line must not load torch to show its help.
    from kvkeep.engine.demo_model import compute_threads, demo_model, describe, make_llm

    first = json_text.loads(line)
    # One thread, so that threads do not wait for each other on a busy machine.
    with (
        compute_threads(1),
        make_llm(
            demo_model(),
            first["address"],
            first["num_blocks"],
            prefix_caching=bool(first["address"]),
            extra=first["extra"],
        ) as llm,
    ):
        _say({"model": describe()})
        for line in sys.stdin:
            _say({"answers": _answer(llm, json_text.loads(line)["questions"])})


def _answer(llm: Any, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from kvkeep.engine.llm import Prompt
    from kvkeep.engine.models.sampling import SamplingParams

    def report(done: int) -> None:
        scheduler = llm.engine.scheduler
        parts = [
            r.num_computed_tokens / (r.prompt_tokens + r.sampling.max_tokens)
            for r in scheduler.unfinished
        ]
        progress = EngineProgress(done + sum(parts), done, len(scheduler.running))
        _say({"progress": dataclasses.asdict(progress)})

    prompts = [
        Prompt(each["prompt"], each["salt"], sampling=SamplingParams(max_tokens=each["max_tokens"]))
        for each in questions
    ]
    return [
        dataclasses.asdict(
            Answer(
                each.token_ids,
                each.finish_reason,
                each.metrics.ttft_ms,
                each.metrics.arrived_s,
                each.metrics.finished_s,
                each.metrics.external_cached_tokens,
                each.metrics.failed_loads,
            )
        )
        for each in llm.generate(prompts, on_progress=report)
    ]


def _say(message: dict[str, Any]) -> None:
    print(json_text.dumps(message), flush=True)


if __name__ == "__main__":
    serve_engine()
