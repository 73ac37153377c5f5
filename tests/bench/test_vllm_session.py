"""What can be measured is found out before anything starts, and said in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.bench import vllm_session
from kvkeep.bench.vllm_session import (
    SILENT_AFTER_S,
    Choice,
    Turns,
    median,
    median_ratio,
    rounded,
)
from kvkeep.errors import SettingsError


def test_what_can_be_had_is_chosen(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"lmcache": "not installed", "native": "needs a GPU"}
    assert Choice.make("cpu", "auto") == Choice("cpu", ("none", "kvkeep"), False, missing)
    installed.add("lmcache")
    monkeypatch.setattr(vllm_session, "find_device", lambda device: "cuda")
    assert Choice.make("auto", "auto") == Choice("cuda", vllm_session.CONNECTORS, False, {})


def test_all_are_compared_with_none(installed: set[str]) -> None:
    assert Choice.make("cpu", "kvkeep") == Choice("cpu", ("none", "kvkeep"), True, {})


@pytest.mark.parametrize(
    ("device", "connectors", "said"),
    [
        ("tpu", "auto", '--device "tpu": expected auto, cpu or cuda'),
        ("cpu", "kvkeep,redis", '--connectors "redis": expected some of none, kvkeep'),
        ("cpu", "", '--connectors "": expected some of'),
        ("cpu", "native", "connector native cannot be measured here: needs a GPU"),
        ("cpu", "lmcache", "connector lmcache cannot be measured here: not installed"),
    ],
)
def test_a_wrong_option_is_named(
    installed: set[str], device: str, connectors: str, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Choice.make(device, connectors)
    assert said in caught.value.message


def test_a_gpu_that_is_not_there_is_missed(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Choice.make("auto", "auto").device == "cpu"
    with pytest.raises(SettingsError, match="torch finds no GPU"):
        Choice.make("cuda", "auto")


def test_without_vllm_there_is_a_hint(installed: set[str]) -> None:
    installed.clear()
    with pytest.raises(SettingsError, match="vLLM is not installed") as caught:
        Choice.make("cpu", "auto")
    assert caught.value.hint.startswith("pip install kvkeep beside vLLM")


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_folder").mkdir()
    (tmp_path / "some_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    there = {
        name: vllm_session.installed(name)
        for name in ("some_folder", "some_package", "nothing_at_all")
    }
    assert there == {"some_folder": False, "some_package": True, "nothing_at_all": False}


class Clock:
    """Time passes when somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(round(seconds, 3))


def test_a_turn_begins_when_all_others_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(vllm_session, "time", clock)
    turns = Turns(1.2)
    for engine, work_s in (("a", 5.0), ("a", 1.0), ("b", 0.5), ("c", 0.1), ("b", 3.0)):
        with turns.turn(engine):
            clock.now += work_s
    assert clock.slept == [0, 0, 1.2, 1.2, 1.2], "an engine need not wait for itself"
    clock.now += 0.7
    with turns.turn("a"):
        pass
    assert clock.slept[-1] == 0.5, "what has passed already is not waited for again"


def test_an_engine_that_fails_has_had_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(vllm_session, "time", clock)
    turns = Turns(1.2)
    with pytest.raises(ValueError, match="wrong"), turns.turn("a"):
        raise ValueError("wrong")
    with turns.turn("b"):
        pass
    assert clock.slept == [0, 1.2]


def test_only_on_a_cpu_must_others_be_silent() -> None:
    assert (
        Turns.on("cpu").silent_after_s == SILENT_AFTER_S > 1
        and Turns.on("cuda").silent_after_s == 0
    )


def test_ratios_are_medians_of_the_repeats() -> None:
    assert rounded([1.06, None, 2], 1) == [1.1, None, 2]
    assert median([], 2) is None and median([3.0, 1.0, 2.004], 2) == 2.0
    assert median_ratio([110.0, 204.0, 400.0], [100.0, 200.0, 400.0]) == 1.02
