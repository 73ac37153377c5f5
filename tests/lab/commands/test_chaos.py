from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvkeep.errors import SettingsError
from kvkeep_lab.chaos.mutants import MUTANTS
from kvkeep_lab.chaos.plan import FAULTS, HostsItem, draw
from kvkeep_lab.commands import chaos as module
from kvkeep_lab.commands.chaos import as_text, chaos, numbers_in

KEYS = [
    "runs",
    "requests",
    "events",
    "faults",
    "wrong_tokens",
    "wrong_bytes",
    "engine_errors",
    "stuck_requests",
]
KEYS += ["leaked_blocks", "leaked_leases", "seconds"]


def test_some_seeds_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    chaos(seeds="0:4", jobs=1, json=True)
    said = json.loads(capsys.readouterr().out)
    assert list(said)[: len(KEYS)] == KEYS
    assert said["runs"] == 4 and said["requests"] > 20 and said["events"] > 1_000
    assert set(said["faults"]) == set(FAULTS) and sum(said["faults"].values()) > 0
    assert not any(said[key] for key in KEYS[4:10]) and said["violations"] == []


def test_runs_with_several_hosts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with_hosts = [seed for seed in range(60) if _has_hosts(seed)]
    chaos(seeds=f"{with_hosts[0]}:{with_hosts[1] + 1}", jobs=1, json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["runs_with_hosts"] == 2 and said["tier_hits"] > 0 and said["violations"] == []


def _has_hosts(seed: int) -> bool:
    return any(isinstance(item, HostsItem) for item in draw(seed).items)


def test_several_processes_and_a_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep.cli.main", "chaos", "--seeds", "0:4", "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 runs (seeds 0:4)")
    assert all(name in done.stdout for name in FAULTS)
    assert "wrong tokens" in done.stdout


def test_a_violation_is_told_as_a_short_story_with_the_way_to_replay_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mutant = "release-without-unpin"
    with pytest.raises(SystemExit) as ended:
        chaos(seeds="0:3", mutant=mutant, jobs=1, json=True)
    assert ended.value.code == 1
    said = capsys.readouterr()
    totals = json.loads(said.out)
    assert totals["broken_rules"] == len(totals["violations"]) > 0
    violation = totals["violations"][0]
    seed = violation["seed"]
    assert "broken_rules: the store contradicts itself" in violation["story"][-1]
    assert violation["replay"].startswith(f"kvkeep chaos --seed {seed} --without ")
    assert violation["replay"] in said.err

    without = violation["replay"].split()[5]
    with pytest.raises(SystemExit):
        chaos(seed=seed, without=without, mutant=mutant, story=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("broken_rules: ")
    assert violation["story"][-1] in lines, "the replay ends in the same way, at the same moment"
    chaos(seed=seed, without=without)
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is wrong"


def test_a_story_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    chaos(seed=1, story=True, json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] == 1 and "serves, empty" in "".join(said["story"][:2])


def test_mutants_are_hunted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import kvkeep_lab.chaos.mutants as mutants

    chosen = ("release-without-unpin", "quota-off-by-one")
    monkeypatch.setattr(mutants, "MUTANTS", {name: MUTANTS[name] for name in chosen})
    with pytest.raises(SystemExit) as ended:  # so few seeds are not enough for the second
        chaos(mutants=True, seeds="0:3", jobs=1, json=True)
    assert ended.value.code == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["mutants"], said["caught"], said["missed"]) == (2, 1, ["quota-off-by-one"])
    assert said["results"][0]["seed"] < 3 and said["results"][0]["finding"] == "broken_rules"


def test_a_mutant_that_does_not_fit_the_code_is_no_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = {
        "seed": 0,
        "finding": "broken_rules",
        "violation": "the server failed inside: TypeError: argument",
    }
    monkeypatch.setattr(module, "_run", lambda what: outcome)
    with pytest.raises(RuntimeError, match="does not fit"):
        module._find(("skip-crc", range(3)))


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("3", [3]), ("2,5:9", [2, 5, 6, 7, 8]), ("0:2,4", [0, 1, 4])]
)
def test_numbers_of_items(text: str, numbers: list[int]) -> None:
    assert numbers_in(text, 9) == numbers
    assert as_text(numbers) == text


def test_blanks_between_numbers_of_items_do_no_harm() -> None:
    assert numbers_in(" 3, 5 : 7 ,8", 9) == [3, 5, 6, 8]


@pytest.mark.parametrize(
    "text", ["3-7", "3:", ":5", "7:3", "3:3", "3,,5", "3,", ",", " ", "-1", "٣", "9" * 5000]
)
def test_what_names_no_item_is_refused_with_what_would(text: str) -> None:
    with pytest.raises(SettingsError, match="names no item") as caught:
        numbers_in(text, 9)
    assert "2,5:9 is 2, 5, 6, 7 and 8" in caught.value.hint


@pytest.mark.parametrize("text", ["9", "3:10", "0:99999999999"])
def test_more_items_than_there_are_cannot_be_left_out(text: str) -> None:
    with pytest.raises(SettingsError, match="the plan has 9 items") as caught:
        numbers_in(text, 9)
    assert "from 0 to 8" in caught.value.hint


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--seeds", "9:3"], "--seeds is '9:3'"),
        (["--seed", "1", "--without", "x"], "--without is 'x'"),
        (["--seed", "1", "--without", "5000"], "the plan has"),
        (["--seed", "1", "--without", "7:3"], "'7:3' names no item"),
        (["--story"], "--without and --story are for one run"),
        (["--mutant", "none"], "--mutant is 'none'"),
        (["--mutants", "--seed", "1"], "--mutants takes"),
        (["--real", "--seeds", "0:3"], "--real takes"),
        (["--real", "--minutes", "0"], "--minutes is 0"),
        (["--real", "--minutes", "nan"], "--minutes is nan"),
        (["--minutes", "3"], "--minutes is for --real"),
    ],
)
def test_bad_options_are_refused(
    refused: Callable[..., str], flags: list[str], problem: str
) -> None:
    assert problem in refused("chaos", *flags)


def test_contradictory_spans_raise() -> None:
    with pytest.raises(SettingsError):
        chaos(seed=1, seeds="1:2")
