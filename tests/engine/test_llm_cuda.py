"""The engine on a GPU. Needs one; without, it is skipped by name."""

from __future__ import annotations

import pytest
import torch

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.errors import SettingsError

if not torch.cuda.is_available():
    pytest.skip("CUDA is not available", allow_module_level=True)

SIZES = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 8}
MODELS = {
    "gqa": ModelSettings(kind="gqa", num_kv_heads=4, head_dim=16, **SIZES),
    "mla": ModelSettings(
        kind="mla",
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        rope_interleaved=True,
        **SIZES,
    ),
}
PROMPTS = [Prompt(list(range(10, 10 + length))) for length in (5, 33, 70, 120)]


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_the_cpu(kind: str, cut: tuple[int, int]) -> None:
    """Also in pieces, and with blocks that run out."""
    answers = []
    for device in ("cpu", "cuda"):
        options = {"tensor_parallel_size": cut[0], "pipeline_parallel_size": cut[1], "max_num_batched_tokens": 48}
        with LLM(MODELS[kind], dtype=torch.float64, device=device, num_blocks=14, **options) as llm:
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


def test_offloading_from_a_gpu_is_refused_for_now() -> None:
    with pytest.raises(SettingsError, match="cuda cannot be offloaded yet"):
        LLM(MODELS["gqa"], device="cuda", kv_offloading_size=1)
