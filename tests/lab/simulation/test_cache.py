from __future__ import annotations

import pytest

from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep_lab.simulation.cache import CacheFaults, SimulatedCache
from kvkeep_lab.simulation.oracle import OracleModel

CONFIG = EngineConfig(block_tokens=4, num_blocks=64, tensor_parallel_size=2)
PROMPT = list(range(41))


def answer(engine: Engine, cache: SimulatedCache) -> Request:
    request = engine.add(PROMPT, SamplingParams(max_tokens=6))
    for _ in range(500):
        if not (engine.busy or engine.has_jobs):
            break
        engine.step()
        cache.pass_time(5)
    return request


def test_another_engine_finds_what_one_has_stored() -> None:
    cache = SimulatedCache(1)
    first = answer(Engine(OracleModel(), CONFIG, cache), cache)
    second = answer(Engine(OracleModel(), CONFIG, cache), cache)
    assert first.output_tokens == second.output_tokens
    assert (first.metrics.external_cached_tokens, second.metrics.external_cached_tokens) == (0, 40)
    cache.check_nothing_held()


@pytest.mark.parametrize("kind", ["load_failure", "load_loss"])
def test_a_load_that_fails_is_computed(kind: str) -> None:
    cache = SimulatedCache(1)
    expected = answer(Engine(OracleModel(), CONFIG, cache), cache).output_tokens
    cache.faults = CacheFaults(**{kind: 1.0})
    request = answer(Engine(OracleModel(), CONFIG, cache), cache)
    assert request.output_tokens == expected and request.metrics.failed_loads > 0
    assert request.metrics.external_cached_tokens < 40 and cache.counts["failed_blocks"] > 0


def test_lost_stores_are_no_hits() -> None:
    cache = SimulatedCache(1, CacheFaults(store_loss=1.0))
    answer(Engine(OracleModel(), CONFIG, cache), cache)
    assert answer(Engine(OracleModel(), CONFIG, cache), cache).metrics.external_cached_tokens == 0
    assert cache.counts["lost_stores"] > 0


def test_a_flipped_bit_is_a_failed_load() -> None:
    cache = SimulatedCache(1, CacheFaults(bit_flip=1.0), pool_bytes=1 << 17)
    expected = answer(Engine(OracleModel(), CONFIG, cache), cache).output_tokens
    while cache.counts["bit_flips"] < 20_000:
        cache.maybe_flip_a_bit()
    request = answer(Engine(OracleModel(), CONFIG, cache), cache)
    assert request.output_tokens == expected and request.metrics.failed_loads > 0


def test_a_restarted_server_is_empty_and_is_found_again() -> None:
    cache = SimulatedCache(1)
    engine = Engine(OracleModel(), CONFIG, cache)
    expected = answer(engine, cache).output_tokens
    cache.restart_server()
    for _ in range(20):
        cache.pass_time(50)
    engine.scheduler.pool.forget_all()
    assert answer(engine, cache).metrics.external_cached_tokens == 0
    engine.scheduler.pool.forget_all()
    again = answer(engine, cache)
    assert again.output_tokens == expected and again.metrics.external_cached_tokens == 40


def test_a_silent_server_costs_no_answer() -> None:
    cache = SimulatedCache(1)
    engine = Engine(OracleModel(), CONFIG, cache)
    expected = answer(engine, cache).output_tokens
    cache.stop_server()
    engine.scheduler.pool.forget_all()
    request = answer(engine, cache)
    assert request.output_tokens == expected and request.metrics.external_cached_tokens == 0


def test_what_is_left_behind_is_noticed() -> None:
    cache = SimulatedCache(1)
    engine = Engine(OracleModel(), CONFIG, cache)
    answer(engine, cache)
    engine.scheduler.pool.forget_all()
    engine.add(PROMPT)  # its lookup holds a lease, and nobody will use it
    cache.pass_time(50)
    with pytest.raises(AssertionError, match="the server still holds"):
        cache.check_nothing_held()
