"""Lookups while a tier moves blocks: the benchmark runs, and the tier did move meanwhile."""

from __future__ import annotations

from pathlib import Path

from kvkeep.bench.tier_lookup import LEAST_POOL_BYTES, lookup_times
from kvkeep.tiers.tier_address import TierAddress


def test_lookups_are_timed_while_the_tier_moves(tmp_path: Path) -> None:
    result = lookup_times(TierAddress(tmp_path / "tier", 4 * LEAST_POOL_BYTES), 40, turns=2)
    assert set(result) == {"p99_ms_without", "p99_ms_with", "moved_gbps", "samples"}
    assert result["samples"] == 40 and min(result.values()) > 0
