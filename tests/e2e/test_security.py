"""Real servers under attack: each thing that the threat model says cannot be done is tried."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import clients
import pytest
from attackers import HOST, Fortress, Knock, Relay, fortress, greeting, resident_kib, say_raw
from clients import holds, stores
from engines import engine, eventually, oracle, prompt, serve, status, tokens_of, without_cache
from local_users import as_another_user

from kvkeep.cli.certificates import Issued, issue, new_authority
from kvkeep.cli.keygen import make
from kvkeep.cli.remote import ask
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.address import unix_name
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, client_context
from kvkeep_lab.simulation.peer import chain

LAYOUT = 1  # the first one that a server opens
KEYS = chain("a", 2)
BLOCKS = [bytes([at + 1]) * 64 for at in range(2)]
TOKENS = list(range(8))
HELLO = [bytes(frame) for frame in encode(Header(0, 1), m.Hello("attacker", 1))]


@pytest.fixture(scope="module")
def fort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    with fortress(tmp_path_factory.mktemp("fort") / "keys") as running:
        yield running


# -- a client with a certificate is served


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_oracle_gets_hits_over_tls(fort: Fortress, shared_memory: bool) -> None:
    """With the oracle model one wrong byte would change the tokens."""
    extra = {f"kvkeep.{name}": value for name, value in fort.tls().items()}
    extra |= {"kvkeep.shared_memory": shared_memory}
    model, prompts = oracle(), [prompt(23) for _ in range(3)]
    expected = without_cache(model, prompts)
    before = fort.status()["counters"]["hit_blocks"]
    for _ in range(2):
        with engine(fort.address, model, extra=extra) as llm:
            assert tokens_of(serve(llm, prompts)) == expected
            planes = {session["plane"] for session in fort.status()["sessions"]}
            assert planes == {"shared_memory" if shared_memory else "network"}
    assert fort.status()["counters"]["hit_blocks"] - before >= 3 * 5


def test_certificates_can_come_from_the_environment(
    fort: Fortress, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fort.tls().items():
        monkeypatch.setenv(f"KVKEEP_CLIENT_{name.upper()}", value)
    with clients.connect(fort.address) as cache:
        assert stores(cache, TOKENS) == 2


def test_on_the_servers_host_its_own_user_needs_no_certificate(tmp_path: Path) -> None:
    """The Unix socket says which user is at the other end."""
    address = f"ipc://{tmp_path}/socket"
    with fortress(tmp_path / "keys", "--address", address), clients.connect(address) as cache:
        assert stores(cache, TOKENS) == 2


# -- a client without one gets nothing


def assert_gets_nothing(fort: Fortress, make_knock: Callable[[], Knock], reason: str) -> None:
    """Nothing comes back, no session is opened, nothing is carried out, and it is counted."""
    before, failures = fort.status()["counters"], fort.failures()
    with contextlib.suppress(ssl.SSLError, ConnectionError), make_knock() as knock:
        knock.say(HELLO)
        assert knock.hear() is None
    assert eventually(lambda: fort.failures().get(reason, 0) > failures.get(reason, 0))
    after = fort.status()["counters"]
    for name in ("sessions_opened", "bad_frames"):
        assert after[name] == before[name]
    assert fort.failures().keys() - failures.keys() <= {reason}


def written(directory: Path, issued: Issued, ca: str) -> TlsFiles:
    files = TlsFiles(directory / "cert.pem", directory / "own.key", directory / "ca.pem")
    for path, text in ((files.cert, issued.cert), (files.key, issued.key), (files.ca, ca)):
        path.write_text(text)
        path.chmod(0o600)
    return files


def stranger(fort: Fortress, folder: Path) -> ssl.SSLContext:
    """A certificate of our CA for a name that was not authorized."""
    ca = fort.authority()
    return client_context(written(folder, issue(ca, "stranger", days=1), ca.cert))


def of_another_ca(fort: Fortress, folder: Path) -> ssl.SSLContext:
    issued = issue(new_authority(1), "engine", days=1)
    return client_context(written(folder, issued, fort.authority().cert))


def expired(fort: Fortress, folder: Path) -> ssl.SSLContext:
    ca, then = fort.authority(), datetime.now(UTC) - timedelta(days=5)
    return client_context(written(folder, issue(ca, "engine", days=1, now=then), ca.cert))


def of_the_server(fort: Fortress, folder: Path) -> ssl.SSLContext:
    return client_context(fort.files("server"))


def without_certificate(fort: Fortress, folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(fort.keys / "ca.pem"))


def tls_1_2(fort: Fortress, folder: Path) -> ssl.SSLContext:
    context = without_certificate(fort, folder)
    context.load_cert_chain(fort.files().cert, fort.files().key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def without_tls(fort: Fortress, folder: Path) -> None:
    return None


@pytest.mark.parametrize(
    "context_of",
    [stranger, of_another_ca, expired, of_the_server, without_certificate, tls_1_2, without_tls],
    ids=lambda each: each.__name__,
)
def test_without_a_valid_certificate_nothing_is_answered(
    fort: Fortress, tmp_path: Path, context_of: Callable[[Fortress, Path], ssl.SSLContext | None]
) -> None:
    context = context_of(fort, tmp_path)
    reason = "unknown_client" if context_of is stranger else "handshake"
    assert_gets_nothing(fort, lambda: Knock(fort.host_and_port, context), reason)


@pytest.mark.parametrize(
    "first", [greeting(b"CURVE"), greeting(b"NULL"), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00"]
)
def test_other_protocols_get_an_alert_and_the_door(fort: Fortress, first: bytes) -> None:
    before = fort.turned_away()
    heard = say_raw(fort.host_and_port, first, HELLO[0] + HELLO[1])
    assert len(heard) <= 7 and b"KVKP" not in heard
    assert eventually(lambda: fort.turned_away() > before)


def test_a_recorded_session_played_again_gets_nothing(fort: Fortress) -> None:
    relay = Relay(fort.host_and_port)
    host, port = relay.address.removeprefix("tcp://").split(":")
    with Knock((host, int(port)), client_context(fort.files())) as honest:
        peer = honest.peer().attach()
        assert peer.store(peer.open_layout(64), KEYS, BLOCKS) in (0, 2)
        peer.ask(m.Done, m.Goodbye())
    relay.close()
    recorded, answered = b"".join(relay.sent), b"".join(relay.answered)
    assert len(recorded) > 500 and len(answered) > 500, "the relay heard a whole session"
    assert b"KVKP" not in recorded + answered and BLOCKS[0] not in recorded, "all of it encrypted"
    assert b"engine" not in recorded, "and the client's name, too"
    before, counters = fort.turned_away(), fort.status()["counters"]
    for pieces in ((recorded,), tuple(relay.sent)):
        heard = say_raw(fort.host_and_port, *pieces)
        assert len(heard) < len(answered), "a server's first flight, which promises nothing"
    assert eventually(lambda: fort.turned_away() >= before + 2)
    assert fort.status()["counters"] == counters, "nothing that was asked then was done now"


def test_a_client_does_not_speak_to_a_server_of_another_ca(tmp_path: Path, fort: Fortress) -> None:
    """A server of an attacker, which would take any client, gets no message."""
    with fortress(tmp_path / "keys") as impostor:
        with pytest.raises(Unavailable, match="not signed by a CA that we trust"):
            fort.cache(address=impostor.address, wait_ms=2_000)
        assert impostor.status()["counters"]["sessions_opened"] == 0
        assert eventually(lambda: impostor.failures().get("handshake", 0) > 0)


def test_a_client_does_not_speak_to_another_client_that_poses_as_the_server(
    tmp_path: Path, fort: Fortress
) -> None:
    """It has a certificate of the right CA, for that very host, but not one for servers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(fort.files().cert, fort.files().key)
    with socket.create_server((HOST, 0)) as listener:
        address = f"tcp://{HOST}:{listener.getsockname()[1]}"
        with fort.cache(address=address, required=False, wait_ms=0) as cache:
            listener.settimeout(30)
            accepted, _ = listener.accept()
            accepted.settimeout(30)
            with pytest.raises(ssl.SSLError):  # which also closes it
                context.wrap_socket(accepted, server_side=True)
            assert not cache.connected


