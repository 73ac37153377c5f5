"""A server for commands to talk to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests of a module. It logs all it can."""
    state_dir: Path = tmp_path_factory.mktemp("state")
    with ServerProcess(
        "--pool-size", "64MiB", "--log-level", "debug", state_dir=state_dir
    ) as running:
        yield running
