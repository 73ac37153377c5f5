"""The lookup benchmark runs, and says what it must in the form it must. How fast is not a test's
business."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvkeep.bench import lookup
from kvkeep.errors import SettingsError


def test_rows_for_every_length_and_kind(without_unit: Callable[..., list[str]]) -> None:
    result = lookup.run(resident=(8192,), rounds=3)
    assert set(result["ping_us"]) == {"p50", "p99"} and without_unit(result) == []
    assert [(row["blocks"], row["kind"], row["resident"]) for row in result["rows"]] == [
        (blocks, kind, 8192) for blocks in (128, 512, 2048, 8192) for kind in ("miss", "hit")
    ]
    for row in result["rows"]:
        assert row["p50_us"] > 0 and row["p99_us"] >= row["p50_us"] and row["ratio_to_ping"] > 0


def test_too_few_resident_blocks_are_refused() -> None:
    with pytest.raises(SettingsError, match="8192"):
        lookup.run(resident=(1000,))
