"""The index benchmark at a size that takes no time: its keys, and that a pool was filled and
overfilled."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep_lab.bench.index import run


def test_a_small_run_gives_every_number(without_unit: Callable[..., list[str]]) -> None:
    numbers = run(blocks=20_000, rounds=2)
    assert list(numbers)[:4] == ["blocks", "bytes_per_block", "stores_per_s", "evictions_per_s"]
    assert numbers["blocks"] == 20_000 and without_unit(numbers) == []
    assert all(value > 0 for value in numbers.values())
