"""The helpers of tests/e2e, and a server for all tests of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from engines import POOL


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL) as running:
        yield running
