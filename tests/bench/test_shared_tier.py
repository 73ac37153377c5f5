"""The benchmark of a shared tier runs with each kind of service, and says what it must in the form it
must. How fast is not a test's business."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvkeep.bench import tier, tier_hits
from kvkeep.bench.shared_tier import own_salt
from kvkeep.bench.tier_lookup import lookup_times
from kvkeep.client.cache import connect
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.tier_address import TierAddress, parse_tier
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
    paces: list[float] = []

    def lookup_times(address: TierAddress, samples: int, most_gbps: float) -> dict[str, float]:
        paces.append(most_gbps)
        return dict(lookup)

    monkeypatch.setattr(tier, "lookup_times", lookup_times)
    with service(kind, tmp_path) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        result = tier.run(
            running.address.replace("size=64MiB", "size=256MiB"),
            block_bytes=(64 * KIB, MIB),
            total_bytes=8 * MIB,
            rounds=1,
            hits=False,
        )
        assert running.objects() == {}
    assert result["hits"] == [] and without_unit(result) == []
    assert set(result) == {"floor", "engine", "rows", "lookup", "recovery", "hits"}
    assert result["recovery"] is None and result["lookup"]["found_512_ms"] > 0
    read = result["rows"][1]["gbps"]
    assert paces == [pytest.approx(0.6 * read)], "more than half of its bench rate"
    assert result["lookup"]["bench_fraction"] == round(0.5 / read, 3)
    assert [(row["direction"], row["block_bytes"]) for row in result["rows"]] == [
        ("write", 64 * KIB),
        ("read", 64 * KIB),
        ("write", MIB),
        ("read", MIB),
    ]
    for row in result["rows"]:
        assert (
            set(row) == ROW and parse_tier(row["tier"]).scheme == parse_tier(running.address).scheme
        )
        assert min(row["gbps"], row["floor_gbps"], row["fraction_of_floor"]) > 0


def test_all_rounds_fit_into_a_tier_that_keeps_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "lookup_times", lambda *_, **__: {"moved_gbps": 1.0})
    rows = tier.run(
        f"file://{tmp_path}?size=256MiB",
        block_bytes=(MIB,),
        total_bytes=64 * MIB,
        rounds=6,
        hits=False,
    )["rows"]
    assert all(row["gbps"] > 0 for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_with_a_salt_of_a_run_is_removed_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(kind, tmp_path) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        with own_salt(parse_tier(running.address)) as salt:
            flags = "--pool-size", "64MiB", "--tier", running.address
            with (
                ServerProcess(*flags, environment=running.environment) as server,
                connect(
                    server.address,
                    model="m",
                    revision="1",
                    block_tokens=1,
                    block_shape=(1024,),
                    dtype="uint8",
                    required=True,
                ) as cache,
            ):
                blocks = np.ones((2, 1024), np.uint8)
                cache.put([1, 2], blocks, salt=salt)
                cache.put([1, 2], blocks, salt="a user")
                eventually(lambda: server.ask("/v1/tiers")[0]["counts"]["written_blocks"] == 4)
            before = running.objects()
        after = running.objects()
        assert set(after) < set(before) and len(after) * 2 == len(before)


def test_two_runs_write_the_same_and_leave_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_hits, "installed", lambda name: False)
    with service("valkey", tmp_path) as running:
        address = parse_tier(running.address)
        for _ in range(2):
            result = lookup_times(address, 20, turns=1, most_gbps=0.05)
            assert result["p99_ms_with"] > 0 and result["moved_gbps"] > 0
            assert result["p99_ms_floor"] is result["floor_gbps"] is None
            _, (row,) = tier_hits.hit_times(address, (100,), 1)
            assert row["same_tokens"] and row["cached_tokens"] == 96
            assert running.objects() == {}
