"""The unit of systemd."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvkeep.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kvkeep.service"
GUIDE = (ROOT / "docs" / "guides" / "install.md").read_text()
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


def test_what_the_guide_makes_of_the_unit_runs_as_another_user() -> None:
    [command] = re.findall(r"^    (sed .*) > /etc/systemd/system/kvkeep.service$", GUIDE, re.M)
    made = subprocess.run(
        shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {"User=vllm", "Group=vllm"} <= set(made.splitlines())
    assert len(made.splitlines()) == len(UNIT.read_text().splitlines())


def test_the_settings_of_the_guide_are_valid(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", GUIDE, re.S)
    config = tmp_path / "kvkeep.toml"
    config.write_text(example)
    given = Settings.load(config, {"KVKEEP_STATE_DIR": str(tmp_path)}, [])
    assert given.pool_size == 64 << 30
