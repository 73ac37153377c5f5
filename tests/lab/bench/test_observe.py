"""The benchmark of what observing costs runs, and says what it must in the form it must. How much is
not a test's business."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep_lab.bench.observe import run


def test_each_is_measured_with_and_without(without_unit: Callable[..., list[str]]) -> None:
    result = run(lookups=2, rounds=1)
    rows = result["rows"]
    assert [(row["what"], row.get("blocks"), row.get("result")) for row in rows] == [
        *(
            ("lookup", blocks, result)
            for blocks in (128, 512, 2048, 8192)
            for result in ("hit", "miss")
        ),
        ("step", None, None),
        ("store_with_events", None, None),
    ]
    for row in rows:
        (unit,) = {"us", "ms", "gbps"} & {name.split("_")[-1] for name in row}
        with_it, without = row[f"with_{unit}"], row[f"without_{unit}"]
        assert min(with_it, without) > 0 and abs(row["ratio"] * without / with_it - 1) < 0.02
        assert ("alike_ratio" in row) == (row["what"] != "step")
        if "alike_ratio" in row:
            assert abs(row["alike_ratio"] * with_it / row[f"alike_{unit}"] - 1) < 0.02
    assert without_unit(result) == []
