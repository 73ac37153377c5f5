"""Fixtures that tests of several folders use: the command line as people run it, and what benchmarks share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from kvkeep.bench.figures import unit_of
from kvkeep.bench.vllm_run import EngineProcess
from kvkeep.bench.vllm_session import Turns

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


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Whenever an engine of vLLM does something: its name, and whose turn it is."""
    now: list[Hashable] = []
    seen: list[tuple[str, Any]] = []
    turn = Turns.turn

    @contextmanager
    def watched(self: Turns, whose: Hashable) -> Iterator[None]:
        with turn(self, whose):
            now.append(whose)
            yield
            now.pop()

    monkeypatch.setattr(Turns, "turn", watched)
    for name in ("__enter__", "ask", "load", "drop_local_cache"):
        method: Any = getattr(EngineProcess, name)

        def working(self: EngineProcess, *asked: Any, method: Any = method, **more: Any) -> Any:
            seen.append((self.name, now[-1]))
            return method(self, *asked, **more)

        monkeypatch.setattr(EngineProcess, name, working)
    return seen
