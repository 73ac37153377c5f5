from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import connect

from kvkeep.cli.tiers import facts, tier_line
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def tier(**changes: Any) -> dict[str, Any]:
    counts = {
        "written_blocks": 2000,
        "written_bytes": 2000 << 16,
        "promoted_blocks": 1,
        "promoted_bytes": 1 << 16,
        "bad_blocks": 3,
        "lost_blocks": 1,
        "refused_blocks": 2,
        "errors": 4,
    }
    return {
        "tier": "/disk",
        "is_shared": False,
        "state": "ok",
        "problem": "",
        "capacity_bytes": 1 << 30,
        "used_bytes": 1 << 28,
        "blocks": 4096,
        "to_write_chains": 5,
        "promotions": 1,
        "in_flight_bytes": 8 << 20,
        "read_ms": 2.5,
        "write_ms": None,
        "read_rate": float(1 << 30),
        "write_rate": None,
        "evicted_unwritten": 6,
        "written_bytes_per_hit": 2000 << 16,
        "counts": counts,
    } | changes


def test_facts_of_a_tier() -> None:
    lines = dict(facts(tier()))
    assert lines["state"] == "ok"
    assert lines["used"] == "256MiB of 1GiB, 4,096 blocks"
    assert lines["reads"] == "1 block promoted, 64KiB; a job takes 2.5 ms, 1GiB/s"
    assert lines["writes"] == "2,000 blocks written, 125MiB"
    assert lines["wear"] == "125MiB written for each block promoted"
    assert lines["now"] == "1 promotion, 8MiB in flight"
    assert lines["to write"] == "5 chains of blocks in memory, for all tiers"
    assert lines["lost"] == "6 chains evicted unwritten, of all tiers"
    assert (lines["bad blocks"], lines["errors"]) == ("3", "4")
    assert dict(facts(tier(written_bytes_per_hit=None)))["wear"] == "no block promoted yet"


def test_facts_of_a_shared_tier() -> None:
    lines = dict(facts(tier(is_shared=True, state="set aside", problem="a job took 12 s")))
    assert lines["state"] == "set aside until it answers again: a job took 12 s"
    assert lines["evicted"] == "1 block gone between lookup and read"
    assert lines["refused"] == "2 blocks for which there was no room"
    assert "wear" not in lines


def test_a_tier_in_trouble() -> None:
    line = tier_line(tier(state="set aside", problem="a job took more than 30 s"))
    assert line == (
        "/disk: 256MiB of 1GiB in use, set aside until the server restarts: "
        "a job took more than 30 s"
    )
    slow = dict(facts(tier(state="slow", problem="[Errno 5] Input/output error")))
    assert slow["state"] == "slow; last error: [Errno 5] Input/output error"


@pytest.fixture(scope="module")
def with_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    disk: Path = tmp_path_factory.mktemp("tiers") / "disk"
    tier = ("--tier", f"disk://{disk}?size=64MiB")
    with ServerProcess("--pool-size", "8MiB", *tier) as running:
        yield running


def test_tiers_of_a_server(kvkeep: Run, with_disk: ServerProcess) -> None:
    with connect(with_disk) as cache:
        assert cache.put([1, 2, 3], np.ones((3, 512), "uint64")) == 3

    def shown() -> dict[str, Any]:
        said = json.loads(kvkeep("tiers", "--http", with_disk.http, "--json").stdout)
        assert len(said) == 1
        return dict(said[0])

    assert eventually(lambda: shown()["counts"]["written_blocks"] == 3)
    tier = shown()
    assert tier["write_ms"] > 0 and tier["write_rate"] > 0
    assert tier["read_ms"] is None and tier["read_rate"] is None
    assert tier["written_bytes_per_hit"] is None
    text = kvkeep("tiers", "--http", with_disk.http).stdout
    assert "12KiB of" in text and "3 blocks written, 12KiB; a job takes" in text
    status = json.loads(kvkeep("status", "--http", with_disk.http, "--json").stdout)
    assert [each["tier"] for each in status["tiers"]] == [tier["tier"]]
    line = f"{tier['tier']}: 12KiB of"
    assert line in kvkeep("status", "--http", with_disk.http).stdout


def test_a_server_without_tiers(kvkeep: Run, server: ServerProcess) -> None:
    assert json.loads(kvkeep("tiers", "--http", server.http, "--json").stdout) == []
    assert "no tiers" in kvkeep("tiers", "--http", server.http).stdout
