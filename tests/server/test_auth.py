"""Tests for who may connect: the list of keys, the answers to ZAP, tenants bound to keys, keys that are taken back."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zmq
from zmq.utils import z85

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.checksum import ABSENT, checksum
from kvkeep.kv.identity import tenant_of
from kvkeep.server.auth import ANYONE, Caller, Gate, read_authorized, read_line
from kvkeep.server.counters import Counters
from kvkeep.server.service import Service
from kvkeep.testing.peer import Peer, chain
from kvkeep.testing.server import SimulatedServer
from kvkeep.wire import messages as m
from kvkeep.wire.auth import new_pair
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.liveness import Watch, hold

LAYOUT = 1  # the first one that a server opens
KEY, OTHER = new_pair()[0], new_pair()[0]
T1, T2 = tenant_of("one"), tenant_of("two")


# -- the list


def no_complaint(problem: str) -> None:
    raise AssertionError(problem)


def test_a_line_is_a_key_a_name_and_perhaps_tenants() -> None:
    assert read_line(f"{KEY} engine-1") == Caller(KEY, "engine-1", None)
    assert read_line(f"{KEY}   e   tenants=default,{T1},t-0*,*") == Caller(KEY, "e", ("default", T1, "t-0*", "*"))
    assert read_line(f"{KEY} e tenants=salt:one,salt:t%2Cw%20o").tenants == (T1, tenant_of("t,w o"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "begin with a public key"),
        ("short name", "begin with a public key"),
        (KEY, "followed by a name"),
        (f"{KEY} na/me", "followed by a name"),
        (f"{KEY} a b", "tenants=a,b once"),
        (f"{KEY} a tenants=default tenants=default", "tenants=a,b once"),
        (f"{KEY} a tenants=", "named by its id"),
        (f"{KEY} a tenants=default,", "named by its id"),
        (f"{KEY} a tenants=one", "named by its id"),
        (f"{KEY} a tenants=salt:", "named by its id"),
        (f"{KEY} a tenants=def*", "named by its id"),
        (f"{KEY} a tenants=*t-", "named by its id"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_line(line or " x")


def test_the_list_is_a_file_or_a_directory_of_public_keys(tmp_path: Path) -> None:
    file = tmp_path / "authorized"
    file.write_text(f"# ours\n{KEY} a\n\n{OTHER} b tenants=default\n")
    callers = read_authorized(file, no_complaint)
    assert callers == {KEY: Caller(KEY, "a"), OTHER: Caller(OTHER, "b", ("default",))}
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "a.pub").write_text(f"{KEY} a\n")
    (keys / "b.pub").write_text(f"{OTHER} b tenants=default\n")
    (keys / "a.key").write_text("a secret, which is not read")
    assert read_authorized(keys, no_complaint) == callers


def test_what_is_wrong_is_complained_of_counts_for_nothing_and_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "a.pub").write_text(f"{KEY} a\nnonsense tenants=salt:secret\n{KEY} again\n")
    (tmp_path / "b.pub").write_text(f"{OTHER} b\n")
    (tmp_path / "b.pub").chmod(0o666)
    complaints: list[str] = []
    assert set(read_authorized(tmp_path, complaints.append)) == {KEY}
    assert len(complaints) == 3 and "secret" not in str(complaints)
    assert "authorized already, as a" in complaints[1] and "open to others" in complaints[2]
    with pytest.raises(SettingsError, match="open to others"):
        read_authorized(tmp_path / "b.pub", no_complaint)


# -- tenants


def test_a_bound_key_may_name_its_tenants_alone() -> None:
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
    """A service whose sessions hold real locks, and peers with keys."""

    def __init__(self, directory: Path) -> None:
        self.server = SimulatedServer(16 * 4096, 4 * 4096)
        self.service: Service = self.server.service
        self.service._make_watch = lambda number: Watch(directory / f"session-{number}.lock")
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
        m.Finish: lambda tenant: m.Finish(tenant, LAYOUT, keys),
        m.PrepareStore: lambda tenant: m.PrepareStore(tenant, layout, 0, b"", keys),
        m.ReportBad: lambda tenant: m.ReportBad(tenant, LAYOUT, keys),
    }
    assert set(asked) == set(named), "a message with a tenant that this test does not know"
    for make in asked.values():
        assert peer.refusal(make(T2)) == peer.refusal(make("default")) == "forbidden_tenant"
        assert peer.refusal(make("no tenant")) == "bad_tenant"
        assert not isinstance(peer.say(make(T1)), m.Refused)
    assert [tenant.name for tenant in world.server.store.tenants] == [T1], "those that were refused left no trace"


def test_a_session_is_its_keys_alone(world: World) -> None:
    owner = world.peer(Caller(KEY)).attach()
    for caller in (Caller(OTHER), ANYONE):
        thief = world.peer(caller)
        thief.session, thief.number = owner.session, 100
        for message in (m.Ping(), m.Goodbye(), m.Release([1])):
            assert thief.refusal(message) == "unknown_session"
    assert owner.ask(m.Done, m.Ping())


def steps_of(world: World, peer: Peer, message: m.Lookup) -> list[tuple[str, int]]:
    """Every line that the server runs for a lookup."""
    steps: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
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


def test_what_only_another_tenant_has_is_looked_up_in_the_very_steps_of_what_nobody_has(world: World) -> None:
    """So time tells nothing either; `kvkeep bench security` measures it."""
    peer = world.peer().attach()
    layout = peer.open_layout(64)
    for tenant, name in ((T1, "mine"), (T2, "theirs")):
        assert peer.store(layout, chain(name, 3), [bytes(64)] * 3, tenant=tenant) == 3
    steps_of(world, peer, m.Lookup(T1, layout, chain("first", 3)))  # the first one of a tenant begins its counts
    absent, theirs, mine = (
        steps_of(world, peer, m.Lookup(T1, layout, chain(name, 3))) for name in ("nobody's", "theirs", "mine")
    )
    assert absent == theirs and len(absent) > 20
    assert absent != mine, "a hit is seen"


# -- keys that are taken back, or bound to less


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_key_that_loses_a_tenant_loses_its_leases_and_writes(world: World, shared_memory: bool) -> None:
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
    gone, stays, anyone = (world.peer(caller).attach() for caller in (Caller(KEY), Caller(OTHER), ANYONE))
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
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert peer.refusal(m.CompleteStore(peer.number, bytes(16))) == "unknown_session"
    world.service.end_dead_sessions(10**9)
    other = world.peer(Caller(OTHER)).attach()
    other.open_layout(64)
    assert len(world.server.store.blocks.table) == 2, "nobody gets slots that it may still be writing"
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    assert world.service.end_dead_sessions(10**9 + 1) >= 1
    assert not len(world.server.store.blocks.table)


# -- the gate


def zap(key: bytes, mechanism: bytes = b"CURVE", *more: bytes) -> list[bytes]:
    return [b"id", b"", b"1.0", b"7", b"kvkeep", b"192.0.2.7", b"", mechanism, key, *more]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "server.key").write_text(new_pair()[1])
    (tmp_path / "server.key").chmod(0o600)
    (tmp_path / "authorized").write_text(f"{KEY} a\n")
    return tmp_path / "server.key", tmp_path / "authorized"


def make_gate(keys: tuple[Path, Path], counters: Counters, clock: Clock | None = None) -> Gate:
    return Gate(zmq.Context.instance(), *keys, lambda: counters, clock or Clock())


def test_zap_lets_in_authorized_keys_and_nobody_else(keys: tuple[Path, Path]) -> None:
    counters = Counters()
    gate = make_gate(keys, counters)
    raw = z85.decode(KEY)
    assert gate.answer(zap(raw)) == [b"id", b"", b"1.0", b"7", b"200", b"", KEY.encode(), b""]
    bad = [zap(z85.decode(OTHER)), zap(raw, b"NULL"), zap(raw, b"PLAIN", b"x"), zap(raw[:31]), zap(raw, b"CURVE", b"x")]
    bad += [zap(b""), zap(KEY.encode()), [b"id", b""], [b"id", b"", b"1.0"], zap(raw)[:-1]]
    for request in bad:
        reply = gate.answer(request)
        assert reply[4] == b"400" and reply[6:] == [b"", b""] and len(reply) == 8
    assert counters.auth_failures == {"unknown_key": len(bad)}


def test_a_failure_is_logged_once_a_minute_whoever_knocks(
    keys: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    clock, counters = Clock(), Counters()
    gate = make_gate(keys, counters, clock)
    with caplog.at_level(logging.WARNING, "kvkeep"):
        for second in range(150):
            clock.now = second
            gate.answer(zap(z85.decode(OTHER)))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 3 and counters.auth_failures["unknown_key"] == 150
    assert "192.0.2.7" in said[0] and "unknown_key" in said[0] and "; 60 since" in said[1]
    assert OTHER not in str(said)


def test_the_list_is_read_again_when_it_changes(keys: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    gate = make_gate(keys, Counters())
    assert not gate.reload() and set(gate.callers) == {KEY}
    keys[1].write_text(f"{OTHER} b\nnonsense\n")
    with caplog.at_level(logging.INFO, "kvkeep"):
        assert gate.reload() and set(gate.callers) == {OTHER}
    assert "1 new, 1 revoked" in caplog.text and "authorized, key 2" in caplog.text and "ignored" in caplog.text
    assert not gate.reload()
    keys[1].write_text("")
    assert gate.reload() and not gate.callers


def test_a_list_that_cannot_be_read_changes_nothing_until_it_can(keys: tuple[Path, Path]) -> None:
    gate = make_gate(keys, Counters())
    keys[1].unlink()
    assert not gate.reload() and set(gate.callers) == {KEY}
    keys[1].write_text(f"{OTHER} b\n")
    keys[1].chmod(0o666)
    assert not gate.reload() and set(gate.callers) == {KEY}
    keys[1].chmod(0o644)
    assert gate.reload() and set(gate.callers) == {OTHER}


def test_a_key_that_leaves_the_directory_is_revoked(keys: tuple[Path, Path], tmp_path: Path) -> None:
    directory = tmp_path / "clients"
    directory.mkdir()
    for name, key in (("a", KEY), ("b", OTHER)):
        (directory / f"{name}.pub").write_text(f"{key} {name}\n")
    gate = make_gate((keys[0], directory), Counters())
    assert set(gate.callers) == {KEY, OTHER}
    (directory / "a.pub").unlink()
    assert gate.reload() and set(gate.callers) == {OTHER}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "clients"
    path.mkdir(mode=0o700)
    for name, key in (("a", KEY), ("b", OTHER)):
        (path / f"{name}.pub").write_text(f"{key} {name}\n")
    return path


@pytest.mark.parametrize("link", [".#a.pub", "c.pub"])
def test_a_link_to_nothing_keeps_nobody_from_being_revoked(
    keys: tuple[Path, Path], directory: Path, link: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Editors leave such while a file is open."""
    gate = make_gate((keys[0], directory), Counters())
    (directory / link).symlink_to("nobody@nowhere.1")
    assert not gate.reload() and set(gate.callers) == {KEY, OTHER}
    assert ("cannot be read" in caplog.text) == (link == "c.pub"), "what begins with a dot is not looked at"
    (directory / "b.pub").unlink()
    assert gate.reload() and set(gate.callers) == {KEY}


