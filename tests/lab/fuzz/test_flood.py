"""A flood is counted, ends, and survives what it finds. Targets of these tests are bad on
purpose."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep_lab.fuzz import flood as fuzz_flood
from kvkeep_lab.fuzz.flood import FLOODS, flood
from kvkeep_lab.fuzz.targets import FuzzResult, load

BAD = """
import os, time
from kvkeep_lab.fuzz.choices import Leak, Ran

kept = []

def quiet(data):
    return Ran(3, 2)

def crash(data):
    if len(data) % 8 == 5:
        raise KeyError("planted")
    return Ran(1, 1)

def gone(data):
    os.kill(os.getpid(), 11)

def leak(data):
    raise Leak("planted")

def grow(data):
    kept.append(b"x" * (1 << 20))
    return Ran(1, 1)

def hang(data):
    while True:
        time.sleep(1)

def never(data):
    return Ran(1)
"""


@pytest.fixture(autouse=True)
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets in a module that the process of a flood finds as well."""
    (tmp_path / "bad_floods.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = {
        name: ("bad_floods", name)
        for name in ("quiet", "crash", "gone", "leak", "grow", "hang", "never")
    }
    monkeypatch.setattr(fuzz_flood, "FLOODS", FLOODS | names)
    monkeypatch.setattr(fuzz_flood, "MOST_FINDINGS", 1)
    # On a busy machine an input of the other targets may take longer than a second.
    within_s = "1 if sys.argv[1] == 'hang' else 30"
    told = f"flood.FLOODS |= {names!r}; flood.HANG_AFTER_S = {within_s}; flood.drown"
    monkeypatch.setattr(fuzz_flood, "_CHILD", fuzz_flood._CHILD.replace("flood.drown", told))


def outcome(result: FuzzResult) -> tuple[int, int, int]:
    return result.crashes, result.hangs, result.leaks


@pytest.mark.parametrize("target", FLOODS)
def test_the_real_targets_refuse_what_they_should_and_the_same_each_time(target: str) -> None:
    one, again = flood(target, 2_000, seed=3), flood(target, 2_000, seed=3)
    assert (
        one.is_clean
        and 2_000 <= one.malformed_frames < 3_500
        and one.malformed_frames < one.messages
    )
    other = flood(target, 2_000, seed=4)
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(again, seconds=0)
    assert dataclasses.replace(one, seconds=0) != dataclasses.replace(other, seconds=0)


def test_it_counts_and_ends_with_the_last_frame_that_was_wanted() -> None:
    result = flood("quiet", 1_001)
    assert (result.inputs, result.messages, result.malformed_frames) == (501, 1_503, 1_002)
    assert result.is_clean and not result.findings and result.edges == 0


def test_a_crash_is_kept_with_its_input_and_the_next_process_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fuzz_flood, "MOST_FINDINGS", 3)
    result = flood("crash", 1_000_000)
    assert outcome(result) == (3, 0, 0) and not result.is_clean
    for found in result.findings:
        assert found["kind"] == "crash" and "KeyError: 'planted'" in found["said"]
        assert len(base64.b64decode(found["input"])) % 8 == 5
    assert len({found["input"] for found in result.findings}) == 3, (
        "each process has a seed of its own"
    )
    assert result.malformed_frames == result.inputs - 3


def test_a_process_that_dies_is_a_crash_and_tells_its_input() -> None:
    result = flood("gone", 1)
    assert outcome(result) == (1, 0, 0) and result.findings[0]["input"]


def test_a_leak_is_no_crash() -> None:
    assert outcome(flood("leak", 1)) == (0, 0, 1)


def test_memory_that_grows_is_a_leak() -> None:
    result = flood("grow", 1_000)
    assert outcome(result) == (0, 0, 1) and "memory grew" in result.findings[0]["said"]
    assert 150 <= result.inputs <= 200


def test_a_hang_is_ended_and_tells_its_input() -> None:
    result = flood("hang", 1)
    assert outcome(result) == (0, 1, 0)
    assert result.findings[0]["kind"] == "hang" and result.findings[0]["input"]


def test_frames_that_are_never_refused_are_no_success() -> None:
    result = flood("never", 10)
    assert outcome(result) == (1, 0, 0) and "only 0 malformed frames" in result.findings[0]["said"]


def test_a_target_without_frames_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(SettingsError, match="'config'") as refused:
        flood("config", 1)
    assert all(name in refused.value.hint for name in FLOODS)


def test_nothing_of_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("TMPDIR", str(empty))
    flood("service", 100)
    flood("gone", 1)
    assert not list(empty.iterdir())


def test_its_targets_are_found_by_name() -> None:
    assert [load(name, FLOODS).__name__ for name in FLOODS] == ["flood_decoder", "flood_service"]
