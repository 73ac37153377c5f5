"""Lanes keep to their number and their pace, and times are those of tokens. The engine is scripted,
and so is time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep_lab.bench import vllm_lanes
from kvkeep_lab.bench.vllm_lanes import Lane, LoadedEngine, digest, serve_conversations, serve_lanes

STEP_S = 0.1


class Engine:
    """A step takes its time, longer where a prompt is new, and gives a token to each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.most, self.aborted = 0.0, 0, list[str]()
        self.begun: dict[str, float] = {}
        self.running: dict[str, SimpleNamespace] = {}
        self.silent_steps = 0  # before the first token of those that arrive
        self.skips: dict[str, int] = {}  # so many tokens are missed while another begins
        clock = SimpleNamespace(perf_counter=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(vllm_lanes, "time", clock)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def add_request(self, request_id: str, prompt: dict[str, list[int]], max_tokens: int) -> None:
        self.begun[request_id] = self.now
        self.running[request_id] = SimpleNamespace(
            prompt=prompt["prompt_token_ids"], most=max_tokens, tokens=[], waited=0
        )
        self.most = max(self.most, len(self.running))

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def step(self) -> list[Any]:
        self.now += STEP_S + STEP_S * any(not each.tokens for each in self.running.values())
        outputs = []
        for request_id, each in [*self.running.items()]:
            if request_id.startswith("1.") and each.waited < self.silent_steps:
                each.waited += 1
                continue
            if self.skips.get(request_id) and any(name != request_id for name in self.begun):
                self.skips[request_id] -= 1
                continue
            each.tokens.append(each.prompt[0] + len(each.tokens))
            finished = len(each.tokens) == each.most
            reason = "error" if each.prompt[0] == 13 else "length"
            outputs.append(
                SimpleNamespace(
                    request_id=f"{request_id}-abc",
                    finished=finished,
                    num_cached_tokens=len(each.prompt) // 2,
                    outputs=[SimpleNamespace(token_ids=list(each.tokens), finish_reason=reason)],
                )
            )
            if finished:
                del self.running[request_id]
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def serve(
    engine: Engine, *lanes: Lane, seconds: float = 1000.0, finish: bool = True
) -> dict[str, Any]:
    return serve_lanes(engine, lambda max_tokens: max_tokens, lanes, seconds, finish=finish)


def test_so_many_are_under_way_at_a_time(engine: Engine) -> None:
    said = serve(engine, Lane([[at] * 10 for at in range(6)], [3] * 6, at_a_time=2))
    [lane] = said["lanes"]
    assert engine.most == 2 and not engine.aborted
    # Three pairs: the first token takes 0.2 s, and two more 0.1 s each.
    assert said["seconds"] == pytest.approx(1.2)
    assert (lane["begun"], lane["done"], lane["failed"]) == (6, 6, 0)
    assert (lane["prompt_tokens"], lane["tokens"], lane["cached_tokens"]) == (60, 18, 30)
    assert lane["ttft_ms"] == pytest.approx(
        {"samples": 6, "mean": 200.0, "p50": 200.0, "p99": 200.0}
    )
    assert lane["itl_ms"] == pytest.approx(
        {"samples": 12, "mean": 100.0, "p50": 100.0, "p99": 100.0}
    )
    assert lane["answers"]["4"] == digest([4, 5, 6]) and len(set(lane["answers"].values())) == 6


def test_when_time_is_over_those_under_way_are_finished(engine: Engine) -> None:
    said = serve(engine, Lane([[at] for at in range(9)], [5] * 9, at_a_time=2), seconds=0.7)
    assert said["lanes"][0]["begun"] == said["lanes"][0]["done"] == 4 and said[
        "seconds"
    ] == pytest.approx(1.2)


def test_others_arrive_at_a_pace_and_what_they_delay_is_seen(engine: Engine) -> None:
    decoding, arriving = (
        Lane([[1]] * 4, [1000] * 4, at_a_time=2),
        Lane([[2] * 8] * 9, [1] * 9, every_s=1.0),
    )
    said = serve(engine, decoding, arriving, seconds=5.0, finish=False)
    slow, large = said["lanes"]
    assert [engine.begun[f"1.{at}"] for at in range(4)] == pytest.approx(
        [1.0, 2.0, 3.0, 4.0], abs=STEP_S + 1e-6
    )
    assert (large["done"], large["itl_ms"]["samples"]) == (4, 0)
    assert slow["itl_ms"]["p50"] == pytest.approx(100.0) and slow["itl_ms"]["p99"] == pytest.approx(
        200.0
    )
    alone = slow["itl_decode_ms"]
    assert alone["p50"] == alone["p99"] == pytest.approx(100.0), (
        "no prompt was computed between those"
    )
    assert alone["samples"] == slow["itl_ms"]["samples"] - 8, "two requests, four prompts"
    assert slow["done"] == 0 and slow["answers"] == {} and sorted(engine.aborted) == ["0.0", "0.1"]


@pytest.mark.parametrize("is_new", [True, False])
def test_steps_before_a_new_prompts_first_token_compute_it(engine: Engine, is_new: bool) -> None:
    decoding = Lane([[1]], [1000], at_a_time=1)
    arriving = Lane([[2] * 8] * 9, [1] * 9, every_s=1.0, is_new=is_new)
    engine.silent_steps = 3  # of one that is loaded, others decode meanwhile
    [slow, _] = serve(engine, decoding, arriving, seconds=3.99, finish=False)["lanes"]
    steps = slow["itl_ms"]["samples"] - slow["itl_decode_ms"]["samples"]
    assert steps == 3 * (4 if is_new else 1)


def test_a_token_that_comes_late_has_waited_for_all_steps_since_the_last(engine: Engine) -> None:
    engine.skips = {"0.0": 2}
    decoding, arriving = Lane([[1]], [1000], at_a_time=1), Lane([[2] * 8], [1], every_s=1.0)
    [slow, _] = serve(engine, decoding, arriving, seconds=2.0, finish=False)["lanes"]
    assert slow["itl_ms"]["samples"] - slow["itl_decode_ms"]["samples"] == 1
    assert slow["itl_decode_ms"]["p99"] == pytest.approx(100.0)


def test_with_nothing_under_way_the_next_is_waited_for(engine: Engine) -> None:
    said = serve(engine, Lane([[1], [1]], [1, 1], every_s=1.0), seconds=5.0)
    assert said["lanes"][0]["done"] == 2 and said["seconds"] == pytest.approx(2.2, abs=0.01)


def test_failed_requests_are_counted(engine: Engine) -> None:
    [lane] = serve(engine, Lane([[13], [14]], [2, 2], at_a_time=2))["lanes"]
    assert (lane["done"], lane["failed"]) == (2, 1)


def test_without_samples_there_are_no_figures(engine: Engine) -> None:
    [lane] = serve(engine, Lane([], [], at_a_time=2))["lanes"]
    assert (
        lane["ttft_ms"]
        == lane["itl_ms"]
        == lane["itl_decode_ms"]
        == {"samples": 0, "mean": None, "p50": None, "p99": None}
    )


def test_conversations_go_on_in_waves_with_the_answers_they_got(engine: Engine) -> None:
    asked = [[[1, 2], [5, 6], [9, 9]], [[3], [7], [9]]]
    sent: list[list[int]] = []
    add = engine.add_request

    def adding(request_id: str, prompt: dict[str, list[int]], max_tokens: int) -> None:
        sent.append(prompt["prompt_token_ids"])
        add(request_id, prompt, max_tokens)

    engine.add_request = adding  # type: ignore[method-assign]
    said = serve_conversations(engine, lambda max_tokens: max_tokens, asked, 2, 2)
    # An answer counts up from the first token of its prompt.
    first = [[1, 2], [5, 6], [9, 9]]
    assert sent == [*first, [1, 2, 1, 2, 3], [5, 6, 5, 6, 7], [9, 9, 9, 10, 9]]
    assert engine.most == 2 and [wave["done"] for wave in said["waves"]] == [3, 3]
    assert said["waves"][1]["prompt_tokens"] == 15
    assert said["seconds"] == pytest.approx(sum(wave["seconds"] for wave in said["waves"]))


# -- in a process, whose vLLM is a stub


@pytest.fixture
def around(stubbed_vllm: Any) -> dict[str, str]:
    """An environment whose vLLM is the stub."""
    environment: dict[str, str] = stubbed_vllm.environment
    return environment


def test_a_stream_is_served_until_time_is_over_and_all_are_done(around: dict[str, str]) -> None:
    prompts = [[at] * 40 for at in range(200)]
    with LoadedEngine("some", {"block_size": 32}, around) as running:
        served = running.serve(prompts, 4, 0.3, 2)
        rest = running.serve(prompts[:6], 4, 60.0, 2)
    begun = served["begun"]
    assert 4 <= begun < 200 and set(served["answers"]) == {str(at) for at in range(begun)}
    assert (
        served["answers"]["3"] == digest([120, 121])
        and served["tokens"] == 2 * begun
        and served["seconds"] >= 0.3
    )
    assert served["failed"] == (begun > 13)
    assert rest["begun"] == len(rest["answers"]) == 6 and rest["seconds"] < 60


def test_lanes_are_served_together_and_the_rest_is_aborted(around: dict[str, str]) -> None:
    decoding = Lane([[at] * 4 for at in range(50)], [10_000] * 50, at_a_time=2)
    arriving = Lane([[at] * 40 for at in range(3)], [1] * 3, every_s=0.05)
    with LoadedEngine("some", {"block_size": 32}, around) as running:
        said = running.load([decoding, arriving], 0.5, finish=False)
        assert running.ask(list(range(100)), 2).tokens, "it goes on"
    assert [each["begun"] for each in said["lanes"]] == [2, 3] and [
        each["done"] for each in said["lanes"]
    ] == [0, 3]
    assert said["lanes"][0]["itl_ms"]["samples"] > 20 and said["seconds"] >= 0.5
