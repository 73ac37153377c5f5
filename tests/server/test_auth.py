"""Tests for who may connect: the list of clients, tenants bound to them, files that change, revoked
clients."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import ssl
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvkeep.cli.certificates import Issued, issue, new_authority
from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.checksum import ABSENT, checksum
from kvkeep.kv.identity import tenant_of
from kvkeep.server.auth import ANYONE, Authority, Caller, read_authorized, read_line
from kvkeep.server.service import Service
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.pool_files import Watch, hold
from kvkeep.wire.tls import TlsFiles
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

LAYOUT = 1  # the first one that a server opens
KEY, OTHER = "engine-a", "sha256:" + "b0" * 32
T1, T2 = tenant_of("one"), tenant_of("two")
CA, OTHER_CA = new_authority(10), new_authority(10)
SERVER = issue(CA, "kvkeep server", ("localhost",), days=5)


# -- the list


def no_complaint(problem: str) -> None:
    raise AssertionError(problem)


def test_a_line_is_a_name_and_perhaps_tenants_and_a_right() -> None:
    for name in ("engine-1", "cache.example", "spiffe://example/engine", "#1", OTHER):
        assert read_line(name) == Caller(name, name, None)
    assert read_line(f"e   tenants=default,{T1},t-0*,*") == Caller(
        "e", "e", ("default", T1, "t-0*", "*")
    )
    assert read_line("e admin") == read_line("e  admin ") == Caller("e", "e", None, admin=True)
    assert (
        read_line("e admin tenants=*")
        == read_line("e tenants=* admin")
        == Caller("e", "e", ("*",), admin=True)
    )
    assert read_line("admin") == Caller("admin", "admin"), "a certificate may be called so"
    assert read_line("e tenants=salt:one,salt:t%2Cw%20o").tenants == (T1, tenant_of("t,w o"))


def test_a_fingerprint_may_be_written_as_openssl_prints_it() -> None:
    assert read_line("SHA256:" + ":".join(["B0"] * 32)).key == OTHER


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a\x07b", "certificate.s name of 1 to 256"),
        ("a" * 257, "certificate.s name of 1 to 256"),
        ("tenants=default", "certificate.s name of 1 to 256"),
        ("sha256:", "64 hex digits"),
        ("sha256:" + "b0" * 31, "64 hex digits"),
        ("sha256:" + "x0" * 32, "64 hex digits"),
        ("a b", "only tenants=a,b and admin"),
        ("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7 engine", "only tenants=a,b and admin"),
        ("a tenants=default tenants=default", "only tenants=a,b and admin"),
        ("a admin admin", "only tenants=a,b and admin"),
        ("a admin=", "only tenants=a,b and admin"),
        ("a Admin", "only tenants=a,b and admin"),
        ("a tenants=", "a tenant is an id"),
        ("a tenants=default,", "a tenant is an id"),
        ("a tenants=one", "a tenant is an id"),
        ("a tenants=salt:", "a tenant is an id"),
        ("a tenants=def*", "a tenant is an id"),
        ("a tenants=*t-", "a tenant is an id"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_line(line)


def test_the_list_is_a_file_or_a_directory_of_files(tmp_path: Path) -> None:
    file = tmp_path / "authorized"
    file.write_text(f"# ours\n{KEY}\n\n{OTHER} tenants=default\n")
    callers = read_authorized(file, no_complaint)
    assert callers == {KEY: Caller(KEY, KEY), OTHER: Caller(OTHER, OTHER, ("default",))}
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "a.client").write_text(f"{KEY}\n")
    (clients / "b.client").write_text(f"{OTHER} tenants=default\n")
    (clients / "c.client~").write_text("an-editor-left-this\n")
    (clients / "c.pem").write_text("a certificate, which is not read")
    assert read_authorized(clients, no_complaint) == callers


def test_what_is_wrong_is_complained_of_counts_for_nothing_and_is_not_quoted(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.client").write_text(
        f"{KEY}\nnonsense tenants=salt:,secret\n{KEY} tenants=default\n"
    )
    (tmp_path / "b.client").write_text(f"{OTHER}\n")
    (tmp_path / "b.client").chmod(0o666)
    complaints: list[str] = []
    assert read_authorized(tmp_path, complaints.append) == {KEY: Caller(KEY, KEY)}
    assert len(complaints) == 3 and "secret" not in str(complaints)
    assert "engine-a is authorized already" in complaints[1]
    assert "open to other users" in complaints[2]
    with pytest.raises(SettingsError, match="open to other users"):
        read_authorized(tmp_path / "b.client", no_complaint)


# -- tenants


def test_a_bound_client_may_name_its_tenants_alone() -> None:
    Caller(KEY).check_tenant(T1)
    ANYONE.check_tenant(T1)
    bound = Caller(KEY, "a", (T1, "t-0*"))
    for tenant in (T1, "t-0" + "f" * 31):
        bound.check_tenant(tenant)
    for tenant in ("default", T2, "t-1" + "f" * 31):
        with pytest.raises(RequestError) as caught:
            bound.check_tenant(tenant)
        assert caught.value.code == "forbidden_tenant" and caught.value.field == "tenant"
    Caller(KEY, "a", ("*",)).check_tenant("default")
    with pytest.raises(RequestError):
        Caller(KEY, "a", ("t-*",)).check_tenant("default")


class World:
    """A service whose sessions hold real locks, and peers with certificates."""

    def __init__(self, directory: Path) -> None:
        self.server = SimulatedServer(
            16 * 4096,
            4 * 4096,
            make_watch=lambda number: Watch(directory / f"session-{number}.lock"),
        )
        self.service: Service = self.server.service
        self.now_ms = 0

    def peer(self, caller: Caller = ANYONE) -> Peer:
        return Peer(lambda frames: self.service.handle(frames, self.now_ms, caller))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_every_request_that_names_a_tenant_is_held_against_the_key(world: World) -> None:
    peer = world.peer(Caller(KEY, "a", (T1,))).attach()
    layout, keys = peer.open_layout(64), chain("a", 1)
    named = [each for each in m.Request.__args__ if "tenant" in each.__struct_fields__]
    asked: dict[type, Any] = {
        m.Lookup: lambda tenant: m.Lookup(tenant, layout, keys),
        m.Prefetch: lambda tenant: m.Prefetch(tenant, layout, keys),
        m.Finish: lambda tenant: m.Finish(tenant, LAYOUT, keys),
        m.PrepareStore: lambda tenant: m.PrepareStore(tenant, layout, 0, b"", keys),
        m.ReportBad: lambda tenant: m.ReportBad(tenant, LAYOUT, keys),
        m.DescribeBlocks: lambda tenant: m.DescribeBlocks(tenant, layout, keys, [b""]),
    }
    assert set(asked) == set(named), "a message with a tenant that this test does not know"
    for make in asked.values():
        assert peer.refusal(make(T2)) == peer.refusal(make("default")) == "forbidden_tenant"
        assert peer.refusal(make("no tenant")) == "bad_tenant"
        allowed = "not_local" if make is asked[m.DescribeBlocks] else ""
        answer = peer.say(make(T1))
        assert (answer.code if isinstance(answer, m.Refused) else "") == allowed
    assert [tenant.name for tenant in world.server.store.tenants] == [T1], (
        "those that were refused left no trace"
    )


def test_a_session_is_its_keys_alone(world: World) -> None:
    owner = world.peer(Caller(KEY)).attach()
    for caller in (Caller(OTHER), ANYONE):
        thief = world.peer(caller)
        thief.session, thief.number = owner.session, 100
        for message in (m.Ping(), m.Goodbye(), m.Release([1])):
            assert thief.refusal(message) == "unknown_session"
    assert owner.ask(m.Done, m.Ping())


def steps_of(world: World, peer: Peer, message: m.Lookup) -> list[tuple[str, int]]:
    """Every line of ours that the server runs for a lookup; the interpreter may collect garbage at
    any of them."""
    steps: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and "/kvkeep/" in frame.f_code.co_filename:
            steps.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    peer.number += 1
    frames = [bytes(frame) for frame in encode(Header(peer.session, peer.number), message)]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        world.service.handle(frames, world.now_ms, ANYONE)
    finally:
        sys.settrace(before)
    peer.ask(m.Done, m.Release([peer.number]))
    return steps


def test_what_only_another_tenant_has_is_looked_up_in_the_very_steps_of_what_nobody_has(
    world: World,
) -> None:
    """So time tells nothing either; `kvkeep bench security` measures it."""
    peer = world.peer().attach()
    layout = peer.open_layout(64)
    for tenant, name in ((T1, "mine"), (T2, "theirs")):
        assert peer.store(layout, chain(name, 3), [bytes(64)] * 3, tenant=tenant) == 3
    steps_of(
        world, peer, m.Lookup(T1, layout, chain("first", 3))
    )  # the first one of a tenant begins its counts
    absent, theirs, mine = (
        steps_of(world, peer, m.Lookup(T1, layout, chain(name, 3)))
        for name in ("nobody's", "theirs", "mine")
    )
    assert absent == theirs and len(absent) > 20
    assert absent != mine, "a hit is seen"


# -- keys that are taken back, or bound to less


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_key_that_loses_a_tenant_loses_its_leases_and_writes(
    world: World, shared_memory: bool
) -> None:
    key = [Caller(KEY, "a", (T1, T2))]
    peer = Peer(lambda frames: world.service.handle(frames, 0, key[0]))
    welcome = peer.hello()
    lock = hold(Path(welcome.pool.lock)) if shared_memory else None
    peer.ask(m.Done, m.Attach(m.SHARED_MEMORY if shared_memory else m.NETWORK))
    layout, held = peer.open_layout(64), {}
    for tenant in (T1, T2):
        writer = world.peer().attach()
        writer.store(writer.open_layout(64), chain("a", 2), [bytes(64)] * 2, tenant=tenant)
        assert peer.ask(m.Found, m.Lookup(tenant, layout, chain("a", 2))).blocks == 2
        lease = peer.number
        peer.ask(m.Prepared, m.PrepareStore(tenant, layout, 0, b"", chain("w", 1)))
        held[tenant] = lease, peer.number
    key[0] = Caller(KEY, "a", (T1,))
    lease, write = held[T2]
    if not shared_memory:  # there are no such requests: it has the pool mapped
        assert peer.refusal(m.Fetch(lease, 0, 0, 1)) == "forbidden_tenant"
        assert peer.refusal(m.Put(write, 0), [bytes(64)]) == "forbidden_tenant"
        peer.ask(m.Done, m.Fetch(held[T1][0], 0, 0, 1))
        peer.ask(m.Done, m.Put(held[T1][1], 0), [bytes(64)])
    checksums = np.array([ABSENT if shared_memory else checksum(bytes(64))], dtype="<u8").tobytes()
    assert peer.refusal(m.CompleteStore(write, checksums)) == "forbidden_tenant"
    assert peer.ask(m.Done, m.CompleteStore(held[T1][1], checksums)).count == 1
    assert peer.ask(m.Done, m.AbandonStore([write])).count == 1, "giving back is always allowed"
    assert peer.ask(m.Done, m.Release([lease])).count == 1
    assert not world.service.sessions.get(peer.session, KEY).write_tenants
    if lock is not None:
        os.close(lock)


def test_sessions_of_a_revoked_key_end_and_those_of_others_stay(world: World) -> None:
    gone, stays, anyone = (
        world.peer(caller).attach() for caller in (Caller(KEY), Caller(OTHER), ANYONE)
    )
    gone.open_layout(64)
    gone.ask(m.Prepared, m.PrepareStore("default", 1, 0, b"", chain("a", 2)))
    world.service.bar({OTHER}, 0)
    assert gone.refusal(m.Ping()) == "unknown_session"
    assert stays.ask(m.Done, m.Ping()) and anyone.ask(m.Done, m.Ping())
    assert len(world.service.sessions) == 2 and not len(world.server.store.blocks.table)
    revoked = world.peer(Caller(KEY, revoked=True))
    assert revoked.refusal(m.Hello("peer", 1)) == "revoked_key"


def test_a_revoked_process_that_has_the_pool_mapped_keeps_its_slots_until_it_is_gone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    peer = world.peer(Caller(KEY))
    lock = hold(Path(peer.hello().pool.lock))
    peer.ask(m.Done, m.Attach(m.SHARED_MEMORY))
    layout = peer.open_layout(64)
    slots = peer.ask(m.Prepared, m.PrepareStore("default", layout, 0, b"", chain("a", 2))).slots
    assert slots
    with caplog.at_level(logging.WARNING, "kvkeep"):
        world.service.bar(set(), 0)
        world.service.bar(set(), 0)
    (line,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert f"its certificate {KEY} is not authorized now" in line
    assert peer.refusal(m.CompleteStore(peer.number, bytes(16))) == "unknown_session"
    world.service.end_dead_sessions(10**9)
    other = world.peer(Caller(OTHER)).attach()
    other.open_layout(64)
    assert len(world.server.store.blocks.table) == 2, (
        "nobody gets slots that it may still be writing"
    )
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    assert world.service.end_dead_sessions(10**9 + 1) >= 1
    assert not len(world.server.store.blocks.table)


# -- the authority


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(files: TlsFiles, issued: Issued, ca: str = CA.cert) -> None:
    """Writes three files anew, each with another inode, as a rotation does."""
    for path, text in ((files.cert, issued.cert), (files.key, issued.key), (files.ca, ca)):
        new = path.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        new.rename(path)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    files = TlsFiles(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")
    put(files, SERVER)
    return files


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    (tmp_path / "authorized").write_text(f"{KEY}\n")
    return tmp_path / "authorized"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "clients"
    path.mkdir(mode=0o700)
    for name, key in (("a", KEY), ("b", OTHER)):
        (path / f"{name}.client").write_text(f"{key}\n")
    return path


def names_in(authority: Authority) -> set[str]:
    assert authority.callers is not None
    return set(authority.callers)


PRINT = "sha256:" + "0" * 64


def test_without_tls_everybody_is_anyone() -> None:
    authority = Authority(None, None)
    assert (
        authority.context is None and authority.caller_of(()) is ANYONE and not authority.reload()
    )


def test_without_a_list_every_certificate_of_the_ca_is_let_in(files: TlsFiles) -> None:
    authority = Authority(files, None)
    assert authority.context is not None and authority.callers is None
    assert authority.caller_of((PRINT, "engine-9", "b.example")) == Caller("engine-9", "engine-9")
    assert authority.caller_of((PRINT,)) == Caller(PRINT, PRINT), "it has no other name"
    assert authority.caller_of(()) is None
    assert not authority.reload()


def test_any_name_of_a_certificate_can_be_in_the_list_and_its_fingerprint_counts_first(
    files: TlsFiles, listed: Path
) -> None:
    listed.write_text(f"{KEY} tenants={T1}\nb.example\nspiffe://x/y\n{OTHER} tenants=default\n")
    authority = Authority(files, listed)
    assert authority.caller_of((PRINT, KEY)) == Caller(KEY, KEY, (T1,))
    assert authority.caller_of((PRINT, "other", "b.example")) == Caller("b.example", "other")
    assert authority.caller_of((PRINT, "spiffe://x/y")) == Caller("spiffe://x/y", "spiffe://x/y")
    assert authority.caller_of((OTHER, KEY)) == Caller(OTHER, KEY, ("default",))
    for names in ((), (PRINT,), (PRINT, "engine"), (PRINT, "Engine-A"), (PRINT, "*")):
        assert authority.caller_of(names) is None


def test_the_list_is_read_again_when_it_changes(
    files: TlsFiles, listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(files, listed)
    context = authority.context
    assert not authority.reload() and names_in(authority) == {KEY}
    listed.write_text(f"{OTHER}\nnon sense\n")
    with caplog.at_level(logging.INFO, "kvkeep"):
        assert authority.reload() and names_in(authority) == {OTHER}
    assert authority.caller_of((PRINT, KEY)) is None and authority.context is context
    assert "1 new, 1 revoked" in caplog.text
    assert "authorized, client 2" in caplog.text
    assert "ignored" in caplog.text
    assert not authority.reload()
    listed.write_text("")
    assert authority.reload() and not authority.callers and authority.caller_of((OTHER,)) is None


def test_tenants_that_change_are_in_force_at_once(files: TlsFiles, listed: Path) -> None:
    authority = Authority(files, listed)
    listed.write_text(f"{KEY} tenants={T1}\n")
    assert authority.reload() and authority.caller_of((PRINT, KEY)) == Caller(KEY, KEY, (T1,))


def test_who_administers_is_read_again_and_holds_as_long_as_its_ca_does(
    files: TlsFiles, listed: Path
) -> None:
    put(files, SERVER, CA.cert + OTHER_CA.cert)
    listed.write_text("ops admin\nengine\n")
    authority = Authority(files, listed)
    ops, engine = (PRINT, "ops"), (PRINT, "engine")
    assert authority.is_admin(ops, 0)
    assert not authority.is_admin(engine, 0)
    assert not authority.is_admin((), 0)
    listed.write_text(f"ops admin\n{PRINT}\n")
    assert authority.reload() and not authority.is_admin(ops, 0), (
        "the line of its fingerprint counts first"
    )
    listed.write_text("ops admin\n")
    assert authority.reload() and authority.is_admin(ops, 0)
    put(files, SERVER)
    assert authority.reload()
    assert not authority.is_admin(ops, 0)
    assert authority.is_admin(ops, authority.trust)
    assert not Authority(files, None).is_admin(ops, 0), "without a list nobody does"
    assert not Authority(None, None).is_admin((), 0)


def test_over_https_a_certificate_is_asked_for_and_not_required(files: TlsFiles) -> None:
    authority = Authority(files, None)
    assert authority.context is not None and authority.http_context is not None
    assert authority.context.verify_mode is ssl.CERT_REQUIRED
    assert authority.http_context.verify_mode is ssl.CERT_OPTIONAL
    before = authority.http_context
    put(files, issue(CA, "kvkeep server", ("localhost",), days=5))
    assert authority.reload() and authority.http_context is not before


def test_a_list_that_cannot_be_read_changes_nothing_until_it_can(
    files: TlsFiles, listed: Path
) -> None:
    authority = Authority(files, listed)
    listed.unlink()
    assert not authority.reload() and names_in(authority) == {KEY}
    listed.write_text(f"{OTHER}\n")
    listed.chmod(0o666)
    assert not authority.reload() and names_in(authority) == {KEY}
    listed.chmod(0o644)
    assert authority.reload() and names_in(authority) == {OTHER}


def test_a_client_that_leaves_the_directory_is_revoked(files: TlsFiles, directory: Path) -> None:
    authority = Authority(files, directory)
    assert names_in(authority) == {KEY, OTHER}
    (directory / "a.client").unlink()
    assert authority.reload() and names_in(authority) == {OTHER}


@pytest.mark.parametrize("link", [".#a.client", "c.client"])
def test_a_link_to_nothing_keeps_nobody_from_being_revoked(
    files: TlsFiles, directory: Path, link: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Editors leave such while a file is open."""
    authority = Authority(files, directory)
    (directory / link).symlink_to("nobody@nowhere.1")
    assert not authority.reload() and names_in(authority) == {KEY, OTHER}
    assert ("cannot be read" in caplog.text) == (link == "c.client"), (
        "what begins with a dot is not looked at"
    )
    (directory / "b.client").unlink()
    assert authority.reload() and names_in(authority) == {KEY}


