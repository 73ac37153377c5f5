"""One trace for each request: an engine, a real server process and a real OTLP receiver."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import (
    POOL,
    engine,
    eventually,
    oracle,
    prompt,
    serve,
    status,
    tokens_of,
    without_cache,
)

from kvkeep.cli.remote import ask
from kvkeep.engine.llm import Prompt
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.collector import CollectedSpan, Collector

# Without shared memory a request waits for the server's word that a block is not there.
TRACED = {"kvkeep.tracing": True, "kvkeep.shared_memory": False}
SALT = "a salt that no span may show"
RANKS = 2
EXPORTER = "/google/_upb/"  # protobuf's C code, which only an exporter needs


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def server(collector: Collector) -> Iterator[ServerProcess]:
    with ServerProcess(*POOL, "--tracing") as running:
        yield running


def tree(
    spans: list[CollectedSpan], parent: CollectedSpan | None = None
) -> dict[str, list[object]]:
    """What hangs below a span, by name: for each of these what hangs below it."""
    found: dict[str, list[object]] = {}
    for span in spans:
        if span.parent == (parent.span if parent else ""):
            found.setdefault(span.name.removeprefix("kvkeep."), []).append(tree(spans, span))
    return found


def check_nests(spans: list[CollectedSpan]) -> None:
    """Each span lies within its parent. But a store may end after its request."""
    by_id = {span.span: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if parent := by_id.get(span.parent):
            assert parent.start_ns <= span.start_ns, (parent.name, span.name)
            is_late_store = span.name == "kvkeep.store"
            assert is_late_store or span.end_ns <= parent.end_ns, (parent.name, span.name)


def test_lookup_load_and_store_are_one_trace_across_processes(
    collector: Collector, server: ServerProcess
) -> None:
    model, tokens = oracle(), prompt(43)
    answers = []
    for _ in range(2):
        with engine(server, model, extra=TRACED, tensor_parallel_size=RANKS) as llm:
            answers += tokens_of(serve(llm, [Prompt(tokens, salt=SALT)], max_tokens=1))
    assert EXPORTER in Path(f"/proc/{server.pid}/maps").read_text()
    server.stop()
    assert answers[0] == answers[1]

    check_nests(collector.spans)
    roots = collector.named("kvkeep.request")
    traces = [[span for span in collector.spans if span.trace == each.trace] for each in roots]
    assert len(traces) == 2 and sum(map(len, traces)) == len(collector.spans)
    assert tree(traces[0]) == {
        "request": [
            {
                "lookup": [{"server.lookup": [{}]}],
                "store": [
                    {
                        "store.worker": [{}] * RANKS,
                        "server.prepare_store": [{}] * RANKS,
                        "server.complete_store": [{}] * RANKS,
                    }
                ],
            }
        ]
    }
    [request] = tree(traces[1])["request"]
    assert isinstance(request, dict)
    # Over the network each worker looks up for itself.
    assert request["load"] == [{"load.worker": [{}] * RANKS, "server.lookup": [{}] * RANKS}]
    names = {span.name for span in collector.spans}
    assert names == {
        f"kvkeep.{name}"
        for name in ("request", "lookup", "load", "load.worker", "store", "store.worker")
    } | {f"kvkeep.server.{name}" for name in ("lookup", "prepare_store", "complete_store")}


def test_spans_say_what_was_found_and_nothing_that_is_secret(
    collector: Collector, server: ServerProcess
) -> None:
    model, tokens = oracle(), prompt(43)
    for _ in range(2):
        with engine(server, model, extra=TRACED) as llm:
            serve(llm, [Prompt(tokens, salt=SALT)], max_tokens=1)
    server.stop()
    first, second = collector.named("kvkeep.request")
    assert first.attributes["kvkeep.computed_tokens"] == 43
    assert second.attributes["kvkeep.loaded_tokens"] == 40
    assert second.attributes["kvkeep.tenant"] == tenant_of(SALT)
    assert second.attributes["kvkeep.outcomes"] == ["10 loaded", "1 last"]
    lookups = [each.attributes["kvkeep.decision"] for each in collector.named("kvkeep.lookup")]
    assert lookups == ["miss", "load"]
    found = [each.attributes["kvkeep.found_blocks"] for each in collector.named("kvkeep.lookup")]
    assert found == [0, 10]
    assert {span.service for span in collector.spans} == {"kvkeep-engine", "kvkeep-server"}
    assert not any(span.failed for span in collector.spans)
    sent = b"".join(collector.bodies)
    assert SALT.encode() not in sent and tenant_of(SALT).encode() in sent
    allowed = {"kvkeep.tenant": 34, "kvkeep.request_id": 128, "kvkeep.decision": 20}
    for span in collector.spans:
        for name, value in span.attributes.items():
            is_count = isinstance(value, int | float) or name == "kvkeep.outcomes"
            assert is_count or len(value) <= allowed[name], (span.name, name)


def test_a_wait_for_a_tier_shows_with_the_promotion_that_ends_it(
    collector: Collector, tmp_path: Path
) -> None:
    model, tokens = oracle(), prompt(203)
    disk = ("--tier", f"disk://{tmp_path / 'tier'}?size=64MiB")
    with ServerProcess(*POOL, *disk, "--tracing") as server:
        with engine(server, model) as one:
            expected = tokens_of(serve(one, [tokens]))
        shown = lambda: ask(server.http, "/v1/tiers")[0]["counts"]["written_blocks"]  # noqa: E731
        assert eventually(lambda: shown() >= 50)
        server.stop(signal.SIGKILL)
        shutil.rmtree(server.pool)
        server.start()
        with engine(server, model, extra=TRACED | {"kvkeep.tier_patience": "wait"}) as other:
            assert tokens_of(serve(other, [tokens])) == expected
    check_nests(collector.spans)
    [promotion], [wait] = (
        collector.named("kvkeep.server.promotion"),
        collector.named("kvkeep.tier_wait"),
    )
    [lookup] = collector.named("kvkeep.lookup")
    assert promotion.parent == wait.parent == lookup.span
    assert promotion.attributes["kvkeep.blocks"] == 50 and not promotion.failed
    assert lookup.attributes["kvkeep.found_blocks"] == 50
    asked = [span for span in collector.named("kvkeep.server.lookup") if span.parent == lookup.span]
    assert len(asked) >= 2  # it was asked again when the blocks were expected


@pytest.mark.parametrize("fault", ["refuses", "stalls", "fails"])
def test_a_collector_with_faults_costs_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model, tokens = oracle(), prompt(43)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Collector() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        if fault == "refuses":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        if fault == "stalls":
            collector.stalls.set()
        collector.status = 500
        with ServerProcess(*POOL, "--tracing") as server:
            answers = []
            for _ in range(2):
                with engine(server, model, extra=TRACED) as llm:
                    answers += tokens_of(serve(llm, [tokens]))
            assert eventually(lambda: status(server)["counters"]["dropped_spans"] > 0)
            assert status(server)["counters"]["hit_blocks"] > 0
        assert answers == without_cache(model, [tokens]) * 2
        assert collector.spans == []
        assert bool(collector.asked) == (fault != "refuses")


def test_a_server_without_tracing_leaves_the_engine_its_own_spans(collector: Collector) -> None:
    model, tokens = oracle(), prompt(43)
    with ServerProcess(*POOL) as server:
        with engine(server, model, extra=TRACED) as llm:
            serve(llm, [tokens])
        assert status(server)["refusals"] == {}
    assert collector.named("kvkeep.request") and collector.named("kvkeep.store.worker")
    assert {span.service for span in collector.spans} == {"kvkeep-engine"}


def test_requests_that_are_not_sampled_make_no_spans(
    collector: Collector, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with engine(server, oracle(), extra=TRACED) as llm:
        serve(llm, [prompt(43)])
    server.stop()
    assert collector.asked == 0


OFF = """
import json, sys
from kvkeep.engine.llm import LLM
from kvkeep.server.daemon import Daemon
from kvkeep_lab.simulation.oracle import OracleModel

extra = {"kvkeep.address": sys.argv[1], "kvkeep.load_when": "always"}
config = {"kv_connector": "KVKeepConnector", "kv_connector_extra_config": extra}
with LLM(OracleModel(7), block_tokens=4, num_blocks=64, kv_transfer_config=config) as llm:
    [answer] = llm.generate([list(range(9))])
print(json.dumps([name for name in sys.modules if name.startswith("opentelemetry")]))
"""


def test_without_tracing_nothing_of_opentelemetry_is_imported() -> None:
    with ServerProcess(*POOL) as server:
        command = [sys.executable, "-c", OFF, server.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert json.loads(done.stdout.splitlines()[-1]) == []
        assert status(server)["counters"]["lookups"] > 0
        assert EXPORTER not in Path(f"/proc/{server.pid}/maps").read_text()
