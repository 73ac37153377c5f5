"""Tests for limits: who hurries is refused, who waits is heard again, and nobody else notices."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvkeep.errors import RequestError
from kvkeep.server.auth import Caller
from kvkeep.server.limits import NO_LIMITS, Bucket, ClientLimits, Pace, Paces, check_sessions
from kvkeep.server.service import Service
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

KEYS = chain("a", 4)
BLOCKS = [bytes([at + 1]) * 64 for at in range(4)]


def test_a_bucket_holds_one_second_and_no_more() -> None:
    bucket = Bucket(10, now_ms=0)
    assert bucket.refill(3_600_000) == 10
    bucket.take(10)
    assert bucket.refill(3_600_000) == 0
    assert bucket.refill(3_600_050) == 0.5
    assert bucket.refill(3_600_100) == 1


def test_a_clock_that_jumps_back_gives_nothing_and_does_no_harm() -> None:
    bucket = Bucket(10, now_ms=1_000)
    bucket.take(10)
    assert bucket.refill(0) == 0
    assert bucket.refill(100) == 1


def test_what_is_taken_beyond_has_to_come_back_first() -> None:
    bucket = Bucket(100, now_ms=0)
    bucket.take(350)
    assert bucket.refill(2_000) == -50
    assert bucket.refill(3_000) == 50


def test_without_limits_there_are_none() -> None:
    pace = Pace()
    for _ in range(100_000):
        pace.check_request(0)
        pace.check_network(0)
        pace.count_network(1 << 40)
    check_sessions(NO_LIMITS, [], "", 1)


@dataclass
class Held:
    key: str
    pid: int


def test_sessions_are_counted_by_key_and_without_one_by_process() -> None:
    limits = ClientLimits(sessions_per_client=2)
    held = [Held("k", 1), Held("k", 2), Held("other", 1), Held("", 1), Held("", 1), Held("", 2)]
    for key, pid in (("k", 3), ("", 1)):
        with pytest.raises(RequestError) as caught:
            check_sessions(limits, held, key, pid)
        assert caught.value.code == "too_many_sessions"
        assert "--max-sessions-per-client" in caught.value.hint
    for key, pid in (("other", 1), ("new", 1), ("", 2), ("", 3)):
        check_sessions(limits, held, key, pid)


class World:
    """A service with limits, its time, and peers that have a key each."""

    def __init__(self, limits: ClientLimits) -> None:
        server = SimulatedServer(16 * 4096, 4 * 4096)
        self.service = Service(
            server.store,
            server.memory,
            m.PoolPlace("", "", 4 * 4096, 16 * 4096),
            m.WireLimits(1 << 20, 1024, 64, 64),
            1,
            lambda number: None,
            client_limits=limits,
        )
        self.now_ms = 0

    def peer(self, key: str = "") -> Peer:
        return Peer(lambda frames: self.service.handle(frames, self.now_ms, Caller(key)))


def test_who_asks_too_fast_is_refused_until_time_has_passed_and_others_are_heard() -> None:
    world = World(ClientLimits(requests_per_second=10))
    hasty, calm = world.peer().attach(), world.peer().attach()
    for _ in range(8):  # Hello and Attach count as well
        hasty.ask(m.Done, m.Ping())
    refused = hasty.ask(m.Refused, m.Ping())
    assert refused.code == "too_fast" and "--max-requests-per-second" in refused.hint
    assert calm.ask(m.Done, m.Ping()) and hasty.refusal(m.Ping()) == "too_fast"
    world.now_ms += 100
    assert hasty.ask(m.Done, m.Ping()) and hasty.refusal(m.Ping()) == "too_fast"
    assert world.service.counters.refusals == {"too_fast": 3}


def test_bytes_through_the_socket_are_counted_both_ways() -> None:
    world = World(ClientLimits(network_bytes_per_second=300))
    peer = world.peer().attach()
    layout = peer.open_layout(64)
    assert peer.store(layout, KEYS, BLOCKS) == 4  # 256 bytes of 300
    found = peer.ask(m.Found, m.Lookup("default", layout, KEYS))
    lease = peer.number
    assert found.blocks == 4
    peer.ask(m.Done, m.Fetch(lease, 0, 0, 4))  # let through whole, 212 bytes too many
    refused = peer.ask(m.Refused, m.Fetch(lease, 0, 0, 1))
    assert (refused.code, refused.field) == (
        "too_fast",
        "bytes",
    ) and "--max-network-rate" in refused.hint
    other = world.peer().attach()
    other.open_layout(64)
    assert other.load(layout, KEYS) == BLOCKS, "others are not slowed"
    plan = peer.ask(m.Prepared, m.PrepareStore("default", layout, 0, b"", chain("b", 1)))
    write = peer.number
    assert plan.positions and peer.refusal(m.Put(write, 0), BLOCKS[:1]) == "too_fast"
    world.now_ms += 700
    assert peer.refusal(m.Put(write, 0), BLOCKS[:1]) == "too_fast"
    world.now_ms += 10
    peer.ask(m.Done, m.Put(write, 0), BLOCKS[:1])


def test_one_client_cannot_take_all_sessions() -> None:
    world = World(ClientLimits(sessions_per_client=2))
    for _ in range(2):
        world.peer("greedy").attach()
    assert world.peer("greedy").refusal(m.Hello("peer", 99)) == "too_many_sessions"
    last = world.peer("modest").attach()
    last.ask(m.Done, m.Goodbye())
    assert len(world.service.sessions) == 2


# -- from session to session


def churn(world: World, key: str) -> tuple[int, int]:
    """Sessions one after the other at one instant. Returns requests that were carried out, and
    bytes."""
    done = nbytes = 0
    for _ in range(50):
        peer = world.peer(key)
        welcome = peer.say(m.Hello("peer", 1))
        if isinstance(welcome, m.Refused):
            assert welcome.code == "too_fast"
            continue
        assert isinstance(welcome, m.Welcome)
        peer.session = welcome.session
        steps = (
            m.Attach(m.NETWORK),
            m.OpenLayout(b"a test's layout.", [64]),
            m.Lookup("default", 1, KEYS),
        )
        replies = [peer.say(step) for step in steps]
        fetched = peer.say(m.Fetch(peer.number, 0, 0, 4))
        nbytes += sum(map(len, peer.payload)) if isinstance(fetched, m.Done) else 0
        peer.ask(m.Done, m.Goodbye())  # never refused
        done += 1 + sum(not isinstance(reply, m.Refused) for reply in (*replies, fetched))
    return done, nbytes


def filled(limits: ClientLimits) -> World:
    world = World(limits)
    writer = world.peer("writer").attach()
    assert writer.store(writer.open_layout(64), KEYS, BLOCKS) == 4
    return world


def test_sessions_one_after_the_other_have_the_pace_of_one() -> None:
    done, _ = churn(filled(ClientLimits(requests_per_second=20)), "hasty")
    assert 15 <= done <= 20
    _, nbytes = churn(filled(ClientLimits(network_bytes_per_second=300)), "hasty")
    assert nbytes == 512, "one message in full, one that leaves a debt, and none after them"


def test_what_one_client_has_used_up_is_no_others_and_is_there_again_after_a_second() -> None:
    world = filled(ClientLimits(requests_per_second=20))
    churn(world, "hasty")
    assert churn(world, "calm")[0] >= 15
    assert world.peer("hasty").refusal(m.Hello("peer", 1)) == "too_fast"
    world.now_ms += 1_000
    world.peer("hasty").attach()


def test_hello_that_is_refused_for_too_many_sessions_counts_too() -> None:
    world = World(ClientLimits(sessions_per_client=1, requests_per_second=10))
    world.peer("greedy").attach()
    codes = [world.peer("greedy").refusal(m.Hello("peer", 1)) for _ in range(20)]
    assert codes == ["too_many_sessions"] * 10 + ["too_fast"] * 10


def test_paces_are_forgotten_when_they_have_rested_and_do_not_pile_up() -> None:
    paces = Paces(ClientLimits(requests_per_second=2))
    for pid in range(5_000):
        paces.end(pid, paces.begin(pid, 0), 0)
    assert len(paces) == 1_024
    paces.end(1, paces.begin(1, 10_000), 10_000)
    assert len(paces) == 1
    unlimited = Paces(NO_LIMITS)
    unlimited.end(1, unlimited.begin(1, 0), 0)
    assert len(unlimited) == 0
