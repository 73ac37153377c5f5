"""Tests for a real server in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvkeep.errors import KVKeepError, Unavailable
from kvkeep.testing.process import JsonProcess, ServerProcess

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


def test_one_that_does_not_end_is_ended_and_told_and_leaves_nothing() -> None:
    with ServerProcess("--pool-size", "1MiB") as server:
        number = server.pid
        server.send(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            server.stop(within_s=0.2)
        assert not Path(f"/proc/{number}").exists()
    assert not server.pool.exists() and not server.state_dir.exists()


def test_the_pool_of_a_killed_server_does_not_stay_behind() -> None:
    with ServerProcess("--pool-size", "1MiB") as server:
        directory = Path("/dev/shm") / f"kvkeep-{server.name}"
        server.stop(signal.SIGKILL)
        assert directory.exists()
    assert not directory.exists()


# -- programs that speak JSON

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)\n"


def test_lines_go_in_and_come_out() -> None:
    echo = JsonProcess("echo", ("-c", ECHO))
    for number in range(3):
        echo.send({"number": number})
    assert [echo.receive()["number"] for _ in range(3)] == [0, 1, 2]
    assert echo.exit_code() is None and echo.end(30) == 0 and echo.end() == 0


def test_all_lines_are_heard_after_the_end() -> None:
    text = 'print(\'{"a": 1}\\n{"a": 2}\\n{"a":\', end=\'\')'
    both = JsonProcess("some", ("-c", text))
    assert both.exit_code(30) == 0
    assert [both.receive()["a"] for _ in range(2)] == [1, 2]
    with pytest.raises(KVKeepError, match=r"some ended with exit code 0\. It said:\n\(nothing\)"):
        both.receive()
    both.end()


def test_a_program_that_fails_is_told_with_its_log() -> None:
    failing = JsonProcess("some", ("-c", "raise SystemExit('no memory')"))
    with pytest.raises(KVKeepError, match=r"some ended with exit code 1\. It said:\nno memory$"):
        failing.receive()
    with pytest.raises(KVKeepError, match="ended with exit code 1"):
        failing.send({})
    assert failing.end() == 1 and failing.log() == "no memory\n"


def test_silence_and_a_lost_program_end_within_their_times() -> None:
    deaf = JsonProcess("deaf", ("-c", "import time; time.sleep(600)"))
    with pytest.raises(KVKeepError, match=r"deaf said nothing for 0\.01 s"):
        deaf.receive(0.01)
    deaf.signal(signal.SIGSTOP)
    assert deaf.end(0.01) == -signal.SIGKILL
    deaf.signal(signal.SIGTERM)  # nobody gets it


def test_what_a_program_has_started_ends_with_it() -> None:
    text = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600'])\n"
    text += "print('{\"pid\": %d}' % child.pid, flush=True); time.sleep(600)"
    parent = JsonProcess("parent", ("-c", text))
    child = Path(f"/proc/{parent.receive()['pid']}/stat")
    parent.end()
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
