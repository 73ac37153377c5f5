"""A planner whose cache answers as the test says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from planning import ScriptedCache, Side


@pytest.fixture
def cache() -> ScriptedCache:
    return ScriptedCache()


@pytest.fixture
def side(cache: ScriptedCache) -> Side:
    return Side(cache)
