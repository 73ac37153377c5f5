"""Hundreds to thousands of inputs for each target, guided by coverage, from the corpus on: a short
`kvkeep fuzz`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep_lab.fuzz.flood import FLOODS
from kvkeep_lab.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
INPUTS = {"wire": 4_000, "service": 600, "index": 1_000, "config": 4_000, "http": 600}


@pytest.mark.parametrize("target", TARGETS)
def test_some_inputs_find_nothing(target: str) -> None:
    pytest.importorskip("atheris")
    flags = ["--target", target, "--inputs", str(INPUTS[target]), "--seconds", "3000", "--json"]
    flags += ["--corpus", str(CORPUS)]
    ended = subprocess.run(
        [sys.executable, "-m", "kvkeep.cli.main", "fuzz", *flags],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    numbers = [
        "inputs",
        "messages",
        "malformed_frames",
        "crashes",
        "hangs",
        "leaks",
        "edges",
        "seconds",
    ]
    assert list(said) == ["target", *numbers]
    assert (said["malformed_frames"] > 100) == (target in FLOODS) and said[
        "malformed_frames"
    ] < said["messages"], said
    assert said["inputs"] >= INPUTS[target] and said["edges"] > 100, said
    assert (said["target"], said["crashes"], said["hangs"], said["leaks"]) == (target, 0, 0, 0)
