"""How a target is run: counted, stopped, and what it finds is kept. Targets of these tests are bad
on purpose."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import SettingsError
from kvkeep_lab.fuzz import targets as fuzzing
from kvkeep_lab.fuzz.choices import Leak, Ran
from kvkeep_lab.fuzz.targets import TARGETS, FuzzResult, child, fuzz, read_corpus, total

BAD = """
import time
from kvkeep_lab.fuzz.choices import Leak, Ran

def crash(data):
    if data[:1] == b"k":
        if data[1:2] == b"v":
            raise KeyError("planted")
    return Ran(1)

def leak(data):
    if len(data) > 3:
        raise Leak("planted")
    return Ran(1)

def hang(data):
    if len(data) > 2:
        time.sleep(60)
    return Ran(1)

def quiet(data):
    return Ran(2, 1)

def gone(data):
    import os
    os._exit(3)
"""


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets in a module that the fuzzer's process finds as well; its name makes it instrumented,
    so it is guided."""
    pytest.importorskip("atheris")
    (tmp_path / "kvkeep_bad.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {name: ("kvkeep_bad", name) for name in ("crash", "leak", "hang", "quiet", "gone")}
    monkeypatch.setattr(fuzzing, "TARGETS", names)
    told = fuzzing._CHILD.replace('"kvkeep_lab"]', '"kvkeep_lab", "kvkeep_bad"]')
    told = told.replace("    run_one", f"    fuzz.TARGETS = {names!r}\n    run_one")
    monkeypatch.setattr(fuzzing, "_CHILD", told)


@pytest.mark.usefixtures("bad")
def test_a_quiet_target_is_counted_and_ends_after_its_inputs() -> None:
    result = fuzz("quiet", 600, inputs=500)
    assert result.is_clean and not result.findings
    assert 500 <= result.inputs <= 510 and result.messages == 2 * result.inputs and result.edges > 0
    assert result.malformed_frames == result.inputs


@pytest.mark.parametrize("target", ["http", "config"])
def test_no_file_of_its_process_stays(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("atheris")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert fuzz(target, 600, inputs=20).is_clean
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("bad")
def test_coverage_leads_to_a_crash_and_its_input_is_kept() -> None:
    """By chance one input in 65,536 begins so."""
    result = fuzz("crash", 600, inputs=200_000)
    assert result.crashes > 0 and (result.hangs, result.leaks) == (0, 0) and not result.is_clean
    found = result.findings[0]
    assert found["kind"] == "crash" and "KeyError: 'planted'" in found["said"]
    assert base64.b64decode(found["input"]).startswith(b"kv")


@pytest.mark.usefixtures("bad")
def test_a_leak_is_no_crash() -> None:
    result = fuzz("leak", 600, inputs=3_000)
    assert result.leaks > 0 and (result.crashes, result.hangs) == (0, 0)
    assert len(result.findings) <= fuzzing.MOST_FINDINGS


@pytest.mark.usefixtures("bad")
def test_a_hang_is_ended_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "HANG_AFTER_S", 1)
    monkeypatch.setattr(fuzzing, "MOST_FINDINGS", 1)
    result = fuzz("hang", 600, inputs=100_000)
    assert (result.hangs, result.crashes, result.leaks) == (1, 0, 0)
    assert result.findings[0]["kind"] == "timeout"


@pytest.mark.usefixtures("bad")
def test_a_process_that_ends_by_itself_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "MOST_FINDINGS", 1)
    result = fuzz("gone", 600)
    assert result.crashes == 1 and result.findings[0]["kind"] == "process"


@pytest.mark.usefixtures("bad")
def test_it_begins_with_the_corpus_and_keeps_what_it_learns(tmp_path: Path) -> None:
    (tmp_path / "crash.txt").write_text(
        f"# found once\n\n{base64.b64encode(b'kv and more').decode()}\n"
    )
    assert fuzz("crash", 600, inputs=50, corpus=tmp_path).crashes > 0, (
        "the input of the corpus is tried first"
    )
    fuzz("crash", 600, inputs=20_000, keep=tmp_path / "kept")
    kept = [path.read_bytes() for path in (tmp_path / "kept" / "crash").iterdir()]
    assert any(data.startswith(b"k") for data in kept), "half of the way"


def test_a_corpus_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wire.txt").write_text("no base64!\n")
    with pytest.raises(SettingsError, match="is no corpus"):
        read_corpus(tmp_path / "wire.txt")
    with pytest.raises(SettingsError, match="is no corpus"):
        read_corpus(tmp_path / "nowhere.txt")


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="'nonsense'") as refused:
        fuzz("nonsense", 1)
    assert all(name in refused.value.hint for name in TARGETS)


def test_a_process_that_ends_early_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, ran = 1_000.0, []

    def process(self: Any, seconds: float, inputs: int, seed: int) -> None:
        nonlocal now_s
        now_s += 120
        ran.append((seconds, inputs, seed))

    monkeypatch.setattr(fuzzing._Run, "process", process)
    monkeypatch.setattr(fuzzing.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(fuzzing.importlib.util, "find_spec", lambda name: True)
    fuzz("wire", 300, seed=5)
    assert ran == [(300, -1, 6), (180, -1, 7), (60, -1, 8)]


@pytest.mark.parametrize("resident_mib", [1_000, 1_100])
def test_a_process_that_has_grown_ends_with_its_inputs_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident_mib: int
) -> None:
    counts, ended = tmp_path / "counts", []
    counts.write_bytes(bytes(fuzzing._COUNTS.size))
    monkeypatch.setattr(fuzzing, "load", lambda target: lambda data: Ran(1, 0))
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setattr(fuzzing, "_resident_mib", lambda: resident_mib)
    monkeypatch.setattr(fuzzing.os, "_exit", lambda code: ended.append((code, counts.read_bytes())))
    one = child("wire", str(counts))
    for _ in range(150):
        one(b"")
    assert ended == ([(0, fuzzing._COUNTS.pack(100, 100, 0, 0))] if resident_mib > 1_024 else [])


def test_without_atheris_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="Atheris") as refused:
        fuzz("wire", 1)
    assert "kvkeep[dev]" in refused.value.hint and "clang" in refused.value.hint


def test_counts_are_in_the_file_whatever_becomes_of_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "counts"
    counts.write_bytes(bytes(fuzzing._COUNTS.size))
    outcomes = iter([Ran(5, 4), Leak("x"), ValueError("y"), Ran(2)])

    def run(data: bytes) -> Ran:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(fuzzing, "load", lambda target: run)
    monkeypatch.setattr("logging.disable", lambda level: None)
    one = child("wire", str(counts))
    for error in (None, Leak, ValueError, None):
        if error is None:
            one(b"")
        else:
            with pytest.raises(error):
                one(b"")
    assert fuzzing._COUNTS.unpack(counts.read_bytes()) == (4, 7, 4, 1)


def test_totals_add_up() -> None:
    one, other = (
        FuzzResult("wire", 10, 20, 15, edges=3, seconds=1.5),
        FuzzResult("http", 1, 2, crashes=1, edges=4),
    )
    sums: dict[str, float] = {
        "inputs": 11,
        "messages": 22,
        "malformed_frames": 15,
        "crashes": 1,
        "hangs": 0,
    }
    sums |= {"leaks": 0, "edges": 7, "seconds": 1.5}
    assert total([one, other]) == {"target": "all", **sums}
    assert total([one])["target"] == "wire"
    assert one.is_clean and not other.is_clean