def test_what_is_wrong_with_the_list_is_tried_again_each_time_and_said_every_minute(
    keys: tuple[Path, Path], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    gate = make_gate((keys[0], directory), Counters(), clock)
    (directory / "c.pub").write_text("nonsense\n")
    for second in range(150):
        clock.now = 1_000.0 + second
        gate.reload()
    assert caplog.text.count("c.pub, key 1") == 3
    (directory / "c.pub").unlink()
    gate.reload()
    assert not gate._problems


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it another user's: or us another user, where we cannot."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)


@pytest.mark.parametrize("what", ["directory", "file", "the only file"])
def test_a_list_that_belongs_to_another_user_lets_nobody_in(
    keys: tuple[Path, Path], directory: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory / "b.pub"
    give_away(directory if what == "directory" else file, monkeypatch)
    complaints: list[str] = []
    if what == "file":
        assert OTHER not in read_authorized(directory, complaints.append)
        assert "b.pub belongs to another user" in str(complaints)
        return
    with pytest.raises(SettingsError, match="belongs to another user") as caught:
        read_authorized(directory if what == "directory" else file, no_complaint)
    assert "chown" in caught.value.hint


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_to_stops_the_start_and_later_changes_nothing(
    keys: tuple[Path, Path], directory: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    gate = make_gate((keys[0], directory), Counters())
    directory.chmod(mode)
    (directory / "evil.pub").write_text(f"{new_pair()[0]} evil\n")
    assert not gate.reload() and set(gate.callers) == {KEY, OTHER}
    assert "others can write to the directory" in caplog.text and "nobody can be revoked" in caplog.text
    with pytest.raises(SettingsError, match="others can write") as caught:
        make_gate((keys[0], directory), Counters())
    assert "chmod 700" in caught.value.hint
    (directory / "evil.pub").unlink()
    (directory / "a.pub").unlink()
    directory.chmod(0o755)
    assert gate.reload() and set(gate.callers) == {OTHER}


def test_a_directory_that_cannot_be_looked_into_throws_nobody_out(
    keys: tuple[Path, Path], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o711)  # or it would be the parent that keeps us out
        moved = Path(shutil.move(directory, parent)) / ""
        gate = make_gate((keys[0], moved), Counters())
        moved.chmod(0o100)
        was_root = os.geteuid() == 0
        try:
            if was_root:
                os.seteuid(65534)
            assert not gate.reload()
        finally:
            if was_root:
                os.seteuid(0)
            moved.chmod(0o700)
        assert set(gate.callers) == {KEY, OTHER} and "cannot be read: Permission denied" in caplog.text
        (moved / "a.pub").unlink()
        assert gate.reload() and set(gate.callers) == {OTHER}


def test_a_list_with_a_mistake_stops_the_start(keys: tuple[Path, Path]) -> None:
    keys[1].write_text("nonsense\n")
    with pytest.raises(SettingsError, match=r"authorized_keys: .*authorized, key 1") as caught:
        make_gate(keys, Counters())
    assert "public-key name" in caught.value.hint


def test_a_handshake_is_let_in_by_the_gate_and_names_its_key(keys: tuple[Path, Path]) -> None:
    """Over real sockets: first nobody, then a key that becomes authorized, then the same key revoked."""
    counters = Counters()
    gate = Gate(context := zmq.Context(), *keys, lambda: counters)
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        gate.guard(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        public, secret = new_pair()
        keys[1].write_text(f"{public} c\n")
        assert gate.reload()
        dealer.curve_publickey, dealer.curve_secretkey = public.encode(), secret.encode()
        dealer.curve_serverkey = zmq.curve_public(keys[0].read_bytes())
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart([b"one", b"two"])
        poller = zmq.Poller()
        for socket in (router, *gate.sockets):
            poller.register(socket, zmq.POLLIN)
        for _ in range(100):  # events of ours come first: one, if all is well
            if router in (ready := dict(poller.poll(10_000))):
                break
            for socket in ready:
                gate.serve(socket)
        assert router.poll(0), "nothing came"
        _, frames, caller = gate.receive(router)
        assert frames == [b"one", b"two"] and caller == Caller(public, "c")
        keys[1].write_text("")
        assert gate.reload()
        dealer.send(b"three")
        assert router.poll(10_000)
        _, _, caller = gate.receive(router)
        assert caller is not None and caller.revoked and counters.auth_failures == {"revoked_key": 1}
        with pytest.raises(zmq.Again):
            gate.receive(router)
    finally:
        gate.close()
        context.destroy(linger=0)


def test_a_message_that_no_key_came_with_is_nobodys(keys: tuple[Path, Path], tmp_path: Path) -> None:
    """It cannot be, unless ZMQ let somebody in without asking us; then it gets nothing all the same."""
    counters = Counters()
    gate = Gate(context := zmq.Context(), *keys, lambda: counters)
    guarded, open_one, dealer = (context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.DEALER))
    try:
        gate.guard(guarded)
        open_one.bind(f"ipc://{tmp_path}/socket")
        dealer.connect(f"ipc://{tmp_path}/socket")
        dealer.send_multipart([b"one", b"two"])
        assert open_one.poll(10_000)
        assert gate.receive(open_one)[1:] == ([b"one", b"two"], None)
        assert counters.auth_failures == {"no_key": 1}
    finally:
        gate.close()
        context.destroy(linger=0)


def test_without_a_key_everybody_is_let_in_as_before(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        gate = Gate(context, None, None, Counters)
        gate.guard(router)
        router.bind(f"ipc://{tmp_path}/socket")
        dealer.connect(f"ipc://{tmp_path}/socket")
        dealer.send_multipart([b"one", b"two"])
        assert router.poll(10_000)
        assert gate.receive(router)[1:] == ([b"one", b"two"], ANYONE)
        assert not gate.sockets and not gate.reload()
        gate.close()
