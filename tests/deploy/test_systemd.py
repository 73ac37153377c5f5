"""The unit of systemd."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "kvkeep.service"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def verify(path: Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
def test_the_unit_is_valid() -> None:
    done = verify(UNIT)
    assert done.returncode == 0 and "kvkeep.service" not in done.stderr, done.stderr


@needs_systemd
def test_a_unit_with_a_mistake_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "kvkeep.service"
    bad.write_text(UNIT.read_text().replace("ExecStart=/usr/bin/env", "ExecStart=/nowhere/kvkeep"))
    assert verify(bad).returncode != 0
