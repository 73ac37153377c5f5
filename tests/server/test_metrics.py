from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.kv.outcomes import NAMES
from kvkeep.server import connections
from kvkeep.server.counters import (
    LATENCY_BUCKETS_US,
    OTHER,
    TENANTS_LABELLED,
    Counters,
    Latency,
    TenantCounts,
    metrics_of,
)
from kvkeep.server.metrics import families
from kvkeep.server.status import LARGEST_TENANTS
from kvkeep.testing.clock import eventually
from kvkeep.wire.address import tcp_host
from kvkeep.wire.messages import RequestReport
from kvkeep.wire.peers import peer_uid

TENANT = "t-" + "a" * 32
Start = Callable[..., Any]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(running: Any) -> Samples:
    """All samples of a scrape, parsed the way Prometheus does."""
    status, text = running.ask("/metrics")
    assert status == 200
    parsed = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in parsed}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_a_scrape_shows_pool_blocks_and_tenants(start: Start) -> None:
    running = start("--default-quota", "1MiB")
    running.store(TENANT, 3)
    running.store("default", 2, complete=False)
    running.http.admin.set_quota("default", 4096)
    samples = scrape(running)
    assert (
        value(samples, "kvkeep_pool_bytes")
        == value(samples, "kvkeep_pool_filled_bytes")
        == 32 << 20
    )
    assert value(samples, "kvkeep_blocks", state="ready") == 3
    assert value(samples, "kvkeep_pool_used_bytes", state="ready") == 3 * 4096
    assert value(samples, "kvkeep_pool_used_bytes", state="writing") == 2 * 4096
    assert value(samples, "kvkeep_tenant_usage_bytes", tenant=TENANT) == 3 * 4096
    assert value(samples, "kvkeep_model_usage_bytes", model="unknown") == 5 * 4096
    assert value(samples, "kvkeep_tenant_quota_bytes", tenant=TENANT) == 1 << 20
    assert value(samples, "kvkeep_tenant_quota_bytes", tenant="default") == 4096
    assert value(samples, "kvkeep_quota_promised_bytes") == 4096
    assert value(samples, "kvkeep_quota_in_force_bytes") == 4096 + (1 << 20)
    assert value(samples, "kvkeep_default_quota_bytes") == 1 << 20
    assert value(samples, "kvkeep_writes") == 1
    assert value(samples, "kvkeep_ready") == 1


def test_what_tenants_ask_for_and_get_is_counted_under_bounded_labels(start: Start) -> None:
    running = start()
    counts = running.daemon.service.counters.tenants
    running.in_loop(lambda: [counts.count_lookup(TENANT, 3, 2), counts.count_loaded(TENANT, 48)])
    samples = scrape(running)
    for name, expected in {
        "lookups": 1,
        "hit_blocks": 3,
        "missed_blocks": 2,
        "loaded_tokens": 48,
    }.items():
        assert value(samples, f"kvkeep_tenant_{name}_total", tenant=TENANT) == expected
        assert value(samples, f"kvkeep_tenant_{name}_total", tenant=OTHER) == 0
    running.in_loop(
        lambda: [counts.count_lookup(f"t-{number:032x}", 0, 1) for number in range(100)]
    )
    labels = [
        dict(labels)["tenant"]
        for name, labels in scrape(running)
        if name == "kvkeep_tenant_lookups_total"
    ]
    assert len(labels) == TENANTS_LABELLED + 1 and {TENANT, OTHER} <= set(labels)


def test_every_outcome_of_a_block_is_a_series_from_the_start(start: Start) -> None:
    """Prometheus sees no increase where a series begins with its first block."""
    found = {
        dict(labels)["outcome"]: count
        for (name, labels), count in scrape(start()).items()
        if name == "kvkeep_prompt_blocks_total"
    }
    # `lacked` is what engines report: the server says why.
    assert found == dict.fromkeys(set(NAMES) - {"lacked"}, 0)


def test_those_who_were_turned_away_are_counted_by_reason(start: Start) -> None:
    running = start()
    for reason in ("unknown_key", "mechanism", "unknown_key"):
        running.in_loop(lambda reason=reason: running.daemon.service.counters.fail_auth(reason))
    samples = scrape(running)
    assert value(samples, "kvkeep_auth_failures_total", reason="unknown_key") == 2
    assert value(samples, "kvkeep_auth_failures_total", reason="mechanism") == 1


