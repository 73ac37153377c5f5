"""Conversations are served in waves by every connector and compared. vLLM is a stub here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.bench import vllm_session
from kvkeep.bench.vllm_session import Choice, FreeMemory
from kvkeep.bench.vllm_setup import ServedModel
from kvkeep.units import GIB
from kvkeep_lab.bench import vllm_conversations, vllm_load
from kvkeep_lab.bench.vllm_conversations import SIZES, Conversations, Sizes
from kvkeep_lab.bench.vllm_lanes import LoadedEngine

MODEL = ServedModel("nowhere", "a stub", "cpu", vocab_size=1000, kv_token_bytes=1024)
FEW = Sizes((2, 3), 3, 40, 10, 2, 2, 1024)
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(stubbed_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    stubbed_vllm.put_into(monkeypatch, vllm_load, vllm_conversations)
    stubbed_vllm.installed.add("lmcache")
    monkeypatch.setitem(SIZES, "cpu", FEW)
    return lambda **asked: vllm_load.run(device="cpu", scenarios="conversations", **asked)


def test_every_connector_serves_all_conversations(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(repeats=2)
    said = result["conversations"]
    assert (result["vllm"], result["repeats"], result["left_out"]) == (
        "0.0.stub",
        2,
        {"native": "needs a GPU"},
    )
    assert (said["turns"], said["context_tokens"], said["engine_tokens"]) == (3, 76, 3 * 76)
    connectors = ["none", "kvkeep", "lmcache"]
    assert [(row["connector"], row["conversations"]) for row in said["rows"]] == [
        (name, count) for count in (2, 3) for name in connectors
    ]
    for row in said["rows"]:
        assert (row["failed"], row["same_answers"], len(row["turn_s"])) == (0, 1.0, 3)
        assert row["total_s"] >= sum(row["turn_s"]) * 0.5 and len(row["samples_s"]) == 2
        assert said["totals_s"][str(row["conversations"])][row["connector"]] == row["total_s"]
    assert [(each["against"], each["conversations"]) for each in said["ratios"]] == [
        (name, count) for count in (2, 3) for name in ("none", "lmcache")
    ]
    turns = [
        line.split(": ")[1]
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("2 conversations, ")
    ]
    assert turns == ["none", "kvkeep", "lmcache", "kvkeep", "lmcache", "none"]


def test_each_run_is_followed_by_a_drop_and_no_repeat_is_like_another(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    converse, drop = LoadedEngine.converse, LoadedEngine.drop_local_cache

    def conversing(self: LoadedEngine, questions: Any, *sizes: int) -> Any:
        calls.append(questions)
        return converse(self, questions, *sizes)

    def dropping(self: LoadedEngine) -> None:
        calls.append("drop")
        drop(self)

    monkeypatch.setattr(LoadedEngine, "converse", conversing)
    monkeypatch.setattr(LoadedEngine, "drop_local_cache", dropping)
    run(repeats=2, connectors="none")
    assert len(calls) == 2 * (1 + 2 * 2) and calls[1::2] == ["drop"] * 5
    asked = [repr(questions) for questions in calls[::2]]
    assert len(set(asked)) == 5


def test_a_peer_that_dies_is_left_out(run: Run, behaviour: dict[str, str]) -> None:
    behaviour["lmcache"] = "dies"
    result = run(connectors="kvkeep,lmcache")
    assert [row["connector"] for row in result["conversations"]["rows"]] == ["none", "kvkeep"] * 2
    assert result["left_out"]["lmcache"].startswith("conversations: vLLM with connector lmcache")


@pytest.mark.parametrize("device", SIZES)
def test_contexts_are_more_than_an_engine_holds(device: str) -> None:
    sizes = SIZES[device]
    assert (sizes.conversations, sizes.turns) == ((24, 48), 6)
    for conversations in sizes.conversations:
        assert conversations * sizes.context_tokens > 1.5 * sizes.engine_tokens
    assert sizes.engine_tokens > sizes.at_a_time * sizes.context_tokens
    first, *later = sizes.questions(24, 0, 1000)
    assert [len(each) for each in first] == [sizes.start_tokens + sizes.question_tokens] * 24
    assert {len(each) for turn in later for each in turn} == {sizes.question_tokens}
    # At the end of turns 1 and 2 of 3 there are 52 and 64 tokens; the last has no KV.
    assert FEW.reusable_tokens(2, 16) == 2 * (48 + 48)


def done(ours: float, native: float) -> dict[str, Any]:
    choice = Choice("cpu", ("none", "kvkeep", "native"), False, {})
    bench = Conversations(choice, MODEL, FEW, 1, True, False)
    for name, seconds in (("none", 2.0), ("kvkeep", ours), ("native", native)):
        wave = {"answers": {"0": "a", "1": name}, "failed": 1, "cached_tokens": 40, "seconds": 0.1}
        waves = [wave | {"ttft_ms": {"mean": 5.0}}] * 3
        bench.said[name, 2] = [{"waves": waves, "seconds": seconds}]
    return bench.result()


def test_totals_are_compared_with_natives() -> None:
    result = done(1.0, 1.0)
    assert result["totals_s"] == {"2": {"none": 2.0, "kvkeep": 1.0, "native": 1.0}}
    assert [(each["against"], each["total_ratio"]) for each in result["ratios"]] == [
        ("none", 0.5),
        ("native", 1.0),
    ]
    row = result["rows"][1]
    assert (row["failed"], row["same_answers"], row["cached_share"]) == (3, 0.5, 0.938)
    assert done(1.02, 1.0)["ratios"][1]["total_ratio"] == 1.02


def test_on_a_gpu_without_room_engines_come_one_after_the_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_session, "find_device", lambda device: "cuda")
    monkeypatch.setattr(vllm_load, "gpu_name", lambda: "Some GPU")
    monkeypatch.setitem(SIZES, "cuda", FEW)
    for gpu_bytes, interleaved in ((100 * GIB, True), (2 * GIB, False)):
        free = FreeMemory(gpu_bytes, 8 * GIB, 8 * GIB)
        monkeypatch.setattr(FreeMemory, "find", lambda free=free: free)
        result = run(connectors="kvkeep,native")
        assert (result["gpu"], result["graphs"]) == ("Some GPU", True)
        assert result["conversations"]["interleaved"] is interleaved
        said = capsys.readouterr().err
        assert ("do not fit" in said) is not interleaved
