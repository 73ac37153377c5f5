"""Hits of blocks that only a disk has: the benchmark says what it must, in the reference engine, and
sees when the blocks did not come from where they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvkeep.bench import tier_hits
from kvkeep.bench.tier_hits import hit_times
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.tiers.tier_address import TierAddress
from kvkeep.units import MIB

ROW = {
    "prompt_tokens",
    "computed_ms",
    "memory_ms",
    "tier_ms",
    "cached_tokens",
    "same_tokens",
    "samples_ms",
}


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_hits, "installed", lambda name: False)


@pytest.mark.usefixtures("reference")
def test_the_reference_engine_takes_blocks_from_memory_and_from_disk(tmp_path: Path) -> None:
    address = TierAddress(tmp_path / "tier", 64 * MIB)
    engine, rows = hit_times(address, (100, 200), 2)
    assert engine == "reference"
    assert [row["prompt_tokens"] for row in rows] == [100, 200]
    for row, blocks in zip(rows, (6, 12), strict=True):
        assert set(row) == ROW
        assert row["same_tokens"] and row["cached_tokens"] == blocks * 16
        assert min(row["computed_ms"], row["memory_ms"], row["tier_ms"]) > 0
        assert {case: len(ms) for case, ms in row["samples_ms"].items()} == {
            "computed": 2,
            "memory": 2,
            "tier": 2,
        }


@pytest.mark.usefixtures("reference")
def test_a_disk_that_gives_nothing_back_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = tier_hits._Server.restart

    def lose_all(self: Any, *, empty_disk: bool) -> None:
        restart(self, empty_disk=True)

    monkeypatch.setattr(tier_hits._Server, "restart", lose_all)
    with pytest.raises(KVKeepError, match="0 of 6 blocks came from the tier"):
        hit_times(TierAddress(tmp_path / "tier", 64 * MIB), (100,), 1)


@pytest.mark.usefixtures("reference")
def test_a_tier_without_room_for_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not fit a tier of 16MiB"):
        hit_times(TierAddress(tmp_path / "tier", 16 * MIB), (2000,), 1)


def test_the_engine_is_vllm_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_hits, "installed", lambda name: True)
    assert tier_hits.engine_kind() == "vllm"
    monkeypatch.setattr(tier_hits, "installed", lambda name: False)
    assert tier_hits.engine_kind() == "reference"
    monkeypatch.setattr(tier_hits.importlib.util, "find_spec", lambda name: None)
    assert tier_hits.engine_kind() == ""
