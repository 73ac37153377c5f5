from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import connect
from rich.console import Console

from kvkeep.cli.top import bar, screen, view
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def drawn(said: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(said))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_once_and_for_programs(kvkeep: Run, server: ServerProcess) -> None:
    with connect(server) as cache:
        assert cache.put([1, 2, 3], np.ones((3, 512), "uint64")) == 3
        assert len(cache.get([1, 2, 3])) == 3
        words = ("top", "--http", server.http, "--every", "0.1")
        said = json.loads(kvkeep(*words, "--json").stdout)
        assert said["blocks"] == 3 and said["found_share"] > 0
        assert {"tokens_loaded", "tokens_computed", "saved_s"} <= set(said["figures"])
        assert {"lookups", "stored_bytes", "saved_s"} <= set(said["rates"])
        assert said["tenants"][0]["tenant"] == "default" and len(said["sessions"]) == 1
        text = kvkeep(*words, "--once").stdout
        assert "3 blocks" in text and "default" in text and "pool 64MiB" not in text
        assert "lookups/s" in text and server.name in text


def test_it_needs_a_terminal_or_once(kvkeep: Run, server: ServerProcess) -> None:
    refused = kvkeep("top", "--http", server.http)
    assert refused.returncode == 2 and "hint: use --once, or --json" in refused.stderr


def test_it_is_live_until_ctrl_c_also_while_the_server_is_away(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with ServerProcess("--pool-size", "16MiB", state_dir=tmp_path) as running:
        token = tmp_path / running.name / "admin.token"
        command = [sys.executable, "-m", "kvkeep.cli.main", "top", "--http", running.http]
        with subprocess.Popen(
            [*command, "--every", "0.2", "--token-file", str(token)], stdin=theirs, stdout=theirs
        ) as live:
            os.close(theirs)
            os.set_blocking(ours, False)

            def wait_for(words: str) -> None:
                said = ""

                def is_said() -> bool:
                    nonlocal said
                    with contextlib.suppress(BlockingIOError):
                        said += os.read(ours, 1 << 16).decode(errors="replace")
                    return words in said

                assert eventually(is_said), said

            wait_for(f"{running.name} (kvkeep ")
            wait_for("missed  none")
            running.flags = (*running.flags, "--http-address", running.http)
            running.stop()
            wait_for("asking again; Ctrl-C ends")
            running.start()
            wait_for(f"{running.name} (kvkeep ")
            os.set_blocking(ours, True)
            live.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # it has ended
                while os.read(ours, 1 << 16):
                    pass
            assert live.wait(60) == 0
        os.close(ours)


def test_without_a_server(kvkeep: Run) -> None:
    assert kvkeep("top", "--http", "127.0.0.1:1", "--once").returncode == 3


@pytest.fixture(scope="module")
def real(server: ServerProcess) -> dict[str, Any]:
    said: dict[str, Any] = server.ask()
    return said


def later(said: dict[str, Any], **changes: Any) -> dict[str, Any]:
    counters = {name: value + 100 for name, value in said["counters"].items()}
    figures = {name: value + 50 for name, value in said["figures"].items()}
    return said | {"counters": counters, "figures": figures} | changes


def test_rates_are_of_the_time_between_two_looks(real: dict[str, Any]) -> None:
    rates = view(real, later(real), 2.0)["rates"]
    assert set(rates.values()) == {50.0, 25.0}
    assert rates["stored_bytes"] == 50.0 and rates["tokens_loaded"] == 25.0


def test_after_a_restart_rates_count_from_zero(real: dict[str, Any]) -> None:
    new = later(real, epoch="another")
    rates = view(later(later(real)), new, 1.0)["rates"]
    assert rates["evictions"] == new["counters"]["evictions"]
    assert all(rate >= 0 for rate in rates.values())


def test_a_crowd_fits_the_screen(real: dict[str, Any]) -> None:
    tenant = {"tenant": "t-" + "0" * 32, "usage_bytes": 1 << 30, "blocks": 9}
    crowd = [tenant | {"figures": real["figures"]} for _ in range(20)]
    text = drawn(view(real, real | {"largest_tenants": crowd}, 1.0))
    assert text.count("t-000") == 8 and "and 12 more" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_it_says_why_blocks_missed(real: dict[str, Any]) -> None:
    blocks = {"loaded": 90, "never_stored": 7, "over_limit": 12, "evicted": 0}
    said = view(real, real | {"prompt_blocks": blocks}, 1.0)
    assert "missed  12 over limit, 7 never stored\n" in drawn(said)
    assert said["prompt_blocks"] == blocks


def test_a_bar_is_the_share_of_memory() -> None:
    assert (bar(0, 10, 4), bar(5, 10, 4), bar(10, 10, 4)) == ("░░░░", "██░░", "████")
    assert bar(20, 10, 4) == "████" and bar(0, 0, 4) == "░░░░"
