"""The comparison of copies runs on a small scale."""

from __future__ import annotations

import pytest

from kvkeep.errors import SettingsError
from kvkeep.kv import native
from kvkeep_lab.bench import copy as bench


def test_result_is_complete() -> None:
    result = bench.run(block_bytes=(64 << 10, 128 << 10), total_bytes=1 << 20, repeats=1)
    assert set(result["memcpy_gb_per_s"]) == {"64 KiB", "128 KiB"}
    assert all(part > 0 for parts in result["of_memcpy"].values() for part in parts.values())
    assert ("gather, C" in result["of_memcpy"]) == native.available
    shown = bench.table(result)
    assert "| gather, numpy by piece |" in shown
    assert shown.count(" GB/s |") == 2 and shown.count("% of memcpy |") == 2 * len(
        result["of_memcpy"]
    )


def test_blocks_that_do_not_divide_what_is_moved_are_refused() -> None:
    for block_bytes, total_bytes in ((1000, 1 << 20), (1 << 20, 1 << 19)):
        with pytest.raises(SettingsError, match="--block-bytes"):
            bench.run(block_bytes=(block_bytes,), total_bytes=total_bytes)
