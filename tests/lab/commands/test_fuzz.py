"""`kvkeep fuzz` as people run it: what it prints, how it ends, and what it says about options that
are wrong."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep_lab.commands.fuzz import fuzz
from kvkeep_lab.fuzz import flood as fuzz_flood
from kvkeep_lab.fuzz.targets import TARGETS

PATIENCE_S = 120
Run = Callable[..., "subprocess.CompletedProcess[str]"]
NUMBERS = [
    "inputs",
    "messages",
    "malformed_frames",
    "crashes",
    "hangs",
    "leaks",
    "edges",
    "seconds",
]


def test_one_target_as_json(kvkeep: Run) -> None:
    pytest.importorskip("atheris")
    done = kvkeep("fuzz", "--target", "wire", "--inputs", "200", "--seconds", "600", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said) == ["target", *NUMBERS]
    assert said["target"] == "wire" and said["inputs"] >= 200 and said["edges"] > 0
    assert 0 < said["malformed_frames"] < said["messages"]
    assert "wire: " in done.stderr and "0 findings" in done.stderr


def test_all_targets_as_json_have_sums_and_each_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(malformed_frames=300, json=True)
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["target", *NUMBERS, "targets"] and said["target"] == "all"
    assert [each["target"] for each in said["targets"]] == ["wire", "service"]
    assert all(list(each) == ["target", *NUMBERS, "findings"] for each in said["targets"])
    assert all(300 <= each["malformed_frames"] < each["messages"] for each in said["targets"])
    for name in NUMBERS[:-1]:
        assert said[name] == sum(each[name] for each in said["targets"])


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(target="service", malformed_frames=300)
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", *NUMBERS] and row.split()[0] == "service"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--target", "nonsense"], "--target is 'nonsense'"),
        (["--target", "http", "--malformed-frames", "5"], "--target is 'http'"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--seconds", "-1"], "--seconds is -1"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--seconds", "inf"], "--seconds is inf"),
        (["--inputs", "-1"], "--inputs is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--corpus", "/nowhere"], "--corpus is /nowhere"),
        (["--malformed-frames", "0"], "--malformed-frames is 0"),
        (
            ["--malformed-frames", "5", "--seconds", "9"],
            "--seconds does not go with --malformed-frames",
        ),
        (
            ["--malformed-frames", "5", "--inputs", "9"],
            "--inputs does not go with --malformed-frames",
        ),
        (["--malformed-frames", "5", "--keep", "x"], "--keep does not go with --malformed-frames"),
        (
            ["--malformed-frames", "5", "--corpus", "/"],
            "--corpus does not go with --malformed-frames",
        ),
    ],
)
def test_bad_options_are_refused_by_name(
    refused: Callable[..., str], flags: list[str], problem: str
) -> None:
    assert problem in refused("fuzz", *flags)


def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the decoder of the processes to come: a message of an odd number of bytes fails."""
    (tmp_path / "sitecustomize.py").write_text(
        "from kvkeep.wire import frames\n"
        "real = frames.decode_request\n"
        "def clumsy(header, given, frame_bytes):\n"
        "    if len(given[1]) % 2:\n"
        "        raise IndexError\n"
        "    return real(header, given, frame_bytes)\n"
        "frames.decode_request = clumsy\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_planted_bug_is_found_and_its_input_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, monkeypatch)
    monkeypatch.setattr(fuzz_flood, "MOST_FINDINGS", 1)
    with pytest.raises(SystemExit) as ended:
        fuzz(target="wire", malformed_frames=50_000, json=True)
    said = capsys.readouterr()
    assert ended.value.code == 1 and json.loads(said.out)["crashes"] == 1
    assert (
        "wire: crash, input " in said.err and "IndexError" in said.err and "1 finding" in said.err
    )
    line = said.err.partition("input ")[2].splitlines()[0]
    again = "import sys; from kvkeep_lab.fuzz.targets import load; load('wire')(sys.stdin.buffer.read())"
    done = subprocess.run(
        [sys.executable, "-c", again],
        input=base64.b64decode(line),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1 and b"IndexError" in done.stderr


@pytest.mark.parametrize(
    "flags", [["--malformed-frames", "100000000"], ["--target", "config", "--seconds", "3000"]]
)
def test_an_interrupt_ends_it_and_its_process_and_leaves_no_file(
    flags: list[str], tmp_path: Path
) -> None:
    if "--seconds" in flags:
        pytest.importorskip("atheris")
    command = [sys.executable, "-m", "kvkeep.cli.main", "fuzz", *flags]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        child = wait_for_child(running.pid)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=PATIENCE_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode not in (0, None) and not out and b"Traceback" not in err
    until = time.monotonic() + PATIENCE_S  # it was killed, and on a busy host ends a moment later
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists() and not list(tmp_path.iterdir())


def wait_for_child(pid: int) -> int:
    """The process that tries inputs, when it has begun to."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            if b"kvkeep_lab.fuzz" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.02)
    raise AssertionError("no process was started")


def test_the_targets_in_the_help_are_those_that_there_are(kvkeep: Run) -> None:
    said = kvkeep("fuzz", "--help").stdout
    assert ", ".join(TARGETS) in said
