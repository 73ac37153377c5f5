"""A short run with real processes; `kvkeep chaos --real` does the same for longer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.cli.main import main
from kvkeep_lab.chaos.real import RealRun
from kvkeep_lab.chaos.real_plan import Counts

KEYS = [
    "minutes",
    "requests",
    "server_kills",
    "server_pauses",
    "engine_kills",
    "engine_pauses",
    "bit_flips",
]
KEYS += ["wrong_tokens", "wrong_bytes", "failed_requests", "ttft_p99_ms_none", "ttft_p99_ms_outage"]
KEYS += [
    "ttft_p99_outage_ratio",
    "hits",
    "external_cached_tokens",
    "leaked_processes",
    "leaked_shm_files",
    "seconds",
]


@pytest.fixture
def shared_memory() -> Iterator[None]:
    before = set(Path("/dev/shm").glob(f"kvkeep-p{os.getpid()}-*"))
    yield
    assert set(Path("/dev/shm").glob(f"kvkeep-p{os.getpid()}-*")) == before


@pytest.mark.usefixtures("shared_memory")
def test_every_fault_and_nothing_is_wrong() -> None:
    counts = Counts(server_kills=2, server_pauses=2, engine_kills=1, engine_pauses=1, bit_flips=4)
    said = RealRun(7, 10, counts, engines=3).run()
    assert said["violations"] == []
    assert list(said)[: len(KEYS)] == KEYS
    assert [said[key] for key in KEYS[2:7]] == [2, 2, 1, 1, 4]
    assert said["requests"] > 20 and said["hits"] > 0 and said["external_cached_tokens"] > 0
    assert said["checked_bytes"] > 0 and said["outage_seconds"] > 0


@pytest.mark.usefixtures("shared_memory")
def test_a_wrong_byte_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: engines that do not verify, and bits that flip all the time. The command says so,
    and ends with 1."""

    def careless(seed: int, seconds: float, counts: Counts, **options: object) -> RealRun:
        flips = Counts(0, 0, 0, 0, bit_flips=2_000)
        return RealRun(seed, 20, flips, engines=2, verify=False, lookup_deadline_ms=2_000)

    monkeypatch.setattr("kvkeep_lab.chaos.real.RealRun", careless)
    monkeypatch.setattr(sys, "argv", ["kvkeep", "chaos", "--real", "--minutes", "1", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert ended.value.code == 1 and result["wrong_bytes"] > 0
    assert "violation: engine" in said.err and "WrongBytes" in said.err
    assert result["leaked_processes"] == result["leaked_shm_files"] == 0
