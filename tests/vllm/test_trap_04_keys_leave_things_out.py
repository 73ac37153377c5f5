"""Trap 4, with vLLM: keys leave out adapters, embeddings, weights and dtype; half a block of
another dtype is read."""

from __future__ import annotations

import json
import platform
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS
from replicas import Answer, Replica, Since, counting, eventually, prompt, request, tokens_of
from safetensors.torch import load_file, save_file

from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")

RANK = 8
LLAMA = CONFIGS["llama"]


# With a seed of Python's own, vLLM's hashes are those of one process, and keys are made from
# tokens.
BOTH_KEYS = pytest.mark.parametrize(
    "seed", [None, "random"], ids=["keys from vLLM's hashes", "keys from tokens"]
)


def adapter(directory: Path, seed: int) -> None:
    """An adapter that changes keys and values, as vLLM reads it."""
    drawn, weights = torch.Generator().manual_seed(seed), {}
    kv_size = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    for layer in range(LLAMA["num_hidden_layers"]):
        for name in ("k_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = (
                torch.randn(RANK, LLAMA["hidden_size"], generator=drawn) / 10
            )
            weights[f"{path}.lora_B.weight"] = torch.randn(kv_size, RANK, generator=drawn) / 10
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def alone_and_again(engine: Replica, asked: list[dict[str, Any]], full: int) -> list[Answer]:
    """Each of these finds nothing of the others, and all of its own; the answers."""
    cold = engine.serve(asked)
    assert (
        [answer.cached for answer in cold] == [answer.extra for answer in cold] == [0] * len(asked)
    )
    assert len({tuple(answer.tokens) for answer in cold}) == len(asked), (
        "another's KV would be seen in the answer"
    )
    warm = engine.fresh().serve(asked)
    assert [answer.extra for answer in warm] == [full] * len(asked)
    assert tokens_of(warm) == tokens_of(cold)
    return cold


@BOTH_KEYS
def test_adapters_share_nothing(
    plain: Replica, one: Replica, server: ServerProcess, tmp_path: Path, seed: str | None
) -> None:
    env = {"PYTHONHASHSEED": seed}
    engine = one.use("llama", server, env=env, enable_lora=True, max_lora_rank=RANK, max_loras=2)
    tokens = prompt(100)
    for number in (1, 2):
        adapter(tmp_path / f"adapter-{number}", number)
        # A request whose adapter is still to be hashed is not cached; hashes are kept of files that
        # are not too new.
        assert eventually(
            lambda at=tmp_path / f"adapter-{number}": CheckpointDigest.of(str(at), None).value
        )
    named = [
        counting(tokens, adapter=[f"a{number}", number, str(tmp_path / f"adapter-{number}")])
        for number in (1, 2)
    ]
    answers = alone_and_again(engine, [counting(tokens), *named], 96)
    assert tokens_of(answers[:1]) == tokens_of(plain.use("llama").serve([request(tokens)]))


@BOTH_KEYS
def test_embeddings_share_nothing(one: Replica, server: ServerProcess, seed: str | None) -> None:
    """In place of tokens, so that those are all alike."""
    engine = one.use("llama", server, env={"PYTHONHASHSEED": seed}, enable_prompt_embeds=True)
    drawn = random.Random(f"embeddings {seed}")
    given = [
        [[drawn.gauss(0, 1) for _ in range(LLAMA["hidden_size"])] for _ in range(100)]
        for _ in range(2)
    ]
    given.append([*given[0][:64], *given[1][64:]])  # the third block is another one
    asked = [counting([], embeds=embeds) for embeds in given[:2]]
    alone_and_again(engine, asked, 96)
    [parted] = engine.fresh().serve([counting([], embeds=given[2])])
    assert parted.extra == 64, "what is alike is shared"


def test_other_weights_and_other_types_under_the_same_name_share_nothing(
    one: Replica, two: Replica, server: ServerProcess, models: Path, tmp_path: Path
) -> None:
    tokens, since = prompt(100), Since(server)
    [stored] = one.use("llama", server).serve([counting(tokens)])
    assert eventually(lambda: since("stored_blocks") == 3)
    trained = tmp_path / "llama"
    shutil.copytree(models / "llama", trained)
    weights = load_file(trained / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    save_file({**weights, name: -weights[name]}, trained / "model.safetensors", {"format": "pt"})
    readers: list[tuple[str, dict[str, Any]]] = [
        (str(trained), {}),
        ("llama", {"dtype": "float16"}),  # half as many bytes in a block
    ]
    if platform.machine() == "x86_64":  # vLLM computes with such KV on no other CPU
        readers.append(("llama", {"kv_cache_dtype": "fp8_e5m2"}))  # and a quarter
    for model, options in readers:
        engine = two.use(model, server, **options)
        [cold] = engine.serve([counting(tokens)])
        assert (cold.extra, cold.cached) == (0, 0), f"{model} {options}"
        [warm] = engine.fresh().serve([counting(tokens)])
        assert (warm.extra, warm.tokens) == (96, cold.tokens), "but its own it finds"
    [again] = one.fresh().serve([counting(tokens)])
    assert (again.extra, again.tokens) == (96, stored.tokens)
