"""The scheduler's side by itself: before and without a handshake, and when something inside goes
wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import Engine, answer_to, cache_config, full, request, vllm_config
from vllm.v1.outputs import KVConnectorOutput

from kvkeep.client.options import ClientOptions
from kvkeep.client.outage import Outage
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm.keys import TokensChanged
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.registration import InactiveScheduler
from kvkeep.vllm.scheduler import SchedulerConnector, SchedulerContext
from kvkeep_lab.simulation.cache import SimulatedCache

pytestmark = pytest.mark.usefixtures("way")

PROMPT = list(range(100, 123))
COUNT = {"num_kvkeep_extra_cached_tokens": None}
NOTHING = SimpleNamespace(
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
    num_scheduled_tokens={},
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Its server has PROMPT, and it has nothing of it itself."""
    cache = SimulatedCache(seed=1)
    first, second = Engine(cache), Engine(cache)
    first.run(request(PROMPT))
    yield second
    for each in (first, second):
        each.rank.shutdown()
        each.scheduler.shutdown()


def inactive(config: Any = None) -> InactiveScheduler:
    context = SchedulerContext(config or vllm_config(), cache_config(full()), ClientOptions())
    return InactiveScheduler(context)


# --- without a cache ------------------------------------------------------------------------------


def check_it_does_nothing(side: Any) -> None:
    assert isinstance(side, InactiveScheduler)
    asked = request(PROMPT, params=COUNT)
    side.arrive(asked)
    assert side.lookup(asked, 0) == 0 and not side.loads_in_step(asked)
    side.allocated(asked, [[1, 2, 3]], 0)
    assert side.build_step(NOTHING) == Step()
    side.end_step(KVConnectorOutput(), Reports())
    assert side.finish_request(asked) == {"num_kvkeep_extra_cached_tokens": 0}
    assert side.reset() is True
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


# --- when something goes wrong --------------------------------------------------------------------


def change_tokens(engine: Engine, name: str) -> None:
    """As if vLLM had replaced the request's tokens."""

    def grow() -> bytes:
        raise TokensChanged("as the test says")

    engine.half._requests[name].new_keys.grow = grow  # type: ignore[method-assign]


def run_to_load(engine: Engine, name: str = "b") -> None:
    engine.add(request(PROMPT, name))
    for _ in range(20):
        engine.step()
        if engine.worker.loads:
            return


def test_a_request_whose_tokens_change_is_served_without_the_cache_and_leaves_nothing(
    engine: Engine,
) -> None:
    engine.add(request(PROMPT, "b", max_tokens=6))
    while not engine.answers["b"]:
        engine.step()
    change_tokens(engine, "b")
    engine.abort("b")
    engine.settle()
    assert "requests=[]" in repr(engine.half), "or it is kept for ever"
    assert engine.connector.faults == 0


def test_a_request_whose_tokens_change_while_it_runs(engine: Engine) -> None:
    engine.add(request(PROMPT, "b", max_tokens=60))
    while not engine.answers["b"]:
        engine.step()
    stored = len(engine.worker.began)
    change_tokens(engine, "b")
    assert engine.run().answers["b"] == answer_to(PROMPT, 60)
    assert [what for what, _ in engine.worker.began[stored:] if what == "store"] == []
    engine.check_nothing_left()


def test_a_load_whose_event_cannot_be_noted_is_told_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.half.events, "prepared", lambda *args: 1 / 0)
    engine.worker.withdraw = lambda block_ids: None  # type: ignore[method-assign]
    engine.add(request(PROMPT, "b"))
    told: list[str] = []
    update = engine.connector.update_connector_output

    def spy(output: Any) -> None:
        update(output)
        told.extend(output.finished_recving or ())  # what vLLM reads

    monkeypatch.setattr(engine.connector, "update_connector_output", spy)
    for _ in range(20):
        engine.step()
    assert told == ["b"]
    assert engine.answers["b"] == answer_to(PROMPT)


def test_a_store_that_cannot_be_prepared_keeps_no_load_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.side, "prepare_store", lambda *args, **words: 1 / 0)
    engine.add(request([9, *PROMPT], "c", max_tokens=12))
    run_to_load(engine)
    assert engine.worker.loads
    monkeypatch.undo()
    engine.run()
    assert engine.answers == {"b": answer_to(PROMPT), "c": answer_to([9, *PROMPT], 12)}
    assert engine.connector.faults == 0


def test_a_store_that_cannot_be_prepared_at_a_requests_end_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.add(request(PROMPT, "b", max_tokens=60))
    while not engine.answers["b"]:
        engine.step()
    side = engine.half
    monkeypatch.setattr(side, "_store", lambda *args, **words: 1 / 0)
    engine.abort("b")
    assert side.faults == 1 and "kvkeep: a store could not be prepared" in caplog.text
    monkeypatch.undo()
    engine.settle()
    assert engine.connector.faults == 0
    engine.check_nothing_left()


def test_stats_count_and_start_anew(engine: Engine) -> None:
    side = engine.half
    side.stats()
    side.arrive(request(PROMPT, "x"))
    side.arrive(request(PROMPT, "y", sampling={"skip_reading_prefix_cache": True}))
    stats = side.stats()
    assert stats is not None and stats.data == {"lookups": 1, "connected": 1}
    assert side.stats() is None
    for name in ("x", "y"):
        side._forget(name)


def test_salts_that_are_none_are_served_without_the_cache(engine: Engine) -> None:
    for salt in ("\ud800", "x" * 10_000, "\x00"):
        try:
            asked = request(PROMPT, cache_salt=salt)
        except UnicodeEncodeError:
            continue
        engine.run(asked)
        assert engine.answers[asked.request_id] == answer_to(PROMPT)
    engine.check_nothing_left()


def outage_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "does not answer" in line or "connected to" in line]


def test_an_outage_that_only_a_rank_sees_is_said_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    outage = engine.worker.connection.outage
    assert not outage.speaks
    with caplog.at_level(logging.INFO, "kvkeep"):
        outage.begin("it has fallen silent", "")
        engine.settle()
        assert ["does not answer" in line for line in outage_lines(caplog)] == [True]
        outage.end()
        engine.settle()
    assert len(outage_lines(caplog)) == 2 and "connected to" in outage_lines(caplog)[1]


def test_an_outage_that_all_ranks_and_the_scheduler_see_is_said_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def hear(outages: Any) -> None:
        engine.half.end_step(KVConnectorOutput(), Reports(outages=outages))

    own = Outage(engine.half._options.address)
    with caplog.at_level(logging.INFO, "kvkeep"):
        hear({0: ("it has fallen silent", ""), 1: ("it has fallen silent", "")})
        own.begin("it has fallen silent", "")
        hear({2: ("it has fallen silent", "")})
        assert len(outage_lines(caplog)) == 1
        own.end()
        hear({0: None, 1: None, 2: None, 3: None})
    assert len(outage_lines(caplog)) == 2 and "connected to" in outage_lines(caplog)[1]
