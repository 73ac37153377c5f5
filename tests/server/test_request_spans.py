"""The server's spans of requests whose clients are traced."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvkeep.kv.checksum import checksum
from kvkeep.wire import messages as m
from kvkeep.wire.tracing import Tracing
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

KEYS = chain("a", 2)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BLOCKS = [bytes([1]) * 64, bytes([2]) * 64]


class World:
    def __init__(self, *, traces: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        self._tracing = Tracing("server", self._exporter)
        self.service = SimulatedServer(16 * 4096, 4 * 4096).service
        if traces:
            self.service.tracing = self._tracing
        self.peer = Peer(lambda frames: self.service.handle(frames, 0))
        self.capabilities = self.peer.hello().capabilities
        self.peer.ask(m.Done, m.Attach(m.NETWORK))
        self.layout = self.peer.open_layout(64)

    def spans(self) -> list[ReadableSpan]:
        self._tracing.close()
        return list(self._exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("kvkeep."): each for name, each in (span.attributes or {}).items()}


@pytest.fixture
def world() -> World:
    return World()


def test_a_store_and_a_lookup_hang_below_the_span_that_they_name(world: World) -> None:
    peer, layout = world.peer, world.layout
    prepare = m.PrepareStore("default", layout, 0, b"", KEYS, trace=TRACE)
    peer.ask(m.Prepared, prepare)
    write = peer.number
    peer.ask(m.Done, m.Put(write, 0), BLOCKS)
    sums = b"".join(checksum(block).to_bytes(8, "little") for block in BLOCKS)
    peer.ask(m.Done, m.CompleteStore(write, sums, TRACE))
    peer.ask(m.Found, m.Lookup("default", layout, KEYS, trace=TRACE))
    prepared, completed, found = world.spans()
    for span in (prepared, completed, found):
        assert span.parent is not None and f"{span.parent.span_id:016x}" in TRACE
        assert span.start_time is not None and span.end_time is not None
        assert span.start_time <= span.end_time
    assert prepared.name == "kvkeep.server.prepare_store"
    assert attributes(prepared) == {"tenant": "default", "blocks": 2, "refused_blocks": 0}
    assert completed.name == "kvkeep.server.complete_store"
    assert attributes(completed) == {"blocks": 2}
    assert found.name == "kvkeep.server.lookup"
    assert attributes(found) == {"tenant": "default", "found_blocks": 2, "coming_blocks": 0}


@pytest.mark.parametrize("trace", ["", "nonsense", TRACE[:-1] + "0"])
def test_a_request_that_is_not_traced_makes_no_span(world: World, trace: str) -> None:
    world.peer.ask(m.Found, m.Lookup("default", world.layout, KEYS, trace=trace))
    assert world.spans() == []


def test_a_refusal_says_why_and_nothing_that_the_client_sent(world: World) -> None:
    refused = m.Lookup("a salt, sent by mistake", world.layout, KEYS, trace=TRACE)
    assert world.peer.ask(m.Refused, refused).code == "bad_tenant"
    [span] = world.spans()
    assert span.status.description == "bad_tenant" and attributes(span) == {}


def test_a_trace_that_is_too_long_is_refused(world: World) -> None:
    too_long = m.Lookup("default", world.layout, KEYS, trace="0" * 56)
    assert "trace" in world.peer.ask(m.Refused, too_long).message
    assert world.spans() == []


@pytest.mark.parametrize("traces", [True, False])
def test_clients_hear_whether_the_server_makes_spans(traces: bool) -> None:
    world = World(traces=traces)
    assert (m.TRACES in world.capabilities) == traces
    world.peer.ask(m.Found, m.Lookup("default", world.layout, KEYS, trace=TRACE))
    assert len(world.spans()) == traces
