"""Loads of a request that is alone in an engine: over before the step that computes the rest, and
never in the way of others. The model in place of the workers checks every byte of KV that a step
reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import engine_parts
from engine_parts import BLOCK, Engine, answer_to, request
from test_scheduler_async import AsyncEngine
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

import kvkeep.vllm.step_loads
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.vllm.scheduler import SchedulerConnector
from kvkeep.vllm.step_loads import LARGEST_BYTES, LONGEST_S
from kvkeep_lab.simulation.cache import SimulatedCache

PROMPT = list(range(100, 123))  # five blocks and three tokens
COUNT = {"num_kvkeep_extra_cached_tokens": None}
AUTO = {"kvkeep.load": "auto"}


@pytest.fixture(params=[Scheduler, AsyncScheduler], ids=["as it comes", "ahead"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedCache:
    monkeypatch.setattr(engine_parts, "Scheduler", request.param)
    return SimulatedCache(seed=3)


@pytest.fixture
def engine(cache: SimulatedCache) -> Iterator[Engine]:
    """Its server has PROMPT, and it has nothing of it itself."""
    made = engine_of(cache)
    yield made
    made.settle()
    made.check_nothing_left()
    for each in (made.rank, made.scheduler):
        each.shutdown()


def engine_of(cache: SimulatedCache, **options: Any) -> Engine:
    kind = AsyncEngine if engine_parts.Scheduler is AsyncScheduler else Engine
    made = kind(cache, **({"extra": AUTO} | options))
    made.run(request(PROMPT)).forget()
    return made


def side_of(engine: Engine) -> SchedulerConnector:
    return engine.half  # type: ignore[no-any-return]


def first_work(engine: Engine, *asked: Any) -> dict[str, int]:
    """What the first step that computes anything computes of these."""
    engine.add(*asked)
    while not (work := engine.step().num_scheduled_tokens):
        assert all(each.status.name == "WAITING" for each in asked), "nobody waits for a load"
    return dict(work)


def fail(engine: Engine, places: Sequence[int]) -> None:
    engine.worker.failing = lambda load: [place for place in places if place < load.blocks]


def cached(engine: Engine, tokens: Sequence[int]) -> int:
    """How many of these tokens' blocks vLLM would give to another request."""
    return (
        int(engine.scheduler.kv_cache_manager.get_computed_blocks(request([*tokens, 1]))[1])
        // BLOCK
    )


def test_it_is_loaded_and_computed_in_one_step(engine: Engine) -> None:
    assert first_work(engine, request(PROMPT, "b", params=COUNT)) == {"b": 3}
    assert engine.run().answers["b"] == answer_to(PROMPT)
    assert engine.params["b"] == {"num_kvkeep_extra_cached_tokens": 5 * BLOCK}
    assert repr(side_of(engine).step_loads) == "StepLoads(short=[])"


@pytest.mark.parametrize("bad", [[], [0], [4]])
def test_of_a_prompt_of_whole_blocks_the_last_token_is_computed(
    engine: Engine, bad: list[int]
) -> None:
    prompt = PROMPT[: 5 * BLOCK]
    fail(engine, bad)
    assert first_work(engine, request(prompt, "b", params=COUNT)) == {"b": 1}
    assert engine.run().answers["b"] == answer_to(prompt)
    assert engine.params["b"] == {"num_kvkeep_extra_cached_tokens": (*bad, 4)[0] * BLOCK}


def test_the_rest_may_be_longer_than_a_step(cache: SimulatedCache) -> None:
    engine = engine_of(cache, budget=16)
    prompt = [*PROMPT, *range(300, 340)]
    assert first_work(engine, request(prompt, "b", params=COUNT)) == {"b": 16}
    assert engine.run().answers["b"] == answer_to(prompt)
    assert engine.params["b"] == {"num_kvkeep_extra_cached_tokens": 5 * BLOCK}


def test_what_it_learns_of_loads_is_what_they_took(engine: Engine) -> None:
    took: list[float | None] = []
    end_load = engine.side.costs.end_load

    def spy(job: int, took_s: float | None) -> None:
        took.append(took_s)
        end_load(job, 0.25)

    engine.side.costs.end_load = spy
    for _ in range(4):
        engine.run(request(PROMPT)).forget()
    assert len(took) == 4 and engine.side.costs.expected_s(5) == pytest.approx(0.25)
    before = len(engine.worker.loads)
    engine.add(asked := request(PROMPT))
    engine.step()
    assert LONGEST_S < 0.25 and asked.status.name == "WAITING_FOR_REMOTE_KVS", (
        "others would wait too long"
    )
    engine.run()
    assert len(engine.worker.loads) == before + 1


