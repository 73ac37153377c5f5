"""The engine benchmark runs, and says what it must in the form it must. How fast is not a test's
business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.llm import Completion
from kvkeep.engine.request import RequestMetrics
from kvkeep.errors import Unavailable
from kvkeep_lab.bench import engine

PAIRS = (
    ("no_cache", "with_cache"),
    ("no_cache_ttft", "with_cache_ttft"),
    ("many_no_cache", "many_with_cache"),
)
RATIOS = {"overhead_ratio", "ttft_overhead_ratio", "many_requests_ratio", "speedup"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return engine.run(rounds=1, prompts=2, prompt_tokens=64, layers=1)


def test_all_is_measured_and_tokens_are_the_same(result: dict[str, Any]) -> None:
    assert result["same_tokens"] is True
    assert {
        name: result[name] for name in ("rounds", "prompts", "prompt_tokens", "threads", "layers")
    } == {
        "rounds": 1,
        "prompts": 2,
        "prompt_tokens": 64,
        "threads": 1,
        "layers": 1,
    }
    assert "1 layers" in result["model"] and "1 KiB" in result["model"]
    for key in {f"{name}_ms" for pair in PAIRS for name in pair} | {
        "cold_ttft_ms",
        "warm_ttft_ms",
        "copy_floor_ms",
    }:
        assert result[key] > 0, key
    for name in ("no_cache", "with_cache"):
        assert result[f"{name}_ttft_ms"] < result[f"{name}_ms"], (
            "the first token comes before the last"
        )


def test_of_one_round_a_ratio_is_that_of_its_times(result: dict[str, Any]) -> None:
    names = dict(
        zip(("overhead_ratio", "ttft_overhead_ratio", "many_requests_ratio"), PAIRS, strict=True)
    )
    for ratio, (below, above) in names.items():
        assert result[ratio] == pytest.approx(
            result[f"{above}_ms"] / result[f"{below}_ms"], rel=0.03
        ), ratio
    assert result["speedup"] == pytest.approx(
        result["cold_ttft_ms"] / result["warm_ttft_ms"], rel=0.05
    )


def test_figures_have_units_and_targets(
    result: dict[str, Any], without_unit: Callable[..., list[str]]
) -> None:
    assert {*RATIOS, "model", "same_tokens"} <= set(result) and without_unit(result) == []
    assert result["targets"] == {"overhead_ratio": 1.03, "speedup": 3.0}


def test_many_prompts_fill_their_blocks_in_different_steps() -> None:
    asked = engine._Asked.draw(seed=0, prompts=1, prompt_tokens=64)
    lengths = [len(tokens) for tokens in asked.many]
    assert len(lengths) == 32 and {length % engine.BLOCK_TOKENS for length in lengths} == set(
        range(16)
    )
    assert (
        min(lengths) >= 1 and max(lengths) + 48 <= engine._MANY_BLOCKS // 32 * engine.BLOCK_TOKENS
    )
    assert len({tuple(tokens) for tokens in asked.many}) == 32
    assert asked.follow_up[:64] == asked.fresh[0] and len(asked.follow_up) > 64


# -- what was found where it must not be, and not where it must


def served(fresh: int, follow_up: int, many: int) -> engine._Served:
    """A round in which so many tokens of each came from the cache."""

    def found(tokens: int) -> list[Completion]:
        return [
            Completion("r", [1], "length", "", None, RequestMetrics(external_cached_tokens=tokens))
        ]

    return engine._Served(1.0, found(fresh), found(follow_up), 1.0, found(many))


def test_prompts_that_are_found_are_no_fresh_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine._check_reuse(served(fresh=0, follow_up=64, many=0))
    for wrong in (served(fresh=16, follow_up=64, many=0), served(fresh=0, follow_up=64, many=16)):
        with pytest.raises(AssertionError, match="16 tokens of prompts that nobody sent before"):
            engine._check_reuse(wrong)
    monkeypatch.setattr(engine._Bench, "_serve", lambda self, address, asked: served(16, 64, 0))
    with pytest.raises(AssertionError, match="nobody sent before"):
        engine._Bench(None, "", 1).round(0, prompts=1, prompt_tokens=64)  # type: ignore[arg-type]


def test_a_follow_up_that_is_not_found_is_no_follow_up() -> None:
    with pytest.raises(Unavailable, match="just served is not in the cache"):
        engine._check_reuse(served(fresh=0, follow_up=0, many=0))
