"""Tests for the service: one reply to every request, refusals by name, and nothing a client says is
believed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvkeep import __version__
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import addresses
from kvkeep.server.counters import TenantCounts
from kvkeep.server.service import LINES_A_MINUTE, Service
from kvkeep.server.sessions import ServerSession
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep.wire.pool_files import Watch, hold
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity

LAYOUT = 1  # the first one that a server opens
KEYS = chain("a", 4)
BLOCKS = [bytes([at + 1]) * 64 for at in range(4)]
LIMITS = Limits(
    blocks_per_request=8,
    leases_per_session=3,
    writing_blocks_per_session=6,
    sessions=4,
    layouts=2,
    tenants=2,
    shards=4,
)


class World:
    """A server with small limits, its time, and peers."""

    def __init__(self) -> None:
        self.server = SimulatedServer(16 * 4096, 4 * 4096, limits=LIMITS, network_timeout_ms=1_000)
        self.service: Service = self.server.service
        self.now_ms = 0

    def peer(self) -> Peer:
        return Peer(lambda frames: self.service.handle(frames, self.now_ms))

    @property
    def session(self) -> ServerSession:
        return self.service.sessions.all()[0]


@pytest.fixture
def world() -> Iterator[World]:
    """Whatever a test did, the store is sound at the end."""
    world = World()
    yield world
    check_integrity(world.server.store)


@pytest.fixture
def peer(world: World) -> Peer:
    return world.peer().attach()


@pytest.fixture
def layout(peer: Peer) -> int:
    return peer.open_layout(64)


def prepare(layout: int, keys: bytes = KEYS, **changes: object) -> m.PrepareStore:
    fields = {"tenant": "default", "shard": 0, "parent": b"", **changes}
    return m.PrepareStore(layout=layout, keys=keys, **fields)  # type: ignore[arg-type]


# -- what tenants ask for and get


def test_hits_misses_and_loaded_tokens_are_counted_for_each_tenant(
    world: World, peer: Peer, layout: int
) -> None:
    peer.store(layout, KEYS, BLOCKS)
    tenants = world.service.counters.tenants
    lease = peer.number + 1
    peer.ask(m.Found, m.Lookup("default", layout, chain("a", 6), 1))
    peer.ask(m.Found, m.Lookup(tenant_of("other"), layout, KEYS))
    assert tenants.of("default") == TenantCounts(1, 4, 2)
    assert tenants.of(tenant_of("other")) == TenantCounts(1, 0, 4)
    for _ in range(2):
        peer.ask(m.Done, m.Release([lease, 99], [48, 7]))
    assert tenants.of("default").loaded_tokens == 48 == world.service.counters.loaded_tokens, (
        "once, and no other lease"
    )


@pytest.mark.parametrize(
    ("said", "counted"), [([], 0), ([0], 0), ([-5], 0), ([1 << 60], 1 << 32), ([3, 4, 5], 3)]
)
def test_tokens_that_cannot_be_meant_do_no_harm(
    world: World, peer: Peer, layout: int, said: list[int], counted: int
) -> None:
    peer.store(layout, KEYS, BLOCKS)
    lease = peer.number + 1
    peer.ask(m.Found, m.Lookup("default", layout, KEYS))
    assert peer.ask(m.Done, m.Release([lease], said)).count == 1
    assert world.service.counters.tenants.of("default").loaded_tokens == counted


# -- the handshake


def test_a_welcome_says_all_that_a_client_needs(world: World) -> None:
    welcome = world.peer().hello()
    assert welcome.session == world.session.token
    assert welcome.epoch == world.service.epoch
    assert welcome.server == f"kvkeep {__version__}"
    assert welcome.limits == m.WireLimits(1 << 20, 8, 3, 6)
    assert set(welcome.capabilities) >= {m.SHARED_MEMORY, m.NETWORK}
    assert welcome.verify


@pytest.mark.parametrize(
    "message",
    [
        m.OpenLayout(b"f" * 16, [64]),
        m.Lookup("default", 1, KEYS),
        m.Prefetch("default", 1, KEYS),
        m.Release([1]),
        m.Finish("default", LAYOUT, KEYS[:16]),
        m.PrepareStore("default", 1, 0, b"", KEYS),
        m.CompleteStore(1, bytes(8)),
        m.AbandonStore([1]),
        m.ReportBad("default", LAYOUT, KEYS[:16]),
        m.Fetch(1, 0, 0, 1),
        m.Put(1, 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nothing_goes_before_attach(world: World, message: m.Message) -> None:
    peer = world.peer()
    peer.hello()
    assert peer.refusal(message) == "not_attached"


def test_a_session_may_ping_and_leave_before_attach(world: World) -> None:
    peer = world.peer()
    peer.hello()
    peer.ask(m.Done, m.Ping())
    peer.ask(m.Done, m.Goodbye())
    assert len(world.service.sessions) == 0


def test_a_session_nobody_opened_is_refused(world: World, peer: Peer) -> None:
    peer.session += 2
    refused = peer.ask(m.Refused, m.Ping())
    assert (refused.code, refused.field) == ("unknown_session", "session")
    assert "Hello" in refused.hint


def test_a_session_that_said_goodbye_is_unknown(peer: Peer) -> None:
    peer.ask(m.Done, m.Goodbye())
    assert peer.refusal(m.Goodbye()) == "unknown_session"


def test_a_plane_nobody_knows_is_refused(world: World) -> None:
    peer = world.peer()
    peer.hello()
    refused = peer.ask(m.Refused, m.Attach("carrier pigeon " * 1_000))
    assert (refused.code, refused.field) == ("bad_plane", "plane")
    assert len(refused.message) <= 1_000


def test_a_plane_is_chosen_once(peer: Peer) -> None:
    assert peer.refusal(m.Attach(m.NETWORK)) == "attached"


def test_too_many_sessions_are_refused_and_the_others_served(world: World, peer: Peer) -> None:
    for _ in range(LIMITS.sessions - 1):
        world.peer().attach()
    refused = world.peer().ask(m.Refused, m.Hello("one more", 1))
    assert refused.code == "too_many_sessions"
    assert "--max-sessions" in refused.hint
    peer.ask(m.Done, m.Ping())
    peer.ask(m.Done, m.Goodbye())
    world.peer().attach()


def test_without_a_lock_file_there_is_still_the_network(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_files(number: int) -> Watch:
        raise OSError("too many open files")

    monkeypatch.setattr(world.service, "_make_watch", no_files)
    peer = world.peer()
    assert peer.hello().pool.lock == ""
    assert peer.refusal(m.Attach(m.SHARED_MEMORY)) == "lock_not_held"
    peer.ask(m.Done, m.Attach(m.NETWORK))
    layout = peer.open_layout(64)
    peer.store(layout, KEYS, BLOCKS)
    assert peer.load(layout, KEYS) == BLOCKS


def test_a_long_name_is_cut(world: World) -> None:
    world.peer().ask(m.Welcome, m.Hello("n" * 10_000, -5))
    assert len(world.session.client) == 120


# -- shared memory and the lock


@pytest.fixture
def local(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(
        world.service, "_make_watch", lambda number: Watch(tmp_path / f"session-{number}.lock")
    )
    yield world
    for session in world.service.sessions.all():
        world.service.sessions.remove(session)


def attached(local: World) -> tuple[Peer, int]:
    """A client with shared memory, and the lock that it holds."""
    peer = local.peer()
    fence = hold(Path(peer.hello().pool.lock))
    peer.ask(m.Done, m.Attach(m.SHARED_MEMORY))
    return peer, fence


def test_shared_memory_needs_the_lock(local: World) -> None:
    peer = local.peer()
    welcome = peer.hello()
    assert peer.refusal(m.Attach(m.SHARED_MEMORY)) == "lock_not_held"
    fence = hold(Path(welcome.pool.lock))
    peer.ask(m.Done, m.Attach(m.SHARED_MEMORY))
    os.close(fence)


def test_a_server_without_lock_files_has_no_shared_memory(world: World) -> None:
    peer = world.peer()
    assert peer.hello().pool.lock == ""
    assert peer.refusal(m.Attach(m.SHARED_MEMORY)) == "lock_not_held"


def test_a_local_session_moves_its_own_bytes(local: World) -> None:
    peer, fence = attached(local)
    layout = peer.open_layout(64)
    plan = peer.ask(m.Prepared, prepare(layout))
    write = peer.number
    assert len(plan.slots) == 4 * 8
    assert peer.refusal(m.Put(write, 0), BLOCKS) == "unknown_write", "Put is for the network plane"
    peer.ask(m.Done, m.CompleteStore(write, bytes(32)))
    assert len(peer.ask(m.Found, m.Lookup("default", layout, KEYS)).slots) == 4 * 8
    assert peer.refusal(m.Fetch(peer.number - 1, 0, 0, 1)) == "unknown_lease", "and so is Fetch"
    os.close(fence)


def test_a_local_session_is_dead_when_its_lock_falls(local: World) -> None:
    peer, fence = attached(local)
    peer.ask(m.Prepared, prepare(peer.open_layout(64)))
    assert local.service.end_dead_sessions(10**9) == 0
    os.close(fence)
    assert local.service.end_dead_sessions(0) == 1
    assert not local.server.store.sessions and not local.server.store.writers
    assert local.service.counters.sessions_died == 1
    assert peer.refusal(m.Ping()) == "unknown_session"


def test_a_session_that_held_nothing_has_not_died(
    local: World, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM kills its processes when it stops in order."""
    os.close(attached(local)[1])
    with caplog.at_level(logging.INFO):
        assert local.service.end_dead_sessions(0) == 1
    counters = local.service.counters
    assert (counters.sessions_died, counters.sessions_vanished) == (0, 1)
    assert all(each.levelno < logging.WARNING for each in caplog.records)


