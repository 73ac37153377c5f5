"""Hosts of the demo: what they reach, and that nothing of them is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvkeep.cli.demo_network import Host, two_hosts
from kvkeep.errors import SettingsError

FILE = "file:///srv/kv?size=1GiB"
CONNECT = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
REFUSED = "unshare: unshare failed: Operation not permitted"


def run_on(host: Host, program: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*host.inside, sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as ends:
        yield ends


def namespaces(tier: str, ends: ExitStack) -> list[Host]:
    hosts, kind = two_hosts(tier, ends)
    if REFUSED in kind:
        pytest.skip("NOT TESTED: network namespaces are not allowed here")
    assert kind == "network namespaces"
    return hosts


def test_a_namespace_has_a_loopback_of_its_own(ends: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        for host in namespaces(FILE, ends):
            assert host.tier == FILE
            said = run_on(host, CONNECT, port).stderr
            assert "ConnectionRefusedError" in said, "its loopback is up, and not ours"


def test_namespaces_reach_a_valkey_of_this_machine(ends: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as valkey:
        port = valkey.getsockname()[1]
        for host in namespaces(f"valkey://127.0.0.1:{port}/3?timeout=1s", ends):
            near, _, rest = host.tier.removeprefix("valkey://127.0.0.1:").partition("/")
            assert rest == "3?timeout=1s"
            asks = [*host.inside, sys.executable, "-c"]
            program = CONNECT + "s.sendall(b'PING'); print(s.recv(4), s.recv(4))"
            with subprocess.Popen([*asks, program, near], stdout=subprocess.PIPE) as client:
                connection, _ = valkey.accept()
                with connection:
                    assert connection.recv(4) == b"PING"
                    connection.sendall(b"PONG")
                assert client.communicate(timeout=30)[0] == b"b'PONG' b''\n"


def test_namespaces_end_with_the_demo() -> None:
    with ExitStack() as ends:
        hosts = namespaces(FILE, ends)
        links = [f"/proc/{host.inside[host.inside.index('--target') + 1]}/ns/net" for host in hosts]
        assert len({os.readlink(link) for link in [*links, "/proc/self/ns/net"]}) == 3
    assert [link for link in links if os.path.lexists(link)] == []


@pytest.mark.parametrize(
    "tier", ["s3://bucket?endpoint=http://s3", "valkeys://v", "valkey://v?cluster=yes"]
)
def test_other_services_are_shared_from_loopback_addresses(tier: str, ends: ExitStack) -> None:
    hosts, kind = two_hosts(tier, ends)
    assert hosts == [Host((), "127.0.0.1", tier), Host((), "127.0.0.2", tier)]
    assert "only a directory or one Valkey without TLS is reached" in kind


def test_where_namespaces_are_not_allowed_hosts_are_loopback_addresses(
    ends: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "unshare"
    refuses.write_text(f"#!/bin/sh\necho '{REFUSED}' >&2; exit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts, kind = two_hosts(FILE, ends)
    assert hosts == [Host((), "127.0.0.1", FILE), Host((), "127.0.0.2", FILE)]
    assert kind == f"loopback addresses (no network namespaces: {REFUSED})"


@pytest.mark.parametrize("tier", ["/srv/kv", "file:///srv/kv", "disk:///srv/kv?size=1GiB"])
def test_what_hosts_cannot_share_is_refused(tier: str, ends: ExitStack) -> None:
    with pytest.raises(SettingsError, match="--tier is"):
        two_hosts(tier, ends)
