"""The admin API over TLS, with real sockets and certificates: who administers, and what stalls
costs nobody else."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.certificates import Issued, issue, new_authority
from kvkeep.cli.keygen import make
from kvkeep.server import http_tls
from kvkeep.server.http_tls import TlsLayer
from kvkeep.wire.tls import handshake_problem

sys.path.insert(0, str(Path(__file__).parent))
from http_clients import (
    LARGE,
    add_tenants,
    connections,
    eventually,
    has_been_closed,
    received,
    request,
    unread_bytes,
)

BEYOND = ("--http-address", "0.0.0.0:0", "--session-check-interval", "50ms")
CHANGE = ("/v1/settings", "PATCH", {"log_level": "info"})
NO_TOKEN = {"authorization": ""}
TENANT = "t-" + "a" * 32
Start = Callable[..., Any]


@dataclass
class Keys:
    """What `kvkeep keygen` has made: a server, a client `engine`, and a client `ops` that
    administers."""

    directory: Path

    def flags(self, *more: str) -> tuple[str, ...]:
        names = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}
        tls = [
            word
            for name, file in names.items()
            for word in (f"--tls-{name}", str(self.directory / file))
        ]
        return (*BEYOND, *tls, "--authorized-clients", str(self.directory / "authorized"), *more)

    def context(self, client: str = "") -> ssl.SSLContext:
        """Of a client that trusts our CA and shows the certificate of this name, or none."""
        context = ssl.create_default_context(cafile=self.directory / "ca.pem")
        if client:
            context.load_cert_chain(
                self.directory / f"{client}.pem", self.directory / f"{client}.key"
            )
        return context

    def authority(self) -> Issued:
        return Issued(
            (self.directory / "ca.pem").read_text(), (self.directory / "ca.key").read_text()
        )

    def put(self, name: str, text: str) -> None:
        """Replaces a file, as a rotation does."""
        new = self.directory / "new"
        new.write_text(text)
        new.chmod(0o600)
        new.rename(self.directory / name)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    make(tmp_path / "keys", ["engine"])
    make(tmp_path / "keys", ["ops"], admin=True)
    return Keys(tmp_path / "keys")


@pytest.fixture
def running(start: Start, keys: Keys) -> Any:
    return start(*keys.flags())


@pytest.fixture
def crowd() -> Iterator[contextlib.ExitStack]:
    """Closes what is put into it when the test ends."""
    with contextlib.ExitStack() as clients:
        yield clients


def connect(running: Any, tls: ssl.SSLContext, receive_bytes: int = 0) -> ssl.SSLSocket:
    """A connection whose handshake is done."""
    connection = socket.socket()
    connection.settimeout(60)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(running.place)
    return tls.wrap_socket(connection, server_hostname="127.0.0.1", suppress_ragged_eofs=False)


def plain(running: Any) -> socket.socket:
    return socket.create_connection(running.place, timeout=60)


def failures(running: Any) -> dict[str, int]:
    found: dict[str, int] = running.in_loop(
        lambda: dict(running.daemon.service.counters.auth_failures)
    )
    return found


# -- who may do what


def test_a_token_does_for_everything_and_needs_no_certificate(running: Any, keys: Keys) -> None:
    tls = keys.context()
    assert running.http.address.startswith("https://0.0.0.0:")
    assert running.ask("/v1/status", tls=tls)[1]["http_address"] == running.http.address
    assert running.ask(*CHANGE, tls=tls)[0] == 200
    assert running.ask("/v1/status", headers={"authorization": "Bearer wrong"}, tls=tls)[0] == 401


@pytest.mark.parametrize("who", ["", "engine"])
def test_without_token_only_health_is_open_also_with_an_engines_certificate(
    running: Any, keys: Keys, who: str
) -> None:
    tls = keys.context(who)
    for path in ("/healthz", "/readyz"):
        assert running.ask(path, headers=NO_TOKEN, tls=tls)[0] == 200
    for asked in (("/v1/status",), ("/metrics",), ("/openapi.json",), CHANGE):
        status, said = running.ask(*asked, headers=NO_TOKEN, tls=tls)
        assert (status, said["error"]) == (401, "unauthorized")
    assert "certificate with the right admin" in said["hint"]
    assert str(running.daemon.settings.state_dir) not in said["hint"], (
        "paths are no business of other hosts"
    )
    assert eventually(lambda: failures(running) == {"admin_token": 4})


def test_a_certificate_that_administers_needs_no_token(running: Any, keys: Keys) -> None:
    tls = keys.context("ops")
    for asked in (
        ("/v1/status",),
        ("/metrics",),
        CHANGE,
        ("/v1/blocks?confirm=everything", "DELETE"),
    ):
        assert running.ask(*asked, headers=NO_TOKEN, tls=tls)[0] == 200


def test_without_a_list_no_certificate_administers(
    start: Start, keys: Keys, tmp_path: Path
) -> None:
    make(tmp_path / "token", [], admin_token=True)
    flags = keys.flags(
        "--authorized-clients", "none", "--admin-token", str(tmp_path / "token" / "admin-token")
    )
    running = start(*flags)
    assert running.ask("/v1/status", headers=NO_TOKEN, tls=keys.context("ops"))[0] == 401
    assert running.ask("/v1/status", tls=keys.context("ops"))[0] == 200


def test_the_servers_own_origin_is_one_of_https(running: Any, keys: Keys) -> None:
    tls, host = keys.context("ops"), "{}:{}".format(*running.place)
    for origin, status in (
        (f"https://{host}", 200),
        (f"http://{host}", 403),
        ("https://evil.example", 403),
    ):
        assert running.ask(*CHANGE, headers={**NO_TOKEN, "origin": origin}, tls=tls)[0] == status


def test_on_loopback_there_is_no_tls(start: Start, keys: Keys) -> None:
    running = start(*keys.flags("--http-address", "127.0.0.1:0"))
    assert (
        running.http.address.startswith("127.0.0.1:")
        and running.ask("/v1/status", headers=NO_TOKEN)[0] == 200
    )


def test_a_token_in_the_clear_beyond_loopback_is_warned_of_once(
    start: Start, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "token", [], admin_token=True)
    token = ("--admin-token", str(tmp_path / "token" / "admin-token"))
    assert start(*BEYOND, *token).ask("/v1/status")[0] == 200
    [said] = [each.getMessage() for each in caplog.records if "in the clear" in each.getMessage()]
    assert "set tls_cert" in said
    start(*keys.flags(*token, "--name", "second"))
    assert caplog.text.count("in the clear") == 1


# -- who gets no connection


def alert(connection: ssl.SSLSocket) -> str:
    """How a connection ends that the server has refused: in TLS 1.3 the client hears of it when it
    reads."""
    connection.sendall(request("GET /healthz", ""))
    with pytest.raises(ssl.SSLError) as caught:
        connection.recv(1)
    return handshake_problem(caught.value)


def test_a_certificate_of_another_ca_is_refused_for_health_too(
    running: Any, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    posing = issue(new_authority(1), "ops", days=1)
    (tmp_path / "posing.pem").write_text(posing.cert + posing.key)
    tls = keys.context()
    tls.load_cert_chain(tmp_path / "posing.pem")
    with connect(running, tls) as connection:
        assert "it rejected our certificate" in alert(connection)
    assert eventually(lambda: failures(running) == {"handshake": 1})
    assert (
        "127.0.0.1 was turned away at the HTTP port: its certificate is not signed by a CA"
        in caplog.text
    )


def test_tls_before_1_3_is_refused(running: Any, keys: Keys) -> None:
    tls = keys.context()
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        connect(running, tls)
    assert eventually(lambda: failures(running) == {"handshake": 1})


@pytest.mark.parametrize(
    "asked",
    [("/healthz",), CHANGE, (f"/v1/tenants/{TENANT}/quota", "PUT", b"x" * 60_000)],
    ids=["GET", "PATCH", "PUT"],
)
def test_plain_http_is_told_to_use_https(
    running: Any, asked: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        status, said = running.ask(*asked)
        assert (status, said["error"]) == (400, "https_only") and "https://" in said["hint"]
    assert eventually(lambda: failures(running) == {"handshake": 3})
    assert caplog.text.count("it speaks HTTP without TLS") == 1


def test_what_is_neither_is_closed(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), request_within_s=3600)
    with plain(running) as connection:
        connection.sendall(b"\x00" * 100)
        assert not received(connection).startswith(b"HTTP")
    with (
        connect(running, keys.context()) as connection,
        socket.socket(fileno=connection.detach()) as raw,
    ):
        raw.sendall(b"\x17\x03\x03\x00\x20" + b"\x00" * 32)  # a record that nobody has encrypted
        received(raw)
    assert running.ask("/healthz", tls=keys.context())[0] == 200
    assert eventually(lambda: not connections(running))


# -- bytes and where they are cut


class Client:
    """A TLS client over a plain socket, which decides when its bytes are sent."""

    def __init__(self, running: Any, tls: ssl.SSLContext) -> None:
        self.socket = plain(running)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = tls.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")

    def shake_hands(self, send: Callable[[bytes], None]) -> None:
        """Up to its last flight, which is still in `outgoing`."""
        while True:
            try:
                self.tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                send(self.outgoing.read())
                self.incoming.write(self.socket.recv(65536))

    def answer(self) -> bytes:
        self.incoming.write(received(self.socket))
        self.incoming.write_eof()
        data = b""
        with contextlib.suppress(ssl.SSLError):
            while piece := self.tls.read(65536):
                data += piece
        return data


def test_a_request_in_the_same_segment_as_the_handshakes_end_is_answered(
    running: Any, keys: Keys
) -> None:
    client = Client(running, keys.context("ops"))
    with client.socket:
        client.shake_hands(client.socket.sendall)
        client.tls.write(request("GET /v1/status", ""))
        client.socket.sendall(client.outgoing.read())
        assert client.answer().startswith(b"HTTP/1.1 200")


def test_bytes_may_come_one_at_a_time(running: Any, keys: Keys) -> None:
    client = Client(running, keys.context("ops"))
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(data: bytes) -> None:
        for at in range(len(data)):
            client.socket.sendall(data[at : at + 1])

    with client.socket:
        client.shake_hands(send)
        client.tls.write(request("GET /v1/status", ""))
        send(client.outgoing.read())
        assert client.answer().startswith(b"HTTP/1.1 200")


def test_a_large_answer_comes_whole_and_ends_with_a_farewell(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), read_within_s=3600)
    add_tenants(running, 5_000)
    with connect(running, keys.context("ops")) as connection:
        connection.sendall(request(LARGE, ""))
        said = received(connection)  # a connection that is cut off raises SSLEOFError here
        assert eventually(lambda: not connections(running)), (
            "the server does not wait for the client's farewell"
        )
    assert said.startswith(b"HTTP/1.1 200") and said.count(b'"tenant"') == 5_000


def test_a_second_request_on_a_connection_is_not_carried_out(running: Any, keys: Keys) -> None:
    running.store(TENANT, 3)
    with connect(running, keys.context("ops")) as connection:
        clear = request("DELETE /v1/blocks?confirm=everything", "")
        connection.sendall(request("GET /v1/status", "") + 10 * clear)
        assert received(connection).count(b"HTTP/1.1 ") == 1
    assert running.ask(f"/v1/tenants/{TENANT}", tls=keys.context())[1]["blocks"] == 3


# -- clients that stall


def handshakes(running: Any) -> int:
    return sum(isinstance(each, TlsLayer) for each in connections(running))


def test_stalled_handshakes_are_bounded_and_health_is_answered_meanwhile(
    start: Start, keys: Keys, crowd: contextlib.ExitStack
) -> None:
    running = start(*keys.flags(), handshake_within_s=3600)
    stalled = [crowd.enter_context(plain(running)) for _ in range(3 * http_tls.MOST_HANDSHAKES)]
    for connection in stalled:
        connection.sendall(b"\x16\x03\x01\x02")
    for path in ("/healthz", "/readyz"):
        assert running.ask(path, headers=NO_TOKEN, tls=keys.context())[0] == 200
    assert has_been_closed(stalled[0]), "the oldest made way"
    assert eventually(lambda: 0 < handshakes(running) <= http_tls.MOST_HANDSHAKES)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_is_not_finished_is_ended(start: Start, keys: Keys, sent: bytes) -> None:
    running = start(*keys.flags(), handshake_within_s=0.1)
    with plain(running) as connection:
        connection.sendall(sent)
        assert has_been_closed(connection)
    assert eventually(lambda: failures(running) == {"handshake_timeout": 1})


def test_a_refused_client_that_stays_is_ended(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), handshake_within_s=0.1)
    with plain(running) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 400")
        assert eventually(lambda: not connections(running))
    assert failures(running) == {"handshake": 1}, "it is counted once"


def test_what_a_refused_client_still_sends_is_not_heard(
    start: Start, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(*keys.flags(), handshake_within_s=3600)
    with plain(running) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert received(connection).count(b"HTTP/1.1 400") == 1
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert eventually(lambda: not connections(running)) and failures(running) == {"handshake": 1}
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_client_that_says_farewell_is_closed(start: Start, keys: Keys) -> None:
    running = start(*keys.flags(), request_within_s=3600)
    with connect(running, keys.context()) as connection, connection.unwrap() as raw:
        assert has_been_closed(raw)
    assert eventually(lambda: not connections(running))


def test_a_handshake_that_is_broken_off_is_counted_and_leaves_nothing(running: Any) -> None:
    plain(running).close()
    assert eventually(lambda: failures(running) == {"handshake": 1} and not connections(running))


def test_health_is_answered_when_others_have_all_connections(
    start: Start, keys: Keys, crowd: contextlib.ExitStack
) -> None:
    running = start(*keys.flags(), request_within_s=3600, handshake_within_s=3600)
    tls = keys.context()
    silent = [crowd.enter_context(connect(running, tls)) for _ in range(300)]
    for _ in range(20):
        crowd.enter_context(plain(running))
    assert running.ask("/healthz", headers=NO_TOKEN, tls=tls)[0] == 200
    assert 250 <= len(connections(running)) - handshakes(running) <= 257
    with contextlib.suppress(ssl.SSLError):  # cut off, without a farewell
        assert has_been_closed(silent[0])


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT"])
def test_a_connection_that_sends_no_whole_request_is_closed(
    start: Start, keys: Keys, sent: bytes
) -> None:
    running = start(*keys.flags(), request_within_s=0.1)
    with connect(running, keys.context()) as connection:
        connection.sendall(sent)
        assert eventually(lambda: not connections(running))
        with contextlib.suppress(ssl.SSLError):
            assert has_been_closed(connection)


def stall(running: Any, keys: Keys) -> ssl.SSLSocket:
    """A client that asks and never reads."""
    connection = connect(running, keys.context("ops"), receive_bytes=4096)
    connection.sendall(request(LARGE, ""))
    return connection


def test_a_client_that_does_not_read_is_cut_off(
    start: Start, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(*keys.flags(), read_within_s=0.1)
    add_tenants(running, 5_000)
    with stall(running, keys) as stalled, socket.socket(fileno=stalled.detach()) as raw:
        assert eventually(
            lambda: "did not read its answer" in caplog.text and not connections(running)
        )
        assert len(received(raw)) < 5_000 * 200


def test_unread_answers_are_bounded_and_the_oldest_goes_first(
    start: Start, keys: Keys, crowd: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(*keys.flags(), read_within_s=3600)
    add_tenants(running, 5_000)
    with stall(running, keys) as first, socket.socket(fileno=first.detach()) as raw:
        assert eventually(lambda: unread_bytes(running) > 500_000)
        one_answer = unread_bytes(running)
        monkeypatch.setattr("kvkeep.server.http._UNREAD_BYTES", int(2.5 * one_answer))
        for _ in range(4):
            crowd.enter_context(stall(running, keys))
        assert eventually(lambda: running.http._server.server_state.total_requests == 5)
        assert len(connections(running)) == 2 and unread_bytes(running) <= 2.5 * one_answer
        assert len(received(raw)) < one_answer


def test_a_server_that_stops_ends_handshakes(
    start: Start, keys: Keys, stop: Callable[[Any], None]
) -> None:
    running = start(*keys.flags(), handshake_within_s=3600)
    with plain(running) as connection:
        assert eventually(lambda: handshakes(running) == 1)
        stop(running)
        assert has_been_closed(connection) and not connections(running)
        assert failures_of_stopped(running) == {}


def failures_of_stopped(running: Any) -> dict[str, int]:
    found: dict[str, int] = running.daemon.service.counters.auth_failures
    return found


# -- what changes without a restart


def shown(running: Any, keys: Keys) -> bytes | None:
    with connect(running, keys.context()) as connection:
        return connection.getpeercert(binary_form=True)


def test_a_renewed_certificate_is_shown_without_a_restart(running: Any, keys: Keys) -> None:
    renewed = issue(keys.authority(), "kvkeep server", ("127.0.0.1",), days=1)
    keys.put("server.key", renewed.key)
    keys.put("server.pem", renewed.cert)
    assert eventually(lambda: shown(running, keys) == ssl.PEM_cert_to_DER_cert(renewed.cert))


def test_a_revoked_line_counts_from_the_next_request_on(running: Any, keys: Keys) -> None:
    tls = keys.context("ops")
    with connect(running, tls) as before:
        (keys.directory / "authorized" / "ops.client").write_text("ops\n")  # an engine from now on
        assert eventually(lambda: running.ask("/v1/status", headers=NO_TOKEN, tls=tls)[0] == 401)
        before.sendall(request("GET /v1/status", ""))
        assert received(before).startswith(b"HTTP/1.1 401")
    assert running.ask("/healthz", headers=NO_TOKEN, tls=tls)[0] == 200
    (keys.directory / "authorized" / "ops.client").write_text("ops tenants=default admin\n")
    assert eventually(lambda: running.ask("/v1/status", headers=NO_TOKEN, tls=tls)[0] == 200)


def test_a_ca_that_was_removed_proves_nothing_from_the_next_request_on(
    start: Start, keys: Keys, tmp_path: Path
) -> None:
    ours, other = keys.authority(), new_authority(1)
    keys.put("trusted.pem", ours.cert + other.cert)
    running = start(*keys.flags("--tls-ca", str(keys.directory / "trusted.pem")))
    issued = issue(other, "ops", days=1)
    (tmp_path / "ops.pem").write_text(issued.cert + issued.key)
    tls = keys.context()
    tls.load_cert_chain(tmp_path / "ops.pem")
    assert running.ask("/v1/status", headers=NO_TOKEN, tls=tls)[0] == 200
    with connect(running, tls) as before:
        assert eventually(lambda: len(connections(running)) == 1 and not handshakes(running))
        keys.put("trusted.pem", ours.cert)
        assert eventually(lambda: running.daemon.authority.trust == 1)
        before.sendall(request("GET /v1/status", ""))
        assert received(before).startswith(b"HTTP/1.1 401")
    with connect(running, tls) as after:
        assert "it rejected our certificate" in alert(after)
    assert running.ask("/v1/status", headers=NO_TOKEN, tls=keys.context("ops"))[0] == 200