def test_a_lock_file_replaced_by_a_directory_keeps_no_session_alive(local: World) -> None:
    peer = local.peer()
    lock = Path(peer.hello().pool.lock)
    fence = hold(lock)
    peer.ask(m.Done, m.Attach(m.SHARED_MEMORY))
    lock.unlink()
    lock.mkdir()
    assert local.service.end_dead_sessions(0) == 0, "it is still held, whatever lies there now"
    os.close(fence)
    assert local.service.end_dead_sessions(0) == 1
    assert not local.server.store.sessions


def test_a_session_that_cannot_be_looked_at_keeps_no_other_alive(
    world: World, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> bool:
        raise OSError("no locks available")

    monkeypatch.setattr(world.session, "is_gone", fail)
    world.peer().attach()
    assert world.service.end_dead_sessions(2_000) == 1
    assert [session.token for session in world.service.sessions.all()] == [peer.session]
    assert world.service.counters.internal_errors == 1 and "could not be checked" in caplog.text


def test_a_silent_network_session_is_dead(world: World, peer: Peer, layout: int) -> None:
    peer.ask(m.Prepared, prepare(layout))
    world.now_ms = 1_000
    assert world.service.end_dead_sessions(world.now_ms) == 0
    peer.ask(m.Done, m.Ping())
    assert world.service.end_dead_sessions(2_000) == 0
    assert world.service.end_dead_sessions(2_001) == 1
    assert not world.server.store.sessions


# -- refusals

REFUSALS = [
    (m.OpenLayout(b"short", [64]), "bad_fingerprint", "fingerprint"),
    (m.OpenLayout(b"x" * 16, []), "bad_shards", "shard_bytes"),
    (m.OpenLayout(b"x" * 16, [64] * 5), "bad_shards", "shard_bytes"),
    (m.OpenLayout(b"x" * 16, [64, 0]), "bad_shards", "shard_bytes"),
    (m.OpenLayout(b"x" * 16, [-1]), "bad_shards", "shard_bytes"),
    (m.OpenLayout(b"x" * 16, [2**63]), "shard_too_large", "shard_bytes"),
    (m.OpenLayout(b"x" * 16, [1 << 20]), "block_too_large", "shard_bytes"),
    (m.OpenLayout(b"a test's layout.", [65]), "layout_conflict", "shard_bytes"),
    (m.Lookup("default", 99, KEYS), "unknown_layout", "layout"),
    (m.Lookup("default", -1, KEYS), "unknown_layout", "layout"),
    (m.Lookup("default", 1, KEYS[:-1]), "bad_keys", "keys"),
    (m.Lookup("default", 1, chain("a", 9)), "too_many_blocks", "keys"),
    (m.Lookup("default", 1, KEYS, 5), "bad_skip", "skip"),
    (m.Lookup("default", 1, KEYS, -1), "bad_skip", "skip"),
    (m.Lookup("default", 1, KEYS, 2**64 - 1), "bad_skip", "skip"),
    (m.Lookup("a salt", 1, KEYS), "bad_tenant", "tenant"),
    (m.Prefetch("a salt", 1, KEYS), "bad_tenant", "tenant"),
    (m.Prefetch("default", 99, KEYS), "unknown_layout", "layout"),
    (m.Prefetch("default", 1, KEYS[:-1]), "bad_keys", "keys"),
    (m.Prefetch("default", 1, chain("a", 9)), "too_many_blocks", "keys"),
    (m.Finish("a salt", LAYOUT, KEYS[:16]), "bad_tenant", "tenant"),
    (m.ReportBad("a salt", LAYOUT, KEYS[:16]), "bad_tenant", "tenant"),
    (prepare(1, tenant="t-" + "A" * 32), "bad_tenant", "tenant"),
    (prepare(2), "unknown_layout", "layout"),
    (prepare(1, keys=b"k"), "bad_keys", "keys"),
    (prepare(1, keys=chain("a", 9)), "too_many_blocks", "keys"),
    (prepare(1, keys=KEYS[:16] * 2), "broken_chain", "keys"),
    (prepare(1, parent=b"p"), "bad_keys", "parent"),
    (prepare(1, shard=1), "bad_shard", "shard"),
    (prepare(1, shard=-1), "bad_shard", "shard"),
    (prepare(1, priority=101), "bad_priority", "priority"),
    (prepare(1, priority=-1), "bad_priority", "priority"),
    (prepare(1, ttl_ms=-1), "bad_ttl", "ttl_ms"),
    (prepare(1, ttl_ms=2**63 - 1), "bad_ttl", "ttl_ms"),
    (prepare(1, ttl_ms=2**64 - 1), "bad_ttl", "ttl_ms"),
    (m.CompleteStore(99, bytes(8)), "unknown_write", "write"),
    (m.CompleteStore(99, bytes(7)), "bad_checksums", "checksums"),
    (m.Fetch(99, 0, 0, 1), "unknown_lease", "lease"),
    (m.Put(99, 0), "unknown_write", "write"),
]


@pytest.mark.parametrize(("message", "code", "field"), REFUSALS)
def test_a_refusal_has_a_code_and_names_the_field(
    world: World, peer: Peer, layout: int, message: m.Message, code: str, field: str
) -> None:
    refused = peer.ask(m.Refused, message)
    assert (refused.code, refused.field) == (code, field)
    assert refused.message
    assert world.service.counters.refusals == {code: 1}
    assert not world.server.store.blocks.table.live_rows().size, "and nothing changed"
    assert not len(world.server.store.tenants)


def test_too_many_leases_are_refused(peer: Peer, layout: int) -> None:
    peer.store(layout, KEYS, BLOCKS)
    for _ in range(LIMITS.leases_per_session):
        peer.ask(m.Found, m.Lookup("default", layout, KEYS))
    assert peer.refusal(m.Lookup("default", layout, KEYS)) == "too_many_leases"


def test_too_many_writes_are_refused(peer: Peer, layout: int) -> None:
    assert peer.ask(m.Prepared, prepare(layout, chain("b", 8))).refused == 2
    assert peer.refusal(prepare(layout, chain("c", 1))) == "too_many_writes"


def test_too_many_layouts_are_refused(peer: Peer, layout: int) -> None:
    peer.open_layout(64, fingerprint=b"the second of 2.")
    assert peer.refusal(m.OpenLayout(b"the third of two", [64])) == "too_many_layouts"


def test_too_many_tenants_are_refused(peer: Peer, layout: int) -> None:
    for salt in ("one", "two"):  # in the middle of a store: whoever only has blocks would make way
        peer.ask(m.Prepared, prepare(layout, KEYS[:16], tenant=tenant_of(salt)))
    assert peer.refusal(prepare(layout, KEYS[:16], tenant=tenant_of("three"))) == "too_many_tenants"


def test_an_orphan_is_answered_and_counted(world: World, peer: Peer, layout: int) -> None:
    plan = peer.ask(m.Prepared, prepare(layout, parent=b"nobody's child.."))
    assert (plan.orphan, plan.refused, plan.positions) == (True, 4, b"")
    assert world.service.counters.orphan_blocks == 4
    assert peer.refusal(m.CompleteStore(peer.number - 1, b"")) == "unknown_write"


@pytest.mark.parametrize(
    "tenant", ["", "Default", "t-", "secret salt", "t-" + "g" * 32, "../../etc", "t-" + "0" * 33]
)
def test_a_salt_cannot_be_sent(
    world: World, peer: Peer, layout: int, tenant: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for message in (
            m.Lookup(tenant, layout, KEYS),
            prepare(layout, tenant=tenant),
            m.Finish(tenant, LAYOUT, KEYS[:16]),
        ):
            refused = peer.ask(m.Refused, message)
            assert refused.code == "bad_tenant"
            assert "secret salt" not in repr(refused)
    assert "secret salt" not in caplog.text
    assert not len(world.server.store.tenants)


def test_another_version_is_told_so(world: World) -> None:
    frames = [
        bytes(frame) for frame in encode(Header(0, 1, version=9), m.Hello("from the future", 1))
    ]
    reply = world.service.handle(frames, 0)
    assert reply is not None
    refused = decode_reply(decode_header(reply), reply)
    assert isinstance(refused, m.Refused)
    assert refused.code == "protocol_version"


def test_bytes_that_are_no_message_are_counted_and_not_answered(world: World) -> None:
    assert world.service.handle([b"GET / HTTP/1.1"], 0) is None
    assert world.service.handle([], 0) is None
    assert world.service.counters.bad_frames == 2


# -- numbers that the client chooses


def test_the_number_of_a_lease_or_a_write_is_taken_until_it_ends(
    world: World, peer: Peer, layout: int
) -> None:
    peer.store(layout, KEYS, BLOCKS)
    held = world.server.store.sessions[world.session.number]
    for number, taken in (
        (50, prepare(layout, chain("b", 1))),
        (51, m.Lookup("default", layout, KEYS)),
    ):
        assert not isinstance(peer.say(taken, number=number), m.Refused)
        assert peer.refusal(prepare(layout, chain("c", 1)), number=number) == "write_exists"
        assert peer.refusal(m.Lookup("default", layout, KEYS), number=number) == "lease_exists"
    assert (list(held.writes), list(held.leases)) == ([50], [51])
    assert (
        peer.ask(m.Done, m.AbandonStore([50])).count == peer.ask(m.Done, m.Release([51])).count == 1
    )
    assert not held.writes and not held.leases


def test_two_sessions_may_use_the_same_number(world: World, peer: Peer, layout: int) -> None:
    peer.ask(m.Prepared, prepare(layout, chain("a", 1)), number=50)
    world.peer().attach().ask(m.Prepared, prepare(layout, chain("b", 1)), number=50)


@pytest.mark.parametrize(
    ("give_back", "request_of"),
    [(m.Release, lambda layout: m.Lookup("default", layout, KEYS)), (m.AbandonStore, prepare)],
    ids=["lease", "write"],
)
def test_what_is_given_up_after_it_came_is_given_back(
    world: World,
    peer: Peer,
    layout: int,
    give_back: Callable[[list[int]], m.Message],
    request_of: Callable[[int], m.Message],
) -> None:
    if give_back is m.Release:
        peer.store(layout, KEYS, BLOCKS)
    peer.say(request_of(layout), number=77)
    assert peer.ask(m.Done, give_back([77, 77]), number=80).count == 1
    held = world.server.store.sessions[world.session.number]
    assert not held.leases and not held.writes
    assert not world.session.network_leases and not world.session.network_writes


def test_another_sessions_lease_is_not_released(world: World, peer: Peer, layout: int) -> None:
    peer.store(layout, KEYS, BLOCKS)
    peer.ask(m.Found, m.Lookup("default", layout, KEYS), number=77)
    other = world.peer().attach()
    assert other.ask(m.Done, m.Release([77])).count == 0
    assert peer.ask(m.Done, m.Release([77])).count == 1


# -- tiers


class ScriptedTiers:
    """Says what the test says, and notes what it was asked."""

    def __init__(self) -> None:
        self.answer = (0, 0)
        self.fails = False
        self.asked: list[tuple[object, ...]] = []
        self.stored_blocks: list[int] = []

    def coming(self, *asked: object) -> tuple[int, int]:
        self.asked.append(asked)
        if self.fails:
            raise OSError("the tier is broken")
        return self.answer

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        return {}

    def stores(self) -> list[Store]:
        return []

    def stored(self, row: int, blocks: int) -> None:
        self.stored_blocks.append(blocks)

    def prefetch(self, *asked: object) -> int:
        self.asked.append(asked)
        return 3


@pytest.fixture
def tiers(world: World) -> ScriptedTiers:
    world.service.tiers = ScriptedTiers()
    return world.service.tiers


def test_only_a_server_with_a_tier_says_so(world: World) -> None:
    assert m.TIERS not in world.peer().hello().capabilities
    world.service.tiers = ScriptedTiers()
    assert m.TIERS in world.peer().hello().capabilities


def test_a_lookup_tells_what_is_coming_beyond_the_hit(
    world: World, tiers: ScriptedTiers, peer: Peer, layout: int
) -> None:
    peer.store(layout, KEYS[:32], BLOCKS[:2])
    tiers.answer, world.now_ms = (2, 40), 5
    found = peer.ask(m.Found, m.Lookup("default", layout, KEYS, 1, 200))
    assert (found.blocks, len(found.checksums), found.coming, found.again_ms) == (2, 8, 2, 40)
    fingerprint = world.server.store.layouts.get(layout).fingerprint
    stored_as = addresses(KEYS, fingerprint)
    assert tiers.asked == [
        (world.session.number, "default", layout, stored_as, 2, 200, 5, False, "")
    ]


def test_a_lookup_that_is_asked_again_is_counted_once(
    world: World, tiers: ScriptedTiers, peer: Peer, layout: int
) -> None:
    tiers.answer = (3, 40)
    peer.store(layout, KEYS[:16], BLOCKS[:1])
    peer.ask(m.Found, m.Lookup("default", layout, KEYS, 0, 200))
    tiers.answer = (1, 40)
    peer.store(layout, KEYS[:48], BLOCKS[:3])
    assert peer.ask(m.Found, m.Lookup("default", layout, KEYS, 0, 100, 1)).coming == 1
    assert [asked[-2] for asked in tiers.asked] == [False, True]
    counters = world.service.counters
    assert (counters.lookups, counters.lookup_blocks, counters.hit_blocks) == (1, 4, 3)
    assert counters.tenants.of("default") == TenantCounts(1, 3, 0)


def test_a_client_without_patience_is_told_nothing_and_its_blocks_come_up_all_the_same(
    tiers: ScriptedTiers, peer: Peer, layout: int
) -> None:
    """It may be of a release that refuses fields that it does not know."""
    tiers.answer = (4, 40)
    found = peer.ask(m.Found, m.Lookup("default", layout, KEYS))
    assert (found.coming, found.again_ms) == (0, 0)
    assert len(tiers.asked) == 1


def test_tiers_learn_of_stores_and_lookups_and_of_nothing_while_the_server_drains(
    world: World, tiers: ScriptedTiers, peer: Peer, layout: int
) -> None:
    peer.store(layout, KEYS, BLOCKS)
    peer.ask(m.Found, m.Lookup("default", layout, KEYS, 0, 200))
    assert len(tiers.asked) == 1 and tiers.stored_blocks == [len(BLOCKS)]
    world.service.draining = True
    peer.ask(m.Found, m.Lookup("default", layout, chain("b", 2), 0, 200))
    assert peer.ask(m.Done, m.Prefetch("default", layout, KEYS)).count == 0
    assert len(tiers.asked) == 1


def test_a_broken_tier_does_not_take_the_answer_from_memory(
    world: World, tiers: ScriptedTiers, peer: Peer, layout: int
) -> None:
    peer.store(layout, KEYS[:32], BLOCKS[:2])
    tiers.fails = True
    found = peer.ask(m.Found, m.Lookup("default", layout, KEYS, 0, 200))
    assert (found.blocks, found.coming) == (2, 0)
    assert world.service.counters.internal_errors == 1


def test_a_prefetch_counts_what_is_coming(
    world: World, peer: Peer, layout: int, request: pytest.FixtureRequest
) -> None:
    assert peer.ask(m.Done, m.Prefetch("default", layout, KEYS)).count == 0, "there is no tier"
    tiers = request.getfixturevalue("tiers")
    assert peer.ask(m.Done, m.Prefetch("default", layout, KEYS)).count == 3
    fingerprint = world.server.store.layouts.get(layout).fingerprint
    stored_as = addresses(KEYS, fingerprint)
    assert tiers.asked == [(world.session.number, "default", layout, stored_as, 0)]


# -- hints and bad blocks


def test_finishing_a_chain_is_answered_whether_it_is_there_or_not(peer: Peer, layout: int) -> None:
    peer.store(layout, KEYS, BLOCKS)
    assert peer.ask(m.Done, m.Finish("default", LAYOUT, KEYS[-16:])).count == 1
    assert peer.ask(m.Done, m.Finish("default", LAYOUT, b"nobody")).count == 0
    assert peer.ask(m.Done, m.Finish(tenant_of("other"), LAYOUT, KEYS[-16:])).count == 0


def test_a_good_block_that_is_called_bad_stays(world: World, peer: Peer, layout: int) -> None:
    peer.store(layout, KEYS, BLOCKS)
    for _ in range(3):
        assert peer.ask(m.Done, m.ReportBad("default", LAYOUT, KEYS[16:32])).count == 0
    assert peer.load(layout, KEYS) == BLOCKS
    assert world.service.counters.bad_blocks == 0


def test_a_bad_block_goes_with_all_that_hangs_on_it(
    world: World, peer: Peer, layout: int, caplog: pytest.LogCaptureFixture
) -> None:
    peer.store(layout, KEYS, BLOCKS)
    memory = world.server.memory.bytes
    memory[np.flatnonzero(memory == 2)[0]] ^= 1
    assert peer.ask(m.Done, m.ReportBad("default", LAYOUT, KEYS[16:32])).count == 3
    assert peer.load(layout, KEYS) == BLOCKS[:1]
    assert world.service.counters.bad_blocks == 1
    assert "does not match its checksum" in caplog.text
    assert peer.store(layout, KEYS, BLOCKS) == 3, "it can be stored anew"


def test_a_block_stored_without_a_checksum_is_dropped_but_is_no_bad_block(
    local: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    peer, fence = attached(local)
    layout = peer.open_layout(64)
    slots = np.frombuffer(peer.ask(m.Prepared, prepare(layout)).slots, "<i8")
    for slot in slots.tolist():
        local.server.memory.view(slot, 64)[:] = 7
    peer.ask(m.Done, m.CompleteStore(peer.number, bytes(32)))
    assert peer.ask(m.Done, m.ReportBad("default", LAYOUT, KEYS[16:32])).count == 3
    assert local.service.counters.bad_blocks == 0
    said = [record for record in caplog.records if "stored without a checksum" in record.message]
    assert [record.levelname for record in said] == ["INFO"]
    os.close(fence)


@pytest.mark.parametrize("key", [b"", b"nobody", b"nobody's block..", b"x" * 1_000])
def test_a_block_that_is_not_there_is_no_bad_block(peer: Peer, layout: int, key: bytes) -> None:
    assert peer.ask(m.Done, m.ReportBad("default", LAYOUT, key)).count == 0


def test_a_block_that_is_being_written_is_no_bad_block(peer: Peer, layout: int) -> None:
    peer.ask(m.Prepared, prepare(layout))
    assert peer.ask(m.Done, m.ReportBad("default", LAYOUT, KEYS[:16])).count == 0


# -- shutting down


def test_a_server_that_stops_takes_nobody_in_and_finishes_what_is_begun(
    world: World, peer: Peer, layout: int
) -> None:
    peer.store(layout, KEYS[:32], BLOCKS[:2])
    peer.ask(m.Prepared, prepare(layout))
    write = peer.number
    world.service.draining = True
    assert world.peer().refusal(m.Hello("late", 1)) == "shutting_down"
    assert peer.refusal(prepare(layout, chain("b", 1))) == "shutting_down"
    assert peer.ask(m.Found, m.Lookup("default", layout, KEYS, 1)) == m.Found(0, b"", b"")
    peer.ask(m.Done, m.Put(write, 0), BLOCKS[2:])
    assert peer.refusal(m.CompleteStore(write, bytes(16))) == "bad_checksum"
    assert peer.ask(m.Done, m.AbandonStore([write])).count == 1
    peer.ask(m.Done, m.Goodbye())


# -- our own faults


def test_a_fault_of_ours_is_answered_counted_and_survived(
    world: World,
    peer: Peer,
    layout: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(world.server.store, "lookup", broken)
        refused = peer.ask(m.Refused, m.Lookup("default", layout, KEYS))
    assert refused.code == "internal_error"
    assert "a bug" not in refused.message, "the inside stays inside"
    assert world.service.counters.internal_errors == 1
    assert world.service.counters.refusals == {"internal_error": 1}
    assert "a Lookup request failed" in caplog.text and "ZeroDivisionError" in caplog.text
    peer.ask(m.Found, m.Lookup("default", layout, KEYS))


# -- counting


def test_requests_are_counted_and_timed_by_kind(world: World, peer: Peer, layout: int) -> None:
    peer.store(layout, KEYS, BLOCKS)
    peer.load(layout, KEYS)
    peer.ask(m.Prepared, prepare(layout, chain("b", 2)))
    peer.ask(m.Done, m.AbandonStore([peer.number]))
    peer.ask(m.Done, m.Goodbye())
    counters = world.service.counters
    assert (counters.lookups, counters.lookup_blocks, counters.hit_blocks) == (1, 4, 4)
    assert (counters.stored_blocks, counters.stored_bytes, counters.abandoned_stores) == (4, 256, 1)
    assert (counters.sessions_opened, counters.sessions_ended, counters.sessions_died) == (1, 1, 0)
    once = "Hello Attach OpenLayout Put CompleteStore Lookup Fetch Release AbandonStore Goodbye"
    timed = {kind: sum(latency.counts) for kind, latency in counters.latency.items()}
    assert timed == dict.fromkeys(once.split(), 1) | {"PrepareStore": 2}
    assert all(latency.total_us > 0 for latency in counters.latency.values())


def test_what_cannot_be_read_is_timed_under_one_name(world: World, peer: Peer) -> None:
    assert peer.refusal(m.Done()) == "bad_message", "a reply is no request"
    assert sum(world.service.counters.latency["unreadable"].counts) == 1


# -- the log


def test_a_client_cannot_fill_the_log(
    world: World, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(1_000):
        parts = {"model": "m" * 512, "x": str(number)}
        peer.ask(m.LayoutOpened, m.OpenLayout(b"a test's layout.", [64], parts=parts))
    assert 1 < len(caplog.records) <= LINES_A_MINUTE
    assert all(len(each.getMessage()) < 500 for each in caplog.records)
    before = len(caplog.records)
    world.now_ms += 60_000
    peer.ask(m.LayoutOpened, m.OpenLayout(b"a test's layout.", [64]))
    assert len(caplog.records) == before + 1, "the next minute has lines of its own"


def test_a_client_cannot_fill_the_log_by_new_sessions(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(1_000):
        world.peer().attach().ask(m.Done, m.Goodbye())
    assert 1 < len(caplog.records) <= LINES_A_MINUTE


# -- workers with several shards


def test_a_worker_declares_how_all_its_shards_lie_or_none(peer: Peer) -> None:
    sizes, name = [64] * 4, b"of four shards.."

    def opening(shard: int, physical: bytes, *further: int) -> m.OpenLayout:
        return m.OpenLayout(name, sizes, shard, physical, further_shards=list(further))

    peer.ask(m.LayoutOpened, opening(3, b"tokens first"))
    assert peer.refusal(opening(2, b"heads first", 3)) == "layout_conflict"
    peer.ask(m.LayoutOpened, opening(1, b"tokens first", 2))
    assert peer.refusal(opening(2, b"heads first")) == "layout_conflict"
    assert peer.refusal(opening(0, b"heads first", 4)) == "bad_shard"
    peer.ask(m.LayoutOpened, opening(0, b"heads first"))


def test_a_store_of_several_shards_tells_which_blocks_lack_only_some(peer: Peer) -> None:
    layout = peer.open_layout(64, 64)
    ask = prepare(layout, chain("a", 2), further_shards=[1])
    assert not peer.ask(m.Prepared, ask).apart
    peer.ask(m.Done, m.AbandonStore([peer.number]))
    peer.ask(m.Prepared, prepare(layout, chain("b", 2), shard=1))
    assert peer.ask(m.Prepared, prepare(layout, chain("b", 2), further_shards=[1])).apart
