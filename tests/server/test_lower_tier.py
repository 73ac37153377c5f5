"""What a tier's jobs say of its speed."""

from __future__ import annotations

import pytest

from kvkeep.server.lower_tier import Throughput


def test_before_any_job_a_speed_is_assumed() -> None:
    assert Throughput().bytes_per_s == 500e6


def test_jobs_that_run_side_by_side_share_the_time() -> None:
    """Four at a time take 40 ms each, so one ends every 10 ms; the loop sees several at once."""
    alone, together, seen_late = Throughput(), Throughput(), Throughput()
    for job in range(1, 201):
        alone.add(8 << 20, 0.01, job * 0.01)
        together.add(8 << 20, 0.04, job * 0.01)
        seen_late.add(8 << 20, 0.04, -(-job // 4) * 0.04)
    assert alone.bytes_per_s == pytest.approx((8 << 20) / 0.01, rel=0.01)
    assert together.bytes_per_s == pytest.approx(alone.bytes_per_s, rel=0.01)
    assert seen_late.bytes_per_s == pytest.approx(alone.bytes_per_s, rel=0.2)


def test_time_without_a_job_does_not_count() -> None:
    rate = Throughput()
    for job in range(200):
        rate.add(8 << 20, 0.5, job * 100.0)
    assert rate.bytes_per_s == pytest.approx(2 * (8 << 20), rel=0.01)


def test_a_tier_that_becomes_slower_is_noticed_within_some_jobs() -> None:
    rate = Throughput()
    for job in range(100):
        rate.add(8 << 20, 0.01, job / 100)
    for job in range(60):
        rate.add(8 << 20, 1.0, 1 + job)
    assert rate.bytes_per_s == pytest.approx(8 << 20, rel=0.1)


def test_one_slow_job_at_the_start_says_little() -> None:
    rate = Throughput()
    rate.add(8 << 20, 0.5, 1.0)
    assert rate.bytes_per_s > 300e6
