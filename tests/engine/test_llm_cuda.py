"""The engine on a GPU. Needs one; without, it is skipped by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings

if not torch.cuda.is_available():
    pytest.skip("CUDA is not available", allow_module_level=True)

SIZES: dict[str, int] = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_layers": 3, "num_heads": 8}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MODELS = {
    "gqa": ModelSettings(kind="gqa", num_kv_heads=4, head_dim=16, **SIZES),
    "mla": ModelSettings(kind="mla", rope_interleaved=True, **LATENT, **SIZES),
}
PROMPTS = [Prompt(list(range(10, 10 + length))) for length in (5, 33, 70, 120)]


def small(cut: tuple[int, int]) -> dict[str, Any]:
    """Options of an engine whose blocks run out."""
    ranks = {"tensor_parallel_size": cut[0], "pipeline_parallel_size": cut[1]}
    return {"dtype": torch.float64, "num_blocks": 14, "max_num_batched_tokens": 48, **ranks}


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_the_cpu(kind: str, cut: tuple[int, int]) -> None:
    """Also in pieces, and with blocks that run out."""
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(MODELS[kind], device=device, **small(cut)) as llm:
            done = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
        answers.append([each.token_ids for each in done])
        assert sum(each.metrics.preemptions for each in done) > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_other_dtypes_run(kind: str, dtype: torch.dtype) -> None:
    with LLM(MODELS[kind], dtype=dtype, device="cuda") as llm:
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert [len(each.token_ids) for each in done] == [8] * len(PROMPTS)


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_what_was_offloaded_gives_the_same_tokens(
    kind: str, cut: tuple[int, int], load: str
) -> None:
    """Blocks run out, so that prompts are computed, stored, given up and loaded again and again."""
    prompts = [
        Prompt([*range(10, 10 + length), last]) for length in (33, 70, 120) for last in (1, 2, 3)
    ]
    sampling = SamplingParams(max_tokens=24)
    options = {"device": "cuda", **small(cut)}
    extra = {"kvkeep.load": load, "kvkeep.load_when": "always"}
    with LLM(MODELS[kind], **options) as llm:
        expected = [each.token_ids for each in llm.generate(prompts, sampling)]
    cache = {"kv_offloading_backend": "native", "kv_offloading_size": 1 / 16}
    config = {"kv_connector_extra_config": extra}
    with LLM(MODELS[kind], **options, **cache, kv_transfer_config=config) as llm:
        rounds = [llm.generate(prompts, sampling) for _ in range(3)]
    for done in rounds:
        assert [each.token_ids for each in done] == expected
    assert sum(each.metrics.external_cached_tokens for each in rounds[-1]) > 0
    assert sum(each.metrics.failed_loads for done in rounds for each in done) == 0
