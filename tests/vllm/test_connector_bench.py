"""`kvkeep bench vllm` with real vLLM: it runs, and finds what it must. How fast is not a test's
business."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.bench import vllm
from kvkeep.bench.vllm_setup import BLOCK_TOKENS

PROMPT_TOKENS = 200


def test_a_hit_covers_all_full_blocks_and_gives_the_same_tokens(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = vllm.run(
        "cpu", str(models / "llama"), str(PROMPT_TOKENS), connectors="kvkeep", repeats=1
    )
    none, kvkeep = result["rows"]
    assert (none["connector"], kvkeep["connector"]) == ("none", "kvkeep")
    full_blocks = PROMPT_TOKENS // BLOCK_TOKENS["cpu"]
    assert (none["cached_tokens"], kvkeep["cached_tokens"]) == (
        0,
        full_blocks * BLOCK_TOKENS["cpu"],
    )
    assert none["same_tokens"] and kvkeep["same_tokens"]
    assert none["external_hit_ms"] is None
    for took in (
        none["cold_ms"],
        none["local_hit_ms"],
        *(kvkeep[f"{case}_ms"] for case in ("cold", "external_hit")),
    ):
        assert took > 0
    said = capsys.readouterr().err
    assert "starting vLLM, connector: kvkeep" in said and "200 tokens, 1 of 1: none" in said
