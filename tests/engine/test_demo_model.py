from __future__ import annotations

import torch

from kvkeep.engine import demo_model as module


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with module.compute_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_model_has_the_kv_it_says() -> None:
    with module.make_llm(module.demo_model(), None, num_blocks=2, prefix_caching=False) as llm:
        assert llm.engine.workers.shape.shard_bytes == (
            module.BLOCK_TOKENS * module.kv_token_bytes(),
        )
        assert llm.engine.workers.shape.identity.kv_dtype == "float64"
    assert module.describe().startswith(
        "random weights, 8 layers, hidden size 256, 8 KiB of KV a token"
    )
