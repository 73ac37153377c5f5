"""The collector of spans takes what the real exporter sends, and has the faults that it is told to
have."""

from __future__ import annotations

import pytest

from kvkeep.testing.clock import eventually
from kvkeep.wire.tracing import Tracing
from kvkeep_lab.simulation.collector import CollectedSpan, Collector


def export(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Tracing:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    tracing = Tracing("tested")
    request = tracing.begin("request", None, count=3)
    assert request is not None
    request.begin("part", start_ns=5, names=["a", "b"]).end(7, failure="planted")
    request.end()
    return tracing


def test_it_shows_the_spans_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        tracing = export(collector, monkeypatch)
        assert eventually(lambda: len(collector.spans) == 2)
        tracing.close()
    [request], [part] = collector.named("kvkeep.request"), collector.named("kvkeep.part")
    attributes = {"kvkeep.names": ["a", "b"]}
    ids = (part.trace, part.span, request.span)
    assert part == CollectedSpan("tested", "kvkeep.part", *ids, 5, 7, attributes, True)
    assert (request.parent, request.failed) == ("", False)
    assert request.trace == part.trace and request.attributes == {"kvkeep.count": 3}


def test_it_takes_nothing_while_it_fails_or_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Collector() as collector:
        collector.status = 500
        failing = export(collector, monkeypatch)
        assert eventually(lambda: failing.dropped == 2) and collector.asked
        collector.stalls.set()
        stalled = export(collector, monkeypatch)
        assert eventually(lambda: stalled.dropped == 2)
        assert collector.spans == []
        failing.close()
        stalled.close()
