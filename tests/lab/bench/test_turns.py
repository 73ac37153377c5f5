"""The benchmark of the loop's turns at a size that takes no time: every operation is there, and
does its work."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep_lab.bench.turns import run


def test_a_small_run_measures_every_operation(without_unit: Callable[..., list[str]]) -> None:
    result = run(blocks=8_192)
    rows = result["rows"]
    assert len({row["operation"] for row in rows}) == len(rows) == 30
    assert all(row["turns"] >= 1 and row["longest_ms"] >= 0 and row["blocks"] > 0 for row in rows)
    turns = {row["operation"]: row["turns"] for row in rows}
    pieces = {
        "a bad block with all below it": 4,
        "clear a tenant": 2,
        "clear of one tenant, in memory and on a disk": 3,
        "clear of all tenants, in memory and on a disk": 3,
        "chain of 2048 blocks written to a disk": 16,
        "256 bad blocks of a disk": 4,
        "chains of 64 blocks on a disk come up into a full memory": 800,
    }
    assert all(turns[operation] > least for operation, least in pieces.items())
    assert without_unit(result) == []
