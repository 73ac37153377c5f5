"""Real servers under attack: each thing that the threat model says cannot be done is tried."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvkeep
from kvkeep.cli.remote import ask
from kvkeep.client.options import ClientOptions
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.peer import Peer, chain
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.auth import new_pair
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.stream import Stream, socket_path

sys.path.insert(0, str(Path(__file__).parent))
from attackers import (
    Fortress,
    Knock,
    Relay,
    as_another_user,
    ask_and_never_read,
    fortress,
    greeting,
    keep_tenants,
    say_raw,
)
from engines import engine, eventually, oracle, prompt, serve, tokens_of, without_cache

LAYOUT = 1  # the first one that a server opens
KEYS = chain("a", 2)
BLOCKS = [bytes([at + 1]) * 64 for at in range(2)]
CACHE: dict[str, Any] = {"model": "m", "revision": "1", "block_tokens": 4, "block_shape": (2, 8), "dtype": "float32"}
HELLO = [bytes(frame) for frame in encode(Header(0, 1), m.Hello("attacker", 1))]


@pytest.fixture(scope="module")
def fort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    with fortress(tmp_path_factory.mktemp("fort") / "keys") as running:
        yield running


def cache_of(fort: Fortress, name: str = "engine", **more: Any) -> kvkeep.Cache:
    return kvkeep.connect(options=fort.options(name, **more), required=True, wait_ms=10_000, **CACHE)


def blocks(number: int) -> np.ndarray:
    return np.full((2, 2, 8), number, dtype=np.float32)


# -- who has a key is served


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_oracle_gets_hits_over_curve(fort: Fortress, shared_memory: bool) -> None:
    """With the oracle model one wrong byte would change the tokens."""
    keys = {"kvkeep.curve_key": str(fort.keys / "engine.key"), "kvkeep.server_key": fort.public_key}
    extra = {**keys, "kvkeep.shared_memory": shared_memory}
    model, prompts = oracle(), [prompt(23) for _ in range(3)]
    expected = without_cache(model, prompts)
    before = fort.status()["counters"]["hit_blocks"]
    for _ in range(2):
        with engine(fort.server, model, extra=extra) as llm:
            assert tokens_of(serve(llm, prompts)) == expected
            planes = {session["plane"] for session in fort.status()["sessions"]}
            assert planes == {"shared_memory" if shared_memory else "network"}
    assert fort.status()["counters"]["hit_blocks"] - before >= 3 * 5


def test_keys_can_come_from_the_environment(fort: Fortress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_CLIENT_KEY", str(fort.keys / "engine.key"))
    monkeypatch.setenv("KVKEEP_SERVER_KEY", str(fort.keys / "server.pub"))
    with kvkeep.connect(fort.server.address, required=True, wait_ms=10_000, **CACHE) as cache:
        assert cache.put(range(8), blocks(1)) == 2


def test_over_ipc_too(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with fortress(tmp_path / "keys", "--address", address) as fort:
        with cache_of(fort) as cache:
            assert cache.put(range(8), blocks(1)) == 2
        with pytest.raises(Unavailable):
            kvkeep.connect(address, required=True, wait_ms=300, **CACHE)


# -- who has none gets nothing


def assert_gets_nothing(fort: Fortress, make_knock: Callable[[], Knock], reasons: set[str]) -> None:
    """Nothing comes back, no session is opened, nothing is carried out, and it is counted."""
    before, failures = fort.status()["counters"], fort.failures()
    with make_knock() as knock:
        knock.socket.send_multipart(HELLO)
        assert eventually(lambda: any(fort.failures().get(each, 0) > failures.get(each, 0) for each in reasons))
        assert not knock.socket.poll(200)
    after = fort.status()["counters"]
    assert after["sessions_opened"] == before["sessions_opened"] and after["bad_frames"] == before["bad_frames"]
    assert fort.failures().keys() - failures.keys() <= {*reasons, "broken_off"}


def test_a_key_that_nobody_authorized(fort: Fortress) -> None:
    assert_gets_nothing(fort, lambda: Knock.curve(fort.server.address, fort.public_key), {"unknown_key"})


def test_the_servers_own_public_key_is_no_client(fort: Fortress) -> None:
    pair = (fort.public_key, new_pair()[1])
    assert_gets_nothing(
        fort, lambda: Knock.curve(fort.server.address, fort.public_key, pair), {"cryptographic", "unknown_key"}
    )


def test_an_authorized_public_key_without_its_secret_half(fort: Fortress) -> None:
    pair = (fort.pair()[0], new_pair()[1])
    assert_gets_nothing(fort, lambda: Knock.curve(fort.server.address, fort.public_key, pair), {"cryptographic"})


def test_a_client_that_takes_the_server_for_another(fort: Fortress) -> None:
    assert_gets_nothing(fort, lambda: Knock.curve(fort.server.address, new_pair()[0], fort.pair()), {"cryptographic"})


def test_no_security_at_all(fort: Fortress) -> None:
    assert_gets_nothing(fort, lambda: Knock(fort.server.address), {"mechanism", "broken_off"})


def test_a_password(fort: Fortress) -> None:
    security = {"plain_username": b"admin", "plain_password": b"admin"}
    assert_gets_nothing(fort, lambda: Knock(fort.server.address, **security), {"mechanism", "broken_off"})


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"GSSAPI", b"", b"CURVEBALL"])
def test_raw_greetings_of_other_mechanisms_get_a_greeting_and_the_door(fort: Fortress, mechanism: bytes) -> None:
    before = fort.turned_away()
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    heard = say_raw(fort.host_and_port, greeting(mechanism), ready + HELLO[0] + HELLO[1])
    assert len(heard) <= 64 and b"KVKP" not in heard
    assert eventually(lambda: fort.turned_away() > before)


def test_a_recorded_handshake_played_again_gets_nothing(fort: Fortress) -> None:
    relay = Relay(fort.host_and_port)
    with Knock.curve(relay.address, fort.public_key, fort.pair()) as honest:
        peer = honest.peer().attach()
        assert peer.store(peer.open_layout(64), KEYS, BLOCKS) in (0, 2)
        peer.ask(m.Done, m.Goodbye())
    relay.close()
    recorded, answered = b"".join(relay.sent), b"".join(relay.answered)
    assert len(recorded) > 500 and len(answered) > 500, "the relay heard a whole session"
    assert b"KVKP" not in recorded + answered and BLOCKS[0] not in recorded, "all of it encrypted"
    before, counters = fort.turned_away(), fort.status()["counters"]
    for pieces in ((recorded,), tuple(relay.sent), (recorded[:64], recorded[64:])):
        heard = say_raw(fort.host_and_port, *pieces)
        # A greeting and the answer to the first step, which promises nothing; an honest session goes on from there.
        assert len(heard) <= 64 + 2 + 168
    assert eventually(lambda: fort.turned_away() >= before + 3)
    assert fort.failures()["cryptographic"] >= 2, "that of the pieces was one step further, to a cookie of old"
    assert fort.status()["counters"] == counters, "nothing that was asked then was done now"


def test_a_client_does_not_speak_to_a_server_that_lacks_the_key(tmp_path: Path, fort: Fortress) -> None:
    """Somebody who listens in the server's place, with a key of his own and an open door, gets no message."""
    with fortress(tmp_path / "keys") as impostor:
        options = ClientOptions(
            address=impostor.server.address, curve_key=str(fort.keys / "engine.key"), server_key=fort.public_key
        )
        with pytest.raises(Unavailable):
            kvkeep.connect(options=options, required=True, wait_ms=500, **CACHE)
        assert impostor.status()["counters"]["sessions_opened"] == 0
        assert eventually(lambda: impostor.failures().get("cryptographic", 0) > 0)


