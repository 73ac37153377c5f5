"""The benchmark of a disk tier runs, and says what it must in the form it must. How fast is not a
test's business."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvkeep.bench import tier, tier_floor
from kvkeep.errors import SettingsError
from kvkeep.tiers.tier_address import TierAddress
from kvkeep.units import KIB, MIB

ROW = {"tier", "direction", "block_bytes", "gbps", "floor_gbps", "fraction_of_floor"}


@pytest.fixture(params=["fio", "own threads"])
def floor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "own threads":
        monkeypatch.setattr(tier_floor, "has_fio", lambda: False)
    elif not tier_floor.has_fio():
        pytest.skip("fio is not installed")
    return str(request.param)


def test_each_size_is_written_and_read(
    floor: str,
    tmp_path: Path,
    without_unit: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").write_text("kept")
    lookup = {"p99_ms_with": 1.0, "moved_gbps": 0.5}
    paces: list[float] = []

    def lookup_times(address: TierAddress, samples: int, most_gbps: float) -> dict[str, float]:
        paces.append(most_gbps)
        return dict(lookup)

    monkeypatch.setattr(tier, "lookup_times", lookup_times)
    address = f"disk://{tmp_path}?size=256MiB"
    result = tier.run(
        address, block_bytes=(64 * KIB, MIB), total_bytes=24 * MIB, rounds=1, hits=False
    )
    rows: list[dict[str, Any]] = result["rows"]
    assert result["floor"] == floor and without_unit(result) == []
    assert result["hits"] == [] and result["engine"] == ""
    read = rows[1]["gbps"]
    assert paces == [pytest.approx(0.6 * read)], "more than half of its bench rate"
    against = {"bench_gbps": read, "bench_fraction": round(0.5 / read, 3)}
    assert result["lookup"] == lookup | against | {"found_512_ms": None}
    # An image may take half of the log, which has 2 MiB, and a row takes 80 bytes.
    assert 13_000 < result["recovery"]["blocks"] <= MIB // 80
    assert result["recovery"]["seconds"] > 0
    said = capsys.readouterr()
    assert "blocks of 64KiB, write, 1 of 1" in said.err and not said.out
    assert [(row["direction"], row["block_bytes"]) for row in rows] == [
        ("write", 64 * KIB),
        ("read", 64 * KIB),
        ("write", MIB),
        ("read", MIB),
    ]
    for row in rows:
        assert set(row) == ROW and row["tier"] == address
        assert min(row["gbps"], row["floor_gbps"], row["fraction_of_floor"]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_hits_are_measured_in_a_directory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[TierAddress, tuple[int, ...], int]] = []

    def hit_times(address: TierAddress, lengths: tuple[int, ...], repeats: int) -> Any:
        asked.append((address, lengths, repeats))
        return "an engine", [{"prompt_tokens": 64}]

    monkeypatch.setattr(tier, "hit_times", hit_times)
    monkeypatch.setattr(tier, "engine_kind", lambda: "reference")
    monkeypatch.setattr(tier, "lookup_times", lambda *_, **__: {"moved_gbps": 0.5})
    address = f"disk://{tmp_path}?size=256MiB"
    result = tier.run(address, (MIB,), total_bytes=8 * MIB, rounds=1, hit_tokens=(64,))
    assert (result["engine"], result["hits"]) == ("an engine", [{"prompt_tokens": 64}])
    ((own, lengths, repeats),) = asked
    assert (own.size_bytes, lengths, repeats) == (256 * MIB, (64,), 3)
    assert own.directory.parent.parent == tmp_path and not own.directory.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tier": "disk:///nowhere/at/all?size=256MiB"}, "no directory"),
        ({"tier": "memory:///tmp?size=64MiB"}, "disk://"),
        ({"tier": "none"}, "one tier"),
        ({"tier": "disk:///tmp?size=64MiB"}, "too small"),
        ({"tier": "file:///tmp/kv?size=64MiB"}, "too small"),
        ({"tier": "disk:///tmp?size=256MiB", "block_bytes": (100,)}, "4096"),
        ({"tier": "disk:///tmp?size=256MiB", "block_bytes": (16 * MIB,)}, "8MiB"),
        ({"tier": "valkey://127.0.0.1:1", "block_bytes": (16 * MIB,)}, "8MiB"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        tier.run(**options)