def test_failures_are_in_the_metrics_and_in_the_log_once(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys") as fort:
        for _ in range(20):
            say_raw(fort.host_and_port, greeting(b"NULL"))
        assert eventually(lambda: fort.turned_away() >= 20)
        request = urllib.request.Request(f"http://{fort.server.http}/metrics")
        request.add_header("authorization", f"Bearer {fort.token_file.read_text().strip()}")
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert 'kvkeep_auth_failures_total{reason="handshake"}' in reply.read().decode()
        assert fort.server.log().count("was turned away") == 1


def test_a_crowd_without_certificates_costs_little_and_others_are_served_meanwhile(
    tmp_path: Path,
) -> None:
    """Hundreds of connections, silent or in the middle of a handshake without end, and what they
    sent is forgotten."""
    with fortress(tmp_path / "keys") as fort, fort.cache() as cache:
        assert stores(cache, TOKENS) == 2
        before = resident_kib(fort.server)
        crowd = [socket.create_connection(fort.host_and_port) for _ in range(300)]
        endless = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(
            8_192
        )  # half of a ClientHello of 16 KiB
        for one in crowd[::2]:
            with contextlib.suppress(OSError):  # it made way for another already
                one.sendall(endless)
        assert holds(cache, TOKENS) == 2
        assert resident_kib(fort.server) - before < 64 << 10
        for one in crowd:
            with contextlib.suppress(OSError):
                one.settimeout(30)
                assert len(one.recv(65536)) <= 7, "each is turned away when its time is over"
            one.close()
        assert holds(cache, TOKENS) == 2


# -- who has a certificate, and means harm


def test_a_hostile_client_with_a_certificate_of_its_own_reaches_no_other_tenant(
    fort: Fortress,
) -> None:
    """It knows everything but the other's key: session token, tenant id, block keys, lease and
    write numbers."""
    victim_tenant, own = tenant_of("victim"), tenant_of("hostile")
    fort.add_client("hostile", own)
    fort.add_client("victim", victim_tenant)
    with fort.knock("victim") as one, fort.knock("hostile") as two:
        victim, hostile = one.peer().attach(), two.peer().attach()
        layout = victim.open_layout(64)
        hostile.open_layout(64)
        assert victim.store(layout, KEYS, BLOCKS, tenant=victim_tenant) == 2
        victim.ask(m.Found, m.Lookup(victim_tenant, layout, KEYS))
        lease = victim.number
        victim.ask(m.Prepared, m.PrepareStore(victim_tenant, layout, 0, b"", chain("w", 2)))
        write = victim.number
        # Naming the other tenant.
        for message in (
            m.Lookup(victim_tenant, layout, KEYS),
            m.PrepareStore(victim_tenant, layout, 0, b"", chain("z", 1)),
            m.Finish(victim_tenant, LAYOUT, KEYS[-16:]),
            m.ReportBad(victim_tenant, LAYOUT, KEYS[:16]),
            m.Lookup("default", layout, KEYS),
        ):
            assert hostile.refusal(message) == "forbidden_tenant"
        # The same keys under its own tenant: there is nothing.
        assert hostile.ask(m.Found, m.Lookup(own, layout, KEYS)).blocks == 0
        # The other's lease and write, by number.
        assert hostile.refusal(m.Fetch(lease, 0, 0, 1)) == "unknown_lease"
        assert hostile.refusal(m.Put(write, 0), BLOCKS[:1]) == "unknown_write"
        assert hostile.refusal(m.CompleteStore(write, bytes(16))) == "unknown_write"
        assert hostile.ask(m.Done, m.Release([lease])).count == 0
        assert hostile.ask(m.Done, m.AbandonStore([write])).count == 0
        # The other's session, by its token.
        hostile.session, hostile.number = victim.session, 1000
        for message in (
            m.Ping(),
            m.Goodbye(),
            m.Lookup(victim_tenant, layout, KEYS),
            m.Fetch(lease, 0, 0, 1),
        ):
            assert hostile.refusal(message) == "unknown_session"
        # And all that the victim has is as it was.
        victim.ask(m.Done, m.Fetch(lease, 0, 0, 2))
        assert victim.payload == BLOCKS
        victim.ask(m.Done, m.Put(write, 0), BLOCKS)
        victim.ask(m.Done, m.Goodbye())


def test_a_hostile_client_that_floods_is_refused_and_slows_nobody_for_long(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys", "--max-requests-per-second", "50") as fort:
        fort.add_client("calm")
        with fort.knock() as flood, fort.cache("calm") as cache:
            peer = flood.peer().attach()
            for number in range(2000):
                flood.say(
                    [bytes(frame) for frame in encode(Header(peer.session, 100 + number), m.Ping())]
                )
                flood.hear(0)
                if number % 500 == 0:
                    assert stores(cache, TOKENS) in (0, 2)
                    assert holds(cache, TOKENS) == 2
            assert eventually(lambda: fort.status()["refusals"].get("too_fast", 0) > 1000)
            assert not cache.counters.failures.get("deadline")


def test_a_client_that_fetches_and_does_not_read_costs_little_by_however_many_connections(
    tmp_path: Path,
) -> None:
    """Asked for: 96 replies of 4 MiB under one token."""
    with fortress(tmp_path / "keys") as fort, contextlib.ExitStack() as connections:
        fort.add_client("calm")
        knocks = [connections.enter_context(fort.knock()) for _ in range(4)]
        greedy = knocks[0].peer().attach()
        layout = greedy.open_layout(1 << 20)
        assert (
            greedy.store(layout, chain("a", 4), [bytes([at]) * (1 << 20) for at in range(4)]) == 4
        )
        greedy.ask(m.Found, m.Lookup("default", layout, chain("a", 4)))
        lease, before = greedy.number, resident_kib(fort.server)
        for knock in knocks[1:]:
            for _ in range(32):
                greedy.number += 1
                frames = encode(Header(greedy.session, greedy.number), m.Fetch(lease, 0, 0, 4))
                knock.stream.send([bytes(frame) for frame in frames])
        with fort.cache("calm", shared_memory=False) as cache:
            assert stores(cache, TOKENS) == 2
            assert holds(cache, TOKENS) == 2, "others are served meanwhile"
        assert resident_kib(fort.server) - before < 128 << 10
        greedy.number += 1
        assert greedy.refusal(m.Ping()) == "unknown_session", "the session has left this connection"


def test_a_session_goes_on_over_a_new_connection(fort: Fortress) -> None:
    """As after one that broke: what it holds is still its own."""
    with fort.knock() as broken:
        first = broken.peer().attach()
        layout = first.open_layout(64)
        first.store(layout, KEYS, BLOCKS)
        first.ask(m.Found, m.Lookup("default", layout, KEYS))
    with fort.knock() as new:
        second = new.peer()
        second.session, second.number = first.session, first.number
        second.ask(m.Done, m.Fetch(first.number, 0, 0, 2))
        assert second.payload == BLOCKS
        second.ask(m.Done, m.Goodbye())


def test_a_session_over_tls_cannot_be_had_by_the_unix_socket(fort: Fortress) -> None:
    """Who gets there is the server's own user. Even so: the session is its certificate's, whoever
    knows its token."""
    name = unix_name(fort.server.address)
    assert name is not None
    with fort.knock() as far, socket.socket(socket.AF_UNIX) as connecting:
        remote = far.peer().attach()
        connecting.connect(name)
        near = Knock.__new__(Knock)
        near.stream = Stream(connecting, 1 << 20)
        stranger = near.peer()
        for token in (0, 1, remote.session):
            stranger.session = token
            assert stranger.refusal(m.Ping()) == "unknown_session"
        remote.ask(m.Done, m.Ping())
        remote.ask(m.Done, m.Goodbye())


# -- clients that are revoked, and come back


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_revoked_client_is_out_without_a_restart_and_back_when_it_is_authorized(
    tmp_path: Path, shared_memory: bool
) -> None:
    with fortress(tmp_path / "keys") as fort, fort.cache(shared_memory=shared_memory) as cache:
        assert stores(cache, TOKENS) == 2
        line = fort.keys / "authorized" / "engine.client"
        line.rename(line.with_suffix(".away"))
        assert eventually(lambda: not fort.status()["sessions"]), (
            "the session ends within a check interval"
        )
        assert eventually(lambda: not cache.connected) and cache.contains(TOKENS) == 0
        with pytest.raises(Unavailable):
            fort.cache(wait_ms=300)
        line.with_suffix(".away").rename(line)
        assert eventually(lambda: cache.contains(TOKENS) == 2), "the client comes back by itself"


def test_tenants_that_are_taken_from_a_client_are_refused_at_once(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys") as fort, fort.knock() as before:
        peer = before.peer().attach()
        layout = peer.open_layout(64)
        assert peer.store(layout, KEYS, BLOCKS) == 2
        (fort.keys / "authorized" / "engine.client").write_text(
            f"engine tenants={tenant_of('other')}\n"
        )
        looked_up = m.Lookup("default", layout, KEYS)
        assert eventually(lambda: isinstance(peer.say(looked_up), m.Refused))
        assert peer.refusal(looked_up) == "forbidden_tenant", "on a connection that was open before"
        assert peer.ask(m.Done, m.Ping())


# -- certificates that are renewed


def test_a_renewed_certificate_is_shown_without_a_restart_and_nobody_loses_a_connection(
    tmp_path: Path,
) -> None:
    with fortress(tmp_path / "keys") as fort, fort.cache() as cache:
        assert stores(cache, TOKENS) == 2
        port, opened = fort.host_and_port[1], fort.status()["counters"]["sessions_opened"]
        with pytest.raises(ssl.SSLCertVerificationError):
            Knock(("127.0.0.3", port), client_context(fort.files()))
        for name in ("server.pem", "server.key"):
            (fort.keys / name).rename(tmp_path / name)
        assert eventually(lambda: "stay in use" in fort.server.log())
        assert cache.contains(TOKENS) == 2
        make(fort.keys, [], hosts=(HOST, "127.0.0.3"))
        assert eventually(lambda: "were read again" in fort.server.log())
        with Knock(("127.0.0.3", port), client_context(fort.files())) as knock:
            knock.peer().attach().ask(m.Done, m.Goodbye())
        assert (
            cache.contains(TOKENS) == 2
            and fort.status()["counters"]["sessions_opened"] == opened + 1
        )


# -- the admin API


def http_status(
    address: str,
    path: str,
    token: str | None,
    method: str = "GET",
    host: str = "",
    tls: ssl.SSLContext | None = None,
) -> int:
    url = f"{'https' if tls else 'http'}://{address}{path}"
    request = urllib.request.Request(url, method=method, headers={"host": host or address})
    if token is not None:
        request.add_header("authorization", token)
    try:
        with urllib.request.urlopen(request, timeout=60, context=tls) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def open_server() -> Iterator[ServerProcess]:
    """One with default settings, as a first user has it."""
    with ServerProcess("--pool-size", "16MiB") as server:
        yield server


def made_token(server: ServerProcess) -> Path:
    assert server.state_dir is not None
    return server.state_dir / server.name / "admin.token"


def test_another_user_of_the_host_neither_drains_the_server_nor_reads_its_token(
    open_server: ServerProcess,
) -> None:
    token = made_token(open_server)
    post = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method='POST'))"
    done = as_another_user("-c", post, f"http://{open_server.http}/v1/drain")
    assert done.returncode and "HTTP Error 401" in done.stderr
    for read in ("open(sys.argv[1]).read()", "os.listdir(os.path.dirname(sys.argv[1]))"):
        done = as_another_user("-c", f"import os, sys; {read}", str(token))
        assert done.returncode and "PermissionError" in done.stderr
    drained, shown = (
        as_another_user("-m", "kvkeep.cli.main", command, "--http", open_server.http)
        for command in ("drain", "status")
    )
    assert drained.returncode == 1
    assert f"{token} cannot be read: Permission denied" in drained.stderr
    assert "Run this as the server's user" in drained.stderr and "--token-file" in drained.stderr
    assert shown.returncode == 0, "reading stays open"
    assert status(open_server)["stopping"] is False
    assert token.read_text().strip() not in open_server.log()


# -- where it listens, and what others on the host can read


def test_beyond_loopback_it_listens_with_certificates_and_token_alone(tmp_path: Path) -> None:
    for flags in (("--address", "tcp://0.0.0.0:0"), ("--http-address", "0.0.0.0:0")):
        with pytest.raises(Unavailable, match="is reachable from other hosts"):
            ServerProcess("--pool-size", "16MiB", *flags).start()
    everywhere = ("--address", "tcp://0.0.0.0:0", "--http-address", "0.0.0.0:0")
    with fortress(tmp_path / "keys", *everywhere) as fort:
        port, http = fort.server.address.rpartition(":")[2], fort.server.http.rpartition(":")[2]
        assert fort.server.http == f"https://0.0.0.0:{http}"
        assert port == str(fort.host_and_port[1])
        with fort.cache() as cache:
            assert stores(cache, TOKENS) == 2
        token = fort.token_file.read_text().strip()
        near, right = f"127.0.0.1:{http}", f"Bearer {token}"
        tls = ssl.create_default_context(cafile=tmp_path / "keys" / "ca.pem")
        for host, given, expected in (
            ("cache.example", right, 200),
            ("cache.example", "", 401),
            (near, right, 200),
        ):
            assert http_status(near, "/v1/status", given, host=host, tls=tls) == expected
        assert http_status(near, "/v1/status", right) == 400, "not without TLS"


def test_everything_it_makes_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    """A running server under umask 000, with an engine attached and quotas kept: every file that is
    there."""
    before = os.umask(0)
    try:
        address = f"ipc://{tmp_path}/socket"
        with (
            fortress(tmp_path / "keys", "--address", address) as fort,
            fort.cache(address=address) as cache,
        ):
            assert stores(cache, TOKENS) == 2
            assert cache.connection.segments is not None
            path, asked = "/v1/tenants/default/quota", {"quota_bytes": 1 << 20}
            ask(fort.server.http, path, "PUT", asked, token_file=fort.token_file)
            assert fort.server.state_dir is not None
            roots = [fort.server.pool, fort.server.state_dir / fort.server.name, fort.keys]
            seen = {
                path: path.lstat().st_mode for root in roots for path in (root, *root.rglob("*"))
            }
            seen[tmp_path / "socket"] = (tmp_path / "socket").lstat().st_mode
            kinds = {path.name.partition("-")[0].partition(".")[0] for path in seen}
            made = "segment session daemon epoch quotas socket server admin"
            assert set(made.split()) <= kinds, kinds
            wrong = {
                path: oct(mode)
                for path, mode in seen.items()
                if stat.S_IMODE(mode) != (0o700 if stat.S_ISDIR(mode) else 0o600)
            }
            assert wrong == {}
    finally:
        os.umask(before)
