"""Tests for the network data plane: bytes in and out through the daemon, checked before anyone sees
them."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import addresses
from kvkeep.server import network
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity

NBYTES = 1_000
BLOCKS = [bytes([at + 1]) * NBYTES for at in range(4)]
KEYS = chain("a", 4)


class World:
    """A server and peers on its network plane."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.server = SimulatedServer(16 * 4096, 4 * 4096, frame_bytes=3 * NBYTES)
        self.peer = self.new_peer()
        self.layout = self.peer.open_layout(NBYTES)

    def new_peer(self) -> Peer:
        return Peer(lambda frames: self.server.service.handle(frames, self.now_ms)).attach()

    def prepare(self, keys: bytes = KEYS) -> int:
        """Takes slots; returns the write."""
        self.peer.ask(m.Prepared, m.PrepareStore("default", self.layout, 0, b"", keys))
        return self.peer.number

    def lease(self, keys: bytes = KEYS) -> int:
        self.peer.ask(m.Found, m.Lookup("default", self.layout, keys))
        return self.peer.number

    def visible(self) -> int:
        found = self.peer.ask(m.Found, m.Lookup("default", self.layout, KEYS))
        self.peer.say(m.Release([self.peer.number]))
        return found.blocks


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def stored(world: World) -> World:
    world.peer.store(world.layout, KEYS[:32], BLOCKS[:2])
    world.peer.store(world.layout, KEYS, BLOCKS)
    return world


def sums(blocks: list[bytes]) -> bytes:
    return np.array([checksum(block) for block in blocks], dtype="<u8").tobytes()


# -- bytes out


def test_a_client_elsewhere_gets_no_slots(stored: World) -> None:
    found = stored.peer.ask(m.Found, m.Lookup("default", stored.layout, KEYS))
    assert found.slots == b"" and len(found.checksums) == 4 * 8
    assert (
        stored.peer.ask(
            m.Prepared, m.PrepareStore("default", stored.layout, 0, b"", chain("b", 1))
        ).slots
        == b""
    )


def test_any_range_of_a_lease_can_be_fetched(stored: World) -> None:
    lease = stored.lease()
    for start, count in [(0, 1), (1, 3), (3, 1), (0, 3)]:
        assert stored.peer.ask(m.Done, m.Fetch(lease, 0, start, count)).count == count
        assert stored.peer.payload == BLOCKS[start : start + count]


def test_fetched_blocks_count_from_the_first_described_one(stored: World) -> None:
    stored.peer.ask(m.Found, m.Lookup("default", stored.layout, KEYS, 3))
    stored.peer.ask(m.Done, m.Fetch(stored.peer.number, 0, 0, 1))
    assert stored.peer.payload == [BLOCKS[3]]


@pytest.mark.parametrize(
    ("shard", "start", "count", "code"),
    [
        (0, 0, 5, "bad_range"),
        (0, 4, 1, "bad_range"),
        (0, -1, 1, "bad_range"),
        (0, 0, 0, "bad_range"),
        (0, 2, -1, "bad_range"),
        (0, 2**63, 2**63, "bad_range"),
        (1, 0, 1, "bad_shard"),
        (-1, 0, 1, "bad_shard"),
        (0, 0, 4, "reply_too_large"),
    ],
)
def test_what_is_not_in_the_lease_is_refused(
    stored: World, shard: int, start: int, count: int, code: str
) -> None:
    lease = stored.lease()
    assert stored.peer.refusal(m.Fetch(lease, shard, start, count)) == code
    assert stored.peer.payload == []


@pytest.mark.parametrize(("reply_bytes", "most"), [(2 * NBYTES, 2), (2 * NBYTES - 1, 1), (1, 1)])
def test_a_reply_is_small_or_has_one_block(
    stored: World, monkeypatch: pytest.MonkeyPatch, reply_bytes: int, most: int
) -> None:
    monkeypatch.setattr(network, "REPLY_BYTES", reply_bytes)
    lease = stored.lease()
    assert stored.peer.ask(m.Done, m.Fetch(lease, 0, 0, most)).count == most
    assert stored.peer.refusal(m.Fetch(lease, 0, 0, most + 1)) == "reply_too_large"


def wait(world: World, milliseconds: int) -> None:
    """Time passes; the session says something now and then, and the server looks at its
    sessions."""
    world.now_ms += milliseconds
    world.peer.ask(m.Done, m.Ping())
    world.server.service.end_dead_sessions(world.now_ms)


def test_a_lease_ends_when_it_is_a_minute_old_however_often_it_was_used(stored: World) -> None:
    lease, service = stored.lease(), stored.server.service
    for _ in range(3):
        wait(stored, 20_000)
        stored.peer.ask(m.Done, m.Fetch(lease, 0, 0, 1))
    wait(stored, 1)
    refused = stored.peer.ask(m.Refused, m.Fetch(lease, 0, 0, 1))
    assert (refused.code, refused.field) == ("lease_expired", "lease") and not stored.peer.payload
    assert service.counters.expired_leases == 1
    assert not stored.server.store.sessions[1].leases
    assert stored.peer.ask(m.Done, m.Release([lease])).count == 0
    assert stored.peer.load(stored.layout, KEYS[:16]) == BLOCKS[:1], "the session can go on"


