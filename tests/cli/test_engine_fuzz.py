from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvkeep.cli import engine_fuzz

FUZZ = [sys.executable, "-m", "kvkeep.cli.main", "engine-fuzz"]


def fuzz(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FUZZ, *flags], capture_output=True, text=True, timeout=300)


def test_one_seed_as_json_is_the_same_each_time() -> None:
    runs = [json.loads(fuzz("--seed", "7", "--json").stdout) for _ in range(2)]
    for run in runs:
        del run["seconds"]
    assert runs[0] == runs[1]
    assert runs[0]["runs"] == 1 and runs[0]["requests"] > 0 and runs[0]["violation_count"] == 0


def test_several_seeds_in_several_processes() -> None:
    done = fuzz("--seeds", "3:9", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 runs (oracle, seeds 3:9)") and "every answer is right" in done.stdout


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--seeds", "9:3"], "--seeds is '9:3'"),
        (["--seeds", "ten"], "--seeds is 'ten'"),
        (["--model", "gpt"], "--model is 'gpt'"),
        (["--jobs", "-1"], "--jobs is -1"),
        (["--seed", "-1"], "--seed is -1"),
    ],
)
def test_bad_options_are_refused(flags: list[str], problem: str) -> None:
    done = fuzz(*flags)
    assert done.returncode == 2 and problem in done.stderr and "hint:" in done.stderr


def test_a_violation_is_told_with_the_way_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def results(span: range, model: str, jobs: int) -> list[dict[str, object]]:
        return [{"seed": 4, "violation": "seed 4: wrong"}]

    monkeypatch.setattr(engine_fuzz, "_results", results)
    with pytest.raises(SystemExit) as ended:
        engine_fuzz.engine_fuzz(seeds="4:5", json=True)
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["violations"] == [{"seed": 4, "violation": "seed 4: wrong"}]
    assert "kvkeep engine-fuzz --model oracle --seed 4" in said.err
