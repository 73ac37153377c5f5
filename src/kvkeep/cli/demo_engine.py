"""An engine in a process of its own, for the demo: prompts go in as lines of JSON, answers come
out.

    parent                                    engine process: python -m kvkeep.cli.demo_engine
    EngineProcess(address, num_blocks)  ────► builds the model, connects     {"address": …, "num_blocks": …}
                                        ◄──── {"model": …}                         ready
    serve(questions)                    ────► {"questions": […]}
                                        ◄──── {"progress": {"answers": 0.4, …}}    after each step
                                        ◄──── {"answers": […]}
    end of the block                    ────► (no more input) stores what is left, and ends

What it writes to stderr is kept, and is part of the error if the process ends in any other way.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvkeep.testing.process import JsonProcess

_END_WITHIN_S = 30  # an engine whose server is gone waits for its last stores to time out


@dataclass(frozen=True)
class Question:
    """A prompt, whose it is, and how long the answer shall be."""

    salt: str
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What came back. Times are of the clock that all processes of this host share."""

    tokens: list[int]
    finish_reason: str
    ttft_ms: float
    arrived_s: float
    finished_s: float
    external_cached_tokens: int
    failed_loads: int


@dataclass(frozen=True)
class Progress:
    """`answers` counts those begun by their parts, `complete` only whole ones; `running` requests
    are computed."""

    answers: float
    complete: int
    running: int


class EngineProcess:
    """The parent's end. Without an address the engine has no cache at all, not even one of its own.
    `program` is what the interpreter runs: the engine, or whatever speaks as it does."""

    def __init__(
        self,
        address: str | None,
        num_blocks: int,
        program: Sequence[str] = ("-m", "kvkeep.cli.demo_engine"),
    ) -> None:
        self._first = {"address": address, "num_blocks": num_blocks}
        self.process = JsonProcess("the engine process", program)
        self.model = ""

    def __enter__(self) -> EngineProcess:
        try:
            self.process.send(self._first)
            self.model = self.process.receive()["model"]
        except BaseException:  # guard: nobody else would end the process; raised again
            self.process.end()
            raise
        return self

    def serve(
        self,
        questions: Sequence[Question],
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> list[Answer]:
        """Answers all questions together. KVKeepError, with what the process said, if it ends
        instead."""
        self.process.send({"questions": [dataclasses.asdict(each) for each in questions]})
        while "answers" not in (said := self.process.receive()):
            on_progress(Progress(**said["progress"]))
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


# -- what the process does


def _main() -> None:
    line = sys.stdin.readline()
    if not line:  # whoever started us is gone
        return
    # Here and not above: the command line must not load torch to show its help.
    from kvkeep.engine.demo_model import compute_threads, demo_model, describe, make_llm

    first = json.loads(line)
    # One thread: the other core is for copies and server, and a busy machine does not make threads
    # wait for each other.
    with (
        compute_threads(1),
        make_llm(
            demo_model(),
            first["address"],
            first["num_blocks"],
            prefix_caching=bool(first["address"]),
        ) as llm,
    ):
        _say({"model": describe()})
        for line in sys.stdin:
            _say({"answers": _answer(llm, json.loads(line)["questions"])})


def _answer(llm: Any, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from kvkeep.engine.llm import Prompt
    from kvkeep.engine.models.sampling import SamplingParams

    def report(done: int) -> None:
        scheduler = llm.engine.scheduler
        parts = [
            r.num_computed_tokens / (r.prompt_tokens + r.sampling.max_tokens)
            for r in scheduler.unfinished
        ]
        progress = Progress(done + sum(parts), done, len(scheduler.running))
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
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _main()
