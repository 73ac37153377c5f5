"""The vLLM benchmark measures what it says, and says it in the form it must. vLLM itself is a stub
here."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvkeep.bench import vllm, vllm_session
from kvkeep.bench.vllm import Bench, Plan
from kvkeep.bench.vllm_run import Answer, EngineProcess
from kvkeep.bench.vllm_session import FreeMemory
from kvkeep.bench.vllm_setup import ServedModel
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.units import GIB

ROW = [
    "connector",
    "prompt_tokens",
    "cold_ms",
    "local_hit_ms",
    "external_hit_ms",
    "cached_tokens",
    "same_tokens",
]
ROW += ["samples_ms"]
MODEL = ServedModel("nowhere", "a stub", "cpu", vocab_size=1000, kv_token_bytes=1024)
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def settled(stubbed_vllm: Any) -> list[int]:
    """Lengths of prompts that were waited for."""
    waited: list[int] = stubbed_vllm.settled
    return waited


@pytest.fixture
def run(stubbed_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`vllm.run` with stubs for vLLM, the model and the connectors' servers."""
    stubbed_vllm.put_into(monkeypatch, vllm)
    return vllm.run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], bool]]:
    """Whole prompts in the order in which engines were asked: which engine, and whether its own
    cache was dropped before."""
    asked: list[tuple[str, tuple[int, ...], bool]] = []
    dropped: set[str] = set()
    ask, drop = EngineProcess.ask, EngineProcess.drop_local_cache

    def note(engine: EngineProcess, prompt: list[int], max_tokens: int = 1) -> Answer:
        if len(prompt) >= 100:
            asked.append((engine.name, tuple(prompt), engine.name in dropped))
            dropped.discard(engine.name)
        return ask(engine, prompt, max_tokens)

    def note_drop(engine: EngineProcess) -> None:
        dropped.add(engine.name)
        drop(engine)

    monkeypatch.setattr(EngineProcess, "ask", note)
    monkeypatch.setattr(EngineProcess, "drop_local_cache", note_drop)
    return asked


# -- options


def make(
    device: str = "cpu",
    prompt_tokens: str = "auto",
    connectors: str = "auto",
    repeats: int = 5,
    interleave: bool = True,
    eager: bool = False,
) -> Plan:
    return Plan.make(device, prompt_tokens, connectors, repeats, interleave, eager)


def test_on_a_cpu_engines_take_turns(installed: set[str]) -> None:
    plan = make()
    assert (plan.device, plan.prompt_tokens, plan.connectors) == (
        "cpu",
        (2000,),
        ("none", "kvkeep"),
    )
    assert plan.left_out == {"lmcache": "not installed", "native": "needs a GPU"}
    assert plan.groups == [("none", "kvkeep")]
    installed.add("lmcache")
    assert make().connectors == ("none", "kvkeep", "lmcache")


def test_on_a_gpu_they_take_turns_or_come_one_after_the_other(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_session, "find_device", lambda device: "cuda")
    plan = make("auto")
    assert plan.prompt_tokens == (2000, 8000, 32000) and plan.left_out == {
        "lmcache": "not installed"
    }
    assert plan.groups == [("none", "kvkeep", "native")]
    assert make("auto", interleave=False).groups == [("none",), ("kvkeep",), ("native",)]


