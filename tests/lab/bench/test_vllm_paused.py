"""What the benchmark makes of two engines and a server; the engines are scripted here."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvkeep.bench import vllm_session
from kvkeep.bench.vllm_run import Answer
from kvkeep.bench.vllm_session import Turns
from kvkeep.errors import Unavailable
from kvkeep_lab.bench import vllm_paused

STREAM = [[at] * 4 for at in range(400)]


class Server:
    """Remembers its signals. `http` is not asked: `Stored` is replaced."""

    http = "nowhere"

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number)


class Engine:
    """Answers each prompt with its own sum, so many requests a window."""

    def __init__(
        self, a_window: int, wrong_from: int = 10**9, failed: int = 0, hits_from: int = 0
    ) -> None:
        self.a_window, self.wrong_from, self.failed, self.hits_from = (
            a_window,
            wrong_from,
            failed,
            hits_from,
        )
        self.asked = self.dropped = 0

    def serve(
        self, prompts: Sequence[list[int]], at_a_time: int, seconds: float, max_tokens: int
    ) -> dict[str, Any]:
        served = list(prompts[: self.a_window])
        answers = {str(at): self._tokens(prompt) for at, prompt in enumerate(served)}
        tokens = sum(map(len, answers.values()))
        return {
            "answers": answers,
            "begun": len(served),
            "tokens": tokens,
            "failed": self.failed,
            "seconds": seconds,
        }

    def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        self.asked += 1
        return Answer(1.0, self._tokens(prompt), 4 if self.dropped > self.hits_from else 0)

    def drop_local_cache(self) -> None:
        self.dropped += 1

    def _tokens(self, prompt: list[int]) -> list[int]:
        return [sum(prompt) + (prompt[0] >= self.wrong_from)] * 3


def measure(
    monkeypatch: pytest.MonkeyPatch, none: Engine, kvkeep: Engine, seconds: int = 15
) -> tuple[Any, Server]:
    monkeypatch.setattr(vllm_paused.Stored, "count", lambda self: 7)
    monkeypatch.setattr(vllm_paused, "_PAUSES_AFTER_S", 0.01)
    monkeypatch.setattr(vllm_session, "SILENT_AFTER_S", 0.0)  # these engines do not spin
    server = Server()
    engines: Any = {"none": none, "kvkeep": kvkeep}
    return vllm_paused._measure(server, engines, STREAM, seconds, 8), server  # type: ignore[arg-type]


def test_the_server_is_paused_once_and_goes_on_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    result, server = measure(monkeypatch, Engine(20), Engine(19))
    assert server.signals == [signal.SIGSTOP, signal.SIGCONT]
    assert (result["paused_seconds"], result["ratio"], result["failed_requests"]) == (15, 0.95, 0)
    assert result["requests"] == {"none": 60, "kvkeep": 57} and result["compared_requests"] == 57
    assert result["same_tokens"] and result["cached_tokens_after"] == 4


def test_an_engine_serves_when_the_other_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    none, kvkeep = Engine(20), Engine(20)
    now: list[object] = []
    turn, serve = Turns.turn, Engine.serve

    @contextmanager
    def watched(self: Turns, engine: str) -> Iterator[None]:
        with turn(self, engine):
            now.append({"none": none, "kvkeep": kvkeep}[engine])
            yield
            now.append(None)

    def served(self: Engine, *asked: Any) -> dict[str, Any]:
        assert now[-1] is self
        return serve(self, *asked)

    monkeypatch.setattr(Turns, "turn", watched)
    monkeypatch.setattr(Engine, "serve", served)
    measure(monkeypatch, none, kvkeep)
    assert len(now) == 2 * 2 * (1 + 3), "a window to warm up, three that count"


def test_a_wrong_token_under_load_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = measure(monkeypatch, Engine(20), Engine(20, wrong_from=30))
    assert not result["same_tokens"]


def test_failed_requests_and_lost_throughput_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = measure(monkeypatch, Engine(20), Engine(10, failed=2))
    assert (result["failed_requests"], result["ratio"]) == (6, 0.5)


def test_caching_may_take_a_few_prompts_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kvkeep = Engine(20, hits_from=3)
    result, _ = measure(monkeypatch, Engine(20), kvkeep)
    assert result["cached_tokens_after"] == 4 and kvkeep.dropped == 4


def test_caching_that_does_not_come_back_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_paused, "_RESUMES_WITHIN_S", 0.5)
    with pytest.raises(Unavailable, match="did not resume"):
        measure(monkeypatch, Engine(20), Engine(20, hits_from=10**9))


def test_the_stream_shares_prefixes_and_nothing_else() -> None:
    class Model:
        vocab_size = 1000

    stream = vllm_paused._stream(Model())  # type: ignore[arg-type]
    prefixes = {tuple(prompt[: vllm_paused._PREFIX_TOKENS]) for prompt in stream}
    assert len(prefixes) == vllm_paused._PREFIXES and len(
        {tuple(prompt) for prompt in stream}
    ) == len(stream)