def test_a_younger_lease_stays(stored: World) -> None:
    stored.lease()
    wait(stored, 30_000)
    young = stored.lease(KEYS[:16])
    wait(stored, 30_001)
    stored.peer.ask(m.Done, m.Fetch(young, 0, 0, 1))
    assert len(stored.server.store.sessions[1].leases) == 1


def test_a_write_ends_like_a_lease_and_leaves_nothing(world: World) -> None:
    write = world.prepare()
    wait(world, 60_001)
    assert world.peer.refusal(m.Put(write, 0), BLOCKS[:1]) == "write_expired"
    assert world.peer.refusal(m.CompleteStore(write, sums(BLOCKS))) == "write_expired"
    assert world.visible() == 0 and not len(world.server.store.blocks.table)


def test_one_check_ends_some_hundred_leases_and_the_next_goes_on(
    stored: World,
) -> None:
    leases = [stored.lease() for _ in range(257)]
    wait(stored, 60_001)
    assert list(stored.server.store.sessions[1].leases) == leases[256:]
    wait(stored, 1)
    assert not stored.server.store.sessions[1].leases


def test_a_released_lease_gives_nothing(stored: World) -> None:
    lease = stored.lease()
    stored.peer.ask(m.Done, m.Release([lease]))
    assert stored.peer.refusal(m.Fetch(lease, 0, 0, 1)) == "unknown_lease"


def test_another_sessions_lease_gives_nothing(stored: World) -> None:
    lease = stored.lease()
    assert stored.new_peer().refusal(m.Fetch(lease, 0, 0, 1)) == "unknown_lease"


def test_a_lookup_that_found_nothing_leaves_no_lease(world: World) -> None:
    assert world.peer.refusal(m.Fetch(world.lease(), 0, 0, 1)) == "unknown_lease"


def test_a_block_dropped_while_it_is_leased_can_still_be_fetched(stored: World) -> None:
    lease = stored.lease()
    (layout,) = stored.server.store.layouts
    address = addresses(KEYS[:16], layout.fingerprint)
    row = stored.server.store.tenants.get("default").index.get(address)  # type: ignore[union-attr]
    stored.server.store.blocks.drop([row])
    assert stored.visible() == 0
    stored.peer.ask(m.Done, m.Fetch(lease, 0, 0, 3))
    assert stored.peer.payload == BLOCKS[:3]


# -- bytes in


def test_blocks_may_come_in_any_order_and_again(world: World) -> None:
    write = world.prepare()
    world.peer.ask(m.Done, m.Put(write, 2), BLOCKS[2:])
    world.peer.ask(m.Done, m.Put(write, 0), [b"x" * NBYTES])
    assert world.peer.ask(m.Done, m.Put(write, 0), BLOCKS[:2]).count == 2
    assert world.peer.ask(m.Done, m.CompleteStore(write, sums(BLOCKS))).count == 4
    assert world.peer.load(world.layout, KEYS[:48]) == BLOCKS[:3]


@pytest.mark.parametrize(
    ("start", "payload", "code"),
    [
        (0, [], "bad_range"),
        (-1, [BLOCKS[0]], "bad_range"),
        (4, [BLOCKS[0]], "bad_range"),
        (3, BLOCKS[:2], "bad_range"),
        (2**64 - 1, [BLOCKS[0]], "bad_range"),
        (0, [b""], "bad_payload"),
        (0, [bytes(NBYTES - 1)], "bad_payload"),
        (0, [bytes(NBYTES + 1)], "bad_payload"),
        (0, [BLOCKS[0], bytes(NBYTES - 1)], "bad_payload"),
        (0, [bytes(3 * NBYTES + 1)], "frame_too_large"),
    ],
)
def test_what_does_not_fit_the_write_is_refused_and_writes_nothing(
    world: World, start: int, payload: list[bytes], code: str
) -> None:
    write = world.prepare()
    before = world.server.memory.bytes.copy()
    assert world.peer.refusal(m.Put(write, start), payload) == code
    assert (world.server.memory.bytes == before).all()
    assert world.peer.refusal(m.CompleteStore(write, sums(BLOCKS))) == "incomplete_write"


def test_a_write_with_a_block_missing_cannot_be_completed(world: World) -> None:
    write = world.prepare()
    world.peer.ask(m.Done, m.Put(write, 0), BLOCKS[:3])
    refused = world.peer.ask(m.Refused, m.CompleteStore(write, sums(BLOCKS)))
    assert refused.code == "incomplete_write"
    assert "1 of 4" in refused.message
    assert world.visible() == 0


