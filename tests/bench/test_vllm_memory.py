"""Engines that share a GPU get what fits, and no more than one alone would have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.bench import vllm_memory
from kvkeep.bench.vllm_memory import FreeMemory, fit_together, fitted, pool_bytes
from kvkeep.bench.vllm_session import Choice
from kvkeep.bench.vllm_setup import own_model
from kvkeep.bench.vllm_stations import Plan, Station
from kvkeep.bench.vllm_traffic import SIZES, Traffic
from kvkeep.errors import KVKeepError
from kvkeep.units import GIB, MIB

H200 = FreeMemory(139 * GIB, 120 * GIB, 64 * GIB)
NONE, KVKEEP = "none", "kvkeep"
EVERYBODY = ("none", "kvkeep", "lmcache", "native")


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    return Traffic(SIZES["cuda"], own_model(tmp_path, "cuda"))


def stations(connectors: tuple[str, ...], scenarios: str = "mixed,fresh,decode") -> list[Station]:
    return Plan.make(Choice("cuda", connectors, False, {}), scenarios, 15, 1, True).stations


def test_few_engines_have_what_one_alone_has(traffic: Traffic) -> None:
    assert fitted(traffic, stations((NONE, KVKEEP), "fresh"), H200) == traffic
    roomy = FreeMemory(139 * GIB, 120 * GIB, 100 * GIB)
    assert fitted(traffic, stations((NONE, KVKEEP)), roomy) == traffic


@pytest.mark.parametrize(
    ("connectors", "scenarios", "engines"),
    [
        ((NONE, KVKEEP), "mixed,fresh,decode", 3),
        (EVERYBODY[:3], "mixed,fresh,decode", 4),
        (EVERYBODY, "mixed,fresh", 4),
        (EVERYBODY, "mixed,fresh,decode", 5),
    ],
)
def test_up_to_five_engines_fit_into_an_h200(
    traffic: Traffic, connectors: tuple[str, ...], scenarios: str, engines: int
) -> None:
    all_stations = stations(connectors, scenarios)
    assert len(all_stations) == engines
    free = replace(H200, shm=66 * GIB) if engines == 5 else H200
    fit = fitted(traffic, all_stations, free)
    assert fit
    kv_bytes = fit.sizes.engine_tokens * fit.model.kv_token_bytes
    assert engines * (16 * GIB + kv_bytes + 3 * GIB) + 2 * 512 * MIB <= 139 * GIB
    pools = {station: pool_bytes(fit, station) for station in all_stations}
    assert sum(pools.values()) <= 0.75 * free.host
    assert sum(size for station, size in pools.items() if station.connector in (KVKEEP, "native")) <= free.shm
    between = sum(map(len, fit.requests("mixed", 0, 2 * fit.sizes.prefixes).prompts))
    assert between >= 1.49 * fit.sizes.engine_tokens, "a prefix is lost before it comes back"
    lengths = [len(prompt) for prompt in fit.requests("mixed", 0, 2 * fit.sizes.prefixes).prompts]
    assert sorted(lengths[::2]) == sorted(fit.sizes.lengths()), "each length once"
    assert fit.sizes.engine_tokens >= 64_000


def test_the_gpu_is_not_left_unused(traffic: Traffic) -> None:
    """With room in the host, four engines take all but a little."""
    roomy = FreeMemory(139 * GIB, 1024 * GIB, 1024 * GIB)
    fit = fitted(traffic, stations(EVERYBODY, "mixed,fresh"), roomy)
    assert fit
    used = 4 * (fit.model.weight_bytes + fit.sizes.engine_tokens * fit.model.kv_token_bytes + 3 * GIB + 512 * MIB)
    assert 0.96 * roomy.gpu < used <= 0.97 * roomy.gpu and fit.sizes.prefixes == traffic.sizes.prefixes


@pytest.mark.parametrize(
    "free",
    [
        H200,
        FreeMemory(80 * GIB, 1024 * GIB, 1024 * GIB),
        FreeMemory(139 * GIB, 32 * GIB, 1024 * GIB),
        FreeMemory(139 * GIB, 1024 * GIB, 24 * GIB),
    ],
)
def test_what_does_not_fit_is_said(traffic: Traffic, free: FreeMemory, capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted(traffic, stations(EVERYBODY), free) is None
    said = capsys.readouterr().err
    assert said.startswith("5 engines at a time do not fit, so they come one after the other: free are ")
    assert f"{free.gpu // GIB} GiB of the GPU, {free.host // GIB} GiB of the host" in said


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
    traffic: Traffic, free: FreeMemory, longest_prompt: int, fit: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit_together(traffic.model, longest_prompt, EVERYBODY, 12 * GIB, free) is fit
    said = capsys.readouterr().err
    assert not said if fit else said.startswith("4 engines at a time do not fit, so they come one after the other: ")


def test_of_one_engine_nothing_is_said(traffic: Traffic, capsys: pytest.CaptureFixture[str]) -> None:
    assert not fit_together(traffic.model, 32_000, (NONE,), 0, FreeMemory(8 * GIB, 8 * GIB, 8 * GIB))
    assert not capsys.readouterr().err


def test_one_engine_more_may_be_too_many(traffic: Traffic) -> None:
    """Each takes its weights, 4 GiB for a prompt of 32,000 tokens, and 3.5 beside."""
    each = traffic.model.weight_bytes + (32_064 * 128 << 10) + 3 * GIB + 512 * MIB
    free = FreeMemory(int(3 * each / 0.85) + 64, 1024 * GIB, 1024 * GIB)
    assert fit_together(traffic.model, 32_000, EVERYBODY[:3], 0, free)
    assert not fit_together(traffic.model, 32_000, EVERYBODY, 0, free)
    assert not fit_together(traffic.model, 32_001, EVERYBODY[:3], 0, free)


def test_an_engine_without_a_connector_has_no_pool(traffic: Traffic) -> None:
    under_load, decode = stations((NONE, KVKEEP))[1:]
    assert pool_bytes(traffic, Station(NONE, ("mixed",))) == 0
    assert (pool_bytes(traffic, under_load), pool_bytes(traffic, decode)) == (
        traffic.pool_bytes,
        traffic.decode_pool_bytes,
    )


def test_another_process_asks_how_much_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm_memory, "available_bytes", lambda: 7)
    torch = tmp_path / "torch.py"
    torch.write_text("class cuda:\n    mem_get_info = lambda: (5, 9)\n")
    free = FreeMemory.find()
    assert (free.gpu, free.host) == (5, 7) and free.shm > 0
    torch.write_text("raise SystemExit('no driver')")
    with pytest.raises(KVKeepError, match="how much memory the GPU has: no driver"):
        FreeMemory.find()
