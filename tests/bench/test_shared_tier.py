"""The benchmark of a shared tier runs with each kind of service, and says what it must in the form it
must. How fast is not a test's business."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.bench import tier
from kvkeep.tiers.tier_address import parse_tier
from kvkeep.units import KIB, MIB

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))
from shared_services import KINDS, service

ROW = {"tier", "direction", "block_bytes", "gbps", "floor_gbps", "fraction_of_floor"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_size_is_written_and_read_and_nothing_is_left(
    kind: str,
    tmp_path: Path,
    without_unit: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = {"p99_ms_with": 1.0, "moved_gbps": 0.5}
    monkeypatch.setattr(tier, "lookup_times", lambda address, samples: dict(lookup))
    with service(kind, tmp_path) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        result = tier.run(
            running.address,
            block_bytes=(64 * KIB, MIB),
            total_bytes=8 * MIB,
            rounds=1,
            hits=False,
        )
        assert running.objects() == {}
    assert result["hits"] == [] and without_unit(result) == []
    assert result["lookup"]["found_512_ms"] > 0
    assert [(row["direction"], row["block_bytes"]) for row in result["rows"]] == [
        ("write", 64 * KIB),
        ("read", 64 * KIB),
        ("write", MIB),
        ("read", MIB),
    ]
    for row in result["rows"]:
        assert set(row) == ROW and parse_tier(row["tier"]) == parse_tier(running.address)
        assert min(row["gbps"], row["floor_gbps"], row["fraction_of_floor"]) > 0
