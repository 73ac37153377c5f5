"""One trace from a request of real vLLM to the server: kvkeep's spans are part of the trace that
vLLM was given, and the copies of its worker and the server's work are in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replicas import ALWAYS, POOL, Replica, Server, eventually, prompt, request, tokens_of

from kvkeep_lab.simulation.collector import Collector

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def test_a_request_of_vllm_is_one_trace_from_lookup_to_load(
    collector: Collector, one: Replica
) -> None:
    asked = request(prompt(170), trace_headers=HEADERS)
    environment: dict[str, str | None] = {**collector.environment}
    with Server(*POOL, "--tracing") as server:
        traced = ALWAYS | {"kvkeep.tracing": True}
        engine = one.use("llama", server, extra=traced, env=environment)
        cold = tokens_of(engine.serve([asked]))
        assert tokens_of(engine.fresh().serve([asked])) == cold
        wanted = (
            "request",
            "load.worker",
            "store.worker",
            "server.lookup",
            "server.complete_store",
        )
        assert eventually(lambda: all(collector.named(f"kvkeep.{name}") for name in wanted))
        assert eventually(lambda: len(collector.named("kvkeep.request")) == 2)
    assert {span.trace for span in collector.spans} == {TRACE_ID}
    by_id = {span.span: span for span in collector.spans}
    assert {span.parent for span in collector.named("kvkeep.request")} == {SPAN_ID}
    for name, parent in (
        ("server.lookup", "lookup"),
        ("load.worker", "load"),
        ("store.worker", "store"),
        ("server.prepare_store", "store"),
        ("server.complete_store", "store"),
    ):
        found = collector.named(f"kvkeep.{name}")
        assert found and {by_id[span.parent].name for span in found} == {f"kvkeep.{parent}"}
    loaded = [each.attributes["kvkeep.loaded_tokens"] for each in collector.named("kvkeep.request")]
    assert sorted(loaded) == [0, 160]
