"""What results of benchmarks have in common: no figure without a unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvkeep.bench.figures import unit_of


@pytest.fixture(scope="session")
def without_unit() -> Callable[[Mapping[str, Any]], list[str]]:
    """Names of the figures in a result that people would read without a unit. Targets are shown in sentences."""

    def find(result: Mapping[str, Any], outer: str = "") -> list[str]:
        found: list[str] = []
        for name, value in result.items():
            if name == "targets" or unit_of(outer) is not None:
                continue
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Mapping):
                    found += find(each, "" if isinstance(value, list | tuple) else name)
                elif isinstance(each, int | float) and not isinstance(each, bool) and unit_of(name) is None:
                    found.append(f"{outer}.{name}".lstrip("."))
        return found

    return find
