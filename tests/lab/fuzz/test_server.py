"""A flood is survived by a real server; a server that keeps what it should not is noticed."""

from __future__ import annotations

import os

import pytest

from kvkeep.testing.process import ServerProcess
from kvkeep_lab.fuzz import server as fuzz_server
from kvkeep_lab.fuzz.choices import Leak
from kvkeep_lab.fuzz.server import ServerFlood

SECONDS = float(os.environ.get("KVKEEP_FLOOD_SECONDS", "2"))


def test_a_server_survives_it_and_serves_others_meanwhile() -> None:
    with ServerProcess("--pool-size", "4MiB", "--slab-size", "256KiB") as server:
        flood = ServerFlood(server.address, server.pid, seed=1)
        flood.run(SECONDS)
        print(flood.frames, flood.connections, flood.pings, flood.first_kib, flood.most_kib)
        assert flood.frames > flood.connections > 20 and flood.pings
        log = server.stop()
    assert "Traceback" not in log


def test_growth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_server, "MOST_GROWTH_KIB", -1)
    with (
        ServerProcess("--pool-size", "4MiB", "--slab-size", "256KiB") as server,
        pytest.raises(Leak),
    ):
        ServerFlood(server.address, server.pid, seed=1).run(60)
