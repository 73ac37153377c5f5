"""The transfer benchmark runs on little memory, and says what it must in the form it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvkeep.bench import transfer
from kvkeep.errors import SettingsError


def test_rows_for_each_direction_size_and_verification(
    without_unit: Callable[..., list[str]],
) -> None:
    result = transfer.run(block_bytes=(64 << 10, 1 << 20), total_bytes=8 << 20, rounds=2)
    assert result["device"] == "cpu" and result["floor_gbps"] > 0
    assert [(row["direction"], row["block_bytes"], row["verify"]) for row in result["rows"]] == [
        (direction, size, verify)
        for size in (64 << 10, 1 << 20)
        for verify in (False, True)
        for direction in ("store", "load")
    ]
    assert all(row["gbps"] > 0 and row["fraction_of_floor"] > 0 for row in result["rows"])
    assert without_unit(result) == []


def test_what_is_of_no_use_on_a_cpu_is_refused() -> None:
    with pytest.raises(SettingsError, match="--geometries is for a GPU"):
        transfer.run(geometries=("mla",))
    with pytest.raises(SettingsError, match="less than a block"):
        transfer.run(total_bytes=1 << 20)
