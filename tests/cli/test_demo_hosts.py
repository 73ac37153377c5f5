"""The demo with two hosts, run whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))
from services import Service, free_port, program

DEMO = [sys.executable, "-m", "kvkeep.cli.main", "demo", "--prompt-tokens", "128"]


def run(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | (environment or {})
    command = [*DEMO, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def check(done: subprocess.CompletedProcess[str], tier: str) -> None:
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "hosts": 2,
        "tier": tier,
        "tokens_from_other_host": 128,
        "prompt_tokens": 128 + 16 + 24,
        "same_tokens": True,
        "killed": True,
    }
    assert "Host A was killed" in done.stderr


def test_one_host_goes_on_after_the_other_is_killed(tmp_path: Path) -> None:
    tier = f"file://{tmp_path / 'shared'}?size=64MiB"
    check(run("--hosts", "2", "--tier", tier, "--json"), tier)


def test_hosts_share_a_valkey_with_a_password(tmp_path: Path) -> None:
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", "sesame"]
    tier = f"valkey://127.0.0.1:{port}/0"
    with Service([program("valkey-server", "redis-server"), *options], tmp_path, port):
        password = {"KVKEEP_VALKEY_PASSWORD": "sesame"}
        check(run("--hosts", "2", "--tier", tier, "--json", environment=password), tier)


def test_an_interrupt_leaves_nothing() -> None:
    with subprocess.Popen(
        [*DEMO, "--hosts", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("1. Two hosts")
        time.sleep(1)  # servers or engines are starting
        os.killpg(demo.pid, signal.SIGINT)
        _, said = demo.communicate(timeout=60)
        assert (demo.returncode, said) == (128 + signal.SIGINT, "stopped\n")
        end = time.monotonic() + 30  # an engine that was being started ends by itself
        while (left := left_behind(demo.pid)) and time.monotonic() < end:
            time.sleep(0.1)
        assert left == []


def left_behind(session: int) -> list[str]:
    """Processes of this session, which are the only ones that keep its namespaces, and pools."""
    left = [str(path) for path in Path("/dev/shm").glob(f"kvkeep-p{session}-*")]
    listed = subprocess.run(
        ["ps", "-o", "args=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    return [*left, *listed.stdout.splitlines()]


@pytest.mark.parametrize("hosts", [(), ("--hosts", "1")])
def test_a_tier_needs_two_hosts(hosts: tuple[str, ...]) -> None:
    done = run("--tier", "file:///srv/kv?size=1GiB", *hosts)
    assert done.returncode != 0 and "--hosts 2" in done.stderr
