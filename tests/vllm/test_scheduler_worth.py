"""Loads that take longer than computing, in vLLM's real scheduler: they are left out, and vLLM's
metrics say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import Engine, answer_to, request

import kvkeep.vllm.scheduler
from kvkeep.connector.cost_model import SKIPS_BEFORE_TRIAL, CostModel
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.vllm.stats import KVKeepStats
from kvkeep_lab.simulation.cache import SimulatedCache

NAME = "num_kvkeep_extra_cached_tokens"
TOKEN_S = 0.001
FULL = 20  # tokens in full blocks of each prompt


def prompt(number: int) -> list[int]:
    return [number, *range(100, 122)]


class Timed(Engine):
    """A token takes a millisecond, and a block of four of them as long to load as `block_s`
    says."""

    now_s = 0.0
    block_s = 0.02
    begun_s = 0.0  # by loads of this step

    def __init__(self, cache: SimulatedCache, when: str = "faster") -> None:
        model = partial(CostModel, clock=lambda: self.now_s)
        with mock.patch.object(kvkeep.vllm.scheduler, "CostModel", model):
            super().__init__(cache, extra={"kvkeep.load_when": when})
        self.stats = KVKeepStats()
        really_update = self.scheduler.update_from_output

        def update(*args: Any) -> Any:
            outputs = really_update(*args)
            for each in outputs.values():
                if each.scheduler_stats is not None and each.scheduler_stats.kv_connector_stats:
                    self.stats.aggregate(KVKeepStats(each.scheduler_stats.kv_connector_stats))
            return outputs

        self.scheduler.update_from_output = update  # type: ignore[method-assign]
        really_load, really_poll, loads_s = self.worker.load, self.worker.poll, dict[Any, float]()

        def load(job: Any, asked: Any) -> None:
            loads_s[job] = self.block_s * asked.blocks
            self.begun_s += loads_s[job]
            really_load(job, asked)

        def poll() -> Any:
            finished = really_poll()
            finished.loads.update(
                {job: replace(end, seconds=loads_s[job]) for job, end in finished.loads.items()}
            )
            return finished

        self.worker.load, self.worker.poll = load, poll  # type: ignore[method-assign]

    def results(self, scheduled: Any) -> Any:
        self.now_s += TOKEN_S * scheduled.total_num_scheduled_tokens
        self.now_s += self.begun_s
        self.begun_s = 0.0
        return super().results(scheduled)

    def serve(self, number: int) -> int:
        """How many tokens the cache gave this prompt, whose answer is right."""
        asked = request(prompt(number), max_tokens=2, params={NAME: None})
        self.forget().run(asked)
        assert self.answers[asked.request_id] == answer_to(prompt(number), 2)
        return int(self.params[asked.request_id][NAME])


@pytest.fixture
def cache() -> Iterator[SimulatedCache]:
    """It has the prompts 0 to 59."""
    cache = SimulatedCache(seed=1, pool_bytes=1 << 22)
    first = Engine(cache)
    for number in range(60):
        first.forget().run(request(prompt(number), max_tokens=1))
    yield cache
    first.rank.shutdown()
    first.scheduler.shutdown()


def learnt(cache: SimulatedCache, when: str = "faster") -> Timed:
    engine = Timed(cache, when)
    for number in range(100, 104):
        assert engine.serve(number) == 0
    for number in range(4):
        assert engine.serve(number) == FULL
    return engine


def end(engine: Engine) -> None:
    engine.settle()
    engine.check_nothing_left()
    engine.rank.shutdown()
    engine.scheduler.shutdown()


def test_slow_loads_are_left_out_until_they_are_fast_again_and_the_metrics_say_so(
    cache: SimulatedCache,
) -> None:
    engine = learnt(cache)
    before = dict(engine.stats.data)
    assert (before["hit_tokens"], before["loaded_blocks"]) == (80, 20)
    assert "skipped_loads" not in before
    engine.worker.began.clear()
    assert [engine.serve(number) for number in range(4, 10)] == [0] * 6
    assert [len(asked.keys) // KEY_BYTES for _, asked in engine.worker.began] == [1] * 6, (
        "stored is what is new"
    )
    after = engine.stats.data
    assert (after["skipped_loads"], after["skipped_tokens"]) == (6, 6 * FULL)
    assert (after["hit_tokens"], after["loaded_blocks"]) == (80, 20), "what is computed is no hit"
    assert after["load_block_us"] == 20_000 and after["prefill_tokens_per_s"] == pytest.approx(
        1_000, rel=0.1
    )
    engine.block_s = 0.0001
    given = [engine.serve(number) for number in range(10, 10 + SKIPS_BEFORE_TRIAL)]
    assert given == [0] * (SKIPS_BEFORE_TRIAL - 6) + [FULL] * 6
    assert engine.stats.data["load_block_us"] < 4_000
    end(engine)


def test_who_wants_every_load_gets_it(cache: SimulatedCache) -> None:
    engine = learnt(cache, "always")
    assert [engine.serve(number) for number in range(4, 10)] == [FULL] * 6
    assert "skipped_loads" not in engine.stats.data
    assert engine.stats.data["load_block_us"] == 20_000, "what is believed is shown all the same"
    end(engine)


def test_each_step_is_measured_also_where_nothing_is_reported(cache: SimulatedCache) -> None:
    engine = Timed(cache)
    for number in range(200, 206):
        engine.serve(number)
    assert repr(engine.side.costs).startswith("CostModel(steps=0, loads=0, prefills=6,")
    end(engine)
