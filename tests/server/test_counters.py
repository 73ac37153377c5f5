"""Tests for what has happened, counted."""

from __future__ import annotations

from collections import Counter
from random import Random

from kvkeep.server.counters import (
    OTHER,
    TENANTS_COUNTED,
    TENANTS_LABELLED,
    CountsByTenant,
    Latency,
    TenantCounts,
)


def test_a_time_falls_into_the_bucket_whose_limit_it_does_not_pass() -> None:
    latency = Latency()
    for microseconds in (0, 50, 50.1, 250_000, 250_001, 10_000_001):
        latency.add(microseconds)
    assert latency.counts == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1]
    assert latency.total_us == 10_500_102.1


def test_lookups_hits_misses_and_loaded_tokens_of_each_tenant() -> None:
    counts = CountsByTenant()
    counts.count_lookup("a", 3, 1)
    counts.count_lookup("a", 0, 5)
    counts.count_lookup("b", 2, 0)
    counts.count_loaded("a", 48)
    assert counts.of("a") == TenantCounts(2, 3, 6, loaded_tokens=48)
    assert counts.of("b") == TenantCounts(1, 2, 0)
    assert counts.of("never seen") == TenantCounts()
    assert counts.by_label() == {"a": counts.of("a"), "b": counts.of("b"), OTHER: TenantCounts()}


def test_what_is_shown_does_not_change_afterwards() -> None:
    counts = CountsByTenant()
    counts.count_lookup("a", 1, 0)
    shown = counts.by_label()
    counts.count_lookup("a", 1, 0)
    assert shown["a"].lookups == 1


def test_labels_are_bounded_and_the_rest_counts_together() -> None:
    counts = CountsByTenant()
    for number in range(TENANTS_LABELLED + 30):
        counts.count_lookup(f"t{number}", 1, 1)
    shown = counts.by_label()
    assert len(shown) == TENANTS_LABELLED + 1 and shown[OTHER].lookups == 30


def test_a_tenant_that_asks_for_far_more_gets_the_label_of_the_smallest() -> None:
    counts = CountsByTenant()
    for number in range(TENANTS_LABELLED):
        counts.count_lookup(f"t{number}", 10 + number, 0)
    counts.count_lookup("late", 20, 0)
    assert "late" not in counts.by_label(), "twice as much is not more than twice as much"
    counts.count_lookup("late", 1, 0)
    shown = counts.by_label()
    assert "late" in shown and "t0" not in shown
    assert shown["late"] == TenantCounts() and shown[OTHER].hit_blocks == 21, (
        "what was under other stays there"
    )
    assert shown[OTHER].lookups == 2
    counts.count_lookup("late", 5, 0)
    assert counts.by_label()["late"].hit_blocks == 5 and counts.of("late").hit_blocks == 26


def test_no_series_ever_falls_and_everything_is_counted_once() -> None:
    """What Prometheus adds up over all series is what happened, whichever tenants have labels when
    it looks."""
    chance, counts = Random(1), CountsByTenant()
    before: dict[str, TenantCounts] = {}
    added: Counter[str] = Counter()
    happened = 0
    for _ in range(300):
        for _ in range(chance.randrange(20)):
            asked = chance.randrange(1, 50)
            counts.count_lookup(f"t{int(chance.paretovariate(0.5)) % 500}", asked, 0)
            happened += asked
        shown = counts.by_label()
        assert len(shown) <= TENANTS_LABELLED + 1
        for label, now in shown.items():
            earlier = before.get(label, TenantCounts())
            assert now.hit_blocks >= earlier.hit_blocks and now.lookups >= earlier.lookups
            added[label] += now.hit_blocks - earlier.hit_blocks
        before = shown
    assert added.total() == happened


def test_tenants_that_were_not_looked_up_for_long_are_forgotten() -> None:
    counts = CountsByTenant()
    for number in range(TENANTS_COUNTED):
        counts.count_lookup(f"t{number}", 1, 0)
    counts.count_lookup("t0", 1, 0)
    counts.count_lookup("one more", 1, 0)
    assert counts.of("t0").lookups == 2
    assert counts.of("t1") == TenantCounts()
    assert counts.of("t2").lookups == 1
