"""Commands as people run them: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def kvkeep() -> Run:
    """`kvkeep(words...)` runs the command with nothing of ours in its environment but what `env` gives."""

    def run(*words: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
        command = [sys.executable, "-m", "kvkeep.cli.main", *words]
        return subprocess.run(
            command, input=stdin, env=clean | (env or {}), capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests of a module. It logs all it can."""
    state_dir: Path = tmp_path_factory.mktemp("state")
    with ServerProcess("--pool-size", "64MiB", "--log-level", "debug", state_dir=state_dir) as running:
        yield running
