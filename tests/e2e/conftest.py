"""Tests with real processes: a server for all tests of a file, and the helpers beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))
from engines import POOL


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL, "--log-level", "debug") as running:
        yield running
