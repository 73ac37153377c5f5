"""The demo is run whole: it is the first thing a new user sees."""

from __future__ import annotations

import json
import subprocess
import sys

DEMO = [sys.executable, "-m", "kvkeep.cli.main", "demo"]


def test_the_story_is_told_and_true() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bit for bit the same" in done.stdout and "free again" in done.stdout
    assert "alice" in done.stdout and "t-" in done.stdout


def test_as_json() -> None:
    done = subprocess.run([*DEMO, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["same_bytes"] is True and outcome["slots_returned"] is True
    assert outcome["stored_blocks"] == outcome["hit_blocks"] == 1024
    assert outcome["other_tenant_blocks"] == outcome["half_written_blocks_visible"] == 0
    assert sum(tenant["blocks"] for tenant in outcome["tenants"]) == 1024
