"""Tests for what has happened, counted."""

from __future__ import annotations

from kvkeep.server.counters import LATENCY_BUCKETS_US, Counters, Latency


def test_a_time_falls_into_the_bucket_whose_limit_it_does_not_pass() -> None:
    latency = Latency()
    for microseconds in (0, 50, 50.1, 250_000, 250_001):
        latency.add(microseconds)
    assert latency.counts == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert latency.total_us == 500_101.1


def test_there_is_one_bucket_more_than_limits() -> None:
    assert len(Latency().counts) == len(LATENCY_BUCKETS_US) + 1
    assert list(LATENCY_BUCKETS_US) == sorted(LATENCY_BUCKETS_US)


def test_refusals_are_counted_by_code() -> None:
    counters = Counters()
    for code in ("bad_keys", "bad_shard", "bad_keys"):
        counters.refuse(code)
    assert counters.refusals == {"bad_keys": 2, "bad_shard": 1}


def test_two_servers_do_not_share_their_counts() -> None:
    first, second = Counters(), Counters()
    first.refuse("bad_keys")
    first.latency["Ping"] = Latency()
    assert not second.refusals and not second.latency
