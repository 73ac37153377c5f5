"""Blocks that are on a tier only: the engine waits for them within patience, serves others
meanwhile, and every answer is the one that it gives without a cache."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.client.options import ClientOptions
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep_lab.simulation.cache import SimulatedCache
from kvkeep_lab.simulation.oracle import OracleModel

CONFIG = EngineConfig(block_tokens=4, num_blocks=64, tensor_parallel_size=2)
PROMPT = list(range(41))
OTHER = list(range(50, 91))
BLOCK_MS = 10


class World:
    """A server with a tier, and engines that come one after the other."""

    def __init__(self) -> None:
        self.cache = SimulatedCache(1)
        self.tiers = self.cache.add_tier(BLOCK_MS)

    def engine(self, **config: Any) -> Engine:
        return Engine(OracleModel(), EngineConfig(**vars(CONFIG) | config), self.cache)

    def finish(self, engine: Engine, *requests: Request) -> None:
        for _ in range(5_000):
            if not (engine.busy or engine.has_jobs):
                return
            engine.step()
            self.cache.pass_time(2)
        raise AssertionError(f"stuck: {requests}")

    def answer(self, engine: Engine, prompt: list[int], **more: Any) -> Request:
        request = engine.add(prompt, SamplingParams(max_tokens=6), **more)
        self.finish(engine, request)
        return request

    @property
    def now_ms(self) -> int:
        return self.cache.network.clock.now_ms


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def expected() -> list[int]:
    engine = Engine(OracleModel(), CONFIG)
    request = engine.add(PROMPT, SamplingParams(max_tokens=6))
    while engine.busy:
        engine.step()
    return request.output_tokens


def patience(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """For the clients of all engines that are made from now on."""
    monkeypatch.setattr(
        ClientOptions, "patience_ms", ClientOptions(tier_patience=policy).patience_ms
    )


@pytest.mark.parametrize("sync_loads", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_prompt_that_only_the_tier_has_is_loaded(
    world: World, expected: list[int], restarts: bool, sync_loads: bool
) -> None:
    assert world.answer(world.engine(), PROMPT).output_tokens == expected
    world.tiers.take_down()
    if restarts:
        world.cache.restart_server()
    found = world.answer(world.engine(sync_loads=sync_loads), PROMPT)
    assert found.output_tokens == expected
    assert found.metrics.external_cached_tokens == 40
    assert world.tiers.promoted >= 10
    world.cache.check_nothing_held()


def test_others_are_served_while_one_waits(world: World, expected: list[int]) -> None:
    world.answer(world.engine(), PROMPT)
    world.tiers.take_down()
    engine = world.engine()
    waiting = engine.add(PROMPT, SamplingParams(max_tokens=6))
    other = engine.add(OTHER, SamplingParams(max_tokens=6))
    began_ms = world.now_ms
    while not other.finish_reason:
        engine.step()
        world.cache.pass_time(2)
    assert not waiting.output_tokens and world.now_ms - began_ms < 10 * BLOCK_MS
    world.finish(engine)
    assert waiting.output_tokens == expected and waiting.metrics.external_cached_tokens == 40


@pytest.mark.parametrize(
    ("policy", "blocks"), [("best_effort", 0), ("timeout=55", 5), ("timeout=200", 10), ("wait", 10)]
)
def test_patience_decides_how_much_is_loaded(
    world: World, expected: list[int], monkeypatch: pytest.MonkeyPatch, policy: str, blocks: int
) -> None:
    world.answer(world.engine(), PROMPT)
    world.tiers.take_down()
    patience(monkeypatch, policy)
    found = world.answer(world.engine(), PROMPT)
    assert found.output_tokens == expected
    assert abs(found.metrics.external_cached_tokens // 4 - blocks) <= (0 < blocks < 10)


def test_a_stalled_tier_costs_no_more_than_patience(world: World, expected: list[int]) -> None:
    world.answer(world.engine(), PROMPT)
    world.tiers.take_down()
    world.tiers.stalled = True
    engine, began_ms = world.engine(), world.now_ms
    found = world.answer(engine, PROMPT)
    assert found.output_tokens == expected and found.metrics.external_cached_tokens == 0
    assert world.now_ms - began_ms < 300
    world.cache.check_nothing_held()


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(world: World) -> None:
    world.answer(world.engine(), PROMPT)
    world.tiers.take_down()
    engine = world.engine()
    for steps in range(1, 60, 7):
        request = engine.add(PROMPT, SamplingParams(max_tokens=6))
        for _ in range(steps):
            engine.step()
            world.cache.pass_time(2)
        engine.abort(request.request_id)
        world.finish(engine)
        world.cache.check_nothing_held()
        engine.scheduler.pool.forget_all()
        world.tiers.take_down()


def test_a_request_that_announces_its_prompt_does_not_wait(
    world: World, expected: list[int]
) -> None:
    world.answer(world.engine(), PROMPT)
    world.tiers.take_down()
    params = {"kvkeep_prefetch": True, "num_kvkeep_extra_cached_tokens": None}
    herald = world.answer(world.engine(), PROMPT, kv_transfer_params=params)
    assert herald.output_tokens == expected
    assert herald.reply_params == {"num_kvkeep_extra_cached_tokens": 0}