def test_how_long_is_known_or_it_is_not_large(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = side_of(engine).step_loads
    assert loads.is_short(None, LARGEST_BYTES) and not loads.is_short(None, LARGEST_BYTES + 1)
    assert loads.is_short(LONGEST_S / 2, 1 << 40) and not loads.is_short(LONGEST_S, 1)
    loads.took(LONGEST_S)
    assert loads.is_short(None, 1)
    loads.took(2 * LONGEST_S)
    assert not loads.is_short(None, 1), "not for a while"
    later_s = time.monotonic() + 61
    monkeypatch.setattr(kvkeep.vllm.step_loads.time, "monotonic", lambda: later_s)
    assert loads.is_short(None, 1)


def test_a_store_that_has_ended_while_vllm_slept_is_in_nobodys_way(engine: Engine) -> None:
    engine.worker.holds = True
    engine.add(request(range(700, 720), max_tokens=1))
    while engine.scheduler.requests:
        engine.step()
    engine.step()  # of which vLLM tells its workers
    assert engine.side.has_stores
    engine.worker.holds = False  # from now on it has ended, but nobody makes a step
    assert first_work(engine, request(PROMPT, "b")) == {"b": 3}
    assert engine.run().answers["b"] == answer_to(PROMPT)


def test_an_engine_is_idle_when_the_last_step_is_over_and_nobody_else_is_there(
    engine: Engine,
) -> None:
    """Not every release makes an empty step behind the last one."""
    side = side_of(engine)
    assert not side._under_way or engine.ahead
    side._is_idle, side._under_way = False, 1
    assert not loaded_so(engine, request(PROMPT, "b")), "one is under way"
    engine.forget()
    engine.step()
    side._is_idle, side._under_way = False, 0
    assert loaded_so(engine, request(PROMPT, "c"))


# --- what is fetched before vLLM has blocks


def fetched(engine: Engine) -> list[str]:
    """For whom; what the worker says of it when it loads, and after each step, is checked there."""
    return [asked for what, asked in engine.worker.began if what == "ahead"]


def test_it_is_fetched_ahead_once_for_each_load(engine: Engine) -> None:
    assert first_work(engine, request(PROMPT, "b")) == {"b": 3}
    assert fetched(engine) == ["b"] and [what for what, _ in engine.worker.began][-2:] == [
        "ahead",
        "load",
    ]
    engine.run()
    assert engine.run(request(range(600, 620), "new")).answers["new"], "of which nothing is there"
    assert fetched(engine) == ["b"]


def test_loads_in_the_background_are_not_fetched_ahead(cache: SimulatedCache) -> None:
    engine = engine_of(cache, extra={"kvkeep.load": "async"})
    assert not loaded_so(engine, request(PROMPT, "b")) and fetched(engine) == []


def test_what_vllm_has_no_blocks_for_is_dropped_and_keeps_the_bus_busy_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            engine.scheduler.kv_cache_manager, "allocate_slots", lambda *given, **named: None
        )
        engine.add(asked := request(PROMPT, "b"))
        while not fetched(engine):
            engine.step()  # after which nothing is left of it
        for _ in range(3):
            engine.step()
        assert asked.status.name == "WAITING"
    assert engine.run().answers["b"] == answer_to(PROMPT) and len(engine.worker.loads) == 1
    assert fetched(engine) == ["b"]
    engine.forget()
    assert first_work(engine, request(PROMPT, "b")) == {"b": 3} and fetched(engine) == ["b", "b"], (
        "another load of it"
    )
    assert engine.run().answers["b"] == answer_to(PROMPT)


