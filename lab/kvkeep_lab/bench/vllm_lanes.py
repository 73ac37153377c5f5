"""A vLLM engine under load: requests that are under way together, and when each of their tokens
came. The engine's process is `python -m kvkeep_lab.bench.vllm_lanes`.

    lane with at_a_time    begins the next request when one is done    ├──┤├────┤├───┤
                                                                       ├────┤├──┤├───┤
    lane with every_s      begins one whenever it is due               ├─┤ ├──┤  ├─┤

Times are taken where vLLM hands tokens out, after each of its steps. Of many samples only figures
leave the process."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from kvkeep.bench.vllm_run import EngineProcess, main, sampling

_NOTHING_DUE_S = 0.001
_LOAD_ENDS_WITHIN_S = 300.0  # after the time to begin requests is over
_CONVERSATIONS_WITHIN_S = 1800.0


@dataclass(frozen=True)
class Lane:
    """Prompts of one kind, each with the tokens wanted for it. Exactly one of `at_a_time` and
    `every_s` is set. With `is_new` nothing is found of them: each step before their first token
    computes some of them."""

    prompts: list[list[int]]
    max_tokens: list[int]
    at_a_time: int = 0
    every_s: float = 0.0
    is_new: bool = False


class LoadedEngine(EngineProcess):
    """An engine process that also serves lanes and conversations."""

    module: ClassVar = "kvkeep_lab.bench.vllm_lanes"

    def load(self, lanes: Sequence[Lane], seconds: float, *, finish: bool = True) -> dict[str, Any]:
        """All lanes together, until the time is over and those under way are done, or with `finish`
        off are aborted: what came of each lane, and `seconds` that it took."""
        asked = {
            "lanes": [vars(lane) for lane in lanes],
            "seconds": seconds,
            "finish": finish,
        }
        return self.call("load", asked, seconds + _LOAD_ENDS_WITHIN_S)

    def serve(
        self, prompts: Sequence[list[int]], at_a_time: int, seconds: float, max_tokens: int
    ) -> dict[str, Any]:
        """A single lane: its figures, and `seconds` that it took."""
        said = self.load([Lane(list(prompts), [max_tokens] * len(prompts), at_a_time)], seconds)
        [served] = said["lanes"]
        return {**served, "seconds": said["seconds"]}

    def converse(
        self, questions: Sequence[Sequence[list[int]]], answer_tokens: int, at_a_time: int
    ) -> dict[str, Any]:
        """Whole conversations, in waves: see `serve_conversations`."""
        asked = {"questions": questions, "answer_tokens": answer_tokens, "at_a_time": at_a_time}
        return self.call("converse", asked, _CONVERSATIONS_WITHIN_S)


@dataclass
class _UnderWay:
    begun_at: float
    last_at: float = 0.0
    tokens: int = 0
    prompt_steps: int = 0  # of the engine, when its last token came


@dataclass
class _Served:
    """What has come of a lane so far."""

    lane: Lane
    begun: int = 0
    under_way: dict[int, _UnderWay] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    answer_tokens: dict[int, list[int]] = field(default_factory=dict)
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    # without those in which a prompt was computed
    decode_gaps_s: list[float] = field(default_factory=list)

    @property
    def left(self) -> bool:
        return self.begun < len(self.lane.prompts)

    def is_due(self, now: float) -> bool:
        if self.lane.at_a_time:
            return self.left and len(self.under_way) < self.lane.at_a_time
        return self.left and now >= (self.begun + 1) * self.lane.every_s

    def begin(self, now: float) -> int:
        """The prompt's place."""
        place = self.begun
        self.under_way[place] = _UnderWay(now)
        self.begun += 1
        return place

    @property
    def computes_prompt(self) -> bool:
        """Whether the next step does, as far as can be told before it."""
        return self.lane.is_new and any(not request.tokens for request in self.under_way.values())

    def is_first(self, place: int, output: Any) -> bool:
        """Whether a prompt's last tokens were computed just now."""
        return not self.under_way[place].tokens and bool(output.outputs[0].token_ids)

    def hear(self, place: int, output: Any, now: float, prompt_steps: int) -> None:
        """vLLM shows all tokens of a request so far. So many steps have computed prompts."""
        request, shown = self.under_way[place], output.outputs[0].token_ids
        if len(shown) > request.tokens:
            if request.tokens:
                self.gaps_s.append(now - request.last_at)
                if prompt_steps == request.prompt_steps:
                    self.decode_gaps_s.append(now - request.last_at)
            else:
                self.ttfts_s.append(now - request.begun_at)
                self.prompt_tokens += len(self.lane.prompts[place])
                self.cached_tokens += output.num_cached_tokens or 0
            self.tokens += len(shown) - request.tokens
            request.tokens, request.last_at, request.prompt_steps = len(shown), now, prompt_steps
        if output.finished:
            del self.under_way[place]
            self.failed += output.outputs[0].finish_reason != "length"
            self.answers[str(place)] = digest(shown)
            self.answer_tokens[place] = list(shown)

    def figures(self) -> dict[str, Any]:
        return {
            "begun": self.begun,
            "done": len(self.answers),
            "failed": self.failed,
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_ms": _figures(self.ttfts_s),
            "itl_ms": _figures(self.gaps_s),
            "itl_decode_ms": _figures(self.decode_gaps_s),
        }