def test_only_the_largest_tenants_are_labels(start: Start) -> None:
    running = start()
    for number in range(LARGEST_TENANTS + 10):
        running.store(f"t-{number:032x}", number + 1)
    samples = scrape(running)
    shown = {
        dict(labels)["tenant"] for name, labels in samples if name == "kvkeep_tenant_usage_bytes"
    }
    assert shown == {f"t-{number:032x}" for number in range(10, LARGEST_TENANTS + 10)}
    assert value(samples, "kvkeep_tenants") == LARGEST_TENANTS + 10


def test_quotas_that_exceed_the_pool_are_seen(start: Start) -> None:
    running = start("--default-quota", "20MiB")
    running.store("default", 1)
    assert value(scrape(running), "kvkeep_quotas_overcommitted") == 0
    running.store(TENANT, 1)
    assert value(scrape(running), "kvkeep_quotas_overcommitted") == 1


def test_requests_refusals_and_latency_are_counted(start: Start) -> None:
    running = start()
    counters: Counters = running.daemon.service.counters
    counters.refuse("bad_keys")
    counters.lookups = 7
    latency = counters.latency.setdefault("Lookup", Latency())
    for microseconds in (10, 60, 60, 1e9):
        latency.add(microseconds)
    samples = scrape(running)
    assert value(samples, "kvkeep_refusals_total", code="bad_keys") == 1
    assert value(samples, "kvkeep_lookups_total") == 7
    assert value(samples, "kvkeep_request_duration_seconds_bucket", kind="Lookup", le="5e-05") == 1
    assert value(samples, "kvkeep_request_duration_seconds_bucket", kind="Lookup", le="0.0001") == 3
    assert value(samples, "kvkeep_request_duration_seconds_bucket", kind="Lookup", le="+Inf") == 4
    assert value(samples, "kvkeep_request_duration_seconds_count", kind="Lookup") == 4
    assert len(latency.counts) == len(LATENCY_BUCKETS_US) + 1


