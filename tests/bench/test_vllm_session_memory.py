"""Engines that share a GPU fit together, or it is said that they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.bench import vllm_session
from kvkeep.bench.vllm_session import FreeMemory, fit_together
from kvkeep.bench.vllm_setup import ServedModel, own_model
from kvkeep.errors import KVKeepError
from kvkeep.units import GIB, MIB

H200 = FreeMemory(139 * GIB, 120 * GIB, 64 * GIB)
NONE = "none"
EVERYBODY = ("none", "kvkeep", "lmcache", "native")


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return own_model(tmp_path, "cuda")


@pytest.mark.parametrize(
    ("free", "longest_prompt", "fit"),
    [
        (H200, 32_000, True),
        (H200, 92_000, False),
        (FreeMemory(80 * GIB, 1024 * GIB, 1024 * GIB), 2_000, False),
        (FreeMemory(139 * GIB, 47 * GIB, 64 * GIB), 32_000, False),
        (FreeMemory(139 * GIB, 48 * GIB, 64 * GIB), 32_000, True),
        (FreeMemory(139 * GIB, 120 * GIB, 23 * GIB), 32_000, False),
        (FreeMemory(139 * GIB, 120 * GIB, 24 * GIB), 32_000, True),
    ],
)
def test_engines_fit_together_if_each_holds_a_prompt_and_all_have_pools(
    model: ServedModel,
    free: FreeMemory,
    longest_prompt: int,
    fit: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fit_together(model, longest_prompt, EVERYBODY, 12 * GIB, free) is fit
    said = capsys.readouterr().err
    assert (
        not said
        if fit
        else said.startswith("4 engines at a time do not fit, so they come one after the other: ")
    )


def test_of_one_engine_nothing_is_said(
    model: ServedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not fit_together(model, 32_000, (NONE,), 0, FreeMemory(8 * GIB, 8 * GIB, 8 * GIB))
    assert not capsys.readouterr().err


def test_one_engine_more_may_be_too_many(model: ServedModel) -> None:
    """Each takes its weights, 4 GiB for a prompt of 32,000 tokens, and 3.5 beside."""
    each = model.weight_bytes + (32_064 * 128 << 10) + 3 * GIB + 512 * MIB
    free = FreeMemory(int(3 * each / 0.85) + 64, 1024 * GIB, 1024 * GIB)
    assert fit_together(model, 32_000, EVERYBODY[:3], 0, free)
    assert not fit_together(model, 32_000, EVERYBODY, 0, free)
    assert not fit_together(model, 32_001, EVERYBODY[:3], 0, free)


def test_another_process_asks_how_much_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(vllm_session, "available_bytes", lambda: 7)
    torch = tmp_path / "torch.py"
    torch.write_text("class cuda:\n    mem_get_info = lambda: (5, 9)\n")
    free = FreeMemory.find()
    assert (free.gpu, free.host) == (5, 7) and free.shm > 0
    torch.write_text("raise SystemExit('no driver')")
    with pytest.raises(KVKeepError, match="how much memory the GPU has: no driver"):
        FreeMemory.find()
