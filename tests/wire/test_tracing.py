"""Spans, and the queue before the collector: bounded, counted, and in nobody's way."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvkeep.errors import SettingsError
from kvkeep.testing.clock import eventually
from kvkeep.wire.messages import MAX_TRACE_CHARS
from kvkeep.wire.tracing import MOST_SPANS, Span, Tracing

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


class Stuck(SpanExporter):
    """Takes a batch and does not come back until it is let go. Then the batch has failed."""

    def __init__(self) -> None:
        self.has_batch = threading.Event()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_batch.set()
        self.let_go.wait()
        return SpanExportResult.FAILURE


class Raising(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("planted")


def begun(tracing: Tracing, headers: dict[str, str] | None = None) -> Span:
    span = tracing.begin("request", headers)
    assert span is not None
    return span


def exported(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_part_hangs_below_its_whole_here_and_in_another_process() -> None:
    one, other = InMemorySpanExporter(), InMemorySpanExporter()
    engine, server = Tracing("engine", one), Tracing("server", other)
    request = begun(engine)
    lookup = request.begin("lookup", kind="client", blocks=7, missing=None)
    handled = server.resume("handled", lookup.trace, kind="server", start_ns=5)
    assert handled is not None
    handled.end(9, failure="busy")
    lookup.end(found=3)
    request.end()
    spans = exported(engine, one) | exported(server, other)
    assert sorted(spans) == ["kvkeep.handled", "kvkeep.lookup", "kvkeep.request"]
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
    for child, parent in (("lookup", "request"), ("handled", "lookup")):
        above, below = spans[f"kvkeep.{parent}"].context, spans[f"kvkeep.{child}"].parent
        assert above is not None and below is not None and above.span_id == below.span_id
    assert spans["kvkeep.request"].parent is None
    assert dict(spans["kvkeep.lookup"].attributes or {}) == {"kvkeep.blocks": 7, "kvkeep.found": 3}
    shown = spans["kvkeep.handled"]
    assert (shown.start_time, shown.end_time) == (5, 9) and not shown.status.is_ok
    assert shown.status.description == "busy"


def test_the_trace_that_the_headers_name_is_continued() -> None:
    tracing = Tracing("engine", InMemorySpanExporter())
    assert begun(tracing, {"traceparent": SAMPLED}).trace.startswith(f"00-{TRACE_ID}-")
    assert len(begun(tracing).trace) == MAX_TRACE_CHARS
    for headers in ({}, None, {"traceparent": "nonsense"}, {"traceparent": ""}):
        assert TRACE_ID not in begun(tracing, headers).trace
    assert tracing.begin("request", {"traceparent": NOT_SAMPLED}) is None
    tracing.close()


@pytest.mark.parametrize(
    "parent", ["", "nonsense", "x" * 55, NOT_SAMPLED, f"00-{'0' * 32}-{SPAN_ID}-01"]
)
def test_what_names_no_sampled_span_is_not_resumed(parent: str) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("server", exporter)
    assert tracing.resume("handled", parent) is None
    assert exported(tracing, exporter) == {} and tracing.dropped == 0


def test_the_sampler_of_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing = Tracing("engine", InMemorySpanExporter())
    assert tracing.begin("request", None) is None
    assert tracing.begin("request", {"traceparent": SAMPLED}) is not None
    tracing.close()


def test_a_service_is_called_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in ((None, "kvkeep-engine"), ("mine", "mine")):
        if name is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        exporter = InMemorySpanExporter()
        tracing = Tracing("kvkeep-engine", exporter)
        begun(tracing).end()
        [span] = exported(tracing, exporter).values()
        assert span.resource.attributes["service.name"] == expected


def test_a_collector_that_hangs_holds_up_neither_spans_nor_the_end() -> None:
    exporter = Stuck()
    tracing = Tracing("engine", exporter)
    for _ in range(MOST_SPANS):
        begun(tracing).end()
    assert exporter.has_batch.wait(30)
    assert tracing.dropped == 0
    for _ in range(10):
        begun(tracing).end()  # none of them waits
    assert tracing.dropped == 10
    tracing.close()
    assert not exporter.let_go.is_set()  # and `close` has returned
    exporter.let_go.set()
    assert eventually(lambda: tracing.dropped == MOST_SPANS + 10)


@pytest.mark.filterwarnings("ignore")
def test_what_an_exporter_loses_or_raises_is_counted() -> None:
    stuck = Stuck()
    stuck.let_go.set()
    for exporter in (stuck, Raising()):
        tracing = Tracing("engine", exporter)
        for _ in range(3):
            begun(tracing).end()
        tracing.close()
        assert tracing.dropped == 3


def test_spans_that_end_after_the_close_raise_nothing() -> None:
    tracing = Tracing("engine", InMemorySpanExporter())
    late = begun(tracing)
    tracing.close()
    late.end()
    tracing.close()


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000", "OTEL_*"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as refused:
        Tracing("engine")
    assert hint in refused.value.hint


MISSING = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as where it is not installed
from kvkeep.errors import SettingsError
try:
    import kvkeep.wire.tracing
except SettingsError as error:
    print(error.message, error.hint)
"""


def test_without_the_packages_the_error_names_the_extra() -> None:
    command = [sys.executable, "-c", MISSING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "OpenTelemetry is not installed" in done.stdout
    assert "pip install 'kvkeep[otel]'" in done.stdout
