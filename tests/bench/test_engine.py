"""The engine benchmark runs, and says what it must in the form it must. How fast is not a test's business."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep.bench import engine

TIMES = {"no_cache_ms", "with_cache_ms", "no_cache_ttft_ms", "with_cache_ttft_ms", "cold_ttft_ms", "warm_ttft_ms"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return engine.run(rounds=2, prompts=2, prompt_tokens=64)


def test_all_is_measured_and_tokens_are_the_same(result: dict[str, Any]) -> None:
    assert result["same_tokens"] is True
    assert result["rounds"] == 2 and result["prompts"] == 2 and result["prompt_tokens"] == 64
    for key in {*TIMES, "copy_floor_ms", "overhead_ratio", "ttft_overhead_ratio", "speedup"}:
        assert result[key] > 0, key
    for name in ("no_cache", "with_cache"):
        assert result[f"{name}_ttft_ms"] < result[f"{name}_ms"], "the first token comes before the last"


def test_threads_are_given_back(result: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    with engine.compute_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_model_has_the_kv_it_says() -> None:
    with engine.make_llm(engine.demo_model(), None, num_blocks=2, prefix_caching=False) as llm:
        assert llm.engine.workers.shape.shard_bytes == (engine.BLOCK_TOKENS * engine.KV_TOKEN_BYTES,)
        assert llm.engine.workers.shape.identity.kv_dtype == "float64"


def test_prompts_that_are_found_are_no_fresh_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [7] * 64
    monkeypatch.setattr(engine, "_tokens", lambda rng, count: same[:count])
    with pytest.raises(AssertionError, match="nobody sent before"):
        engine.run(rounds=1, prompts=1, prompt_tokens=64)
