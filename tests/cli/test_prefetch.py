"""`kvkeep prefetch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.server.test_movement import BLOCKS, World, children_of

from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A server that was restarted, with a conversation on disk and nothing in memory."""
    made = World(tmp_path / "disk")
    made.put(1)
    assert eventually(lambda: made.written(BLOCKS))
    made.restart()
    yield made
    made.close()


def test_it_waits_until_the_blocks_are_in_memory(world: World, kvkeep: Run) -> None:
    done = kvkeep("prefetch", "default", "--most", "1MiB", "--http", world.server.http)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "prefetch 1 of default is done: 16 blocks, 1MiB brought to memory\n"
    shown = json.loads(kvkeep("prefetch", "--list", "--http", world.server.http, "--json").stdout)
    assert [each["blocks"] for each in shown] == [16]
    table = kvkeep("prefetch", "--list", "--http", world.server.http).stdout
    assert "default" in table and "done" in table


def test_ctrl_c_cancels_it(world: World, kvkeep: Run) -> None:
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    try:
        command = [sys.executable, "-m", "kvkeep.cli.main", "prefetch", "default", "--json"]
        with subprocess.Popen(
            [*command, "--http", world.server.http],
            stdout=subprocess.PIPE,
            text=True,
            # A shell's background jobs, and what they start, ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert eventually(lambda: world.ask("/v1/prefetch"))
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
    finally:
        os.kill(mover, signal.SIGCONT)
    assert process.returncode == 0 and json.loads(out)["state"] == "cancelled"
    ended = kvkeep("prefetch", "--cancel", "1", "--http", world.server.http)
    assert ended.stdout.startswith("prefetch 1 of default is cancelled")
    assert eventually(lambda: world.get(1) == BLOCKS)


def test_it_can_be_left_to_the_server(world: World, kvkeep: Run) -> None:
    begun = kvkeep("prefetch", "default", "--no-wait", "--http", world.server.http)
    assert begun.stdout.startswith("prefetch 1 of default is looking")
    shown = eventually(lambda: world.ask("/v1/prefetch")[0]["state"] == "done")
    assert shown and world.ask("/v1/prefetch")[0]["blocks"] == 32
    every = kvkeep("prefetch", "--cancel", "all", "--http", world.server.http)
    assert every.stdout == "0 running prefetches are cancelled\n"


def test_a_server_without_tiers_refuses(kvkeep: Run, server: ServerProcess) -> None:
    for words in (["prefetch", "default"], ["verify"]):
        done = kvkeep(*words, "--http", server.http)
        assert done.returncode == 1
        assert "no disk below memory" in done.stderr
        assert "--tier" in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["my-salt"], "a tenant is named"),
        ([], "either TENANT or --salt-stdin"),
        (["default", "--most", "much"], "--most"),
        (["default", "--list"], "only one of"),
        (["--cancel", "some"], "--cancel"),
    ],
)
def test_mistakes(kvkeep: Run, words: list[str], error: str) -> None:
    done = kvkeep("prefetch", *words, "--http", "127.0.0.1:1")
    assert done.returncode == 2 and error in done.stderr and "my-salt" not in done.stderr