def test_openmetrics_is_spoken_to_who_asks_for_it(start: Start) -> None:
    status, text = start().ask(
        "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert status == 200 and text.endswith("# EOF\n")


def test_every_counter_is_a_metric_and_stands_in_the_status(start: Start) -> None:
    running = start()
    samples, counters = scrape(running), running.http.admin.status().counters
    names = metrics_of(Counters, "kvkeep_")
    plain = {field.name for field in fields(Counters) if field.default == 0}
    assert set(names) == set(counters) == plain and "lookups" in plain
    for name, _ in names.values():
        assert value(samples, f"{name}_total") == 0
    assert set(metrics_of(TenantCounts, "")) == {field.name for field in fields(TenantCounts)}


def test_names_carry_prefix_and_unit(start: Start) -> None:
    running = start()
    for family in families(running.http.admin.snapshot(), 0.0):
        assert family.name.startswith("kvkeep_")
        assert family.documentation.endswith(".")
        assert "bytes" not in family.name or family.name.endswith("_bytes")
        assert "seconds" not in family.name or family.name.endswith("_seconds")


def test_the_longest_turn_of_the_loop_is_that_since_the_last_scrape(start: Start) -> None:
    running = start()
    scrape(running)
    running.in_loop(lambda: running.daemon.service.counters.turns.add(3e6))
    samples = scrape(running)
    assert value(samples, "kvkeep_loop_longest_turn_seconds") == 3
    assert value(samples, "kvkeep_loop_turn_seconds_count") > 1
    assert value(samples, "kvkeep_loop_turn_seconds_sum") > 3
    assert value(scrape(running), "kvkeep_loop_longest_turn_seconds") < 3


def test_the_time_that_a_turn_takes_is_measured(start: Start) -> None:
    running = start()
    scrape(running)
    running.in_loop(lambda: time.sleep(0.3))
    samples = scrape(running)
    assert value(samples, "kvkeep_loop_longest_turn_seconds") >= 0.3
    assert value(samples, "kvkeep_loop_turn_seconds_sum") >= 0.3


def test_accepting_a_connection_is_part_of_the_turn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the metric, and for /healthz, which tells by `busy_since` whether the loop is stuck."""
    running = start()
    busy_since: list[float | None] = []

    def slow(connected: socket.socket) -> int | None:
        busy_since.append(running.daemon.busy_since)
        time.sleep(0.3)
        return peer_uid(connected)

    monkeypatch.setattr(connections, "peer_uid", slow)
    where = tcp_host(running.daemon.address)
    assert where is not None
    with socket.create_connection(where):
        assert eventually(lambda: busy_since)
        running.in_loop(lambda: None)  # what is asked from now on waits for the next turn
        assert value(scrape(running), "kvkeep_loop_longest_turn_seconds") >= 0.3
    assert None not in busy_since


def test_each_tier_has_its_samples(start: Start, tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    running = start(*(f"--tier=disk://{disk}?size=64MiB" for disk in (fast, slow)))
    movement = running.daemon.movement

    def work() -> None:
        counts = movement.tiers[0].counts
        counts.written_blocks, counts.written_bytes, counts.errors = 3, 3 * 4096, 1
        movement.tiers[0].write_ms = 2.5
        movement.put_aside(movement.tiers[1], "a test")
        movement.writers[0].evicted_unwritten = 7

    running.in_loop(work)
    samples = scrape(running)
    tier = str(fast)
    capacity = value(samples, "kvkeep_tier_capacity_bytes", tier=tier)
    assert 32 << 20 < capacity < 64 << 20
    assert value(samples, "kvkeep_tier_used_bytes", tier=tier) == 0
    assert value(samples, "kvkeep_tier_written_blocks_total", tier=tier) == 3
    assert value(samples, "kvkeep_tier_written_bytes_total", tier=tier) == 3 * 4096
    assert value(samples, "kvkeep_tier_errors_total", tier=tier) == 1
    assert value(samples, "kvkeep_tier_write_seconds", tier=tier) == 0.0025
    assert ("kvkeep_tier_read_seconds", frozenset({("tier", tier)})) not in samples
    for disk, aside in ((fast, 0), (slow, 1)):
        assert value(samples, "kvkeep_tier_set_aside", tier=str(disk)) == aside
    assert value(samples, "kvkeep_evicted_unwritten_total") == 7


def test_ten_thousand_tenants_and_models_make_no_more_series(start: Start) -> None:
    running = start()

    def series() -> int:
        return len(scrape(running))

    def many(count: int) -> None:
        counters = running.daemon.service.counters
        for number in range(count):
            tenant = f"t-{number:032x}"
            report = RequestReport(f"r{number}", tenant, [("loaded", 1)], computed_tokens=5)
            counters.tenants.count_lookup(tenant, 1, 1)
            counters.tenants.count_report(report)
            counters.models.of(f"model {number}").count_report(report)

    running.in_loop(lambda: many(100))
    few = series()
    running.in_loop(lambda: many(10_000))
    assert series() == few
    samples = scrape(running)
    total = sum(
        count
        for (name, _), count in samples.items()
        if name == "kvkeep_tenant_computed_tokens_total"
    )
    lost = 5 * TENANTS_LABELLED  # at most: of series that tenants lost to others
    assert 10_100 * 5 - lost <= total <= 10_100 * 5, "the rest counts together"


def test_evictions_are_shown_by_reason_and_age(start: Start) -> None:
    running = start()
    running.store("default", 3)
    departures = running.daemon.store.remember_departures()
    words = np.arange(4, dtype=np.uint64).reshape(2, 2)

    def evict() -> None:
        departures.uses.note(0, 1_000)
        departures.evicted(words, "limit", "default", "default", 5, 31_000)

    running.in_loop(evict)
    samples = scrape(running)
    assert value(samples, "kvkeep_evicted_blocks_total", reason="limit") == 2
    assert value(samples, "kvkeep_evicted_blocks_total", reason="own") == 0
    assert value(samples, "kvkeep_evicted_age_seconds_bucket", le="10") == 0
    assert value(samples, "kvkeep_evicted_age_seconds_bucket", le="60") == 2
    assert value(samples, "kvkeep_load_failures_total", cause="gone") == 0
    status, said = running.ask("/v1/status")
    assert status == 200 and said["evicted_age_s"] == 30.0
