"""The scripts of continuous integration: the last word on what was not tested, its services, and the
site of the documentation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvkeep.tiers.tier_address import SCHEMES

ROOT = Path(__file__).parent.parent
CI = ROOT / ".ci"
MAKEFILE = """\
one:
	@echo "SKIPPED [2] tests/a.py:7: fio is not installed"
	@echo "SKIPPED [1] tests/b.py: it needs: a GPU"
two:
	@echo "SKIPPED [3] tests/c.py:9: fio is not installed"
none:
	@true
"""


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_last_lines_say_what_was_not_tested(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    said = run(tmp_path, sys.executable, str(CI / "lanes.py"), "one", "two").stdout
    assert said.splitlines()[-3:] == [
        "lanes: NOT TESTED HERE:",
        "lanes:     5 skipped: fio is not installed",
        "lanes:     1 skipped: it needs: a GPU",
    ]
    said = run(tmp_path, sys.executable, str(CI / "lanes.py"), "none").stdout
    assert "NOT TESTED" not in said


def test_a_service_that_cannot_be_installed_is_said_and_fails_nothing(tmp_path: Path) -> None:
    for name, script in (
        ("dpkg-query", '[ "$3" = fio ] || printf installed'),
        ("apt-get", "exit 100"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = run(tmp_path, str(CI / "services.sh"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0
    [said] = [line for line in done.stderr.splitlines() if "NOT INSTALLED" in line]
    assert "fio" in said and "chromium" not in said


def test_what_shared_tiers_need_is_installed_so_that_none_of_their_tests_is_skipped() -> None:
    """Also those with real vLLM."""
    wanted = [line.partition("#")[0] for line in (CI / "services.sh").read_text().splitlines()]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [beside_vllm] = re.findall(r"-e '\.\[(.*)\]'", (ROOT / "Makefile").read_text())[1:]
    for scheme in SCHEMES.values():
        assert set(scheme.libraries) <= set(" ".join(wanted).split())
        assert set(extras.get(scheme.extra, ())) <= set(extras["dev"])
        assert not scheme.extra or scheme.extra in beside_vllm.split(",")


# -- the site of the documentation


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository, with the script that builds its site."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "site.py", tmp_path / ".ci")
    for path in (
        *("README.md", "CONTRIBUTING.md", "docs/getting-started.md", "docs/ARCHITECTURE.md"),
        *("docs/BENCHMARKS.md", "docs/decisions/README.md"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"# {path}\n")
    return tmp_path


def build(repository: Path, version: str) -> subprocess.CompletedProcess[str]:
    (repository / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    return run(repository, sys.executable, str(repository / ".ci" / "site.py"))


@pytest.mark.parametrize("link", ["docs/nowhere.md", "docs/getting-started.md#nowhere"])
def test_a_broken_link_fails_the_site(repository: Path, link: str) -> None:
    (repository / "README.md").write_text(f"# kvkeep\n\n[broken]({link})\n")
    done = build(repository, "1.0.0")
    assert done.returncode != 0 and "nowhere" in done.stderr


def test_versions_of_the_site_stand_side_by_side(repository: Path) -> None:
    for version in ("1.9.0", "1.10.0"):
        done = build(repository, version)
        assert done.returncode == 0, done.stderr
    site = repository / "build" / "site"
    assert {path.name for path in site.iterdir()} == {"1.9.0", "1.10.0", "index.html"}
    assert "kvkeep 1.9.0" in (site / "1.9.0" / "index.html").read_text()
    index = (site / "index.html").read_text()
    assert "url=./1.10.0/" in index, "the newest one by number"
    assert 'href="./1.9.0/"' in index
