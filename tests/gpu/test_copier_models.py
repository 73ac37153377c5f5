"""Families of models in real vLLM on a GPU: full attention, sliding windows, MLA, experts. Hits
answer as computing does, and what is damaged in the pool is computed."""

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
# What a hit of 1,000 tokens gives at least: hybrids need whole windows, in blocks of their own
# size.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 960),
    "gemma3": ({}, 900),
    "mla": ({}, 900),
    "mla-moe": ({}, 900),
    "gptoss": ({}, 900),
}


# Attention kernels for MLA on a GPU take DeepSeek's own sizes alone.
_MLA = {"qk_nope_head_dim": 128, "v_head_dim": 128}
_CHANGES = {"mla": ("mla", _MLA), "mla-moe": ("mla", {**_MLA, "first_k_dense_replace": 1})}
_SAVE = "import json, sys; from pathlib import Path; import checkpoints; kind, changes, to = sys.argv[1:]; "
_SAVE += "checkpoints.CONFIGS[kind].update(json.loads(changes)); checkpoints.save(kind, Path(to))"


def checkpoint(family: str, folder: Path) -> Path:
    kind, changes = _CHANGES.get(family, (family, {}))
    command = [sys.executable, "-c", _SAVE, kind, json.dumps(changes), str(folder)]
    subprocess.run(command, check=True, timeout=WITHIN_S, cwd=HERE.parent / "vllm")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_answer_as_computing_does_and_damage_is_computed(family: str, tmp_path: Path) -> None:
    options, least = FAMILIES[family]
    with ServerProcess("--pool-size", "1GiB") as server:
        model = checkpoint(family, tmp_path)
        arguments = (HERE / "serving.py", model, server.address, server.pool, json.dumps(options))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(next(lane for lane in done.stdout.splitlines() if lane.startswith("{")))
        status = ask(server.http, "/v1/status")
    right = list(zip(found["computed"], found["local"], strict=True))
    for kind in ("cold", "hits", "damaged"):
        tokens = [answer["tokens"] for answer in found[kind]]
        assert all(
            got in (computed["tokens"], local["tokens"])
            for got, (computed, local) in zip(tokens, right, strict=True)
        ), f"{kind}: {tokens}\nright: {right}"
    assert [answer["extra"] for answer in found["cold"]] == [0] * len(found["cold"])
    assert min(answer["extra"] for answer in found["hits"]) >= least
    assert max(answer["extra"] for answer in found["damaged"]) < least, "no damaged block was used"
    assert status["counters"]["bad_blocks"] > 0