def test_failures_are_in_the_metrics_and_in_the_log_once(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys") as fort:
        for _ in range(20):
            say_raw(fort.host_and_port, greeting(b"NULL"))
        assert eventually(lambda: fort.turned_away() >= 20)
        request = urllib.request.Request(f"http://{fort.server.http}/metrics")
        request.add_header("authorization", f"Bearer {fort.token_file.read_text().strip()}")
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert 'kvkeep_auth_failures_total{reason="mechanism"}' in reply.read().decode()
        assert fort.server.log().count("was turned away") == 1


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_a_crowd_without_keys_costs_little_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    """Hundreds of connections, silent or in the middle of a step without end, and what they sent is forgotten."""
    with fortress(tmp_path / "keys") as fort, cache_of(fort) as cache:
        cache.put(range(8), blocks(1))
        before = resident_kib(fort.server.pid)
        crowd = [socket.create_connection(fort.host_and_port) for _ in range(300)]
        endless = greeting(b"CURVE") + b"\x06" + (32 << 20).to_bytes(8, "big") + bytes(16_384)  # so much is to come
        for one in crowd[::2]:
            with contextlib.suppress(OSError):  # the first ones' time is over already
                one.sendall(endless)
        assert (cache.get(range(8)) == blocks(1)).all()
        assert resident_kib(fort.server.pid) - before < 128 << 10
        assert eventually(lambda: fort.turned_away() >= 300), "each is turned away when its time is over"
        assert (cache.get(range(8)) == blocks(1)).all()
        for one in crowd:
            one.close()


# -- who has a key, and means harm


def test_a_hostile_client_with_a_key_of_its_own_reaches_no_other_tenant(fort: Fortress) -> None:
    """It knows everything but the other's key: session token, tenant id, block keys, lease and write numbers."""
    victim_tenant, own = tenant_of("victim"), tenant_of("hostile")
    fort.add_client("hostile", own)
    fort.add_client("victim", victim_tenant)
    assert eventually(lambda: "3 keys" in fort.server.log())
    address, server_key = fort.server.address, fort.public_key
    with (
        Knock.curve(address, server_key, fort.pair("victim")) as one,
        Knock.curve(address, server_key, fort.pair("hostile")) as two,
    ):
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
        for message in (m.Ping(), m.Goodbye(), m.Lookup(victim_tenant, layout, KEYS), m.Fetch(lease, 0, 0, 1)):
            assert hostile.refusal(message) == "unknown_session"
        # And all that the victim has is as it was.
        victim.ask(m.Done, m.Fetch(lease, 0, 0, 2))
        assert victim.payload == BLOCKS
        victim.ask(m.Done, m.Put(write, 0), BLOCKS)
        victim.ask(m.Done, m.Goodbye())


def test_a_hostile_client_that_floods_is_refused_and_slows_nobody_for_long(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys", "--max-requests-per-second", "50") as fort:
        fort.add_client("calm")
        assert eventually(lambda: "2 keys" in fort.server.log())
        with Knock.curve(fort.server.address, fort.public_key, fort.pair()) as flood, cache_of(fort, "calm") as cache:
            peer = flood.peer().attach()
            for number in range(2000):
                frames = encode(Header(peer.session, 100 + number), m.Ping())
                flood.socket.send_multipart([bytes(frame) for frame in frames])
                if number % 500 == 0:
                    assert cache.put(range(8), blocks(1)) in (0, 2)
                    assert (cache.get(range(8)) == blocks(1)).all()
            assert eventually(lambda: fort.status()["refusals"].get("too_fast", 0) > 1000)
            assert not cache.counters.failures.get("deadline")


def test_one_key_cannot_take_all_sessions(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys", "--max-sessions", "6", "--max-sessions-per-client", "4") as fort:
        fort.add_client("calm")
        assert eventually(lambda: "2 keys" in fort.server.log())
        with Knock.curve(fort.server.address, fort.public_key, fort.pair()) as greedy:
            for _ in range(4):
                greedy.peer().attach()
            assert greedy.peer().refusal(m.Hello("peer", 2)) == "too_many_sessions"
            with cache_of(fort, "calm") as cache:
                assert cache.put(range(8), blocks(1)) == 2


def test_a_client_that_fetches_and_does_not_read_costs_little_by_however_many_connections(tmp_path: Path) -> None:
    """Asked for: 96 replies of 4 MiB under one token, each connection with room for 256. Kept: some 64 MiB."""
    with fortress(tmp_path / "keys") as fort, contextlib.ExitStack() as connections:
        fort.add_client("calm")
        assert eventually(lambda: "2 keys" in fort.server.log())
        public, secret = (half.encode() for half in fort.pair())
        keys = {"curve_serverkey": fort.public_key.encode(), "curve_publickey": public, "curve_secretkey": secret}
        knocks = [
            connections.enter_context(Knock(fort.server.address, **keys, rcvhwm=room, rcvbuf=4096))
            for room in (1000, 1, 1, 1)
        ]
        greedy = knocks[0].peer().attach()
        layout = greedy.open_layout(1 << 20)
        assert greedy.store(layout, chain("a", 4), [bytes([at]) * (1 << 20) for at in range(4)]) == 4
        greedy.ask(m.Found, m.Lookup("default", layout, chain("a", 4)))
        lease, before = greedy.number, resident_kib(fort.server.pid)
        for knock in knocks[1:]:
            heard = fort.status()["refusals"].get("too_fast", 0)
            for _ in range(32):
                greedy.number += 1
                frames = encode(Header(greedy.session, greedy.number), m.Fetch(lease, 0, 0, 4))
                knock.socket.send_multipart([bytes(frame) for frame in frames])
            assert eventually(lambda heard=heard: fort.status()["refusals"].get("too_fast", 0) > heard)
        assert resident_kib(fort.server.pid) - before < 128 << 10
        greedy.number += 1
        assert greedy.refusal(m.Ping()) == "unknown_session", "the session has left this connection"
        with cache_of(fort, "calm", shared_memory=False) as cache:
            assert cache.put(range(8), blocks(1)) == 2
            assert (cache.get(range(8)) == blocks(1)).all(), "others are served meanwhile"


def test_a_session_goes_on_over_a_new_connection(fort: Fortress) -> None:
    """As after one that broke: what it holds is still its own."""
    address, server_key = fort.server.address, fort.public_key
    with Knock.curve(address, server_key, fort.pair()) as broken:
        first = broken.peer().attach()
        layout = first.open_layout(64)
        first.store(layout, KEYS, BLOCKS)
        first.ask(m.Found, m.Lookup("default", layout, KEYS))
    with Knock.curve(address, server_key, fort.pair()) as new:
        second = new.peer()
        second.session, second.number = first.session, first.number
        second.ask(m.Done, m.Fetch(first.number, 0, 0, 2))
        assert second.payload == BLOCKS
        second.ask(m.Done, m.Goodbye())


# -- the socket beside the pool


def test_nobody_becomes_anybody_by_the_socket_beside_the_pool(fort: Fortress) -> None:
    """Who gets there is the server's own user. Even so: no Hello, and no session but one that has attached here."""
    with (
        Knock.curve(fort.server.address, fort.public_key, fort.pair()) as far,
        socket.socket(socket.AF_UNIX) as connecting,
    ):
        remote = far.peer().attach()
        with socket_path(fort.server.pool) as path:
            connecting.connect(path)
        stream = Stream(connecting, 1 << 20)

        def exchange(frames: list[bytes]) -> list[bytes] | None:
            stream.send(frames)
            replies: list[list[bytes]] = []
            give_up_s = time.monotonic() + 60
            while not replies and not stream.is_over and time.monotonic() < give_up_s:
                stream.read()
                replies += [reply for reply in [stream.next()] if reply is not None]
            return replies[0] if replies else None

        stranger = Peer(exchange)
        assert stranger.refusal(m.Hello("stranger", 1)) == "revoked_key"
        for token in (0, 1, remote.session):
            stranger.session = token
            assert stranger.refusal(m.Ping()) == "unknown_session"
        remote.ask(m.Done, m.Ping())
        remote.ask(m.Done, m.Goodbye())


def test_nor_where_no_keys_are_asked_for(tmp_path: Path) -> None:
    """A session over a network stays one, whoever knows its token."""
    with (
        ServerProcess("--pool-size", "16MiB", "--slab-size", "256KiB") as server,
        Knock(server.address) as far,
        socket.socket(socket.AF_UNIX) as connecting,
    ):
        remote = far.peer().attach()
        with socket_path(server.pool) as path:
            connecting.connect(path)
        stream = Stream(connecting, 1 << 20)
        stream.send([bytes(frame) for frame in encode(Header(remote.session, 77), m.Ping())])
        reply = None
        give_up_s = time.monotonic() + 60
        while reply is None and time.monotonic() < give_up_s:
            stream.read()
            reply = stream.next()
        assert reply is not None and b"unknown_session" in reply[1]
        remote.ask(m.Done, m.Ping())


# -- keys that are taken back, and come back


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_revoked_key_is_out_without_a_restart_and_back_when_it_is_authorized(
    tmp_path: Path, shared_memory: bool
) -> None:
    with fortress(tmp_path / "keys") as fort, cache_of(fort, shared_memory=shared_memory) as cache:
        assert cache.put(range(8), blocks(1)) == 2
        line = fort.keys / "authorized" / "engine.pub"
        line.rename(line.with_suffix(".away"))
        assert eventually(lambda: not fort.status()["sessions"]), "the session ends within a check interval"
        assert eventually(lambda: not cache.connected) and cache.contains(range(8)) == 0
        with pytest.raises(Unavailable):
            kvkeep.connect(options=fort.options(), required=True, wait_ms=300, **CACHE)
        line.with_suffix(".away").rename(line)
        assert eventually(lambda: cache.contains(range(8)) == 2), "the client comes back by itself"


def test_a_client_whose_key_is_authorized_late_connects_by_itself(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys") as fort:
        line = fort.keys / "authorized" / "engine.pub"
        line.rename(line.with_suffix(".away"))
        assert eventually(lambda: "1 revoked" in fort.server.log())
        with kvkeep.connect(options=fort.options(), wait_ms=300, **CACHE) as cache:
            assert not cache.connected and eventually(lambda: fort.failures().get("unknown_key", 0) > 0)
            line.with_suffix(".away").rename(line)
            assert eventually(lambda: cache.connected)


# -- the admin API


def http_status(address: str, path: str, token: str | None, method: str = "GET", host: str = "") -> int:
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers={"host": host or address})
    if token is not None:
        request.add_header("authorization", token)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_admin_api_is_closed_to_those_without_the_token(fort: Fortress) -> None:
    token = fort.token_file.read_text().strip()
    paths = ["/metrics", "/v1/status", "/v1/tenants", "/v1/settings", "/openapi.json", "/nothing"]
    wrong = [None, "", "Bearer", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", token]
    wrong += [f"Bearer {'x' * len(token)}", f"Bearer {token} {token}"]
    for path in paths:
        assert http_status(fort.server.http, path, f"Bearer {token}") == (404 if path == "/nothing" else 200)
        for given in wrong:
            assert http_status(fort.server.http, path, given) == 401, (path, given)
    assert http_status(fort.server.http, "/v1/blocks?confirm=everything", None, "DELETE") == 401
    assert {http_status(fort.server.http, path, None) for path in ("/healthz", "/readyz")} == {200}
    assert fort.failures()["admin_token"] >= len(paths) * len(wrong)
    assert token not in fort.server.log() and token[:-1] not in fort.server.log()


def test_a_new_token_holds_at_once_and_the_old_one_no_longer(tmp_path: Path) -> None:
    with fortress(tmp_path / "keys") as fort:
        old = fort.token_file.read_text().strip()
        fort.token_file.write_text("n" * 43)
        assert http_status(fort.server.http, "/v1/status", f"Bearer {old}") == 401
        assert http_status(fort.server.http, "/v1/status", "Bearer " + "n" * 43) == 200
        fort.token_file.chmod(0o644)
        assert http_status(fort.server.http, "/v1/status", "Bearer " + "n" * 43) == 401, (
            "a token that others can read is none"
        )


@pytest.fixture
def open_server() -> Iterator[ServerProcess]:
    """One with default settings, as a first user has it."""
    with ServerProcess("--pool-size", "16MiB") as server:
        yield server


def made_token(server: ServerProcess) -> Path:
    assert server.state_dir is not None
    return server.state_dir / server.name / "admin.token"


def test_nobody_stops_or_changes_a_server_of_default_settings_without_its_token(open_server: ServerProcess) -> None:
    http, token = open_server.http, made_token(open_server).read_text().strip()
    changes = [("POST", "/v1/drain"), ("DELETE", "/v1/blocks?confirm=everything"), ("PATCH", "/v1/settings")]
    changes += [("PUT", f"/v1/tenants/default/{what}") for what in ("quota", "limit")]
    for method, path in [*changes, ("DELETE", "/v1/tenants/default/blocks")]:
        for given in (None, "Bearer ", f"Bearer {token}x", f"Basic {token}"):
            assert http_status(http, path, given, method) == 401, (method, path, given)
    status = ask(http, "/v1/status")
    assert status["pid"] == open_server.pid and not status["stopping"] and status["auth_failures"]["admin_token"] == 24
    log = open_server.log()
    assert log.count("was refused: ") == 1 and token not in log, "one line a minute"
    assert http_status(http, "/v1/drain", f"Bearer {token}", "POST") == 202


def test_another_user_of_the_host_neither_drains_the_server_nor_reads_its_token(open_server: ServerProcess) -> None:
    post = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method='POST'))"
    done = as_another_user(sys.executable, "-c", post, f"http://{open_server.http}/v1/drain")
    assert done.returncode and "HTTP Error 401" in done.stderr
    for read in ("open(sys.argv[1]).read()", "os.listdir(os.path.dirname(sys.argv[1]))"):
        done = as_another_user(sys.executable, "-c", f"import os, sys; {read}", str(made_token(open_server)))
        assert done.returncode and "PermissionError" in done.stderr
    done = as_another_user(sys.executable, "-m", "kvkeep.cli.main", "drain", "--http", open_server.http)
    assert done.returncode == 1 and f"{made_token(open_server)} cannot be read: Permission denied" in done.stderr
    assert "Run this as the server's user" in done.stderr and "--token-file" in done.stderr
    done = as_another_user(sys.executable, "-m", "kvkeep.cli.main", "status", "--http", open_server.http)
    assert done.returncode == 0, "reading stays open"
    assert ask(open_server.http, "/v1/status")["stopping"] is False


def test_clients_that_never_read_do_not_keep_health_from_being_answered() -> None:
    """More of them than there are connections, each with an answer that does not fit the kernel's buffers."""
    server = ServerProcess("--pool-size", "16MiB")
    keep_tenants(server, 5_000)
    with server, contextlib.ExitStack() as crowd:
        host, _, port = server.http.rpartition(":")
        memory = resident_kib(server.pid)
        for number in range(600):
            path = "/metrics" if number % 2 else "/v1/tenants?limit=100000"
            crowd.enter_context(ask_and_never_read((host, int(port)), path))
        for _ in range(20):
            assert [http_status(server.http, path, None) for path in ("/healthz", "/readyz")] == [200, 200]
        assert eventually(lambda: http_status(server.http, "/metrics", None) == 200), "nor others from being served"
        assert resident_kib(server.pid) - memory < 256 << 10
        lines = [line for line in server.log().splitlines() if "kvkeep.server.guard" in line]
        assert 1 <= len(lines) <= 4 and any("too many connections" in line for line in lines), lines


# -- where it listens, and what others on the host can read


def test_beyond_loopback_it_listens_with_keys_and_token_alone(tmp_path: Path) -> None:
    for flags in (("--address", "tcp://0.0.0.0:0"), ("--http-address", "0.0.0.0:0")):
        with pytest.raises(Unavailable, match="is reachable from other hosts"):
            ServerProcess("--pool-size", "16MiB", *flags).start()
    everywhere = ("--address", "tcp://0.0.0.0:0", "--http-address", "0.0.0.0:0")
    with fortress(tmp_path / "keys", *everywhere) as fort:
        port, http = fort.server.address.rpartition(":")[2], fort.server.http.rpartition(":")[2]
        options = ClientOptions(
            address=f"tcp://127.0.0.1:{port}", curve_key=str(fort.keys / "engine.key"), server_key=fort.public_key
        )
        with kvkeep.connect(options=options, required=True, wait_ms=10_000, **CACHE) as cache:
            assert cache.put(range(8), blocks(1)) == 2
        token = fort.token_file.read_text().strip()
        for host, given, expected in (
            ("cache.example", f"Bearer {token}", 200),
            ("cache.example", "", 401),
            (f"127.0.0.1:{http}", f"Bearer {token}", 200),
        ):
            assert http_status(f"127.0.0.1:{http}", "/v1/status", given, host=host) == expected


def test_on_loopback_another_hosts_name_is_refused_even_with_the_token(fort: Fortress) -> None:
    token = f"Bearer {fort.token_file.read_text().strip()}"
    assert http_status(fort.server.http, "/v1/status", token, host="rebound.example") == 403
    assert http_status(fort.server.http, "/v1/status", token, host="localhost") == 200


def test_everything_it_makes_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    """A running server under umask 000, with an engine attached and quotas kept: every file that is there."""
    before = os.umask(0)
    try:
        address = f"ipc://{tmp_path}/socket"
        with fortress(tmp_path / "keys", "--address", address) as fort, cache_of(fort) as cache:
            cache.put(range(8), blocks(1))
            assert cache.connection.segments is not None
            asked = {"quota_bytes": 1 << 20}
            ask(fort.server.http, "/v1/tenants/default/quota", "PUT", asked, token_file=fort.token_file)
            pool, state = Path(f"/dev/shm/kvkeep-{fort.server.name}"), fort.server.state_dir
            assert state is not None
            roots = [pool, state / fort.server.name, fort.keys]
            seen = {path: path.lstat().st_mode for root in roots for path in (root, *root.rglob("*"))}
            seen[tmp_path / "socket"] = (tmp_path / "socket").lstat().st_mode
            kinds = {path.name.partition("-")[0].partition(".")[0] for path in seen}
            assert {"segment", "session", "daemon", "epoch", "quotas", "socket", "server", "admin"} <= kinds, kinds
            for path, mode in seen.items():
                assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), (path, oct(mode))
    finally:
        os.umask(before)
