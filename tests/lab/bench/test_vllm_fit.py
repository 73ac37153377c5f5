"""Engines that share a GPU get what fits, and no more than one alone would have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.bench.vllm_session import Choice, FreeMemory
from kvkeep.bench.vllm_setup import own_model
from kvkeep.units import GIB, MIB
from kvkeep_lab.bench.vllm_fit import fitted, pool_bytes
from kvkeep_lab.bench.vllm_stations import Plan, Station
from kvkeep_lab.bench.vllm_traffic import SIZES, Traffic

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
    assert (
        sum(size for station, size in pools.items() if station.connector in (KVKEEP, "native"))
        <= free.shm
    )
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
    used = 4 * (
        fit.model.weight_bytes
        + fit.sizes.engine_tokens * fit.model.kv_token_bytes
        + 3 * GIB
        + 512 * MIB
    )
    assert (
        0.96 * roomy.gpu < used <= 0.97 * roomy.gpu and fit.sizes.prefixes == traffic.sizes.prefixes
    )


@pytest.mark.parametrize(
    "free",
    [
        H200,
        FreeMemory(80 * GIB, 1024 * GIB, 1024 * GIB),
        FreeMemory(139 * GIB, 32 * GIB, 1024 * GIB),
        FreeMemory(139 * GIB, 1024 * GIB, 24 * GIB),
    ],
)
def test_what_does_not_fit_is_said(
    traffic: Traffic, free: FreeMemory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fitted(traffic, stations(EVERYBODY), free) is None
    said = capsys.readouterr().err
    assert said.startswith(
        "5 engines at a time do not fit, so they come one after the other: free are "
    )
    assert f"{free.gpu // GIB} GiB of the GPU, {free.host // GIB} GiB of the host" in said


def test_an_engine_without_a_connector_has_no_pool(traffic: Traffic) -> None:
    under_load, decode = stations((NONE, KVKEEP))[1:]
    assert pool_bytes(traffic, Station(NONE, ("mixed",))) == 0
    assert (pool_bytes(traffic, under_load), pool_bytes(traffic, decode)) == (
        traffic.pool_bytes,
        traffic.decode_pool_bytes,
    )
