"""Requests of vLLM's own scheduler, traced: kvkeep's spans are part of the trace that came with the
request. A real OTLP receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import Engine, answer_to, request

from kvkeep.errors import SettingsError
from kvkeep.testing.clock import eventually
from kvkeep_lab.simulation.cache import SimulatedCache
from kvkeep_lab.simulation.collector import Collector

PROMPT = list(range(100, 123))  # five blocks and three tokens
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
TRACED = {"kvkeep.tracing": True}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def test_spans_hang_below_the_span_that_came_with_the_request(
    make: Callable[..., Engine], cache: SimulatedCache, collector: Collector, way: str
) -> None:
    for name in ("stores", "loads"):
        engine = make(extra=TRACED).run(request(PROMPT, name, trace_headers=HEADERS))
        assert engine.answers[name] == answer_to(PROMPT)
    assert eventually(lambda: len(collector.named("kvkeep.request")) == 2)
    assert eventually(lambda: collector.named("kvkeep.load") != [])
    assert {span.trace for span in collector.spans} == {TRACE_ID}
    requests = {
        each.attributes["kvkeep.request_id"]: each for each in collector.named("kvkeep.request")
    }
    assert {each.parent for each in requests.values()} == {SPAN_ID}
    [load] = collector.named("kvkeep.load")
    assert load.parent == requests["loads"].span and load.attributes["kvkeep.blocks"] == 5
    assert requests["loads"].attributes["kvkeep.loaded_tokens"] == 20
    assert requests["stores"].span in {each.parent for each in collector.named("kvkeep.store")}


def test_a_request_without_a_trace_begins_one_and_a_strange_one_is_served(
    make: Callable[..., Engine], collector: Collector
) -> None:
    strange = {"traceparent": "00-" + "0" * 32 + "-0-01", "x": "y"}
    engine = make(extra=TRACED)
    for headers in (None, {}, strange):
        asked = request(PROMPT, trace_headers=headers)
        assert engine.forget().run(asked).answers[asked.request_id] == answer_to(PROMPT)
    assert eventually(lambda: len(collector.named("kvkeep.request")) == 3)
    assert len({each.trace for each in collector.named("kvkeep.request")}) == 3
    assert {each.parent for each in collector.named("kvkeep.request")} == {""}


def test_nothing_is_exported_unless_it_is_switched_on(
    make: Callable[..., Engine], collector: Collector
) -> None:
    make().run(request(PROMPT, trace_headers=HEADERS))
    assert collector.asked == 0


def test_a_protocol_that_kvkeep_does_not_speak_stops_the_start(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(SettingsError, match="http/protobuf only"):
        make(extra=TRACED)
