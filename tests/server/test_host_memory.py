"""Tests for what a server says of the memory it was given. That of disks is in test_daemon.py."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvkeep.server import host_memory as module
from kvkeep.server.host_memory import allow_many_files, warn_of_small_pool
from kvkeep.tiers.free_memory import Room
from kvkeep.units import MIB


@pytest.fixture(autouse=True)
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(62 * MIB, 64 * MIB, "/dev/shm has 64MiB free", "make /dev/shm larger")
    monkeypatch.setattr(module, "pool_room", lambda directory: room)


def pool(pool_bytes: int, is_left: bool = False) -> Any:
    return cast(
        Any, SimpleNamespace(directory=Path("/dev/shm/x"), pool_bytes=pool_bytes, is_left=is_left)
    )


def test_a_small_pool_is_warned_of_with_the_reason_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_small_pool(pool(56 * MIB))
    assert caplog.messages == [
        "pool_size = auto came to only 56MiB: /dev/shm has 64MiB free; make /dev/shm larger, "
        "then start the server with --fresh"
    ]


def test_a_small_pool_that_was_adopted_names_the_way_to_a_larger_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_small_pool(pool(56 * MIB, is_left=True))
    assert "took only 56MiB, the size of the pool that the last server left" in caplog.text
    assert "--fresh" in caplog.text


def test_of_a_larger_pool_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_small_pool(pool(256 * MIB))
    assert not caplog.messages


def test_a_server_may_open_as_many_files_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