def digest(tokens: Sequence[int]) -> str:
    """Stands for an answer where it is compared with another."""
    return hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]


def _figures(samples_s: Sequence[float]) -> dict[str, Any]:
    if not samples_s:
        return {"samples": 0, "mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(samples_s, [50, 99]) * 1e3
    mean = float(np.mean(samples_s)) * 1e3
    return {"samples": len(samples_s), "mean": mean, "p50": float(p50), "p99": float(p99)}


def serve_conversations(
    engine: Any,
    sample: Callable[[int], Any],
    questions: Sequence[Sequence[list[int]]],
    answer_tokens: int,
    at_a_time: int,
) -> dict[str, Any]:
    """Serves `questions[turn][conversation]` in waves, one per turn. A wave sends every
    conversation's history with its next question, `at_a_time` requests at a time, and ends with the
    last answer; the next wave follows at once. Returns the figures of each wave and the total
    time."""
    histories: list[list[int]] = [[] for _ in questions[0]]
    waves: list[dict[str, Any]] = []
    started = time.perf_counter()
    for asked in questions:
        histories = [[*history, *more] for history, more in zip(histories, asked, strict=True)]
        wave = _Served(Lane(histories, [answer_tokens] * len(histories), at_a_time))
        seconds = _serve(engine, sample, [wave], math.inf, finish=True)
        waves.append({**wave.figures(), "seconds": seconds})
        histories = [
            [*history, *wave.answer_tokens[place]] for place, history in enumerate(histories)
        ]
    return {"waves": waves, "seconds": time.perf_counter() - started}


def serve_lanes(
    engine: Any,
    sample: Callable[[int], Any],
    lanes: Sequence[Lane],
    seconds: float,
    *,
    finish: bool,
) -> dict[str, Any]:
    """Begins no more requests when the time is over; those under way are finished, or else
    aborted."""
    served = [_Served(lane) for lane in lanes]
    took = _serve(engine, sample, served, seconds, finish=finish)
    return {"lanes": [each.figures() for each in served], "seconds": took}


def _serve(
    engine: Any,
    sample: Callable[[int], Any],
    served: Sequence[_Served],
    seconds: float,
    *,
    finish: bool,
) -> float:
    """Serves the requests and returns the time that it took."""
    prompt_steps = 0
    started = time.perf_counter()
    while True:
        if (now := time.perf_counter() - started) < seconds:
            for number, each in enumerate(served):
                while each.is_due(now):
                    place = each.begin(now)
                    prompt = {"prompt_token_ids": each.lane.prompts[place]}
                    engine.add_request(
                        f"{number}.{place}", prompt, sample(each.lane.max_tokens[place])
                    )
                    now = time.perf_counter() - started
        elif not finish:
            break
        if any(each.under_way for each in served):
            computes_prompt = any(each.computes_prompt for each in served)
            outputs = engine.step()
            now = time.perf_counter() - started
            heard = [
                (*map(int, output.request_id.partition("-")[0].split(".")), output)
                for output in outputs
            ]
            prompt_steps += computes_prompt or any(
                served[number].is_first(place, output) for number, place, output in heard
            )
            for number, place, output in heard:
                served[number].hear(place, output, now, prompt_steps)
        elif now < seconds and any(each.left for each in served):
            time.sleep(_NOTHING_DUE_S)
        else:
            break
    took = time.perf_counter() - started
    rest = [f"{number}.{place}" for number, each in enumerate(served) for place in each.under_way]
    if rest:
        engine.abort_request(rest)
    return took


def _load(
    vllm: Any, llm: Any, lanes: list[dict[str, Any]], seconds: float, finish: bool
) -> dict[str, Any]:
    made = [Lane(**lane) for lane in lanes]
    return serve_lanes(llm.llm_engine, partial(sampling, vllm), made, seconds, finish=finish)


def _converse(vllm: Any, llm: Any, **asked: Any) -> dict[str, Any]:
    return serve_conversations(llm.llm_engine, partial(sampling, vllm), **asked)


if __name__ == "__main__":
    main({"load": _load, "converse": _converse})
