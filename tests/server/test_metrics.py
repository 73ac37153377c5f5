from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

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
    assert (
        value(samples, "kvkeep_loop_turn_seconds_count") > 1
        and value(samples, "kvkeep_loop_turn_seconds_sum") > 3
    )
    assert value(scrape(running), "kvkeep_loop_longest_turn_seconds") < 3
