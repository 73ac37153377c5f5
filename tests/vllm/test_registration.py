"""The connector in the scheduler's process until every worker has registered."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import Engine, cache_config, full, request, vllm_config
from vllm.v1.outputs import KVConnectorOutput

from kvkeep.client.options import ClientOptions
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.registration import InactiveScheduler
from kvkeep.vllm.scheduler import SchedulerConnector, SchedulerContext
from kvkeep_lab.simulation.cache import SimulatedCache

PROMPT = list(range(100, 123))
COUNT = {"num_kvkeep_extra_cached_tokens": None}
NOTHING = SimpleNamespace(
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
    num_scheduled_tokens={},
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(SimulatedCache(seed=1))
    yield made
    made.rank.shutdown()
    made.scheduler.shutdown()


def inactive(config: Any = None) -> InactiveScheduler:
    context = SchedulerContext(config or vllm_config(), cache_config(full()), ClientOptions())
    return InactiveScheduler(context)


def check_it_does_nothing(side: Any) -> None:
    assert isinstance(side, InactiveScheduler)
    asked = request(PROMPT, params=COUNT)
    side.on_new_request(asked)
    assert side.get_num_new_matched_tokens(asked, 0) == (0, False)
    side.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: [[1, 2, 3]]), 0)
    assert side.build_connector_meta(NOTHING) == Step()
    side.update_connector_output(KVConnectorOutput(), Reports())
    assert side.request_finished_all_groups(asked, ()) == (
        False,
        {"num_kvkeep_extra_cached_tokens": 0},
    )
    assert side.reset_cache() is True
    assert side.stats() is None and side.take_events() == ()
    side.close()


def test_before_the_workers_have_registered_it_does_nothing() -> None:
    check_it_does_nothing(inactive())


@pytest.mark.parametrize("handshakes", [[], [Handshake(None, "no such layout")]])
def test_workers_that_refuse_are_said_once_and_served_without_a_cache(
    handshakes: list[Handshake], caplog: pytest.LogCaptureFixture
) -> None:
    side = inactive()
    with caplog.at_level(logging.ERROR):
        side = side.register_workers([*handshakes, *handshakes])
    [record] = [each for each in caplog.records if each.name.startswith("kvkeep")]
    assert record.getMessage().count("no such layout") == len(handshakes)
    check_it_does_nothing(side)


def test_one_rank_that_refuses_is_enough(engine: Engine) -> None:
    shape = engine.rank.get_handshake_metadata()
    assert shape is not None
    side = inactive()
    side = side.register_workers([shape, Handshake(None, "not here")])
    check_it_does_nothing(side)


def two_ranks() -> InactiveScheduler:
    config = vllm_config()
    config.parallel_config.world_size = 2
    options = ClientOptions(address="tcp://127.0.0.1:9")
    return InactiveScheduler(SchedulerContext(config, cache_config(full()), options))


def shape(**changes: Any) -> BlockShape:
    facts = {
        "model": "m",
        "revision": "1",
        "kv_dtype": "f",
        "block_tokens": 4,
        "content": "full",
    } | changes
    return BlockShape(ModelIdentity(**facts, details=(("attention", "fused-kv"),)), (64, 64))


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name.startswith("kvkeep") and each.levelno == level
    ]


def test_ranks_whose_handshakes_differ_are_refused_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = two_ranks()
    side = side.register_workers([Handshake(shape()), Handshake(shape(revision="2"))])
    (error,) = said(caplog, logging.ERROR)
    assert "its ranks do not agree on revision (1 | 2)" in error
    check_it_does_nothing(side)


def test_the_cache_is_used_once_the_last_worker_knows_its_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = two_ranks()
    with caplog.at_level(logging.INFO):
        side = side.register_workers([Handshake(shape()), Handshake(None, is_pending=True)])
        check_it_does_nothing(side)
        assert ["for the first time" in line for line in said(caplog, logging.INFO)] == [True]
        side = side.add_handshakes([Handshake(shape())])
    assert isinstance(side, SchedulerConnector)
    assert any(f"identity {shape().digest}" in line for line in said(caplog, logging.INFO))
    side.close()


def test_a_worker_that_refuses_late_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    side = two_ranks()
    side = side.register_workers([Handshake(shape()), Handshake(None, is_pending=True)])
    side = side.add_handshakes([Handshake(None, "no weights")])
    assert said(caplog, logging.ERROR) == [
        "kvkeep: this engine is served without the cache: no weights"
    ]
    check_it_does_nothing(side)