def test_bytes_that_are_not_those_that_were_sent_stay_invisible(world: World) -> None:
    write = world.prepare()
    world.peer.ask(m.Done, m.Put(write, 0), [*BLOCKS[:3], b"z" * NBYTES])
    assert world.peer.refusal(m.CompleteStore(write, sums(BLOCKS))) == "bad_checksum"
    assert world.visible() == 0
    world.peer.ask(m.Done, m.Put(write, 3), BLOCKS[3:])
    assert world.peer.ask(m.Done, m.CompleteStore(write, sums(BLOCKS))).count == 4, (
        "sent again, they are right"
    )
    assert world.visible() == 4


def test_completing_a_write_reads_no_blocks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one small message could keep the loop busy with gigabytes."""
    write = world.prepare()
    world.peer.ask(m.Done, m.Put(write, 0), BLOCKS)
    monkeypatch.delattr(network, "checksum")
    assert world.peer.ask(m.Done, m.CompleteStore(write, sums(BLOCKS))).count == 4


@pytest.mark.parametrize(
    "checksums", [b"", bytes(7), bytes(8), sums(BLOCKS)[:24], sums([*BLOCKS, BLOCKS[0]])]
)
def test_a_wrong_number_of_checksums_is_refused(world: World, checksums: bytes) -> None:
    write = world.prepare()
    world.peer.ask(m.Done, m.Put(write, 0), BLOCKS)
    assert world.peer.refusal(m.CompleteStore(write, checksums)) in (
        "bad_checksums",
        "bad_checksum",
    )
    assert world.visible() == 0


@pytest.mark.parametrize("end", ["completed", "abandoned"])
def test_a_write_that_ended_takes_no_more_bytes(world: World, end: str) -> None:
    write = world.prepare()
    world.peer.ask(m.Done, m.Put(write, 0), BLOCKS)
    last = m.CompleteStore(write, sums(BLOCKS)) if end == "completed" else m.AbandonStore([write])
    world.peer.ask(m.Done, last)
    assert world.peer.refusal(m.Put(write, 0), BLOCKS[:1]) == "unknown_write"
    assert world.peer.refusal(m.CompleteStore(write, sums(BLOCKS))) == "unknown_write"
    check_integrity(world.server.store)


def test_another_sessions_write_takes_no_bytes(world: World) -> None:
    write = world.prepare()
    other = world.new_peer()
    assert other.refusal(m.Put(write, 0), BLOCKS) == "unknown_write"
    assert other.refusal(m.CompleteStore(write, sums(BLOCKS))) == "unknown_write"
    assert other.ask(m.Done, m.AbandonStore([write])).count == 0
    world.peer.ask(m.Done, m.Put(write, 0), BLOCKS)


def test_shards_go_to_places_of_their_own(world: World) -> None:
    layout = world.peer.open_layout(100, 200, 300, fingerprint=b"three of a block")
    shards = [
        [bytes([10 * shard + at]) * 100 * (shard + 1) for at in range(2)] for shard in range(3)
    ]
    for shard in (2, 0, 1):
        assert world.peer.store(layout, chain("s", 2), shards[shard], shard=shard) == 2
    for shard in range(3):
        assert world.peer.load(layout, chain("s", 2), shard=shard) == shards[shard]


def test_bytes_are_counted_both_ways(stored: World) -> None:
    counters = stored.server.service.counters
    assert (counters.network_bytes_in, counters.network_bytes_out) == (4 * NBYTES, 0)
    stored.peer.ask(m.Done, m.Fetch(stored.lease(), 0, 0, 3))
    assert (counters.network_bytes_in, counters.network_bytes_out) == (4 * NBYTES, 3 * NBYTES)


# -- several shards of one write


def two_shards(world: World) -> int:
    """A write of both shards of two blocks."""
    world.layout = world.peer.open_layout(NBYTES, 500, fingerprint=b"of two shards...")
    keys = chain("a", 2)
    prepare = m.PrepareStore("default", world.layout, 0, b"", keys, further_shards=[1])
    world.peer.ask(m.Prepared, prepare)
    return world.peer.number


def test_each_shard_of_a_write_comes_by_itself(world: World) -> None:
    write, halves = two_shards(world), [block[:500] for block in BLOCKS[:2]]
    together = [each for pair in zip(BLOCKS[:2], halves, strict=True) for each in pair]
    world.peer.ask(m.Done, m.Put(write, 0, 0), BLOCKS[:2])
    refused = world.peer.ask(m.Refused, m.CompleteStore(write, sums(together)))
    assert refused.code == "incomplete_write" and refused.message.startswith("2 of 2 blocks")
    world.peer.ask(m.Done, m.Put(write, 0, 1), halves)
    assert world.peer.ask(m.Done, m.CompleteStore(write, sums(together))).count == 2
    assert world.visible() == 2
    lease = world.lease(chain("a", 2))
    for shard, blocks in enumerate((BLOCKS[:2], halves)):
        world.peer.ask(m.Done, m.Fetch(lease, shard, 0, 2))
        assert world.peer.payload == blocks


@pytest.mark.parametrize("shard", [-1, 2, -2])
def test_a_shard_that_is_not_of_the_write_is_refused(world: World, shard: int) -> None:
    write = two_shards(world)
    assert world.peer.refusal(m.Put(write, 0, shard), BLOCKS[:1]) == "bad_shard"
