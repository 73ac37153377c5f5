"""Peers that do not read, and peers that never finish what they say: over TCP and over TLS, against
a real server."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import clients
import pytest
from attackers import Knock, flags_of, resident_kib
from clients import holds, stores
from engines import eventually, status

from kvkeep.cli.keygen import make
from kvkeep.kv.identity import tenant_of
from kvkeep.server.guard import MAX_WORKED_ON
from kvkeep.server.quotas import KeptQuotas, QuotaFile
from kvkeep.testing.process import ServerProcess, wait_for
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host, unix_name
from kvkeep.wire.frames import Header, encode, seal
from kvkeep.wire.tls import TlsFiles, client_context
from kvkeep_lab.simulation.peer import chain

PATIENCE_S = 60  # ends a test that has failed
_SENT_AT_ONCE = 300_000  # no part of a message's size, so that memory is asked for in odd sizes
BLOCKS = [bytes([at + 1]) * MIB for at in range(4)]
KEYS = chain("a", len(BLOCKS))


@dataclass
class Host:
    """A server, and how its clients connect."""

    server: ServerProcess
    tls: TlsFiles | None

    @property
    def where(self) -> tuple[str, int]:
        where = tcp_host(self.server.address)
        assert where is not None
        return where

    def knock(self) -> Knock:
        return Knock(self.where, client_context(self.tls) if self.tls else None)

    def check_served(self) -> None:
        """By the network plane, and so by TCP."""
        files = self.tls
        named = {} if files is None else {"tls_cert": files.cert, "tls_key": files.key}
        named |= {} if files is None else {"tls_ca": files.ca}
        options = {name: str(path) for name, path in named.items()}
        with clients.connect(self.server.address, shared_memory=False, **options) as cache:
            assert stores(cache, range(8)) in (0, 2) and holds(cache, range(8)) == 2

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))


@pytest.fixture(params=["tcp", "tls"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    flags = ["--pool-size", "32MiB", "--session-check-interval", "50ms", "--shutdown-grace", "0s"]
    tls = None
    if request.param == "tls":
        keys = tmp_path / "keys"
        flags += flags_of(make(keys, ["engine"])["server"])
        tls = TlsFiles(keys / "engine.pem", keys / "engine.key", keys / "ca.pem")
    with ServerProcess(*flags) as server:
        yield Host(server, tls)


def test_those_who_do_not_read_cost_one_reply_each_and_the_others_nothing(host: Host) -> None:
    """Asked for: 512 MiB of replies by 16 connections. Held: 64 MiB at most, beside what a server
    needs anyway."""
    deaf = [host.knock() for _ in range(16)]
    peers = [wire.peer().attach() for wire in deaf]
    [layout] = {peer.open_layout(MIB) for peer in peers}
    assert peers[0].store(layout, KEYS, BLOCKS) == len(BLOCKS)
    for peer in peers:
        assert peer.ask(m.Found, m.Lookup("default", layout, KEYS)).blocks == len(BLOCKS)
    before = resident_kib(host.server)
    for wire, peer in zip(deaf, peers, strict=True):
        for number in range(8):
            wire.stream.send(
                encode(Header(peer.session, 100 + number), m.Fetch(peer.number, 0, 0, len(BLOCKS)))
            )
    host.check_served()
    assert eventually(lambda: status(host.server)["counters"]["network_bytes_out"] >= 16 * 4 * MIB)
    assert resident_kib(host.server) - before < 160 * KIB, "in KiB"
    host.check_served()
    replies = [deaf[3].hear(PATIENCE_S) for _ in range(8)]
    assert all(reply is not None and reply[2:] == BLOCKS for reply in replies), (
        "a client that reads after all gets them all"
    )
    for wire in deaf:
        wire.stream.close()


def test_those_who_never_finish_cost_what_they_sent_and_are_closed(host: Host) -> None:
    before, resident = host.descriptors(), resident_kib(host.server)
    hello = b"".join(encode(Header(0, 1), m.Hello("half", 1)))
    put = b"".join(encode(Header(7, 1), m.Put(1, 0), BLOCKS))
    crowd: list[socket.socket] = []
    for number in range(120):
        connected = socket.create_connection(host.where, timeout=PATIENCE_S)
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
            host.check_served()
    host.check_served()
    assert resident_kib(host.server) - resident < 64 * KIB, "in KiB"
    is_over = lambda: host.descriptors() <= before + 20  # noqa: E731  (of 120; HTTP has some, too)
    assert eventually(is_over, 120), "connections that said nothing whole in time are closed"
    assert status(host.server)["counters"]["internal_errors"] == 0
    for one in crowd:
        one.close()
    host.check_served()


def test_half_messages_of_all_take_no_more_memory_than_is_counted(tmp_path: Path) -> None:
    """Thirty connections announce 119 MiB each and send 12 of them, in turns: 360 MiB, of which the
    server holds 256 at most."""
    head = seal(Header(7, 1), b"body", [bytes(MIB)] * 119)[0]
    with ServerProcess("--pool-size", "32MiB", "--shutdown-grace", "0s") as server:
        name = unix_name(server.address)
        before = most = resident_kib(server)
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(30)]
        for connected in crowd:
            connected.settimeout(PATIENCE_S)
            connected.connect(name)
            connected.sendall(head)
        for _ in range(12 * MIB // _SENT_AT_ONCE):
            for connected in crowd:
                with contextlib.suppress(OSError):  # the server has closed it
                    connected.sendall(bytes(_SENT_AT_ONCE))
            most = max(most, resident_kib(server))
        assert eventually(lambda: status(server)["counters"]["connection_resets"] >= 6)
        assert most - before < (256 + 24) * KIB, f"{(most - before) // KIB} MiB"
        Host(server, None).check_served()
        for connected in crowd:
            connected.close()


# -- over HTTP

HTTP_CLIENTS, AT_ONCE = 512, 64
OF_THE_LARGEST = 48  # clients that ask for the largest answer: 166 MiB together
TENANTS = 10_000
UNREAD_KIB = 64 * KIB  # of all answers that are not read
COPIES = 5  # of an answer that is worked on: its rows, text and parts, and what malloc keeps


def asked(http: str, path: str) -> tuple[int, int]:
    """The status of an answer, and how many bytes it has."""
    connection = HTTPConnection(http, timeout=PATIENCE_S)
    connection.request("GET", path)
    reply = connection.getresponse()
    size = len(reply.read())
    connection.close()
    return reply.status, size


def test_http_clients_that_never_read_cost_what_is_counted_and_health_is_answered(
    tmp_path: Path,
) -> None:
    """Twice as many as there may be connections. The first ask for the largest answer that the
    server has, its list of tenants, one after the other: else most would be refused."""
    limits = {tenant_of(str(number)): MIB for number in range(TENANTS)}
    QuotaFile(tmp_path / "never-read" / "quotas.json").save(KeptQuotas(limits=limits))
    where = {"name": "never-read", "state_dir": tmp_path}
    with (
        ServerProcess("--pool-size", "16MiB", "--shutdown-grace", "0s", **where) as server,
        contextlib.ExitStack() as crowd,
    ):
        host, _, port = server.http.rpartition(":")
        largest = f"/v1/tenants?limit={TENANTS}"
        answered, size = asked(server.http, largest)
        assert answered == 200 and size > 3 * MIB
        before = most = resident_kib(server)
        for number in range(HTTP_CLIENTS):
            client = crowd.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
            client.settimeout(PATIENCE_S)
            client.connect((host, int(port)))
            path = largest if number < OF_THE_LARGEST else "/openapi.json"
            client.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
            if path == largest:
                assert wait_for(client, 1_000 * PATIENCE_S), "the answer has begun"
                most = max(most, resident_kib(server))
            if number % AT_ONCE == AT_ONCE - 1:
                assert asked(server.http, "/healthz")[0] == 200
                most = max(most, resident_kib(server))
        may_grow = UNREAD_KIB + MAX_WORKED_ON * COPIES * size // KIB
        assert most - before < may_grow, f"{(most - before) // KIB} MiB"
        assert asked(server.http, "/healthz")[0] == 200
