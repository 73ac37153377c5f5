"""The spans of a request, as the planner makes them; the cache answers as the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from planning import LAYOUT, ScriptedCache, Side

from kvkeep.client.requests import Finished, LoadOutcome
from kvkeep.connector.planner import CachePlanner
from kvkeep.connector.request_trace import UNTRACED, start_tracing
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire.tracing import Tracing

KEYS = b"".join(bytes([1, at]) + bytes(KEY_BYTES - 2) for at in range(5))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A planner of two ranks whose spans are kept."""

    def __init__(self, cache: ScriptedCache) -> None:
        self._exporter = InMemorySpanExporter()
        self._tracing = Tracing("engine", self._exporter)
        self.side = Side(cache)
        self.side.planner = CachePlanner(cache, LAYOUT, 2, tracing=self._tracing)

    def spans(self) -> list[ReadableSpan]:
        """Those that have ended, in this order. Ends the test's planner."""
        self.side.planner.close()
        return list(self._exporter.get_finished_spans())

    def named(self) -> dict[str, Any]:
        """The attributes of each, by names without the prefix."""
        return {
            span.name.removeprefix("kvkeep."): {
                name.removeprefix("kvkeep."): value
                for name, value in (span.attributes or {}).items()
            }
            for span in self.spans()
        }

    def report(self, finished: Finished, **times: tuple[int, int]) -> None:
        """Both ranks report this; `times` by rank: when the only job ran there."""
        [job] = {**finished.loads, **finished.stored}
        for rank in range(2):
            ran = {job: times[f"rank{rank}"]} if f"rank{rank}" in times else {}
            self.side.complete([replace(finished, rank=rank, times=ran)])


@pytest.fixture
def traced(cache: ScriptedCache) -> Traced:
    return Traced(cache)


def test_workers_report_when_they_ran_and_the_load_ends_with_the_last(
    traced: Traced, cache: ScriptedCache
) -> None:
    side, cache.blocks = traced.side, 3
    side.arrive("r", "salt", None, KEYS)
    assert side.lookup("r", 0, 5) == 3
    job = side.prepare_load("r", 0, [10, 11, 12])
    step = side.build_step()
    trace = step.loads[job.number].trace
    start = 2_000_000_000_000_000_000
    times = {"rank0": (start, start + 50), "rank1": (start + 10, start + 40)}
    traced.report(Finished(loads={job.number: LoadOutcome(seconds=1.0)}), **times)
    side.end("r")
    *ranks, load = [span for span in traced.spans() if "load" in span.name]
    assert [(span.start_time, span.end_time) for span in ranks] == list(times.values())
    assert [(span.attributes or {})["kvkeep.rank"] for span in ranks] == [0, 1]
    assert load.name == "kvkeep.load" and load.end_time == start + 50
    assert load.context is not None and f"{load.context.span_id:016x}" in trace
    assert all(span.parent == load.context for span in ranks)


