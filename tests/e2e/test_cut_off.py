"""Somebody truncates the segments of a pool that engines have mapped: loads fail, stores end, no
engine dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvkeep.kv import native
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.chaos.real_engine import Job, RealEngine

pytestmark = pytest.mark.skipif(not native.available, reason="only the C kernel survives it")

POOL = ("--pool-size", "8MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms")
TRUNCATES = """
import os, random, sys, time
paths = sys.argv[1:]
sizes = {path: os.path.getsize(path) for path in paths}
print("begins", flush=True)
while True:
    path = random.choice(paths)
    os.truncate(path, random.choice([0, 100, sizes[path] // 2, random.randrange(sizes[path])]))
    time.sleep(random.choice([0, 0.01, 0.05]))
    os.truncate(path, sizes[path])
    time.sleep(random.choice([0, 0.01, 0.05]))
"""


def was_cut_off(engine: RealEngine) -> bool:
    return (
        sum(each.failed_loads > 0 for each in engine.answers) >= 5 and "was cut off" in engine.log()
    )


@contextmanager
def truncating(pool: Path) -> Iterator[None]:
    """A process that makes the segments shorter, and longer again, all the time."""
    paths = sorted(str(path) for path in pool.glob("segment-*"))
    assert paths
    with subprocess.Popen(
        [sys.executable, "-c", TRUNCATES, *paths], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begins\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "faulthandler"), [(0, "1"), (3, "")], ids=["async, faulthandler", "sync"]
)
def test_an_engine_serves_on_with_the_right_tokens(
    number: int, faulthandler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", faulthandler)
    with ServerProcess(*POOL) as server:
        job = Job(
            server.address,
            seed=1,
            number=number,
            life=0,
            tp=2,
            lookup_deadline_ms=2_000,
            num_blocks=256,
            verify=True,
        )
        engine = RealEngine(job)
        try:
            assert eventually(
                lambda: any(each.external_cached_tokens for each in engine.answers)
            ), engine.log()
            with truncating(server.pool):
                assert eventually(lambda: not engine.alive or was_cut_off(engine))
                assert engine.alive, f"ended by {engine.process.poll()}: {engine.log()}"
            answered = len(engine.answers)
            assert eventually(lambda: len(engine.answers) > answered + 5), "it serves on"
            assert engine.finish(60), engine.log()
        finally:
            engine.kill()
        assert engine.said["checked_bytes"] > 0 and "wrong_bytes" not in engine.said
        assert all(
            not each.wrong_tokens and each.finish_reason == "length" for each in engine.answers
        )
        assert "failed inside" not in engine.log() and "Bus error" not in engine.log()
        assert server.process is not None and server.process.poll() is None, (
            "nor does the server die"
        )
        assert "failed inside" not in server.log()
