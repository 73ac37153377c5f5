from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.bench.figures import unit_of, with_unit


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("own_ping_us", 118.4, "118.4 µs"),
        ("us_per_block", 1.125, "1.125 µs/block"),
        ("put_us_per_mib", 2000.0, "2,000 µs/MiB"),
        ("ms", 0.25, "0.25 ms"),
        ("serving_again_s", 1.2, "1.2 s"),
        ("paused_seconds", 30, "30 s"),
        ("floor_gbps", 12.5, "12.5 GB/s"),
        ("memcpy_gb_per_s", 9, "9 GB/s"),
        ("bytes_per_block", 85.2, "85.2 B/block"),
        ("stores_per_s", 70123, "70,123 stores/s"),
        ("evictions_per_s_10k", 5, "5 evictions/s"),
        ("output_tokens_per_s", 98.0, "98 tokens/s"),
        ("block_bytes", 65536, "64KiB"),
        ("wrong_bytes", 0, "0B"),
        ("overhead_ratio", 1.028, "1.028×"),
        ("ratio_to_ping", 11.0, "11×"),
        ("hit_fraction", 0.99999, "99.999%"),
        ("hit_fraction", 1.0, "100%"),
        ("cost", -0.012, "-1.2%"),
        ("resident", 10_000, "10,000 blocks"),
        ("prompt_tokens", 1536, "1,536"),
        ("blocks", 64, "64"),
        ("verify", True, "yes"),
        ("cached_share", None, "-"),
        ("device", "cpu", "cpu"),
        ("left_out", [], "none"),
        ("left_out", ["a", "b"], "a,b"),
        ("unheard_of", 2.5, "2.5"),
    ],
)
def test_a_figure_has_the_unit_of_its_name(name: str, value: Any, shown: str) -> None:
    assert with_unit(name, value) == shown


def test_a_mapping_with_a_unit_lends_it_to_all_in_it() -> None:
    assert with_unit("p99", 200.25, "ping_us") == "200.25 µs"
    assert with_unit("handshake_us", 1.04, "tls_to_none") == "1.04×", "a ratio of times is no time"
    assert with_unit("hit_us", 12.8, "timing") == "12.8 µs"


def test_a_name_is_known_by_its_end_only() -> None:
    assert unit_of("us_of_it") is None and unit_of("status") is None and unit_of("p50") is None


def test_a_figure_without_a_unit_would_be_found(without_unit: Callable[..., list[str]]) -> None:
    result = {
        "p50": 1,
        "name": "a",
        "ok": True,
        "rows": [{"blocks": 1, "b": 2}],
        "ping_us": {"p50": 1},
        "c": {"d": 1},
    }
    assert without_unit(result) == ["p50", "b", "c.d"]
