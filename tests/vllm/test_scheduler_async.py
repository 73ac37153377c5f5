"""vLLM's scheduler of GPUs, which schedules a step before it knows the last one's tokens: random
lives, in which every byte of KV that a step reads is checked, every load is told once, and nothing
stays behind."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import engine_parts
from engine_parts import COUNT, Engine, answer_to, full, needs_named_failures, request, window
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from kvkeep_lab.simulation.cache import SimulatedCache

SEEDS = range(30)
STEPS = 120
MODELS = [
    pytest.param((full(),), id="full"),
    pytest.param((full(), window()), id="full and window", marks=needs_named_failures),
]
BAD_BLOCKS = [
    lambda load: [],
    lambda load: list(range(load.blocks)),
    lambda load: [load.blocks - 1],
]


class AsyncEngine(Engine):
    """Its worker knows the tokens that it has sampled itself; the scheduler hears of them a step
    later."""

    ahead = True

    def __init__(self, cache: SimulatedCache, *specs: Any, **options: Any) -> None:
        def asynchronous(config: Any) -> None:
            config.scheduler_config.async_scheduling = True

        super().__init__(cache, *specs, change=asynchronous, **options)
        self.told: Counter[str] = Counter()
        update = self.connector.update_connector_output

        def spy(output: Any) -> None:
            update(output)
            self.told.update(output.finished_recving or ())  # what vLLM reads next

        self.connector.update_connector_output = spy  # type: ignore[method-assign]

    def _tokens(self, held: Request) -> list[int]:
        prompt = list(held.prompt_token_ids or ())
        return [*prompt, *answer_to(prompt, held.max_tokens + 4)]

    def _sample(self, held: Request, guessed: list[int]) -> list[int]:
        return [] if held.is_prefill_chunk else [self._tokens(held)[held.num_computed_tokens]]


@pytest.fixture(autouse=True)
def _asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_parts, "Scheduler", AsyncScheduler)


class Life:
    """An engine, and what happens to it."""

    def __init__(self, seed: int, specs: tuple[Any, ...], mode: str = "async") -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.often = (
            0.25 if mode == "async" else self.chance.choice([0.05, 0.1, 0.25])
        )  # to be alone now and then
        # The longest request has 47 tokens: 12 blocks in each of two groups, and vLLM keeps one
        # block for itself.
        room = {
            "num_blocks": self.chance.choice([25, 40, 64]),
            "budget": self.chance.choice([16, 64]),
        }
        self.engine = AsyncEngine(SimulatedCache(seed), *specs, extra={"kvkeep.load": mode}, **room)
        self.engine.cache.is_seen = seed % 2 == 0
        self.engine.worker.hasty = lambda: self.chance.random() < 0.5
        self.engine.is_told = lambda: self.chance.random() < 0.9
        self.in_step = 0
        if (worker := self.engine.rank.half) is not None:
            load_now = worker.load_now

            def spy(request_id: str, load: Any) -> Any:
                self.in_step += 1
                return load_now(request_id, load)

            worker.load_now = spy  # type: ignore[method-assign]
        self.asked: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self._stems = [self._some_tokens(self.chance.choice([8, 16, 24])) for _ in range(3)]

    def _some_tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(900) for _ in range(count)]

    def live(self) -> None:
        for number in range(STEPS):
            self._something(number)
            self.engine.step(delivers=self.chance.random() < 0.8)
        self.engine.worker.holds = False
        self.engine.worker.failing = BAD_BLOCKS[0]
        self.engine.run(most=600)

    def _something(self, number: int) -> None:
        engine, chance = self.engine, self.chance
        alive = [name for name, each in engine.scheduler.requests.items() if not each.is_finished()]
        roll = chance.random()
        if roll < self.often:
            tokens = [*chance.choice(self._stems), *self._some_tokens(chance.randrange(1, 12))]
            name, max_tokens = f"s{self.seed}n{number}", chance.choice([1, 2, 6, 12])
            each = request(tokens, name, max_tokens=max_tokens, params={COUNT: None})
            self.asked[each.request_id] = each
            engine.add(each)
        elif 0.25 <= roll < 0.32 and alive:
            self.aborted.add(name := chance.choice(alive))
            engine.abort(name)
        elif 0.25 <= roll < 0.40:
            engine.worker.holds = not engine.worker.holds
        elif 0.25 <= roll < 0.46:
            engine.worker.failing = chance.choice(BAD_BLOCKS)
        elif 0.25 <= roll < 0.50:
            with suppress(RuntimeError):  # vLLM's own, where something is being loaded
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif 0.25 <= roll < 0.54:
            engine.scheduler.reset_prefix_cache()
        elif 0.25 <= roll < 0.55:
            engine.connector.reset_cache()

    def check(self) -> None:
        for name, each in self.asked.items():
            right, got = (
                answer_to(each.prompt_token_ids or (), each.max_tokens),
                self.engine.answers[name],
            )
            assert got == (right[: len(got)] if name in self.aborted else right), name
        self.engine.check_counts(
            *(each for name, each in self.asked.items() if name not in self.aborted)
        )
        self.engine.settle()
        self.engine.check_nothing_left()
        assert repr(self.engine.rank.half).startswith(
            "WorkerSide(loading=[], reports=0, untold=[], invalid=[],"
        )


@pytest.mark.parametrize("mode", ["async", "auto"])
@pytest.mark.parametrize("apart", [False, True], ids=["one process", "two processes"])
@pytest.mark.parametrize("specs", MODELS)
def test_whatever_comes_each_load_is_told_once(
    specs: tuple[Any, ...], apart: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncEngine, "apart", apart)
    loads = told = in_step = 0
    for seed in SEEDS:
        life = Life(seed, specs, mode)
        assert f"joined={not apart}" in repr(life.engine.rank.half)
        life.live()
        life.check()
        loads += len(life.engine.worker.loads)
        told += life.engine.told.total()
        in_step += life.in_step
    assert loads == told + in_step > 10
    assert (in_step > 10) == (mode == "auto" and not apart and len(specs) == 1)
