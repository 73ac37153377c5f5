"""Lookups while a tier moves blocks: the benchmark runs, and the tier did move meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvkeep.bench.tier_lookup import LEAST_POOL_BYTES, lookup_times
from kvkeep.tiers.tier_address import TierAddress

KEYS = {"p99_ms_without", "p99_ms_with", "moved_gbps", "samples", "p99_ms_floor", "floor_gbps"}


@pytest.mark.parametrize("most_gbps", [0.0, 0.05])
def test_lookups_are_timed_while_the_tier_moves(tmp_path: Path, most_gbps: float) -> None:
    tier = TierAddress(tmp_path / "tier", 4 * LEAST_POOL_BYTES)
    result = lookup_times(tier, 40, turns=2, most_gbps=most_gbps)
    assert set(result) == KEYS
    if shutil.which("fio") is None:
        assert result.pop("p99_ms_floor") is result.pop("floor_gbps") is None
    assert result["samples"] == 40 and min(result.values()) > 0


def test_without_fio_there_is_no_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = lookup_times(TierAddress(tmp_path / "tier", 4 * LEAST_POOL_BYTES), 20, turns=1)
    assert result["p99_ms_floor"] is result["floor_gbps"] is None
    assert result["p99_ms_with"] > 0
