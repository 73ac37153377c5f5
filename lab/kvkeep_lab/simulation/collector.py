"""A collector of spans: an OTLP/HTTP receiver on this host, with faults on request."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_STATUS_ERROR = 2


@dataclass(frozen=True)
class CollectedSpan:
    """Ids are hexadecimal; `parent` is "" at the root of a trace."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """Listens on a free port until the block ends. While `status` is not 200 it answers so and
    takes nothing; while `stalls` is set it does not answer at all."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.bodies: list[bytes] = []
        self.status = 200
        self.stalls = threading.Event()
        self.asked = 0
        self._is_over = threading.Event()
        handler = type("Handler", (_Handler,), {"collector": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Where exporters find it; they send what they have without delay."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "NO_PROXY": "127.0.0.1",
        }

    def take(self, body: bytes) -> int:
        """Takes one request in. Returns the HTTP status of the answer."""
        self.asked += 1
        while self.stalls.is_set() and not self._is_over.wait(0.01):
            pass
        if self.status == 200:
            self.bodies.append(body)
            self.spans += _spans(ExportTraceServiceRequest.FromString(body))
        return self.status

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name == name]

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        status = self.collector.take(self.rfile.read(length)) if self.path == "/v1/traces" else 404
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _spans(request: Any) -> list[CollectedSpan]:
    return [
        CollectedSpan(
            _values(each.resource.attributes)["service.name"],
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            span.status.code == _STATUS_ERROR,
        )
        for each in request.resource_spans
        for scope in each.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
