"""Peers that do not read, and peers that never finish what they say: over TCP and over TLS, against
a real server."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvkeep
from kvkeep.cli.keygen import make
from kvkeep.client.options import ClientOptions
from kvkeep.testing.process import ServerProcess, wait_for
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, client_context
from kvkeep_lab.simulation.peer import Peer, chain

sys.path.insert(0, str(Path(__file__).parent))
from engines import eventually, status

CACHE: dict[str, Any] = {
    "model": "m",
    "revision": "1",
    "block_tokens": 4,
    "block_shape": (2, 8),
    "dtype": "float32",
}
PATIENCE_S = 60  # ends a test that has failed
BLOCKS = [bytes([at + 1]) * MIB for at in range(4)]
KEYS = chain("a", len(BLOCKS))


class Wire:
    """A connection that does what it is told, and reads only when it is told to."""

    def __init__(self, connected: socket.socket) -> None:
        self.stream = Stream(connected, 1 << 30)

    def hear(self) -> list[bytes] | None:
        """The next message; None if the connection ends first."""
        give_up_s = time.monotonic() + PATIENCE_S
        while (frames := self.stream.next()) is None:
            assert time.monotonic() < give_up_s, "nothing came"
            if self.stream.is_over:
                return None
            wait_for(self.stream, 100, writable=bool(self.stream.unsent_bytes))
            self.stream.flush()
            self.stream.read()
        return frames

    def peer(self) -> Peer:
        def exchange(frames: list[bytes]) -> list[bytes] | None:
            self.stream.send(frames)
            return self.hear()

        return Peer(exchange)


@dataclass
class Host:
    """A server, and how its clients connect."""

    server: ServerProcess
    tls: TlsFiles | None

    def socket(self) -> socket.socket:
        where = tcp_host(self.server.address)
        assert where is not None
        return socket.create_connection(where, timeout=PATIENCE_S)

    def wire(self) -> Wire:
        connected = self.socket()
        if self.tls is not None:
            connected = client_context(self.tls).wrap_socket(connected, server_hostname="127.0.0.1")
        return Wire(connected)

    def cache(self) -> kvkeep.Cache:
        """By the network plane, and so by TCP."""
        files = self.tls
        named = (
            {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}
            if files
            else {}
        )
        options = ClientOptions(
            address=self.server.address,
            shared_memory=False,
            lookup_deadline_ms=30_000,
            **named,  # type: ignore[arg-type]
        )
        return kvkeep.connect(options=options, required=True, wait_ms=10_000, **CACHE)

    def resident_kib(self) -> int:
        lines = Path(f"/proc/{self.server.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))


@pytest.fixture(params=["tcp", "tls"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    flags = ["--pool-size", "32MiB", "--session-check-interval", "50ms", "--shutdown-grace", "0s"]
    tls = None
    if request.param == "tls":
        made = make(tmp_path / "keys", ["engine"])
        flags += [
            word
            for name, value in made["server"].items()
            for word in ("--" + name.replace("_", "-"), value)
        ]
        keys = tmp_path / "keys"
        tls = TlsFiles(keys / "engine.pem", keys / "engine.key", keys / "ca.pem")
    with ServerProcess(*flags) as server:
        yield Host(server, tls)


def check_served(host: Host) -> None:
    with host.cache() as cache:
        assert cache.put(range(8), np.ones((2, 2, 8), np.float32)) in (0, 2)
        assert (cache.get(range(8)) == 1).all() and cache.contains(range(8)) == 2


def test_those_who_do_not_read_cost_one_reply_each_and_the_others_nothing(host: Host) -> None:
    """Asked for: 512 MiB of replies by 16 connections. Held: 64 MiB at most, beside what a server
    needs anyway."""
    deaf = [host.wire() for _ in range(16)]
    peers = [wire.peer().attach() for wire in deaf]
    [layout] = {peer.open_layout(MIB) for peer in peers}
    assert peers[0].store(layout, KEYS, BLOCKS) == len(BLOCKS)
    for peer in peers:
        assert peer.ask(m.Found, m.Lookup("default", layout, KEYS)).blocks == len(BLOCKS)
    before = host.resident_kib()
    for wire, peer in zip(deaf, peers, strict=True):
        for number in range(8):
            wire.stream.send(
                encode(Header(peer.session, 100 + number), m.Fetch(peer.number, 0, 0, len(BLOCKS)))
            )
    check_served(host)
    assert eventually(lambda: status(host.server)["counters"]["network_bytes_out"] >= 16 * 4 * MIB)
    assert host.resident_kib() - before < 160 * KIB, "in KiB"
    check_served(host)
    replies = [deaf[3].hear() for _ in range(8)]
    assert all(reply is not None and reply[2:] == BLOCKS for reply in replies), (
        "who reads after all has them all"
    )
    for wire in deaf:
        wire.stream.close()


def test_those_who_never_finish_cost_what_they_sent_and_are_closed(host: Host) -> None:
    before, resident = host.descriptors(), host.resident_kib()
    hello = b"".join(encode(Header(0, 1), m.Hello("half", 1)))
    put = b"".join(encode(Header(7, 1), m.Put(1, 0), BLOCKS))
    crowd: list[socket.socket] = []
    for number in range(120):
        connected = host.socket()
        crowd.append(connected)
        if host.tls is not None and number % 2:
            with contextlib.suppress(OSError):
                connected.sendall(
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[: 1 + number % 11]
                )
            continue
        if host.tls is not None:
            with contextlib.suppress(OSError, ssl.SSLError):
                connected = client_context(host.tls).wrap_socket(
                    connected, server_hostname="127.0.0.1"
                )
                crowd[-1] = connected
        said = (hello if number % 4 else put)[: 1 + number * 7]
        with contextlib.suppress(OSError):
            connected.sendall(said)
        if number % 30 == 0:
            check_served(host)
    check_served(host)
    assert host.resident_kib() - resident < 64 * KIB, "in KiB"
    is_over = lambda: host.descriptors() <= before + 20  # noqa: E731  (of 120; HTTP has some, too)
    assert any(eventually(is_over) for _ in range(4)), (
        "those who said nothing whole in time are closed"
    )
    assert status(host.server)["counters"]["internal_errors"] == 0
    for one in crowd:
        one.close()
    check_served(host)


def test_one_who_sends_half_and_then_the_rest_is_served(host: Host) -> None:
    wire = host.wire()
    peer = wire.peer().attach()
    ping = b"".join(encode(Header(peer.session, 50), m.Ping()))
    for at in range(0, len(ping), 7):
        wire.stream.socket.send(ping[at : at + 7])
        time.sleep(0.01)
    assert wire.hear() is not None
    wire.stream.close()
