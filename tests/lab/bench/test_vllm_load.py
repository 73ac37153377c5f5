"""The benchmark under load asks engines for what it says, and makes of it what it should. vLLM is a
stub here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvkeep.bench import vllm_session
from kvkeep.bench.vllm_session import SILENT_AFTER_S, Choice, FreeMemory, Turns
from kvkeep.bench.vllm_setup import ServedModel
from kvkeep.units import GIB
from kvkeep_lab.bench import vllm_load
from kvkeep_lab.bench.vllm_lanes import LoadedEngine
from kvkeep_lab.bench.vllm_load import Bench
from kvkeep_lab.bench.vllm_stations import Plan
from kvkeep_lab.bench.vllm_traffic import SIZES, Traffic

MODEL = ServedModel("nowhere", "a stub", "cpu", vocab_size=1000, kv_token_bytes=1024)
DECODE = ("decode_loads", "decode_stores")
EVERY = {
    "connector",
    "scenario",
    "requests",
    "failed",
    "seconds",
    "ttft_mean_ms",
    "ttft_p99_ms",
    "cached_share",
}
EVERY |= {"same_answers"}
LOAD = EVERY | {"prompt_tokens", "output_tokens", "output_tokens_per_s", "total_tokens_per_s"}
ITL = EVERY | {"samples", "itl_p50_ms", "itl_p99_ms", "itl_decode_p50_ms", "itl_decode_p99_ms"}
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Engines with their arguments."""
    all_made: list[tuple[str, dict[str, Any]]] = []
    start = LoadedEngine.__enter__

    def enter(self: LoadedEngine) -> LoadedEngine:
        all_made.append((self.name, self.arguments))
        return start(self)

    monkeypatch.setattr(LoadedEngine, "__enter__", enter)
    return all_made


@pytest.fixture
def run(stubbed_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`vllm_load.run` with stubs for vLLM, the model and the connectors' servers."""
    stubbed_vllm.put_into(monkeypatch, vllm_load)
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], every_s=0.2))
    return vllm_load.run


# -- the run


def test_all_is_measured_with_as_few_engines_as_possible(
    run: Run, made: list[tuple[str, dict[str, Any]]]
) -> None:
    result = run(device="cpu", seconds=1)
    assert (result["device"], result["model"], result["vllm"]) == ("cpu", "a stub", "0.0.stub")
    rows = {(row["connector"], row["scenario"]): row for row in result["rows"]}
    names, scenarios = ("none", "kvkeep"), ("mixed", "fresh", *DECODE)
    assert [*rows] == [(name, scenario) for scenario in scenarios for name in names]
    for (_, scenario), row in rows.items():
        assert set(row) == (ITL if scenario in DECODE else LOAD) and row["failed"] == 0
        assert row["ttft_p99_ms"] >= row["ttft_mean_ms"] > 0 and row["requests"] > 0
        assert row["same_answers"] == 1.0 or scenario in DECODE
    for scenario in ("mixed", "fresh"):
        same = ("requests", "prompt_tokens", "output_tokens")
        assert len({tuple(rows[name, scenario][key] for key in same) for name in names}) == 1, (
            "the same work"
        )
    assert (
        rows["none", "fresh"]["cached_share"] is None
        and rows["none", "decode_loads"]["samples"] > 10
    )
    assert [(each["connector"], each["scenario"]) for each in result["ratios"]] == [
        ("kvkeep", s) for s in scenarios
    ]
    for ratios in result["ratios"]:
        own = (
            {"itl_p50", "itl_p99", "itl_decode_p50", "itl_decode_p99"}
            if ratios["scenario"] in DECODE
            else {"output", "total"}
        )
        names_of_ratios = {f"{name}_ratio{s}" for name in own | {"ttft_mean"} for s in ("", "s")}
        assert set(ratios) == {"connector", "scenario"} | names_of_ratios
    assert [(name, each["enable_prefix_caching"]) for name, each in made] == [
        ("none", True),
        ("kvkeep", True),
        ("kvkeep", False),
    ]
    assert (
        {each["num_gpu_blocks_override"] for _, each in made} == {result["engine_blocks"]} == {96}
    )
    assert result["interleaved"] is True and result["prefixes"] == 8


