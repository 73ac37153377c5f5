"""The tier on Valkey or Redis, with the real server: as check_tier() says, in its own faults, with
TLS, with a password, and as a cluster."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import valkey
from services import Relay, Service, free_port, program

from kvkeep.errors import KVKeepError, SettingsError, TierError
from kvkeep.testing.tiers import PLACE, check_tier
from kvkeep.tiers import valkey as valkey_tier
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.tier import Part, Tier
from kvkeep.tiers.valkey import ValkeyTier, open_valkey

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers with these flags; all end with the test."""
    path = program("valkey-server", "redis-server")
    services: list[Service] = []

    def run(*flags: str, port: int = 0) -> Service:
        port = port or free_port()
        directory = tmp_path / f"server{len(services)}"
        command = [path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *flags]
        services.append(Service(command, directory, port))
        return services[-1]

    yield run
    for service in services:
        service.kill()


class FaultyServer:
    """Faults of one real server; the tier speaks to it through a relay."""

    def __init__(self, server: Service, relay: Relay) -> None:
        self.server, self.relay = server, relay
        self.client = valkey.Valkey(port=server.port)

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        if fault == "stall":
            with self.server.paused():
                yield
        elif fault == "half":
            with self.relay.cutting_after(4500):
                yield
        else:
            used = self.client.info("memory")["used_memory"]
            self.client.config_set("maxmemory", used - 1)
            try:
                yield
            finally:
                self.client.config_set("maxmemory", 0)

    def garble(self) -> None:
        for name in self.client.keys("*"):
            at = 90 if self.client.strlen(name) > 90 else 0
            (byte,) = self.client.getrange(name, at, at)
            self.client.setrange(name, at, bytes([byte ^ 4]))


def part(name: str, data: bytes) -> Part:
    return Part(f"{PLACE}/{name}", [memoryview(data)])


def read(tier: Tier, name: str, nbytes: int) -> bytes | None:
    view = memoryview(bytearray(nbytes))
    (found,) = tier.read([Part(f"{PLACE}/{name}", [view])])
    return None if found < 0 else view[:found].tobytes()


def test_a_server_is_a_tier(start: Start) -> None:
    server = start()
    relay = Relay(server.port)
    faults = FaultyServer(server, relay)

    def make() -> tuple[Tier, FaultyServer]:
        faults.client.flushall()
        medium = open_valkey(f"valkey://127.0.0.1:{relay.port}/0?timeout=1s")
        return CheckedTier(medium), faults

    with closing(relay), closing(faults.client):
        check_tier(make)


def test_a_cluster_is_a_tier(start: Start) -> None:
    """Two nodes with half of the slots each."""
    servers = [start("--cluster-enabled", "yes", port=_cluster_port()) for _ in range(2)]
    clients = [valkey.Valkey(port=server.port) for server in servers]
    for client, first in zip(clients, (0, 8192), strict=True):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, first + 8191)
    clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port)
    known = threading.Event()
    for _ in range(600):
        states = [client.execute_command("CLUSTER INFO") for client in clients]
        if all(
            state["cluster_state"] == "ok" and state["cluster_known_nodes"] == "2"
            for state in states
        ):
            break
        known.wait(0.05)
    with closing(
        open_valkey(f"valkey://127.0.0.1:{servers[0].port}?cluster=yes&timeout=1s")
    ) as medium:
        tier = CheckedTier(medium)
        blocks = {f"{number}": os.urandom(5000) for number in range(40)}
        assert tier.write([part(name, data) for name, data in blocks.items()]) == [True] * 40
        assert all(client.dbsize() for client in clients), "all are on one node"
        names = [f"{PLACE}/{name}" for name in blocks]
        assert tier.leading(names) == 40
        assert tier.leading([*names[:7], f"{PLACE}/none", *names]) == 7
        assert {name: read(tier, name, 5000) for name in blocks} == blocks
        assert tier.usage().blocks == 40 and tier.usage().used_bytes > 40 * 5000
        servers[1].kill()
        with pytest.raises(TierError, match="the service"):
            tier.read([part(name, bytearray(5000)) for name in blocks])
    for client in clients:
        client.close()