def test_all_are_compared_with_none(installed: set[str]) -> None:
    plan = make(connectors="kvkeep", prompt_tokens="200,100,200")
    assert plan.connectors == ("none", "kvkeep") and plan.prompt_tokens == (200, 100) and plan.named


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "tpu"}, '--device "tpu": expected auto, cpu or cuda'),
        ({"prompt_tokens": "many"}, '--prompt-tokens "many": expected at least 64'),
        ({"prompt_tokens": "2000,63"}, '--prompt-tokens "2000,63": expected at least 64'),
        ({"eager": True}, "--eager needs a GPU"),
    ],
)
def test_a_wrong_option_is_named(installed: set[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**options)
    assert said in caught.value.message


def test_with_graphs_a_hit_is_one_launch_whoever_found_it(
    run: Run, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Engine(vllm.EngineProcess):
        def __init__(self, name: str, arguments: dict[str, Any], *given: Any) -> None:
            made.append(dict(arguments))
            super().__init__(name, arguments, *given)

    monkeypatch.setattr(vllm, "EngineProcess", Engine)
    assert run(device="cpu", prompt_tokens="100", repeats=1)["graphs"] is False
    assert all(each["enforce_eager"] for each in made)
    made.clear()
    monkeypatch.setattr(vllm_session.Choice, "has_graphs", lambda choice, eager: not eager)
    assert run(device="cpu", prompt_tokens="100", repeats=1)["graphs"] is True
    assert len(made) == 2 and not any(each["enforce_eager"] for each in made)
    for each in made:
        sizes = each["compilation_config"]["cudagraph_capture_sizes"]
        assert {1, MODEL.block_tokens} <= set(sizes), (
            "what is left where all is found, and where all but a block is"
        )
        assert max(sizes) > 2000 % 256, "LMCache finds whole chunks of 256 tokens"


# -- the run


def test_rows_have_these_names_and_all_is_measured(run: Run, settled: list[int]) -> None:
    result = run(device="cpu", prompt_tokens="100,200", repeats=2)
    assert (result["device"], result["model"], result["vllm"]) == ("cpu", "a stub", "0.0.stub")
    assert [list(row) for row in result["rows"]] == [ROW] * 4
    measured = [(row["connector"], row["prompt_tokens"]) for row in result["rows"]]
    assert measured == [("none", 100), ("kvkeep", 100), ("none", 200), ("kvkeep", 200)]
    assert [row["cached_tokens"] for row in result["rows"]] == [0, 96, 0, 192]
    assert all(row["same_tokens"] is True for row in result["rows"])
    for row in result["rows"]:
        assert row["cold_ms"] > 0 and row["local_hit_ms"] > 0
        assert (row["external_hit_ms"] is None) == (row["connector"] == "none")
        counts = {case: len(samples) for case, samples in row["samples_ms"].items()}
        assert counts == {"cold": 2, "local": 2, "external": 0 if row["connector"] == "none" else 2}
    assert (
        result["repeats"] == 2
        and result["interleaved"] is True
        and result["targets"] == vllm.TARGETS["cpu"]
    )
    # Both engines, a round to warm up and two that count.
    assert settled == [100] * 6 + [200] * 6
    assert [each["connector"] for each in result["ratios"]] == ["kvkeep"] * 2


def test_engines_take_turns_in_changing_order(run: Run, asked: list[Any]) -> None:
    run(device="cpu", prompt_tokens="100", repeats=1)
    names, drops = ["none", "kvkeep"], (True, False, True)  # cold, local, external
    warm_up = [(name, drop) for drop in drops for name in names]
    measured = [(name, drop) for drop in drops for name in reversed(names)]
    assert [(name, drop) for name, _, drop in asked] == warm_up + measured[:-1], (
        "without a connector nothing external would be found"
    )


def test_hits_follow_each_other_several_times_where_they_are_soon_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_HITS", {"cpu": 3})
    result = run(device="cpu", prompt_tokens="100", repeats=2)
    for row in result["rows"]:
        counts = {case: len(samples) for case, samples in row["samples_ms"].items()}
        assert counts == {"cold": 2, "local": 6, "external": 0 if row["connector"] == "none" else 6}
    [row] = [row for row in result["rows"] if row["connector"] == "kvkeep"]
    cold, external = row["samples_ms"]["cold"], row["samples_ms"]["external"]
    speedups = [cold[at // 3] / ms for at, ms in enumerate(external)]
    assert result["ratios"][0]["speedup"] == pytest.approx(statistics.median(speedups), rel=0.1)


def test_on_a_gpu_without_room_for_all_engines_come_one_after_the_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_session, "find_device", lambda device: "cuda")
    monkeypatch.setattr(vllm, "own_model", lambda folder, device: replace(MODEL, device="cuda"))
    monkeypatch.setattr(vllm, "bus_gbps", lambda: 50.0)
    monkeypatch.setattr(vllm, "gpu_name", lambda: "Some GPU")
    asked = {"device": "auto", "prompt_tokens": "100", "repeats": 1, "connectors": "kvkeep"}
    ready = "waiting until their pools are as fast as they will be"
    for gpu_bytes, interleave, together in ((12, True, True), (6, True, False), (12, False, False)):
        monkeypatch.setattr(
            FreeMemory, "find", lambda free=gpu_bytes: FreeMemory(free * GIB, 8 * GIB, 8 * GIB)
        )
        result = run(**asked, interleave=interleave)
        assert result["interleaved"] is together and [
            row["connector"] for row in result["rows"]
        ] == ["none", "kvkeep"]
        said = capsys.readouterr().err.splitlines()
        assert said.count(ready) == (1 if together else 2), "so many groups of engines"
        assert any(line.startswith("2 engines at a time do not fit, so") for line in said) == (
            gpu_bytes == 6
        )


def test_short_prompts_are_cold_several_times_and_each_after_a_rest(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    monkeypatch.setattr(vllm, "_MORE_COLD", {"cpu": 2})
    monkeypatch.setattr(vllm, "_REST_S", {"cpu": 0.125})
    monkeypatch.setattr(vllm, "_SHORT_TOKENS", 200)
    rests: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(
        vllm.time,
        "sleep",
        lambda seconds: rests.append(seconds) if seconds == 0.125 else sleep(seconds),
    )
    result = run(device="cpu", prompt_tokens="100,200", repeats=2)
    counts = [len(row["samples_ms"]["cold"]) for row in result["rows"]]
    assert counts == [6, 6, 2, 2] and all(
        len(row["samples_ms"]["local"]) == 2 for row in result["rows"]
    )
    assert len(rests) == 2 * (1 + 6 + 1 + 2), "of both engines, with the rounds that warm up"
    cold = list(dict.fromkeys((name, prompt) for name, prompt, _ in asked))
    prompts = {name: [each for who, each in cold if who == name] for name in ("none", "kvkeep")}
    assert prompts["none"] == prompts["kvkeep"], "the same prompts"
    assert len(prompts["none"]) == 1 + 6 + 1 + 2, "and each of them is cold once"
    firsts = [name for name, _ in cold][2::2]
    assert firsts[:3] in (["none", "kvkeep", "none"], ["kvkeep", "none", "kvkeep"])


def test_an_engine_works_in_its_own_turn_only(run: Run, worked: list[tuple[str, Any]]) -> None:
    run(device="cpu", prompt_tokens="100", repeats=1)
    assert {name for name, _ in worked} == {"none", "kvkeep"} and all(
        name == whose for name, whose in worked
    )


def test_other_tokens_are_seen(run: Run, behaviour: dict[str, str]) -> None:
    behaviour["kvkeep"] = "wrong"
    rows = run(device="cpu", prompt_tokens="100", repeats=1)["rows"]
    assert [row["same_tokens"] for row in rows] == [True, False]


def test_a_cold_prompt_that_is_found_is_none(run: Run, behaviour: dict[str, str]) -> None:
    behaviour["kvkeep"] = "finds all"
    with pytest.raises(
        AssertionError, match="kvkeep: 96 tokens of a prompt that nobody sent before"
    ):
        run(device="cpu", prompt_tokens="100", repeats=1)


@pytest.mark.parametrize("wrong", ["no server", "no start", "dies"])
def test_a_peer_that_fails_is_left_out(
    run: Run, installed: set[str], behaviour: dict[str, str], wrong: str
) -> None:
    installed.add("lmcache")
    behaviour["lmcache"] = wrong
    result = run(device="cpu", prompt_tokens="100", repeats=1)
    assert [row["connector"] for row in result["rows"]] == ["none", "kvkeep"]
    assert set(result["left_out"]) == {"native", "lmcache"}
    assert result["left_out"]["lmcache"].startswith(
        ("its server", "vLLM with connector lmcache ended")
    )
    with pytest.raises(KVKeepError):
        run(device="cpu", prompt_tokens="100", repeats=1, connectors="lmcache")


def test_kvkeep_that_fails_ends_the_run(run: Run, behaviour: dict[str, str]) -> None:
    behaviour["kvkeep"] = "dies"
    with pytest.raises(KVKeepError, match=r"(?s)connector kvkeep ended.*a last word"):
        run(device="cpu", prompt_tokens="100", repeats=1)


def test_a_signal_ends_it_in_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    end = lambda *ignored: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(EngineProcess, "drop_local_cache", end)
    with pytest.raises(SystemExit) as caught:
        run(device="cpu", prompt_tokens="100", repeats=1)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


# -- what is shown


def bench(none_ms: float, kvkeep_ms: float, external_ms: float, cached: int = 1984) -> Bench:
    plan = Plan(
        "cpu", (2000,), ("none", "kvkeep"), 1, True, False, {"native": "needs a GPU\nand more"}
    )
    done = Bench(plan, MODEL, "0.0.stub")
    for name, cold, external in (("none", none_ms, []), ("kvkeep", kvkeep_ms, [external_ms])):
        tokens = [[1, 2]] * 3
        found = [cached] * len(external)
        done.samples[name, 2000] = vllm.Samples(
            {"cold": [cold], "local": [30.0], "external": external}, found, tokens
        )
    return done


def test_ratios_are_medians_of_the_repeats() -> None:
    done = bench(100.0, 104.0, 20.0)
    done.samples["none", 2000].ms["cold"] = [100.0, 200.0, 400.0]
    done.samples["kvkeep", 2000].ms |= {
        "cold": [110.0, 204.0, 400.0],
        "external": [10.0, 51.0, 200.0],
    }
    for name in ("none", "kvkeep"):
        done.samples[name, 2000].ms["local"] = [30.0] * 3
    done.samples["kvkeep", 2000].cached_tokens = [1984, 1952, 1984]
    result = done.result()
    expected = {
        "connector": "kvkeep",
        "prompt_tokens": 2000,
        "cold_ratio": 1.02,
        "local_hit_ratio": 1.0,
        "speedup": 4.0,
    }
    assert result["ratios"] == [expected]
    assert result["rows"][1]["cold_ms"] == 204.0 and result["rows"][1]["cached_tokens"] == 1952
    done.samples["kvkeep", 2000].ms["external"] = [10.04, 51.06, 200.0]
    samples = done.result()["rows"][1]["samples_ms"]
    assert samples == {
        "cold": [110.0, 204.0, 400.0],
        "local": [30.0] * 3,
        "external": [10.0, 51.1, 200.0],
    }


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], dict[str, Any]]:
    """The result with a bus of 0.1024 GB/s, which takes 20 ms for 2,000 tokens of 1 KiB: the floor
    is 50 ms."""
    monkeypatch.setattr(vllm, "gpu_name", lambda: "Some GPU")

    def make(kvkeep_ms: float, external_ms: float) -> dict[str, Any]:
        done = bench(100.0, kvkeep_ms, external_ms)
        done.plan = Plan("cuda", (2000,), ("none", "kvkeep", "native"), 1, False, False, {})
        ms = {"cold": [101.0], "local": [31.0], "external": [60.5]}
        done.samples["native", 2000] = vllm.Samples(ms, [2000], [[1, 2]] * 3)
        return done.result(0.1024)

    return make


def test_on_a_gpu_a_hit_is_compared_with_its_floor_and_with_peers(on_a_gpu: Any) -> None:
    result = on_a_gpu(102.0, 60.0)
    assert (result["gpu"], result["device"], result["floor_gbps"]) == ("Some GPU", "cuda", 0.1)
    assert [(each["floor_ms"], each["floor_ratio"]) for each in result["ratios"]] == [
        (50.0, 1.2),
        (50.0, 1.21),
    ]
