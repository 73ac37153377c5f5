"""What fails inside the connector while a step is made or has begun: nothing of it is stored under
a wrong key, and no job stays. Blocks are few, so that another request has them in the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import Engine, answer_to, request

import kvkeep.connector.planner
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.connector.step import StepMetadata
from kvkeep.vllm import versions
from kvkeep.vllm.connector import KVKeepConnector

A, B = list(range(100, 122)), list(range(300, 322))


@pytest.fixture
def make(make: Callable[..., Engine]) -> Callable[..., Engine]:
    def engine(**options: Any) -> Engine:
        each = make(**options)
        each.worker.may_lose_all = True
        return each

    return engine


def fails() -> mock.Mock:
    return mock.Mock(side_effect=MemoryError)


def check_right(engine: Engine, prompt: list[int], generated: int) -> None:
    """The next turn of a conversation that the server may have."""
    turn = [*prompt, *answer_to(prompt, generated)]
    assert engine.run(request(turn, "next")).answers["next"] == answer_to(turn)


def with_a_store_that_waits(make: Callable[..., Engine]) -> Engine:
    """A request is over, and what it has generated is stored with the next step."""
    engine = make(num_blocks=8)
    engine.add(request(A, "a", max_tokens=6, params={"kvkeep_session_finished": True}))
    while engine.scheduler.requests:
        engine.step()
    assert engine.side.has_stores and not engine.side.handed_out
    return engine


@pytest.mark.parametrize("where", ["correct", "begin_step"])
def test_a_step_that_cannot_be_made_takes_its_stores_with_it(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = with_a_store_that_waits(make)
    requests = engine.half
    assert requests is not None
    with monkeypatch.context() as patched:
        patched.setattr(
            engine.side.costs if where == "begin_step" else requests.step_loads, where, fails()
        )
        engine.add(request(B, "b", max_tokens=6))
        engine.step()
    assert not engine.side.has_stores and "steps=0" in repr(requests)
    engine.run()
    assert engine.answers["b"] == answer_to(B, 6)
    check_right(make(), A, 6)


def test_if_even_that_fails_they_go_with_no_later_step(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_a_store_that_waits(make)
    with monkeypatch.context() as patched:
        patched.setattr(engine.side.costs, "begin_step", fails())
        patched.setattr(SchedulerAdapter, "finish_conversation", fails())
        engine.add(request(B, "b", max_tokens=6))
        engine.step()
    assert not engine.side.has_stores
    engine.run()
    check_right(make(), A, 6)


@pytest.mark.parametrize("where", ["correct", "grown", "begin_step"])
def test_blocks_that_a_lost_step_added_are_missed_in_no_table(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before 0.30 vLLM shows a request's blocks once, and the tables are our own."""
    bind = KVKeepConnector.bind_gpu_block_pool
    monkeypatch.setattr(
        KVKeepConnector,
        "bind_kv_cache_manager",
        lambda self, manager: bind(self, manager.block_pool),
    )
    engine = make()
    requests = engine.half
    owner: Any = {
        "correct": requests.step_loads,
        "grown": versions.BlockTables,
        "begin_step": engine.side.costs,
    }[where]
    build, lost = requests.build_connector_meta, list[Any]()

    def lose_one(scheduled: Any) -> Any:
        grows = any(scheduled.scheduled_cached_reqs.new_block_ids)
        with monkeypatch.context() as patched:
            if grows and not lost:
                lost.append(scheduled)
                patched.setattr(owner, where, fails())
            return build(scheduled)

    monkeypatch.setattr(requests, "build_connector_meta", lose_one)
    engine.run(request(A, "a", max_tokens=40))
    assert lost and engine.answers["a"] == answer_to(A, 40)
    check_right(make(num_blocks=96), A, 40)


def test_a_worker_that_cannot_begin_a_steps_stores_saves_blocks_all_the_same(
    make: Callable[..., Engine],
) -> None:
    engine = make(num_blocks=8)
    worker = engine.rank.half
    assert worker is not None
    engine.worker.holds = True
    engine.add(request(A, "a", max_tokens=1))
    engine.step()  # its store is under way, and nothing of it is read
    engine.is_told = lambda: False
    engine.add(request([7, 8, 9], "x", max_tokens=8))
    engine.step()
    assert "computes=True" in repr(worker)
    engine.add(request(B, "b", max_tokens=1))
    with mock.patch.object(engine.worker, "store_all", fails()):  # called when the next step comes
        engine.step()
    engine.is_told, engine.worker.holds = lambda: True, False
    engine.run()
    check_right(make(), A, 1)


@pytest.mark.parametrize("after_step", [True, False])
def test_a_store_that_cannot_be_described_is_no_job(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, after_step: bool
) -> None:
    engine = make()
    if not after_step:
        engine.add(request(A, "a", max_tokens=6))
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(kvkeep.connector.planner, "StoreRequest", fails())
        if after_step:
            engine.add(request(A, "a", max_tokens=1))
        while engine.scheduler.requests:
            engine.step()
    engine.settle()
    assert engine.side.idle and not engine.side.build_step(range(64)).withdrawn
    check_right(make(), A, 6)


def test_a_load_goes_with_the_next_step_if_its_own_cannot_be_made(
    make: Callable[..., Engine],
) -> None:
    make().run(request(A, "a", max_tokens=1))
    engine, turn, failed = make(), [*A, 5], list[str]()

    def fails_once(loads: Any, *jobs: Any) -> StepMetadata:
        if loads and not failed:
            failed.append("x")
            raise MemoryError
        return StepMetadata(loads, *jobs)

    with mock.patch.object(kvkeep.connector.planner, "StepMetadata", fails_once):
        engine.run(request(turn, "x", max_tokens=2))
    assert failed and engine.answers["x"] == answer_to(turn, 2) and engine.side.idle


def test_stores_are_over_if_their_step_cannot_be_made(make: Callable[..., Engine]) -> None:
    engine = with_a_store_that_waits(make)
    with mock.patch.object(kvkeep.connector.planner, "StepMetadata", fails()):
        engine.step()
    engine.settle()
    assert engine.side.idle
    check_right(make(), A, 6)
