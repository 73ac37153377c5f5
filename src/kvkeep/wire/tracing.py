"""Spans of requests, for a collector that speaks OTLP over HTTP (decision 37).

    begin ──► Span ──► end ──► queue of MOST_SPANS at most ──► collector, by a thread of its own

Needs the extra `kvkeep[otel]`: only who switches tracing on imports this module. The standard
variables of OpenTelemetry say where the collector is (OTEL_EXPORTER_OTLP_*), which requests are
sampled (OTEL_TRACES_SAMPLER) and what the process is called (OTEL_SERVICE_NAME).

No call blocks, and none raises because of a collector: what it does not take is counted. Spans of
one Tracing begin and end in one thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.errors import SettingsError

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise SettingsError(
        f"tracing is on, and OpenTelemetry is not installed: {error}", "pip install 'kvkeep[otel]'"
    ) from error

MOST_SPANS = 2_048  # that wait for the collector; more are dropped
CLOSE_S = 1.0  # that `close` waits for it at most

_PROTOCOL = "http/protobuf"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PREFIX = "kvkeep."
_TRACE_PARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


class Span:
    """A piece of work, from its making until `end`. Attributes are named without their prefix
    `kvkeep.`; None is left out."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def trace(self) -> str:
        """Its place in its trace, for another process to continue: a W3C traceparent."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return carrier[_TRACE_PARENT]

    def begin(
        self, name: str, *, kind: str = "internal", start_ns: int | None = None, **attributes: Any
    ) -> Span:
        """A part of this work, which begins now, or began at that nanosecond of the epoch."""
        span = _begin(self._tracer, name, self._context, kind, start_ns, attributes)
        return Span(self._tracer, span)

    def end(self, end_ns: int | None = None, *, failure: str = "", **attributes: Any) -> None:
        self._span.set_attributes(_named(attributes))
        if failure:
            self._span.set_status(trace.StatusCode.ERROR, failure)
        self._span.end(end_ns)

    @property
    def _context(self) -> Context:
        return trace.set_span_in_context(self._span, Context())


class Tracing:
    """Of one process. SettingsError if the environment asks for what this cannot do."""

    def __init__(self, service: str, exporter: SpanExporter | None = None) -> None:
        for variable in _PROTOCOL_VARIABLES:
            if os.environ.get(variable, _PROTOCOL) != _PROTOCOL:
                raise SettingsError(
                    f"{variable} = {os.environ[variable]!r}: kvkeep exports {_PROTOCOL} only",
                    f"set it to {_PROTOCOL}, and the endpoint to the collector's port for HTTP",
                )
        try:
            self._queue = _Queue(exporter or OTLPSpanExporter())
            resource = Resource.create()
            if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
                resource = resource.merge(Resource({SERVICE_NAME: service}))
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        except (ValueError, TypeError, OSError) as error:
            raise SettingsError(
                f"tracing cannot be set up: {error}", "correct the variables OTEL_*"
            ) from error
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("kvkeep")

    @property
    def dropped(self) -> int:
        """Spans that the collector did not take, or that found the queue full."""
        return self._queue.dropped

    def begin(self, name: str, headers: Mapping[str, str] | None, **attributes: Any) -> Span | None:
        """The first span of this process in the trace that the headers name, or in a new one if
        they name none. None if the trace is not sampled."""
        context = _PROPAGATOR.extract(headers or {}, Context())
        return self._sampled(_begin(self._tracer, name, context, "internal", None, attributes))

    def resume(
        self,
        name: str,
        parent: str,
        *,
        kind: str = "internal",
        start_ns: int | None = None,
        **attributes: Any,
    ) -> Span | None:
        """Work for the span of another process that has this `Span.trace`. None if it is not
        sampled, or the text is not one."""
        context = _PROPAGATOR.extract({_TRACE_PARENT: parent}, Context())
        if not trace.get_current_span(context).get_span_context().is_valid:
            return None
        return self._sampled(_begin(self._tracer, name, context, kind, start_ns, attributes))

    def close(self) -> None:
        """Exports what is left, for CLOSE_S at most."""
        # On a thread of its own: an exporter may wait for its collector, and none can be told how
        # long.
        closing = threading.Thread(target=self._queue.shutdown, name="kvkeep-spans", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends: no thread may begin
            closing.start()
            closing.join(CLOSE_S)

    def _sampled(self, span: trace.Span) -> Span | None:
        is_sampled = span.is_recording() and span.get_span_context().trace_flags.sampled
        return Span(self._tracer, span) if is_sampled else None


class _Queue(SpanProcessor):
    """Batches of spans that have ended, on their way to an exporter. Bounded here, because a batch
    processor does not tell how many spans it drops."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = _CountingExporter(exporter)
        self._batches = BatchSpanProcessor(self._exporter, max_queue_size=MOST_SPANS)
        self._taken = 0
        self._refused = 0

    @property
    def dropped(self) -> int:
        return self._refused + self._exporter.failed

    def on_end(self, span: ReadableSpan) -> None:
        if self._taken - self._exporter.ended >= MOST_SPANS:
            self._refused += 1
            return
        self._taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]


class _CountingExporter(SpanExporter):
    """Counts the spans that another exporter was given, and those that it could not deliver."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.ended = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:  # what it raises is logged by the batch processor
            self.ended += len(spans)
            self.failed += 0 if result is SpanExportResult.SUCCESS else len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _begin(
    tracer: trace.Tracer,
    name: str,
    context: Context,
    kind: str,
    start_ns: int | None,
    attributes: Mapping[str, Any],
) -> trace.Span:
    return tracer.start_span(
        _PREFIX + name,
        context,
        trace.SpanKind[kind.upper()],
        attributes=_named(attributes),
        start_time=start_ns,
    )


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {_PREFIX + name: value for name, value in attributes.items() if value is not None}
