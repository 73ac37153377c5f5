from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two prompts in turn, each of 20 blocks of 512 tokens."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": at,
            "input_length": 10_000,
            "hash_ids": [*range(at % 2 * 20, at % 2 * 20 + 20)],
        }
        for at in range(10)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_plan_for_programs_and_for_people(kvkeep: Run, trace: str, tmp_path: Path) -> None:
    words = ("--memory", "1280MiB,2560MiB", "--disk", "2560MiB", "--token-bytes", "128KiB")
    said = json.loads(kvkeep("plan", trace, *words, "--json").stdout)
    sizes = [(row["memory_blocks"], row["disk_blocks"]) for row in said["rows"]]
    assert sizes == [(20, 0), (40, 0), (40, 40)]
    assert [row["hit_rate"] for row in said["rows"]] == [0, 0.8, 0.8]
    assert said["assumptions"]["block_tokens"] == 512 and said["recommendation"]["words"]
    picture = tmp_path / "plan.svg"
    shown = kvkeep("plan", trace, *words, "--svg", str(picture))
    assert "80.0%" in shown.stdout
    assert "◄ knee" in shown.stdout
    assert "Give the pool 2.5GiB" in shown.stdout
    assert "38,000 tokens/s" in shown.stdout, "what is assumed is said"
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "much"), '--memory "much": expected a size'),
        (("--memory", "1KiB"), '--memory "1KiB": less than a block of 64MiB'),
        (("--disk-speed", "0"), '--disk-speed "0": expected a size'),
        (("--svg", "/proc/none/plan.svg"), "--svg /proc/none/plan.svg cannot be written"),
    ],
)
def test_a_wrong_option_is_named(
    kvkeep: Run, trace: str, words: tuple[str, ...], said: str
) -> None:
    refused = kvkeep("plan", trace, *words)
    assert refused.returncode == 2 and refused.stdout == "" and said in refused.stderr


def test_what_is_no_trace_is_refused(kvkeep: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    refused = kvkeep("plan", str(path))
    assert refused.returncode == 2 and "neither a trace nor a log of vLLM" in refused.stderr
    assert "hint: run vLLM with --enable-log-requests" in refused.stderr
