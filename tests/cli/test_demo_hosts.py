"""The demo with two hosts, run whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DEMO = [sys.executable, "-m", "kvkeep.cli.main", "demo", "--prompt-tokens", "128"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *flags], capture_output=True, text=True, check=False)


def test_one_host_goes_on_after_the_other_is_killed(tmp_path: Path) -> None:
    tier = f"file://{tmp_path / 'shared'}?size=64MiB"
    done = run("--hosts", "2", "--tier", tier, "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["hosts"] == 2 and outcome["tier"] == tier
    assert outcome["prompt_tokens"] == 128 + 16 + 24
    assert outcome["tokens_from_other_host"] >= 128
    assert outcome["same_tokens"] is True and outcome["killed"] is True
    assert "Host A was killed" in done.stderr


def test_a_tier_needs_two_hosts() -> None:
    done = run("--tier", "file:///srv/kv?size=1GiB")
    assert done.returncode != 0 and "--hosts 2" in done.stderr