def test_the_lookup_says_what_was_decided_and_by_which_times(
    traced: Traced, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, costs, cache.blocks = traced.side, traced.side.planner.costs, 3
    monkeypatch.setattr(costs, "decide", lambda blocks, tokens: False)
    monkeypatch.setattr(costs, "expected_s", lambda blocks: blocks * 0.5)
    monkeypatch.setattr(costs, "computing_s", lambda tokens: tokens * 0.01)
    side.arrive("r", None, None, KEYS)
    assert cache.lookups[0].trace  # goes out with the Lookup
    assert side.lookup("r", 0, 5) == 0
    side.no_load("r")
    side.end("r")
    lookup = traced.named()["lookup"]
    assert lookup == {
        "blocks": 5,
        "decision": "compute",
        "found_blocks": 3,
        "usable_blocks": 3,
        "late_blocks": 0,
        "loading_s": 1.5,
        "computing_s": 0.12,
    }


def test_a_wait_for_a_tier_is_part_of_the_lookup(traced: Traced, cache: ScriptedCache) -> None:
    side, cache.blocks, cache.coming, cache.waits = traced.side, 1, 2, True
    side.arrive("r", None, None, KEYS)
    for _ in range(3):
        assert side.lookup("r", 0, 5) is None
    cache.waits = False
    assert side.lookup("r", 0, 5) == 1
    side.end("r")
    wait, lookup, _ = traced.spans()
    assert (wait.name, lookup.name) == ("kvkeep.tier_wait", "kvkeep.lookup")
    assert wait.parent == lookup.context
    assert wait.attributes == {"kvkeep.blocks": 2}


@pytest.mark.parametrize("ends", [True, False])
def test_a_lookup_that_nobody_waits_for_ends_when_the_request_begins(
    traced: Traced, cache: ScriptedCache, ends: bool
) -> None:
    side, cache.silent = traced.side, True
    side.arrive("r", None, None, KEYS)
    if not ends:
        cache.surely_lacking.add(KEYS[:KEY_BYTES])
        assert side.lookup("r", 0, 5) == 0
    side.no_load("r")
    assert side.end("r") is None
    assert traced.named()["lookup"]["decision"] == ("not_awaited" if ends else "lacked")


def test_a_store_that_outlives_its_request_is_a_part_of_it(
    traced: Traced, cache: ScriptedCache
) -> None:
    side = traced.side
    side.arrive("r", None, None, KEYS)
    assert side.lookup("r", 0, 5) == 0
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 5)
    assert job is not None
    assert side.build_step().stores[job.number].trace
    side.end("r")
    traced.report(Finished(stored={job.number: 5}, incomplete=[job.number]), rank1=(1, 2))
    spans = {span.name: span for span in traced.spans()}
    store = spans["kvkeep.store"]
    assert store.parent == spans["kvkeep.request"].context
    assert not store.status.is_ok and spans["kvkeep.store.worker"].status.is_ok


def test_a_load_that_fails_says_so_and_the_blocks_of_the_request_have_outcomes(
    traced: Traced, cache: ScriptedCache
) -> None:
    side, cache.blocks = traced.side, 3
    state = side.arrive("r", "salt", None, KEYS)
    assert side.lookup("r", 0, 5) == 3
    job = side.prepare_load("r", 0, [10, 11, 12])
    side.build_step()
    failed = Finished(loads={job.number: LoadOutcome(frozenset([11]), 0.5)})
    traced.report(failed)
    state.hold(5)
    side.end("r")
    spans = {span.name: span for span in traced.spans()}
    assert not spans["kvkeep.load"].status.is_ok
    worker = spans[
        "kvkeep.load.worker"
    ]  # it has no times: made in the scheduler's thread, just now
    assert worker.start_time is not None and worker.end_time is not None
    assert worker.end_time - worker.start_time == 500_000_000
    assert (worker.attributes or {})["kvkeep.failed_blocks"] == 1
    attributes = spans["kvkeep.request"].attributes or {}
    assert attributes["kvkeep.outcomes"] == ("1 loaded", "2 load_failed", "2 lacked")


def test_a_trace_that_comes_with_the_request_is_continued(cache: ScriptedCache) -> None:
    traced = Traced(cache)
    side = traced.side
    for name, headers in (("ours", {"traceparent": PARENT}), ("new", None)):
        state = side.arrive(name, None, None, KEYS, reads=False)
        state.trace_headers = headers
        side.planner.arrive(state)
        side.end(name)
    ours, new = [span for span in traced.spans() if span.name == "kvkeep.request"]
    assert ours.parent is not None and f"{ours.parent.span_id:016x}" in PARENT
    assert new.parent is None


def test_a_request_that_is_not_sampled_is_not_traced(cache: ScriptedCache) -> None:
    traced = Traced(cache)
    state = traced.side.arrive("r", None, None, KEYS)
    assert state.trace is not UNTRACED
    state.trace_headers = {"traceparent": PARENT[:-1] + "0"}
    state.trace = UNTRACED
    traced.side.planner.arrive(state)
    assert state.trace is UNTRACED and cache.lookups[-1].trace == ""


def test_spans_that_were_dropped_are_counted_once(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracing, "dropped", 3)
    for name in "ab":
        traced.side.arrive(name, None, None, KEYS)
        traced.side.end(name)
    assert traced.side.planner.counts["dropped_spans"] == 3


def test_it_is_off_unless_switched_on() -> None:
    assert start_tracing(False) is None
