"""Tests for who listens on a port of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvkeep.cli import listeners as module
from kvkeep.cli.listeners import UNKNOWN_UID, listeners


@pytest.mark.parametrize(
    ("bound", "asked", "reached"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::1", "localhost", True),
        ("::1", "127.0.0.1", False),
        ("::", "127.0.0.1", True),
    ],
)
def test_it_is_who_a_connection_would_reach(bound: str, asked: str, reached: bool) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    if family == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("there is no IPv6 here")
    with socket.create_server((bound, 0), family=family) as server:
        port = server.getsockname()[1]
        assert listeners(asked, port) == ({os.geteuid()} if reached else set())
    assert listeners(asked, port) == set()


def test_who_connects_is_no_listener() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert listeners("127.0.0.1", client.getsockname()[1]) == set()


def test_without_the_kernels_word_nobody_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    assert listeners("127.0.0.1", 80) == {UNKNOWN_UID}
