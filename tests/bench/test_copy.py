"""The comparison of copies runs on a small scale."""

from __future__ import annotations

from kvkeep.bench import copy as bench
from kvkeep.kv import native


def test_result_is_complete() -> None:
    result = bench.run(sizes=(64 << 10, 128 << 10), total_bytes=1 << 20, repeats=1)
    assert set(result["memcpy_gb_per_s"]) == {"64 KiB", "128 KiB"}
    assert all(part > 0 for parts in result["of_memcpy"].values() for part in parts.values())
    assert ("gather, C" in result["of_memcpy"]) == native.available
    assert "| gather, numpy by piece |" in bench.table(result)
