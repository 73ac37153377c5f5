from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.cli.bench import BENCHES, read_options, show
from kvkeep.errors import SettingsError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(
    *, blocks: int = 8, share: float = 0.5, sizes: tuple[int, ...] = (1, 2), verify: bool = True, kind: str = "a"
) -> None:
    """Stands for a benchmark."""


def test_options_are_the_arguments_of_run() -> None:
    assert read_options(run, []) == {}
    assert read_options(run, ["--blocks", "9", "--share=1", "--sizes", "3,4", "--kind=b"]) == {
        "blocks": 9,
        "share": 1.0,
        "sizes": (3, 4),
        "kind": "b",
    }
    assert read_options(run, ["--no-verify"]) == {"verify": False}
    assert read_options(run, ["--verify"]) == {"verify": True}
    assert read_options(run, ["--verify=false"]) == {"verify": False}


@pytest.mark.parametrize(
    "argv", [["--block", "9"], ["--blocks", "many"], ["--blocks"], ["9"], ["--sizes="], ["--no-blocks"], ["--kind"]]
)
def test_a_wrong_option_is_named(argv: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        read_options(run, argv)
    assert argv[0].partition("=")[0] in str(caught.value)


def test_json_is_pure_and_names_the_machine(kvkeep: Run) -> None:
    done = kvkeep("bench", "keys", "--blocks", "64", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["blocks"] == 64
    assert said["command"] == "kvkeep bench keys --blocks 64 --repeats 1 --json"
    assert set(said["machine"]) == {"cpu", "cores", "memory", "python", "kvkeep"}
    assert "$ kvkeep bench keys" in done.stderr


def test_every_benchmark_can_be_loaded_and_explains_itself(kvkeep: Run) -> None:
    for name in BENCHES:
        done = kvkeep("bench", name, "--help")
        assert done.returncode == 0, done.stderr
        assert "Options of this benchmark" in done.stdout


def test_any_result_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result: dict[str, Any] = {
        "floor_gbps": 12.5,
        "none": [],
        "left_out": ["a", "b"],
        "ping_us": {"p50": 100, "p99": 200.25},
        "rows": [{"blocks": 1000, "hit": True}, {"blocks": 2, "extra": None}],
    }
    show(result)
    words = capsys.readouterr().out.split()
    for word in ("12.5", "a,b", "200.25", "1,000", "yes", "extra"):
        assert word in words