def _cluster_port() -> int:
    """A cluster's nodes speak to each other 10,000 ports above."""
    while True:
        port = free_port()
        with suppress(OSError, OverflowError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + 10_000))
            return port


def test_leading_finds_holes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_tier, "_MOST_NAMES_A_COMMAND", 16)
    with closing(open_valkey(f"valkey://127.0.0.1:{start().port}")) as tier:
        names = [f"{PLACE}/{number}" for number in range(50)]
        for holes in ([], [0], [49], [17, 30], [15], [16], [3, 4, 5, 6, 7, 8, 9], range(20, 50)):
            tier.delete("v1/")
            tier.write(
                [Part(name, [memoryview(b"x")]) for at, name in enumerate(names) if at not in holes]
            )
            assert tier.leading(names) == min(holes, default=50), holes


def test_a_killed_server_is_an_error_and_the_next_one_serves(start: Start) -> None:
    server = start()
    with closing(CheckedTier(open_valkey(f"valkey://127.0.0.1:{server.port}?timeout=1s"))) as tier:
        assert tier.write([part("a", bytes(1000))]) == [True]
        usage = tier.usage()
        server.kill()
        for call in (
            lambda: tier.read([part("a", bytearray(1000))]),
            lambda: tier.write([part("b", bytes(1000))]),
            lambda: tier.leading([f"{PLACE}/a"]),
            lambda: tier.delete("v1/"),
        ):
            with pytest.raises(TierError, match="the service failed"):
                call()
        assert tier.usage() == usage, "it says what it knew last"
        start(port=server.port)
        assert read(tier, "a", 1000) is None
        assert tier.write([part("a", bytes(1000))]) == [True]
        assert read(tier, "a", 1000) == bytes(1000)


def test_a_paused_server_is_an_error_after_the_timeout(start: Start) -> None:
    server = start()
    with closing(
        CheckedTier(open_valkey(f"valkey://127.0.0.1:{server.port}?timeout=200ms"))
    ) as tier:
        tier.write([part("a", b"first")])
        with server.paused():
            for _ in range(3):
                with pytest.raises(TierError, match=r"[Tt]imeout|timed out"):
                    tier.read([part("a", bytearray(5))])
        tier.write([part("b", b"other")])
        # No answer to a call that had given up is taken for the answer to a later one.
        assert [read(tier, name, 5) for name in ("a", "b", "a")] == [b"first", b"other", b"first"]


def test_a_server_that_evicts_loses_blocks_and_nothing_else(start: Start) -> None:
    server = start("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with closing(CheckedTier(open_valkey(f"valkey://127.0.0.1:{server.port}"))) as tier:
        blocks = {str(number): os.urandom(100_000) for number in range(200)}
        for name, data in blocks.items():
            assert tier.write([part(name, data)]) == [True]
        found = {name: read(tier, name, 100_000) for name in blocks}
        there = {name: data for name, data in found.items() if data is not None}
        assert 0 < len(there) < 200 and there == {name: blocks[name] for name in there}
        assert tier.usage().capacity_bytes == 8 << 20


@pytest.mark.parametrize("left", [0, 10, 63, 64, 65, 900, 1063])
def test_a_truncated_value_is_a_miss_and_makes_room_for_the_right_one(
    start: Start, left: int
) -> None:
    server = start()
    with (
        closing(CheckedTier(open_valkey(f"valkey://127.0.0.1:{server.port}"))) as tier,
        closing(valkey.Valkey(port=server.port)) as client,
    ):
        data = os.urandom(1000)
        tier.write([part("a", data)])
        client.set(f"{PLACE}/a", client.get(f"{PLACE}/a")[:left])
        assert read(tier, "a", 1000) is None
        assert tier.leading([f"{PLACE}/a"]) == 0, "what is no block was left in the way"
        tier.write([part("a", data)])
        assert read(tier, "a", 1000) == data


def test_a_key_of_another_type_is_an_error(start: Start) -> None:
    server = start()
    with (
        closing(open_valkey(f"valkey://127.0.0.1:{server.port}")) as tier,
        closing(valkey.Valkey(port=server.port)) as client,
    ):
        client.rpush(f"{PLACE}/a", "x")
        with pytest.raises(TierError, match="WRONGTYPE"):
            tier.read([part("a", bytearray(5))])


def test_a_deletion_takes_its_prefix_and_no_pattern(start: Start) -> None:
    with closing(open_valkey(f"valkey://127.0.0.1:{start().port}")) as tier:
        names = ["v1/a*/x", "v1/ab/x", "v1/a?/x", "v1/[ab]/x", "v1/a\\/x"]
        tier.write([Part(name, [memoryview(b"x")]) for name in names])
        for gone, name in enumerate(names, start=1):
            assert tier.delete(name.removesuffix("x")) == 1
            assert [tier.leading([each]) for each in names] == [0] * gone + [1] * (5 - gone)
        tier.write([Part(f"v1/many/{number}", [memoryview(b"x")]) for number in range(2500)])
        assert tier.delete("v1/many/") == 2500 and tier.usage().blocks == 0


def test_a_value_over_the_limit_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_tier, "MOST_BYTES_A_VALUE", 100)
    with closing(open_valkey(f"valkey://127.0.0.1:{start().port}")) as tier:
        parts = [part("a", bytes(100)), part("b", bytes(101)), part("c", bytes(99))]
        assert tier.write(parts) == [True, False, True]
        assert [tier.leading([each.name]) for each in parts] == [1, 0, 1]


