"""The transfer benchmark runs on little memory, and says what it must in the form it must."""

from __future__ import annotations

from kvkeep.bench import transfer


def test_rows_for_each_direction_size_and_verification() -> None:
    result = transfer.run(block_bytes=(64 << 10, 1 << 20), total_bytes=8 << 20, rounds=2)
    assert result["floor_gbps"] > 0
    assert [(row["direction"], row["block_bytes"], row["verify"]) for row in result["rows"]] == [
        (direction, size, verify)
        for size in (64 << 10, 1 << 20)
        for verify in (False, True)
        for direction in ("store", "load")
    ]
    assert all(row["gbps"] > 0 and row["fraction_of_floor"] > 0 for row in result["rows"])
