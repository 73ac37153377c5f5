"""Families of models in real vLLM on a GPU: full attention, sliding windows, MLA, recurrent states. Hits answer as
computing does, and what is damaged in the pool is computed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.cli.remote import ask
from kvkeep.testing.process import ServerProcess

if not torch.cuda.is_available():
    pytest.skip("CUDA is not available", allow_module_level=True)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

HERE = Path(__file__).parent
WITHIN_S = 400  # only ends a test that has failed
# What a hit of 1,000 tokens gives at least: hybrids need whole windows and states, in blocks of their own size.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 960),
    "gemma3": ({}, 900),
    "mla": ({}, 900),
    "lfm2": ({"mamba_cache_mode": "align"}, 500),
    "gptoss": ({}, 900),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    program = HERE.parent / "vllm" / "checkpoints.py"
    subprocess.run([sys.executable, str(program), str(folder)], check=True, timeout=WITHIN_S)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_answer_as_computing_does_and_damage_is_computed(family: str, checkpoints: Path) -> None:
    options, least = FAMILIES[family]
    with ServerProcess("--pool-size", "1GiB") as server:
        arguments = (HERE / "serving.py", checkpoints / family, server.address, server.pool, json.dumps(options))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(done.stdout.splitlines()[-1])
        status = ask(server.http, "/v1/status")
    right = list(zip(found["computed"], found["local"], strict=True))
    for kind in ("cold", "hits", "damaged"):
        tokens = [answer["tokens"] for answer in found[kind]]
        assert all(
            got in (computed["tokens"], local["tokens"]) for got, (computed, local) in zip(tokens, right, strict=True)
        ), f"{kind}: {tokens}\nright: {right}"
    assert [answer["extra"] for answer in found["cold"]] == [0] * len(found["cold"])
    assert min(answer["extra"] for answer in found["hits"]) >= least
    assert max(answer["extra"] for answer in found["damaged"]) < least, "no damaged block was used"
    assert status["counters"]["bad_blocks"] > 0