def test_what_is_wrong_is_tried_again_each_time_and_said_every_minute(
    files: TlsFiles, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    authority = Authority(files, directory, clock)
    (directory / "c.client").write_text("non sense\n")
    files.key.write_text("nonsense")
    for second in range(150):
        clock.now = 1_000.0 + second
        authority.reload()
    assert caplog.text.count("c.client, client 1") == caplog.text.count("holds no private key") == 3
    (directory / "c.client").unlink()
    put(files, SERVER)
    authority.reload()
    caplog.clear()
    clock.now += 1_000.0
    authority.reload()
    assert not caplog.text


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it another user's: or us another user, where we cannot."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)


@pytest.mark.parametrize("what", ["directory", "file", "the only file"])
def test_a_list_that_belongs_to_another_user_lets_nobody_in(
    directory: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory / "b.client"
    give_away(directory if what == "directory" else file, monkeypatch)
    complaints: list[str] = []
    if what == "file":
        assert OTHER not in read_authorized(directory, complaints.append)
        assert "b.client belongs to another user" in str(complaints)
        return
    with pytest.raises(SettingsError, match="belongs to another user") as caught:
        read_authorized(directory if what == "directory" else file, no_complaint)
    assert "chown" in caught.value.hint


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_to_stops_the_start_and_later_changes_nothing(
    files: TlsFiles, directory: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(files, directory)
    directory.chmod(mode)
    (directory / "evil.client").write_text("evil\n")
    assert not authority.reload() and names_in(authority) == {KEY, OTHER}
    assert "other users can write to the directory" in caplog.text
    assert "no client can be revoked" in caplog.text
    with pytest.raises(SettingsError, match="other users can write") as caught:
        Authority(files, directory)
    assert "chmod 700" in caught.value.hint
    (directory / "evil.client").unlink()
    (directory / "a.client").unlink()
    directory.chmod(0o755)
    assert authority.reload() and names_in(authority) == {OTHER}


def test_a_directory_that_cannot_be_looked_into_throws_nobody_out(
    files: TlsFiles, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o711)  # or it would be the parent that keeps us out
        moved = Path(shutil.move(directory, parent)) / ""
        authority = Authority(files, moved)
        moved.chmod(0o100)
        was_root = os.geteuid() == 0
        try:
            if was_root:
                os.seteuid(65534)
            assert not authority.reload()
        finally:
            if was_root:
                os.seteuid(0)
            moved.chmod(0o700)
        assert names_in(authority) == {KEY, OTHER}
        assert "cannot be read: Permission denied" in caplog.text
        (moved / "a.client").unlink()
        assert authority.reload() and names_in(authority) == {OTHER}


def test_a_list_with_a_mistake_stops_the_start(files: TlsFiles, listed: Path) -> None:
    listed.write_text("non sense\n")
    with pytest.raises(
        SettingsError, match=r"authorized_clients: .*authorized, client 1"
    ) as caught:
        Authority(files, listed)
    assert "[tenants=a,b] [admin]" in caught.value.hint


def test_a_list_without_anybody_is_warned_of(
    files: TlsFiles, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for each in directory.iterdir():
        each.rename(each.with_suffix(".pub"))
    Authority(files, directory)
    assert "no client is authorized" in caplog.text and ".client" in caplog.text


# -- certificates that change


def test_a_renewed_certificate_is_used_without_a_restart(
    files: TlsFiles, listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(files, listed)
    before = authority.context
    put(files, issue(CA, "kvkeep server", ("localhost",), days=5))
    with caplog.at_level(logging.INFO, "kvkeep"):
        assert authority.reload()
    assert authority.context is not before
    assert "were read again" in caplog.text
    assert authority.trust == 0
    assert not authority.reload(), "once is enough"


def expired() -> Issued:
    return issue(
        CA, "kvkeep server", ("localhost",), days=1, now=datetime.now(UTC) - timedelta(days=5)
    )


@pytest.mark.parametrize("broken", ["half", "expired", "key", "ca"])
def test_broken_files_leave_those_before_in_force_until_they_are_mended(
    files: TlsFiles, listed: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(files, listed)
    before, new = authority.context, issue(CA, "kvkeep server", ("localhost",), days=5)
    if broken == "half":
        files.cert.write_text(new.cert)  # the key follows in a moment
    elif broken == "expired":
        put(files, expired())
    else:
        getattr(files, broken).chmod(0o666)
    listed.write_text(f"{OTHER}\n")
    assert authority.reload() and names_in(authority) == {OTHER}, "the list changes all the same"
    assert authority.context is before
    assert f"tls: tls_{'key' if broken == 'half' else ''}" in caplog.text
    assert "stay in use" in caplog.text
    assert not authority.reload()
    put(files, new)
    assert authority.reload() and authority.context is not before


def test_a_broken_list_does_not_keep_a_certificate_from_being_renewed(
    files: TlsFiles, listed: Path
) -> None:
    authority = Authority(files, listed)
    before = authority.context
    listed.unlink()
    put(files, issue(CA, "kvkeep server", ("localhost",), days=5))
    assert authority.reload() and authority.context is not before and names_in(authority) == {KEY}


def test_connections_are_to_be_verified_again_when_a_ca_was_removed_and_not_when_one_was_added(
    files: TlsFiles,
) -> None:
    authority = Authority(files, None)
    put(files, SERVER, CA.cert + OTHER_CA.cert)
    assert authority.reload() and authority.trust == 0
    put(files, SERVER, "# in another order\n" + OTHER_CA.cert + CA.cert)
    assert authority.reload() and authority.trust == 0
    put(files, SERVER, OTHER_CA.cert)
    assert authority.reload() and authority.trust == 1
    put(files, SERVER, "")
    assert not authority.reload() and authority.trust == 1


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_files_that_cannot_be_used_stop_the_start(files: TlsFiles, which: str) -> None:
    getattr(files, which).write_text("nonsense")
    with pytest.raises(SettingsError, match=f"tls_{which}: "):
        Authority(files, None)