def test_a_password_comes_from_the_environment_or_a_file(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"valkey://127.0.0.1:{start('--requirepass', 'a-secret-word').port}"
    with pytest.raises(TierError, match="Authentication"):
        open_valkey(address)
    monkeypatch.setenv("KVKEEP_VALKEY_PASSWORD", "another-word")
    with pytest.raises(TierError) as refused:
        open_valkey(address)
    assert "another-word" not in str(refused.value)
    monkeypatch.setenv("KVKEEP_VALKEY_PASSWORD", "a-secret-word")
    open_valkey(address).close()
    monkeypatch.delenv("KVKEEP_VALKEY_PASSWORD")
    file = tmp_path / "password"
    file.write_text("a-secret-word\n")
    file.chmod(0o644)
    monkeypatch.setenv("KVKEEP_VALKEY_PASSWORD_FILE", str(file))
    with pytest.raises(SettingsError, match="password"):
        open_valkey(address)
    file.chmod(0o600)
    open_valkey(address).close()


def test_tls_needs_a_certificate_of_the_authority(start: Start, tmp_path: Path, kvkeep) -> None:  # type: ignore[no-untyped-def]
    for keys in ("ours", "foreign"):
        done = kvkeep("keygen", "--dir", str(tmp_path / keys), "--host", "127.0.0.1")
        assert done.returncode == 0, done.stderr
    ours, port = tmp_path / "ours", free_port()
    flags = {
        "--tls-port": str(port),
        "--tls-cert-file": str(ours / "server.pem"),
        "--tls-key-file": str(ours / "server.key"),
        "--tls-ca-cert-file": str(ours / "ca.pem"),
        "--tls-auth-clients": "no",
    }
    start(*[word for pair in flags.items() for word in pair])
    address = f"rediss://127.0.0.1:{port}?ca={ours / 'ca.pem'}"
    with closing(CheckedTier(open_valkey(address))) as tier:
        assert tier.write([part("a", b"over tls")]) == [True] and read(tier, "a", 8) == b"over tls"
    with pytest.raises(TierError, match="certificate"):
        open_valkey(f"rediss://127.0.0.1:{port}?ca={tmp_path / 'foreign' / 'ca.pem'}")
    with pytest.raises(TierError, match="certificate"):
        open_valkey(f"rediss://127.0.0.1:{port}")


def test_an_address_with_nothing_behind_it_is_an_error() -> None:
    with pytest.raises(TierError, match="the service failed"):
        open_valkey(f"valkey://127.0.0.1:{free_port()}?timeout=1s")
    with pytest.raises(KVKeepError, match="database"):
        open_valkey("valkey://127.0.0.1/kv")
    assert ValkeyTier.best_bytes <= valkey_tier.MOST_BYTES_A_VALUE
