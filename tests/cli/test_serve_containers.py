"""`kvkeep serve` where there is little: in Docker's /dev/shm of 64 MiB, and under real memory
limits."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import containers
import pytest
from containers import (
    PROMPT_BLOCKS,
    LimitedServer,
    MemoryGroup,
    advice,
    fill,
    finds,
    memory_group,
    needs_mounts,
)

from kvkeep.cli.remote import ask
from kvkeep.errors import Unavailable
from kvkeep.units import MIB

LIMIT = 300 * MIB


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(LIMIT) as made:
        yield made


def assert_full(report: dict[str, Any]) -> None:
    """All of the pool is there, and blocks in all of it."""
    assert report["filled_bytes"] == report["pool_bytes"] and report["degraded"] == ""
    assert report["unused_slabs"] == 0 and report["first"] < PROMPT_BLOCKS, "the first had to go"
    assert report["stored_bytes"] > report["pool_bytes"] * 3 // 4


# -- a small /dev/shm


def in_docker_shm(*words: str) -> Any:
    """What a server says and does in a /dev/shm of 64 MiB."""
    command = [*containers.in_small_shm("64m"), sys.executable, containers.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_mounts
def test_a_server_starts_in_the_shared_memory_that_docker_gives() -> None:
    report = in_docker_shm()
    assert 32 * MIB <= report["pool_bytes"] < 64 * MIB
    assert_full(report)
    assert report["adopted"] == PROMPT_BLOCKS, "the next server finds what it left"
    assert "warning" in report["log"] and "pool_size = auto came to only" in report["log"]
    assert "--shm-size" in report["log"]
    assert "no shared memory for the index" not in report["log"]


@needs_mounts
@pytest.mark.parametrize(
    "words", [("--pool-size", "64MiB"), ("--pool-size", "1GiB", "--slab-size", "64MiB")]
)
def test_the_advice_of_a_refused_size_works_word_for_word(words: tuple[str, ...]) -> None:
    refused = in_docker_shm(*words)["refused"]
    assert "does not fit: /dev/shm has" in refused and "free, room for" in refused
    assert_full(in_docker_shm(*words, *advice(refused)))


# -- a memory limit


def test_a_server_under_a_memory_limit_fills_its_pool_and_survives(group: MemoryGroup) -> None:
    with LimitedServer(group) as server:
        report = fill(server)
        assert_full(report)
        assert MIB <= report["pool_bytes"] <= LIMIT // 4
        assert report["pool_bytes"] < group.used_bytes() < LIMIT and group.kills() == 0
        assert f"({group.directory})" in server.log() and "MemoryMax=" in server.log(), (
            "it says why it is small"
        )


def test_a_limit_on_a_group_above_counts(group: MemoryGroup) -> None:
    with group.child() as below, LimitedServer(below) as server:
        report = fill(server)
        assert_full(report)
        assert report["pool_bytes"] <= LIMIT // 4 and group.kills() == 0
        assert f"({group.directory})" in server.log()


def test_a_size_beyond_the_limit_is_refused_with_advice_that_works(group: MemoryGroup) -> None:
    with pytest.raises(
        Unavailable, match="a pool of 1GiB does not fit: the memory limit of 300MiB"
    ) as caught:
        LimitedServer(group, "--pool-size", "1GiB").start()
    assert group.kills() == 0
    with LimitedServer(group, *advice(str(caught.value))) as server:
        report = fill(server)
        assert_full(report)
        assert report["pool_bytes"] > LIMIT // 2 and group.kills() == 0, (
            "most of what there is, and no more"
        )


# -- killed for memory


EAT = """
import os
open("/proc/self/oom_score_adj", "w").write("-1000")
eaten = [os.urandom(1 << 20) for _ in range(4096)]
"""


def kill_for_memory(server: LimitedServer) -> None:
    """Another process of the group takes memory until the kernel ends the server. (It then ends
    that one, too, or the test does.)"""
    Path(f"/proc/{server.pid}/oom_score_adj").write_text("1000")
    assert server.process is not None
    hog = subprocess.Popen(
        server.group.inside(sys.executable, "-c", EAT), stderr=subprocess.DEVNULL
    )
    try:
        assert server.process.wait(60) == -signal.SIGKILL
    finally:
        hog.kill()
        hog.wait()
    server.stop()


def test_a_server_killed_for_memory_is_adopted_by_the_next_one(group: MemoryGroup) -> None:
    with LimitedServer(group) as server:
        report = fill(server)
        kill_for_memory(server)
        assert group.kills() > 0 and group.used_bytes() > report["pool_bytes"], (
            "its memory stays, in its files"
        )
        server.start()
        assert finds(server, report["last"]) == PROMPT_BLOCKS
        status = ask(server.http, "/v1/status")
        assert status["pool"]["pool_bytes"] == report["pool_bytes"] and status["restart"]["warm"]
        kills = group.kills()
        assert_full(fill(server))
        assert group.kills() == kills


def test_a_pool_that_counts_for_another_group_is_adopted(group: MemoryGroup) -> None:
    """As when a container or a service is started again: its group is another, under the same
    limit."""
    with contextlib.ExitStack() as first:
        below = first.enter_context(group.child())
        server = first.enter_context(LimitedServer(below))
        report = fill(server)
        server.send(signal.SIGKILL)
        server.stop()
        with group.child() as other:
            server.group = other
            server.start()
            assert finds(server, report["last"]) == PROMPT_BLOCKS
            assert other.used_bytes() < report["pool_bytes"] + 150 * MIB and group.kills() == 0
            server.stop()


# What releases did that knew nothing of limits: a pool of any size, filled until the kernel ends
# the process.
FILL_UNTIL_KILLED = """
import sys
from pathlib import Path
from kvkeep.store.store import Store
from kvkeep.tiers import memory
memory.pool_room = lambda *_: memory.Room(1 << 62, 1 << 62, "", "")
memory.room_to_fill = lambda *_: None
pool = memory.Pool(Path("/dev/shm"), sys.argv[1], 4 << 30, 16 << 20, 1, keep=True)
Store(pool.pool_bytes, pool.slab_bytes, columns=pool.columns)
while pool.fill_next() != (0, 0): pass
"""


@pytest.fixture
def left_by_a_kill(group: MemoryGroup) -> Iterator[LimitedServer]:
    """A server, not started, and under its name what a killed one left: a pool of 4 GiB of which
    some is there."""
    group.limit_to(700 * MIB)
    server = LimitedServer(group, "--slab-size", "16MiB")
    command = group.inside(sys.executable, "-c", FILL_UNTIL_KILLED, server.name)
    try:
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert group.kills() > 0 and group.used_bytes() >= 512 * MIB
        yield server
    finally:
        server.__exit__(None, None, None)


def test_what_a_server_killed_while_filling_left_makes_room_for_the_next(
    group: MemoryGroup, left_by_a_kill: LimitedServer
) -> None:
    server, kills = left_by_a_kill.start(), group.kills()
    report = fill(server)
    assert_full(report)
    assert 128 * MIB <= report["pool_bytes"] <= 175 * MIB, (
        "a quarter of what is free without the old pool"
    )
    assert "not reusing the old pool" in server.log() and "its pool size is 4GiB" in server.log()
    assert group.used_bytes() < 400 * MIB, "the old pool's memory is free"
    assert group.kills() == kills


def test_a_size_that_was_too_large_once_is_refused_and_its_memory_freed(
    group: MemoryGroup, left_by_a_kill: LimitedServer
) -> None:
    server, kills = left_by_a_kill, group.kills()
    flags, server.flags = server.flags, (*server.flags, "--pool-size", "4GiB")
    with pytest.raises(
        Unavailable, match="a pool of 4GiB does not fit: the memory limit of 700MiB"
    ) as caught:
        server.start()
    assert group.used_bytes() < 100 * MIB
    server.flags = (*flags, *advice(str(caught.value)))
    pool = containers.all_there(server.start())
    assert 350 * MIB < pool["filled_bytes"] == pool["pool_bytes"] < 600 * MIB
    assert group.kills() == kills