def test_parts_can_be_run_alone_and_repeated(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(device="cpu", seconds=1, scenarios="fresh", repeats=2)
    assert [(row["connector"], row["scenario"]) for row in result["rows"]] == [
        ("none", "fresh"),
        ("kvkeep", "fresh"),
    ]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fresh, ")]
    assert [line.split(": ")[:2] for line in said] == [
        ["fresh, 1 of 2", "none"],
        ["fresh, 1 of 2", "kvkeep"],
        ["fresh, 2 of 2", "kvkeep"],
        ["fresh, 2 of 2", "none"],
    ]


def test_prefixes_are_stored_first_and_then_dropped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    load, drop = LoadedEngine.load, LoadedEngine.drop_local_cache
    monkeypatch.setattr(
        LoadedEngine,
        "load",
        lambda self, lanes, *rest, **more: (calls.append("load"), load(self, lanes, *rest, **more))[
            1
        ],
    )
    monkeypatch.setattr(
        LoadedEngine, "drop_local_cache", lambda self: (calls.append("drop"), drop(self))[1]
    )
    run(device="cpu", seconds=1, scenarios="mixed,decode", connectors="none")
    assert calls == ["load", "drop", "load", "load", "load", "load"], (
        "those of decode stay where they are"
    )


def test_an_engine_works_in_its_own_turn_only(run: Run, worked: list[tuple[str, Any]]) -> None:
    run(device="cpu", seconds=1, scenarios="fresh", repeats=2)
    assert {name for name, _ in worked} == {"none", "kvkeep"}
    assert all(name == station.connector for name, station in worked)
    assert len(worked) == 2 * (1 + 1 + 2 * 3), (
        "a start, what is stored first; then drop, wake and load in each repeat"
    )


@pytest.fixture
def on_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Everything is a CPU's, but for what is said about it."""
    monkeypatch.setattr(vllm_session, "find_device", lambda device: "cuda")
    monkeypatch.setattr(vllm_session, "SILENT_AFTER_S", SILENT_AFTER_S)
    monkeypatch.setattr(vllm_load, "gpu_name", lambda: "Some GPU")
    monkeypatch.setattr(
        vllm_load, "own_model", lambda folder, device: replace(MODEL, device="cuda")
    )
    monkeypatch.setitem(SIZES, "cuda", SIZES["cpu"])
    monkeypatch.setattr(FreeMemory, "find", lambda: FreeMemory(12 * GIB, 8 * GIB, 8 * GIB))
    return run


def test_on_a_gpu_engines_take_turns_where_they_fit(
    on_a_gpu: Run,
    made: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits, on = [], Turns.on
    monkeypatch.setattr(
        Turns, "on", lambda device: (waits.append(on(device).silent_after_s), on(device))[1]
    )
    asked = {
        "device": "auto",
        "seconds": 1,
        "scenarios": "fresh",
        "repeats": 2,
        "connectors": "kvkeep",
    }
    result = on_a_gpu(**asked)
    assert result["interleaved"] is True and result["gpu"] == "Some GPU"
    turns = [
        line.split(": ")[1]
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("fresh, ")
    ]
    assert turns == ["none", "kvkeep", "kvkeep", "none"]
    blocks = {each["num_gpu_blocks_override"] for _, each in made}
    assert blocks == {result["engine_blocks"]} == {3072 // 16}, "as many as one alone has"
    assert [each["gpu_memory_utilization"] for _, each in made] == [0.425] * 2
    monkeypatch.setattr(FreeMemory, "find", lambda: FreeMemory(6 * GIB, 8 * GIB, 8 * GIB))
    for interleave in (True, False):
        made.clear()
        result = on_a_gpu(**asked, interleave=interleave)
        assert (
            result["interleaved"] is False
            and [each["gpu_memory_utilization"] for _, each in made] == [0.85] * 2
        )
        lines = capsys.readouterr().err.splitlines()
        assert interleave == any(
            line.startswith("2 engines at a time do not fit, so") for line in lines
        )
        turns = [line.split(": ")[1] for line in lines if line.startswith("fresh, ")]
        assert turns == ["none", "none", "kvkeep", "kvkeep"]
    assert waits == [0.0] * 5, "there are cores enough for engines that spin"


def test_engines_decode_with_graphs_unless_they_are_to_be_eager(
    on_a_gpu: Run, made: list[tuple[str, dict[str, Any]]]
) -> None:
    asked = {"device": "auto", "seconds": 1, "scenarios": "fresh", "connectors": "kvkeep"}
    assert on_a_gpu(**asked, eager=True)["graphs"] is False
    assert all(each["enforce_eager"] and "compilation_config" not in each for _, each in made)
    made.clear()
    assert on_a_gpu(**asked)["graphs"] is True
    assert len(made) == 2 and not any(each["enforce_eager"] for _, each in made)
    sizes, asked_for = (
        [each["compilation_config"]["cudagraph_capture_sizes"] for _, each in made],
        SIZES["cpu"],
    )
    assert sizes[0] == sizes[1] == sorted(set(sizes[0])) and asked_for.at_a_time in sizes[0]
    assert asked_for.at_a_time + asked_for.own_tokens in sizes[0], (
        "of those that others decode beside"
    )
    assert {each["compilation_config"]["cudagraph_mode"] for _, each in made} == {"FULL"}


@pytest.mark.parametrize("wrong", ["no server", "no start", "dies"])
def test_a_peer_that_fails_is_left_out_even_if_named(
    run: Run, installed: set[str], behaviour: dict[str, str], wrong: str
) -> None:
    installed.add("lmcache")
    behaviour["lmcache"] = wrong
    result = run(device="cpu", seconds=1, scenarios="fresh", connectors="lmcache")
    assert [row["connector"] for row in result["rows"]] == ["none"]
    assert result["left_out"]["lmcache"].startswith(
        ("fresh: its server", "fresh: vLLM with connector lmcache ended")
    )


# -- what is made of it


def load(rate: float, answers: dict[str, str], failed: int = 0) -> dict[str, Any]:
    figures = {
        "output_tokens_per_s": rate,
        "total_tokens_per_s": 10 * rate,
        "ttft_mean_ms": 5.0,
        "ttft_p99_ms": 9.0,
    }
    return {
        "requests": 40,
        "failed": failed,
        "seconds": 1.0,
        "cached_share": 0.5,
        "answers": answers,
    } | figures


def decode(p99: float | None) -> dict[str, Any]:
    figures = {
        "samples": 100,
        "itl_p50_ms": 10.0,
        "itl_p99_ms": p99,
        "ttft_mean_ms": None,
        "ttft_p99_ms": None,
    }
    figures |= {"itl_decode_p50_ms": 9.0, "itl_decode_p99_ms": p99 and p99 / 2}
    return {
        "requests": 4,
        "failed": 0,
        "seconds": 1.0,
        "cached_share": None,
        "answers": {},
    } | figures


def bench(
    rates: tuple[float, float], itl: tuple[float | None, float | None], repeats: int = 1
) -> Bench:
    choice = Choice("cpu", ("none", "kvkeep"), False, {"native": "needs a GPU\nand more"})
    done = Bench(
        Plan(choice, ("fresh", "decode_loads"), 15, repeats, True),
        Traffic(SIZES["cpu"], MODEL),
        "0.0.stub",
    )
    for name, rate, p99 in zip(choice.connectors, rates, itl, strict=True):
        done.said[name, "fresh"] = [load(rate, {"0": "a", "1": "b"})]
        done.said[name, "decode_loads"] = [decode(p99)]
    return done


def test_what_was_not_seen_is_no_target_met() -> None:
    result = bench((100.0, 98.0), (20.0, None)).result()
    ratios = result["ratios"][1]
    assert ratios["itl_p99_ratio"] is None and ratios["itl_p99_ratios"] == [None]


def test_ratios_and_rows_are_medians_and_failures_add_up() -> None:
    done = bench((100.0, 98.0), (20.0, 22.0), repeats=3)
    done.said["none", "fresh"] = [
        load(rate, {"0": "a", "1": "b"}) for rate in (100.0, 200.0, 400.0)
    ]
    done.said["kvkeep", "fresh"] = [
        load(rate, {"0": "a", "1": "c"}, failed=1) for rate in (110.0, 204.0, 400.0)
    ]
    result = done.result()
    assert len(result["rows"]) == 2, "what was not repeated as often is left out"
    assert result["rows"][1]["output_tokens_per_s"] == 204.0 and result["rows"][1]["failed"] == 3
    assert result["rows"][1]["same_answers"] == 0.5 and result["ratios"][0]["output_ratio"] == 1.02
    assert result["ratios"][0]["output_ratios"] == [1.1, 1.02, 1.0], (
        "one for each repeat, in its order"
    )
