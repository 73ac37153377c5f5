"""Tests with real processes: a server for all tests of a file, and the helpers beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tiers")]  # services of shared tiers
from engines import POOL  # noqa: E402  (beside this file)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL, "--log-level", "debug") as running:
        yield running
