"""Engine processes and a server that these tests share; without vLLM, each file is skipped and says
what to do.

An engine starts in seconds once its process is there, so there are few processes, and each has one
engine after the other. Tests share what they have stored: each asks with prompts of its own.

With KVKEEP_TEST_VLLM_SOURCES, vLLM is a folder with the Python sources of a release and nothing
that is compiled (`make test-vllm-contract`). Its scheduler runs and its engines do not, so tests
that need one are left out."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.cache import SimulatedCache

if TYPE_CHECKING:
    from engine_parts import Engine

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tiers")]  # services of shared tiers
from replicas import POOL, Replica, Server, at_rest, cores  # noqa: E402  (beside this file)

HAS_VLLM = (_spec := importlib.util.find_spec("vllm")) is not None and _spec.origin is not None
SOURCES = os.environ.get("KVKEEP_TEST_VLLM_SOURCES", "")
# modules that warn when vLLM is imported
THEIRS = "vllm|torch|transformers|triton|ray|importlib|swig|google|pydantic"


def pytest_configure(config: pytest.Config) -> None:
    if SOURCES and not (
        _spec is not None and _spec.origin and Path(_spec.origin).is_relative_to(SOURCES)
    ):
        raise pytest.UsageError(f"vLLM is not imported from {SOURCES}: put it into PYTHONPATH")
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, lambda *_: pytest.exit("terminated")
        )  # fixtures end what they have started
    config.addinivalue_line("filterwarnings", f"ignore:::({THEIRS})")
    config.addinivalue_line(
        "filterwarnings", "ignore:builtin type .* has no __module__:DeprecationWarning"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SOURCES:
        computing = [item for item in items if "models" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=computing)
        items[:] = [item for item in items if item not in set(computing)]


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"{self.path.name} needs vLLM: make test-vllm", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if HAS_VLLM or HERE not in module_path.parents:
        return None
    return _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all models."""
    directory = tmp_path_factory.mktemp("models")
    made = subprocess.run(
        [sys.executable, str(HERE / "checkpoints.py"), str(directory)],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with Server(*POOL) as running:
        yield running


def _replica(models: Path, threads_bind: str) -> Iterator[Replica]:
    replica = Replica(models, threads_bind)
    try:
        yield replica
    finally:
        replica.close()


@pytest.fixture(scope="session")
def plain(models: Path) -> Iterator[Replica]:
    """For engines without a cache."""
    yield from _replica(models, str(cores()[0]))


@pytest.fixture(scope="session")
def one(models: Path) -> Iterator[Replica]:
    yield from _replica(models, str(cores()[-1]))


@pytest.fixture(scope="session")
def two(models: Path) -> Iterator[Replica]:
    yield from _replica(models, str(cores()[0]))


@pytest.fixture(scope="session")
def ranks(models: Path) -> Iterator[Replica]:
    """For engines of two ranks, each a process of its own."""
    yield from _replica(models, f"{cores()[0]}|{cores()[-1]}")


@pytest.fixture
def _nothing_is_left(server: ServerProcess) -> Iterator[None]:
    yield
    assert at_rest(server), "a lease or a write outlived its request"


@pytest.fixture(params=["one process", "two processes", "ahead"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways in which vLLM runs the two sides of a connector."""
    from engine_parts import Engine

    monkeypatch.setattr(Engine, "apart", request.param == "two processes")
    monkeypatch.setattr(Engine, "ahead", request.param == "ahead")
    return str(request.param)


@pytest.fixture
def cache() -> SimulatedCache:
    return SimulatedCache(seed=1)


@pytest.fixture
def make(cache: SimulatedCache) -> Iterator[Callable[..., Engine]]:
    """Engines of one server, with vLLM's scheduler and no process. At the end nothing is left of
    what they did."""
    from engine_parts import Engine

    made: list[Engine] = []

    def engine(*specs: Any, **options: Any) -> Engine:
        made.append(Engine(cache, *specs, **options))
        return made[-1]

    yield engine
    for each in made:
        each.settle()
    for each in made:
        each.check_nothing_left()
        each.rank.shutdown()
        each.scheduler.shutdown()
