"""The scheduler's half by itself, when something inside goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import Engine, answer_to, request
from vllm.v1.outputs import KVConnectorOutput

from kvkeep.client.options import ClientOptions
from kvkeep.client.outage import Outage
from kvkeep.connector.planner import CachePlanner
from kvkeep.vllm.keys import TokensChanged
from kvkeep.vllm.messages import Reports
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
    monkeypatch.setattr(CachePlanner, "knows_stored", lambda *args: 1 / 0)
    engine.abort("b")
    assert engine.half.faults == 1 and "kvkeep: a store could not be prepared" in caplog.text
    monkeypatch.undo()
    engine.settle()
    assert engine.connector.faults == 0
    engine.check_nothing_left()


def test_stats_count_and_start_anew(engine: Engine) -> None:
    side = engine.half
    side.stats()
    side.on_new_request(request(PROMPT, "x"))
    side.on_new_request(request(PROMPT, "y", sampling={"skip_reading_prefix_cache": True}))
    stats = side.stats()
    assert stats is not None and stats.data == {"lookups": 1, "connected": 1}
    assert side.stats() is None
    side.reset_cache()


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
        engine.half.update_connector_output(KVConnectorOutput(), Reports(outages=outages))

    own = Outage(ClientOptions().address)
    with caplog.at_level(logging.INFO, "kvkeep"):
        hear({0: ("it has fallen silent", ""), 1: ("it has fallen silent", "")})
        own.begin("it has fallen silent", "")
        hear({2: ("it has fallen silent", "")})
        assert len(outage_lines(caplog)) == 1
        own.end()
        hear({0: None, 1: None, 2: None, 3: None})
    assert len(outage_lines(caplog)) == 2 and "connected to" in outage_lines(caplog)[1]
