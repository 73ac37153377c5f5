"""The comparison of checksums runs, and its damage is damage."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import SettingsError
from kvkeep_lab.bench import checksum as bench


def test_result_is_complete() -> None:
    result = bench.run(block_bytes=(1 << 24,), repeats=1, trials=20)
    names = set(result["gb_per_s"])
    assert {"kvkeep, numpy", "CRC-32", "Adler-32", "sum of words", "xor of words"} <= names
    assert all(speed > 0 for speeds in result["gb_per_s"].values() for speed in speeds.values())
    assert not any(result["missed"]["CRC-32"].values())
    assert result["missed"]["xor of words"]["swapped 4 KiB rows"] == 20
    text = bench.table(result)
    assert "| swapped 4 KiB rows |" in text
    assert "16 MiB, GB/s |" in text and "| missed of 20 damaged blocks |" in text
    assert all(f"| {name} |" in text for name in names)


def test_ours_misses_nothing() -> None:
    candidates, _ = bench._candidates()
    name = next(iter(candidates))
    assert name.startswith("kvkeep")
    assert not any(bench._missed({name: candidates[name]}, trials=200, seed=7)[name].values())


@pytest.mark.parametrize("kind", bench.DAMAGE)
def test_damage_changes_bytes(kind: str) -> None:
    rng = np.random.default_rng(0)
    changed = 0
    for _ in range(20):
        good, other = bench._kv_like(rng), bench._kv_like(rng)
        bad = good.copy()
        bench.DAMAGE[kind](bad, other, rng)
        changed += not np.array_equal(good, bad)
    assert changed >= 19


def test_what_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    candidates, left_out = bench._candidates()
    assert {"XXH3", "BLAKE3"} <= set(left_out)
    assert not set(candidates) & set(left_out)


@pytest.mark.parametrize("missing", ["torch", "triton", ""])
def test_a_device_that_is_not_here_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def find(name: str) -> Any:
        if name == missing:
            raise ImportError(f"No module named {name}")
        return SimpleNamespace(
            cuda=SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
        )

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(SettingsError) as caught:
        bench.run(device="cuda:1")
    assert missing in caught.value.message and "--device" in caught.value.hint
    with pytest.raises(SettingsError, match="expected cpu, cuda"):
        bench.run(device="cuda:x")


def test_block_sizes_that_no_candidate_takes_are_refused() -> None:
    with pytest.raises(SettingsError, match="--block-bytes"):
        bench.run(block_bytes=(1001,))
