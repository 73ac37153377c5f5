from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from kvkeep.bench import transfer, vllm
from kvkeep.cli.bench import BENCHES, OPTIONS, add_bench, app, show
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep_lab.bench import vllm_load

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(
    *,
    blocks: int = 8,
    share: float = 0.5,
    sizes: tuple[int, ...] = (1, 2),
    block_bytes: tuple[int, ...] = (1024,),
    seed: int = 0,
    verify: bool = True,
    kind: str = "a",
) -> None:
    """Stands for a benchmark."""


Bench = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs a benchmark: `kvkeep bench tried ARGV`. Gives the exit code, what was said, and what
    its `run` got."""
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    monkeypatch.setitem(BENCHES, "tried", None)

    def invoke(run: Callable[..., Any], *argv: str) -> tuple[int, str, dict[str, Any]]:
        given: dict[str, Any] = {}
        stands_in = wraps(run)(lambda **options: given.update(options) or run(**options) or {})
        meanings = dict.fromkeys(signature(run).parameters, "What it means.")
        module = SimpleNamespace(run=stands_in, OPTIONS=meanings)
        monkeypatch.setitem(sys.modules, "tried_bench", cast(ModuleType, module))
        add_bench("tried", "tried_bench", "Tried by a test.")
        done = CliRunner().invoke(app, ["tried", *argv])
        if isinstance(done.exception, KVKeepError):
            raise done.exception
        return done.exit_code, done.output, given

    return invoke


USUAL = {
    "blocks": 8,
    "share": 0.5,
    "sizes": (1, 2),
    "block_bytes": (1024,),
    "seed": 0,
    "verify": True,
    "kind": "a",
}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", {}),
        (
            "--blocks 9 --share=1 --sizes 3,4 --kind=b",
            {"blocks": 9, "share": 1.0, "sizes": (3, 4), "kind": "b"},
        ),
        ("--block-bytes 4096,64KiB --seed=0", {"block_bytes": (4096, 65536), "seed": 0}),
        ("--no-verify", {"verify": False}),
        ("--verify", {"verify": True}),
    ],
)
def test_options_are_the_arguments_of_run(
    bench: Bench, argv: str, expected: dict[str, Any]
) -> None:
    assert bench(run, *argv.split())[::2] == (0, USUAL | expected)


@pytest.mark.parametrize(
    "argv",
    [
        *("--block 9", "--blocks many", "--blocks 0", "--blocks -1", "--share nan", "--sizes 1,0"),
        *("--seed -1", "--block-bytes 0", "--block-bytes 64KB_B", "--blocks", "9", "--sizes="),
        *("--no-blocks", "--verify=maybe", "--no-verify=false", "--kind"),
    ],
)
def test_a_wrong_option_is_named(bench: Bench, argv: str) -> None:
    code, said, given = bench(run, *argv.split())
    assert code == 2 and given == {}
    assert argv.split()[0].partition("=")[0] in said


def run_on(file: str, other: str, *, blocks: int = 8) -> None:
    """Stands for a benchmark with two arguments."""


def test_parameters_without_a_default_are_arguments(bench: Bench) -> None:
    _, _, given = bench(run_on, "a.jsonl", "--blocks", "9", "b.jsonl")
    assert given == {"file": "a.jsonl", "blocks": 9, "other": "b.jsonl"}


@pytest.mark.parametrize(
    ("argv", "named"),
    [("a.jsonl", "other"), ("a.jsonl b.jsonl c.jsonl", "c.jsonl"), ("--file a.jsonl", "--file")],
)
def test_a_wrong_argument_is_named(bench: Bench, argv: str, named: str) -> None:
    code, said, given = bench(run_on, *argv.split())
    assert code == 2 and given == {} and named in said.lower()


def test_a_trace_is_replayed_from_the_command_line(kvkeep: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n{"timestamp": 1, "hash_ids": [1, 2]}\n')
    done = kvkeep("bench", "replay", str(trace), "--policy", "lru", "--blocks", "1,2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["blocks"], row["hit_rate"], row["belady"]) for row in rows] == [
        (1, 0.25, 0.25),
        (2, 0.5, 0.5),
    ]
    assert "2/2: lru" in done.stderr
    explained = kvkeep("bench", "replay", "--help").stdout
    assert "{trace}" in explained and "--trace" not in explained and "[required]" in explained


def test_json_is_pure_and_names_the_machine(kvkeep: Run) -> None:
    done = kvkeep("bench", "index", "--blocks", "1000", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["blocks"] == 1000
    assert said["command"] == "kvkeep bench index --blocks 1000 --rounds 1 --json"
    assert set(said["machine"]) == {"cpu", "cores", "memory", "python", "kvkeep"}
    assert "$ kvkeep bench index" in done.stderr


def test_every_benchmark_can_be_loaded_and_explains_itself(kvkeep: Run) -> None:
    for name in BENCHES:
        done = kvkeep("bench", name, "--help")
        assert done.returncode == 0, done.stderr
        options = signature(importlib.import_module(BENCHES[name].module).run).parameters
        for option, given in options.items():
            flag = option if given.default is given.empty else f"--{option.replace('_', '-')}"
            assert flag in done.stdout


def test_every_option_is_explained_and_none_that_is_gone() -> None:
    assert set(OPTIONS) == {
        option
        for name in BENCHES
        for option in signature(importlib.import_module(BENCHES[name].module).run).parameters
    }


def test_what_cannot_be_measured_here_is_said_without_a_traceback(kvkeep: Run) -> None:
    done = kvkeep("bench", "transfer", "--device", "foo")
    assert done.returncode == 2 and 'error: --device "foo": expected cpu, cuda' in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_is_an_error_of_the_options(bench: Bench) -> None:
    def greedy() -> None:
        raise MemoryError

    with pytest.raises(SettingsError, match="not enough memory"):
        bench(greedy)


def test_a_gpu_that_is_not_here_is_no_reason_to_measure_the_cpu(kvkeep: Run) -> None:
    done = kvkeep("bench", "transfer", "--device", "cuda:99", "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert "error: --device cuda:99 " in done.stderr and "Traceback" not in done.stderr
    assert set(transfer.OPTIONS) == set(signature(transfer.run).parameters)


def test_an_option_means_what_its_benchmark_says(kvkeep: Run) -> None:
    texts = {name: kvkeep("bench", name, "--help").stdout for name in ("vllm", "lookup")}
    explained = {name: " ".join(text.split()) for name, text in texts.items()}
    assert "auto takes a GPU where there is one" in explained["vllm"]
    assert OPTIONS["rounds"] in explained["lookup"]
    for module in (vllm, vllm_load):
        assert set(module.OPTIONS) == set(signature(module.run).parameters)


def test_real_vllm_is_a_matter_of_settings(kvkeep: Run) -> None:
    """Whether it is missing or there: this device is not."""
    for name in ("vllm", "vllm-load"):
        done = kvkeep("bench", name, "--device", "tpu", "--json")
        assert done.returncode == 2 and done.stdout == ""
        assert "error: " in done.stderr and "Traceback" not in done.stderr


def test_any_result_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result: dict[str, Any] = {
        "floor_gbps": 12.5,
        "none": [],
        "left_out": ["a", "b"],
        "ping_us": {"p50": 100, "p99": 200.25},
        "rows": [{"blocks": 1000, "hit": True}, {"blocks": 2, "extra": None, "samples": [1, 2]}],
        "part": {"turns": 6, "totals_s": {"24": 1.5}},
    }
    show(result)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["floor_gbps", "12.5", "GB/s"],
        ["none", "none"],
        ["left_out", "a,b"],
        [],
        ["ping_us"],
        ["p50", "100", "µs"],
        ["p99", "200.25", "µs"],
        [],
        ["blocks", "hit", "extra"],
        ["1,000", "yes", "-"],
        ["2", "-", "-"],
        [],
        ["turns", "6"],
        [],
        ["totals_s"],
        ["24", "1.5", "s"],
    ]
    show({"rows": [{"blocks": 1}]})
    assert capsys.readouterr().out.splitlines() == ["blocks", "     1"], (
        "no empty line where no fact stands above"
    )
