from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvkeep_lab.commands import engine_fuzz
from kvkeep_lab.fuzz.engine import Fuzz, Outcome


def test_one_seed_as_json_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for _ in range(2):
        engine_fuzz.engine_fuzz(seed=7, json=True)
        runs.append(json.loads(capsys.readouterr().out))
        del runs[-1]["seconds"]
    assert runs[0] == runs[1]
    assert runs[0]["runs"] == 1 and runs[0]["requests"] > 0 and runs[0]["violation_count"] == 0


def test_several_seeds_in_several_processes() -> None:
    flags = ["--seeds", "3:9", "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep.cli.main", "engine-fuzz", *flags],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("6 runs (oracle, seeds 3:9)")
        and "every answer is right" in done.stdout
    )


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
def test_bad_options_are_refused(
    refused: Callable[..., str], flags: list[str], problem: str
) -> None:
    assert problem in refused("engine-fuzz", *flags)


def test_a_violation_is_told_with_the_way_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def results(run: object, runs: object, jobs: int) -> list[dict[str, object]]:
        return [{"seed": 4, "violation": "seed 4: wrong"}]

    monkeypatch.setattr(engine_fuzz, "sweep", results)
    with pytest.raises(SystemExit) as ended:
        engine_fuzz.engine_fuzz(seeds="4:5", json=True)
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["violations"] == [{"seed": 4, "violation": "seed 4: wrong"}]
    assert "kvkeep engine-fuzz --model oracle --seed 4" in said.err


def test_what_is_raised_in_a_run_is_a_finding_and_the_other_seeds_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Fuzz.run

    def run(self: Fuzz) -> Outcome:
        if self.seed == 4:
            raise KeyError("nothing")
        return right(self)

    monkeypatch.setattr(Fuzz, "run", run)
    with pytest.raises(SystemExit) as ended:
        engine_fuzz.engine_fuzz(seeds="4:6", jobs=1, json=True)
    assert ended.value.code == 1
    said = capsys.readouterr()
    outcome = json.loads(said.out)
    [violation] = outcome["violations"]
    assert outcome["violation_count"] == 1 and outcome["runs"] == 2 and outcome["requests"] > 0
    assert (
        violation["seed"] == 4
        and "seed 4, model oracle: KeyError: 'nothing'" in violation["violation"]
    )
    assert "in run" in violation["violation"], "where it was raised"
    assert "--model oracle --seed 4" in said.err
