"""The benchmark of the loop's turns at a size that takes no time: every operation is there, and
does its work."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep_lab.bench.turns import run


def test_a_small_run_measures_every_operation(without_unit: Callable[..., list[str]]) -> None:
    result = run(blocks=8_192)
    rows = result["rows"]
    assert len({row["operation"] for row in rows}) == len(rows) == 19
    assert all(row["turns"] >= 1 and row["longest_ms"] >= 0 and row["blocks"] > 0 for row in rows)
    turns = {row["operation"]: row["turns"] for row in rows}
    assert turns["a bad block with all below it"] > 4 and turns["clear a tenant"] > 2, (
        "they go in pieces"
    )
    assert without_unit(result) == []
