"""Tests for a real server in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvkeep.errors import Unavailable
from kvkeep.testing import process
from kvkeep.testing.process import ServerProcess

SMALL = ("--pool-size", "1MiB", "--slab-size", "64KiB")


def test_it_serves_on_ports_of_its_own_and_leaves_nothing() -> None:
    with ServerProcess(*SMALL) as first, ServerProcess(*SMALL) as second:
        assert len({first.address, second.address, first.http, second.http}) == 4
        assert first.pid != second.pid
        pools = [Path("/dev/shm") / f"kvkeep-{server.name}" for server in (first, second)]
        states = [server.state_dir for server in (first, second)]
        assert all(pool.is_dir() for pool in pools)
    assert not any(path is not None and path.exists() for path in [*pools, *states])


def test_a_server_that_does_not_start_says_why() -> None:
    server = ServerProcess("--pool-size", "enormous")
    with pytest.raises(Unavailable, match="pool_size"):
        server.start()
    assert server.process is None
    assert server.state_dir is not None and not server.state_dir.exists()


def test_the_log_can_be_read_before_and_after_the_end() -> None:
    with ServerProcess(*SMALL) as server:
        while "serving on" not in server.log():
            os.sched_yield()
        assert "stopped" in server.stop()
        assert "serving on" in server.log()


def test_a_paused_server_can_still_be_ended() -> None:
    with ServerProcess(*SMALL) as server:
        server.send(signal.SIGSTOP)
    assert server.process is None


def test_a_server_that_was_killed_can_be_started_again_where_it_was() -> None:
    with ServerProcess(*SMALL) as server:
        address, pid = server.address, server.pid
        server.stop(signal.SIGKILL)
        server.start()
        assert server.address == address
        assert server.pid != pid


def test_settings_in_the_environment_are_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_POOL_SIZE", "enormous")
    with ServerProcess(*SMALL) as server:
        assert server.address


def test_state_that_is_given_stays(tmp_path: Path) -> None:
    with ServerProcess(*SMALL, state_dir=tmp_path) as server:
        assert server.state_dir == tmp_path
    assert tmp_path.exists()


def test_one_that_does_not_end_is_ended_and_told_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_ENDS_IN_S", 0.2)
    with ServerProcess("--pool-size", "1MiB") as server:
        number = server.pid
        server.send(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            server.stop()
        assert not Path(f"/proc/{number}").exists()
    assert not server.pool.exists() and not server.state_dir.exists()


def test_the_pool_of_a_killed_server_does_not_stay_behind() -> None:
    with ServerProcess("--pool-size", "1MiB") as server:
        directory = Path("/dev/shm") / f"kvkeep-{server.name}"
        server.stop(signal.SIGKILL)
        assert directory.exists()
    assert not directory.exists()