def test_what_could_not_be_fetched_yet_is_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool may not be mapped yet."""
    tried, load_ahead = list[str](), engine.worker.load_ahead
    with monkeypatch.context() as patched:
        patched.setattr(
            engine.scheduler.kv_cache_manager, "allocate_slots", lambda *given, **named: None
        )
        patched.setattr(
            engine.worker, "load_ahead", lambda owner, *given: bool(tried.append(owner))
        )
        engine.add(request(PROMPT, "b"))
        while len(tried) < 3:
            engine.step()
    assert engine.worker.load_ahead == load_ahead and fetched(engine) == []
    assert engine.run().answers["b"] == answer_to(PROMPT) and fetched(engine) == ["b"]


def end(side: SchedulerConnector, asked: Any) -> None:
    side.request_finished_all_groups(asked, ())


def reset(side: SchedulerConnector, asked: Any) -> None:
    side.reset_cache()


def allocate_for_nothing(side: SchedulerConnector, asked: Any) -> None:
    side.update_state_after_alloc(
        asked, SimpleNamespace(get_block_ids=lambda: [[1, 2, 3, 4, 5, 6]]), 0
    )


@pytest.mark.parametrize("what", [end, reset, allocate_for_nothing])
def test_it_goes_before_the_lease_of_its_slots(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    side, asked, let_go = side_of(engine), request(PROMPT, "b"), SchedulerAdapter.release
    engine.add(asked)
    engine.cache.pass_time(1)
    assert side.get_num_new_matched_tokens(asked, 0)[0] and engine.worker.ahead is not None

    def spy(*lookup: Any) -> None:
        assert engine.worker.ahead is None
        let_go(*lookup)

    with monkeypatch.context() as patched:
        patched.setattr(SchedulerAdapter, "release", spy)
        what(side, asked)
    assert engine.worker.ahead is None
    engine.abort("b")


# --- loads that fail


@pytest.mark.parametrize("bad", [[0], [2], [4], [0, 1, 2, 3, 4], [1, 3]])
def test_what_fails_is_computed_and_no_token_comes_of_it(engine: Engine, bad: list[int]) -> None:
    fail(engine, bad)
    assert first_work(engine, request(PROMPT, "b", params=COUNT)) == {"b": 3}, (
        "as many as were to be, but others"
    )
    assert cached(engine, PROMPT) == bad[0], "what is not there is nobody's"
    assert engine.run().answers["b"] == answer_to(PROMPT)
    assert engine.params["b"] == {"num_kvkeep_extra_cached_tokens": bad[0] * BLOCK}
    assert len(engine.worker.loads) == 1
    assert engine.cached["b"] == bad[0] * BLOCK, "and vLLM says so too"
    fail(engine, [])
    engine.forget()
    assert engine.run(request(PROMPT, "c", params=COUNT)).answers["c"] == answer_to(PROMPT), (
        "and it is stored again"
    )
    assert engine.params["c"] == {"num_kvkeep_extra_cached_tokens": 5 * BLOCK}


def test_after_a_recovery_one_line_says_what_was_recomputed(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    fail(engine, [1, 3])
    with caplog.at_level(logging.WARNING, "kvkeep"):
        engine.run(request(PROMPT, "b"))
    assert [line for line in caplog.messages if "failed" in line] == [
        f"kvkeep: 1 load failed; 1 request recomputed {4 * BLOCK} tokens"
    ]


@pytest.mark.parametrize("aborted", [False, True])
def test_who_comes_before_it_is_computed_takes_nothing_bad(
    cache: SimulatedCache, aborted: bool
) -> None:
    engine = engine_of(cache, budget=8)
    fail(engine, [1])
    first_work(engine, request(PROMPT, "b"))
    engine.add(request([*PROMPT, 7, 8], "c"))
    if aborted:
        engine.abort("b")
    assert engine.run().answers["c"] == answer_to([*PROMPT, 7, 8])
    assert aborted or engine.answers["b"] == answer_to(PROMPT)
    engine.settle()
    engine.check_nothing_left()


def test_a_load_that_cannot_be_begun_has_failed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*given: Any) -> None:
        raise RuntimeError("not now")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "kvkeep"):
        patched.setattr(engine.worker, "load_now", raises)
        first_work(engine, request(PROMPT, "b"))
    assert "could not be begun" in caplog.text and cached(engine, PROMPT) == 0
    assert engine.run().answers["b"] == answer_to(PROMPT)


def test_a_step_without_a_request_that_fell_short_is_no_step(engine: Engine) -> None:
    loads = side_of(engine).step_loads
    loads.fell_short(request(PROMPT), 4, [])
    with pytest.raises(AssertionError, match="not in"):
        loads.correct(SimpleNamespace(scheduled_new_reqs=[]))


@pytest.mark.parametrize("what", ["prepare_load", "complete"])
def test_whatever_goes_wrong_inside_it_has_failed(
    cache: SimulatedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    engine = engine_of(cache)
    fail(engine, range(5))  # so that its blocks hold anything

    def raises(*given: Any) -> None:
        raise RuntimeError("odd")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "kvkeep"):
        patched.setattr(engine.side, what, raises)
        assert first_work(engine, request(PROMPT, "b")) == {"b": 3}
    assert "could not be prepared" in caplog.text
    assert cached(engine, PROMPT) == 0
    for _ in range(10):
        engine.step()
    assert engine.answers["b"] == answer_to(PROMPT)


# --- who is not loaded so


def loaded_so(engine: Engine, asked: Any) -> bool:
    """Whether that was what happened to it."""
    before = len(engine.worker.loads)
    engine.add(asked)
    waited = False
    while len(engine.worker.loads) == before:
        engine.step()
        waited |= asked.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.run()
    assert engine.answers[asked.request_id] == answer_to(asked.prompt_token_ids)
    return not waited


@pytest.mark.parametrize(
    ("options", "so"),
    [
        ({}, True),
        ({"extra": {"kvkeep.load": "async"}}, False),
        ({"extra": AUTO | {"kvkeep.load_failure_policy": "fail"}}, False),
    ],
)
def test_settings(cache: SimulatedCache, options: dict[str, Any], so: bool) -> None:
    assert loaded_so(engine_of(cache, **options), request(PROMPT, "b")) == so


@pytest.mark.parametrize(
    ("of", "attribute", "value"),
    [
        pytest.param(Engine, "apart", True, id="worker in another process"),
        pytest.param(Engine, "alone", False, id="another connector beside it"),
        pytest.param(KVCacheConfig, "needs_kv_cache_zeroing", True, id="vLLM zeroes blocks"),
        pytest.param(engine_parts.StepWorker, "is_near", False, id="server on another host"),
    ],
)
def test_engines_that_load_in_the_background(
    cache: SimulatedCache, monkeypatch: pytest.MonkeyPatch, of: type, attribute: str, value: bool
) -> None:
    monkeypatch.setattr(of, attribute, value)
    assert not loaded_so(engine_of(cache), request(PROMPT, "b"))


def test_nobody_waits_for_the_load_of_another(engine: Engine) -> None:
    other = request(range(500, 510), "other", max_tokens=30)
    engine.add(other)
    while not engine.answers["other"]:
        engine.step()
    engine.add(asked := request(PROMPT, "b"))
    seen = set()
    while not engine.answers["b"]:
        engine.step()
        seen.add(asked.status.name)
    assert "WAITING_FOR_REMOTE_KVS" in seen
    engine.run()
    engine.forget()
    engine.add(both := request(PROMPT, "c"), request([*PROMPT, 5], "d"))
    engine.step()
    assert both.status.name == "WAITING_FOR_REMOTE_KVS"
    assert engine.run().answers["d"] == answer_to([*PROMPT, 5])


def test_requests_that_are_not_cached_are_others_too(engine: Engine) -> None:
    engine.add(request([*range(800, 830)], "u", resumable=True), asked := request(PROMPT, "b"))
    engine.step()
    assert asked.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.abort("u")
    assert engine.run().answers["b"] == answer_to(PROMPT)


def test_not_while_anything_is_stored(engine: Engine) -> None:
    engine.worker.holds = True
    engine.add(request(range(700, 720), max_tokens=1))
    while engine.scheduler.requests:
        engine.step()
    assert engine.side.has_stores
    engine.add(asked := request(PROMPT, "b"))
    for _ in range(3):
        engine.step()
    assert asked.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.worker.holds = False
    assert engine.run().answers["b"] == answer_to(PROMPT)


@pytest.mark.parametrize(
    ("what", "value"), [("num_preemptions", 1), ("num_computed_tokens", 4), ("mm_features", ["a"])]
)
def test_requests_that_are_more_than_new_tokens(engine: Engine, what: str, value: Any) -> None:
    loads, asked = side_of(engine).step_loads, request(PROMPT)
    assert loads.may_load(asked)
    setattr(asked, what, value)
    assert not loads.may_load(asked)
