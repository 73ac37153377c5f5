"""A program for test_copier_models.py: one family of models in vLLM on a GPU, without a cache and
with kvkeep.

    python serving.py CHECKPOINT ADDRESS POOL_DIRECTORY [OPTIONS_AS_JSON]

Prints one line of JSON: what both engines answered, what came from the server, and what happened
when blocks in the pool were damaged."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

COUNT = "num_kvkeep_extra_cached_tokens"
LENGTH, OUTPUT, PROMPTS = 1000, 8, 6


def engine(model: str, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=2048,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
        **more,
    )


def answers(llm: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    params.extra_args = {"kv_transfer_params": {COUNT: None}}
    outputs = [
        llm.generate([{"prompt_token_ids": each}], params, use_tqdm=False)[0] for each in prompts
    ]
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "extra": (each.kv_transfer_params or {}).get(COUNT, 0),
        }
        for each in outputs
    ]


def forget(llm: Any) -> None:
    for _ in range(200):
        if llm.reset_prefix_cache(reset_connector=False):
            return
        time.sleep(0.05)
    raise TimeoutError("vLLM did not reset its prefix cache")


def damage(pool: Path) -> None:
    """One bit in each 4 KiB of the pool."""
    for segment in pool.glob("segment-*"):
        with segment.open("r+b") as file:
            for at in range(0, segment.stat().st_size, 4096):
                file.seek(at + at // 4096 % 4096)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))


def main(model: str, address: str, pool: str, options: str = "{}") -> None:
    chance = random.Random(5)
    prompts = [[chance.randrange(3, 760) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    plain = engine(model, **json.loads(options))
    computed, local = answers(plain, prompts), answers(plain, prompts)
    transfer = {
        "kv_connector": "KVKeepConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvkeep.vllm",
        "kv_connector_extra_config": {"kvkeep.address": address, "kvkeep.load_when": "always"},
    }
    cached = engine(model, **json.loads(options), kv_transfer_config=transfer)
    cold = answers(cached, prompts)
    time.sleep(3)  # stores run in the background
    forget(cached)
    hits = answers(cached, prompts)
    forget(cached)
    damage(Path(pool))
    damaged = answers(cached, prompts)
    found = {"computed": computed, "local": local, "cold": cold, "hits": hits, "damaged": damaged}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
