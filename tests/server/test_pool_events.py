"""What engines hear of the pool: a subscriber that follows changes has exactly what the indexes
have, and descriptions are kept for as long as their blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from life import LAYOUTS, Life

from kvkeep.errors import RequestError
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import addresses
from kvkeep.server import pool_events
from kvkeep.server.auth import Caller
from kvkeep.server.pool_events import PoolEvents
from kvkeep.server.quotas import KeptQuotas
from kvkeep.server.recording import Recorder
from kvkeep.store import operators
from kvkeep.store.store import Store
from kvkeep.store.tree import split_keys
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

PRINTS = [fingerprint for fingerprint, _ in LAYOUTS]
FINGERPRINT = b"a test's layout."
KEYS = chain("a", 4)


def anyone(tenant: str) -> bool:
    return True


class Subscriber:
    """Follows one layout as an engine does."""

    def __init__(self, fingerprint: bytes, may_name: Callable[[str], bool] = anyone) -> None:
        self.media: dict[bytes, int] = {}
        self.texts: dict[bytes, bytes] = {}
        self.contents = 0  # how often it was given all blocks
        self._fingerprint, self._may_name = fingerprint, may_name
        self._after = self._cursor = -1
        self._seen: set[bytes] = set()

    def ask(self, events: PoolEvents) -> bool:
        """One question. Returns whether there is more."""
        before = self._after, self._cursor
        if self._cursor < 0:
            reply = events.since(self._after, self._fingerprint, self._may_name)
        else:
            reply = events.content(self._after, self._cursor, self._fingerprint, self._may_name)
        assert len(reply.addresses) == 16 * len(reply.media) == 16 * len(reply.descriptions)
        if self._cursor < 0 <= reply.cursor:
            self.contents += 1
            self._seen = set()
        for at, address in enumerate(split_keys(reply.addresses)):
            self._seen.add(address)
            self.media[address], self.texts[address] = reply.media[at], reply.descriptions[at]
        if self._cursor >= 0 > reply.cursor:
            self.media = {each: media for each, media in self.media.items() if each in self._seen}
        self._after, self._cursor = reply.after, reply.cursor
        return before != (self._after, self._cursor)

    def catch_up(self, events: PoolEvents) -> dict[bytes, int]:
        while self.ask(events):
            pass
        return {address: media for address, media in self.media.items() if media}


def content(
    stores: list[Store], fingerprint: bytes, may_name: Callable[[str], bool] = anyone
) -> dict[bytes, int]:
    """Where each READY block of a layout is, read from the indexes one by one."""
    found: dict[bytes, int] = {}
    for place, store in zip((1, 2, 2), stores, strict=False):
        for owner in store.tenants:
            for key, row in owner.index.items():
                table = store.blocks.table
                is_ready = table.state[row] == 3
                is_same = store.layouts[table.layout[row]].fingerprint == fingerprint
                if is_ready and is_same and may_name(owner.name):
                    found[key] = found.get(key, 0) | place
    return found


def settle(lives: list[Life]) -> None:
    for life in lives:
        while life.store.tidy(life.now_ms):
            pass


@pytest.mark.parametrize("changes", [1 << 17, 40], ids=["all", "overflows"])
@pytest.mark.parametrize("seed", range(12))
def test_after_a_random_run_a_subscriber_has_what_the_indexes_have(
    seed: int, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and two disks with the same prompts: stores, evictions, drops, clears, expiries, other
    layouts; a disk that is set aside, a new server, a subscriber that comes late."""
    monkeypatch.setattr(pool_events, "MOST_CHANGES", changes)
    monkeypatch.setattr(pool_events, "_BLOCKS_A_REPLY", 7)
    monkeypatch.setattr(pool_events, "_ROWS_A_LOOK", 16)
    random = Random(seed)
    lives = [Life(random), Life(random), Life(random)]
    stores = [life.store for life in lives]
    used = list(stores)

    def new_server() -> PoolEvents:
        return PoolEvents(lambda: list(used))

    events = new_server()
    subscribers = [Subscriber(print_) for print_ in PRINTS]
    subscribers.append(Subscriber(PRINTS[0], lambda tenant: tenant == "b"))
    for at in range(400):
        random.choice(lives).step()
        if random.random() < 0.02:
            operators.clear_all(random.choice(stores), random.choice(["a", "ab"]))
        if random.random() < 0.3:
            random.choice(lives).store.tidy(lives[0].now_ms)
        if random.random() < 0.5:
            random.choice(subscribers).ask(events)
        if at == 150:
            used.pop()
        if at == 250:
            events = new_server()  # and its numbers begin anew
            subscribers = [Subscriber(print_) for print_ in PRINTS]
            subscribers.append(Subscriber(PRINTS[0], lambda tenant: tenant == "b"))
    settle(lives)
    for subscriber, print_ in zip(subscribers, PRINTS, strict=False):
        assert subscriber.catch_up(events) == content(used, print_)
    only_b = content(used, PRINTS[0], lambda tenant: tenant == "b")
    assert subscribers[3].catch_up(events) == only_b
    assert any(content(used, print_) for print_ in PRINTS), "something is there"
    if changes == 40:
        assert max(each.contents for each in subscribers) > 1, "some were too late"


def test_what_came_and_went_in_between_is_told_as_gone() -> None:
    life = Life(Random(1))
    events = PoolEvents(lambda: [life.store])
    subscriber = Subscriber(PRINTS[0])
    subscriber.catch_up(events)
    layout = life.layouts[0]
    life.store.prepare_store(1, 1, "a", layout, 0, b"", KEYS, 0)
    life.store.complete_store(1, 1, np.zeros(4, np.uint64), 0)
    life.store.drop_blocks("a", [KEYS[:16]])
    settle([life])
    assert subscriber.catch_up(events) == {}
    assert subscriber.media == dict.fromkeys(split_keys(KEYS), 0)
    assert subscriber.contents == 1


def complete(life: Life, write: int, blocks: int) -> None:
    life.store.complete_store(1, write, np.zeros(blocks, np.uint64), 0)


def test_a_block_that_waited_for_its_parent_is_told_when_it_is_ready() -> None:
    life = Life(Random(1))
    events, subscriber = PoolEvents(lambda: [life.store]), Subscriber(PRINTS[0])
    subscriber.catch_up(events)
    layout = life.layouts[0]
    life.store.prepare_store(1, 1, "a", layout, 0, b"", KEYS[:16], 0)
    life.store.prepare_store(1, 2, "a", layout, 0, KEYS[:16], KEYS[16:], 0)
    complete(life, 2, 3)
    assert subscriber.catch_up(events) == {}
    complete(life, 1, 1)
    assert subscriber.catch_up(events) == dict.fromkeys(split_keys(KEYS), m.IN_MEMORY)


def test_a_disk_keeps_what_memory_loses_and_a_disk_that_is_set_aside_has_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_events, "MOST_DESCRIBED_BYTES", 4 * 300)
    lives = [Life(Random(1)), Life(Random(1))]
    used = [life.store for life in lives]
    events, subscriber = PoolEvents(lambda: list(used)), Subscriber(PRINTS[0])
    subscriber.catch_up(events)
    for life in lives:
        life.store.prepare_store(1, 1, "a", life.layouts[0], 0, b"", KEYS, 0)
        complete(life, 1, 4)
    said, layout = texts(4), lives[0].store.layouts[lives[0].layouts[0]]
    assert events.describe("a", layout, KEYS, said) == 4
    blocks = split_keys(KEYS)
    assert subscriber.catch_up(events) == dict.fromkeys(blocks, m.IN_MEMORY | m.ON_DISK)
    lives[0].store.drop_blocks("a", [KEYS[:16]])
    settle(lives)
    assert subscriber.catch_up(events) == dict.fromkeys(blocks, m.ON_DISK)
    assert [subscriber.texts[block] for block in blocks] == said
    used.pop()
    assert subscriber.catch_up(events) == {} and subscriber.contents == 2
    others = chain("b", 4)
    lives[0].store.prepare_store(1, 2, "a", lives[0].layouts[0], 0, b"", others, 0)
    complete(lives[0], 2, 4)
    assert events.describe("a", layout, others, said) == 4, "no description of the disk's is kept"


# -- by messages


class Held:
    """The lock of a process that lives."""

    path = Path("session.lock")

    def is_held(self) -> bool:
        return True

    def close(self) -> None: ...


class World:
    """A server whose sessions may use shared memory, and what its callers are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int = 16) -> None:
        self.server = SimulatedServer(slots * 4096, 4 * 4096)
        self.service = self.server.service
        monkeypatch.setattr(self.service, "_make_watch", lambda number: Held())

    def peer(self, caller: Caller | None = None, plane: str = m.SHARED_MEMORY) -> Peer:
        who = caller or Caller()
        return Peer(lambda frames: self.service.handle(frames, 0, who)).attach(plane)

    def store(self, peer: Peer, keys: bytes = KEYS, tenant: str = "default") -> int:
        layout = peer.open_layout(64)
        plan = peer.ask(m.Prepared, m.PrepareStore(tenant, layout, 0, b"", keys))
        write = peer.number
        return peer.ask(m.Done, m.CompleteStore(write, bytes(2 * len(plan.positions)))).count

    def described(self, peer: Peer) -> dict[bytes, bytes]:
        """What a new engine is told."""
        layout = peer.open_layout(64)
        start = peer.ask(m.PoolChanges, m.PoolEvents(layout))
        part = peer.ask(m.PoolChanges, m.PoolEvents(layout, start.after, start.cursor))
        assert part.cursor == -1
        return dict(zip(split_keys(part.addresses), part.descriptions, strict=True))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def texts(count: int, what: bytes = b"text") -> list[bytes]:
    return [what + bytes([at]) for at in range(count)]


def test_nothing_is_kept_before_an_engine_asks(world: World) -> None:
    peer = world.peer()
    world.store(peer)
    assert world.service.events is None and world.server.store.blocks.changes is None


def test_a_description_reaches_another_engine_and_goes_with_its_block(world: World) -> None:
    one, other = world.peer(), world.peer()
    layout = one.open_layout(64)
    assert world.described(other) == {}
    world.store(one, KEYS[:32])
    start = other.ask(m.PoolChanges, m.PoolEvents(layout)).after
    said = one.ask(m.Done, m.DescribeBlocks("default", layout, KEYS, texts(4)))
    assert said.count == 2, "the server has no more of them"
    changes = other.ask(m.PoolChanges, m.PoolEvents(layout, start))
    assert changes.addresses == addresses(KEYS[:32], FINGERPRINT)
    assert (changes.media, changes.descriptions) == (b"\x01\x01", texts(2))
    operators.clear(world.server.store)
    while world.server.store.tidy(0):
        pass
    gone = other.ask(m.PoolChanges, m.PoolEvents(layout, changes.after))
    assert (gone.media, gone.descriptions) == (b"\0\0", [b"", b""])
    world.store(one, KEYS[:32])
    assert set(world.described(other).values()) == {b""}, "what was said went with the blocks"


def test_a_block_can_be_described_while_it_is_written_and_again(world: World) -> None:
    peer = world.peer()
    layout = peer.open_layout(64)
    peer.ask(m.Prepared, m.PrepareStore("default", layout, 0, b"", KEYS))
    write = peer.number
    peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS, texts(4)))
    assert world.described(peer) == {}, "it is not READY"
    peer.ask(m.Done, m.CompleteStore(write, bytes(32)))
    assert list(world.described(peer).values()) == texts(4)
    peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS[:16], [b"better"]))
    assert list(world.described(peer).values()) == [b"better", *texts(4)[1:]]


def test_a_store_that_is_abandoned_takes_its_descriptions_along(world: World) -> None:
    peer = world.peer()
    layout = peer.open_layout(64)
    peer.ask(m.Prepared, m.PrepareStore("default", layout, 0, b"", KEYS))
    write = peer.number
    peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS, texts(4)))
    peer.ask(m.Done, m.AbandonStore([write]))
    world.store(peer)
    assert set(world.described(peer).values()) == {b""}


def test_descriptions_have_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_events, "MOST_DESCRIBED_BYTES", 700)
    peer = world.peer()
    layout = peer.open_layout(64)
    world.store(peer)
    for _ in range(3):
        said = peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS[:32], texts(2)))
        assert said.count == 2, "those before are replaced"
    said = peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS[32:], texts(2)))
    assert said.count == 0
    assert list(world.described(peer).values()) == [*texts(2), b"", b""]
    world.server.store.drop_blocks("default", [addresses(KEYS[16:32], FINGERPRINT)])
    while world.server.store.tidy(0):
        pass
    world.store(peer)
    said = peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS[16:32], texts(1)))
    assert said.count == 1, "a block that is gone makes room"


def test_a_reply_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_events, "_BYTES_A_REPLY", 5)
    world = World(monkeypatch)
    peer = world.peer()
    layout = peer.open_layout(64)
    world.store(peer)
    after = peer.ask(m.PoolChanges, m.PoolEvents(layout)).after
    peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS, texts(4)))
    told = []
    for _ in range(4):
        changes = peer.ask(m.PoolChanges, m.PoolEvents(layout, after))
        told += changes.descriptions
        after = changes.after
    assert told == texts(4), "one in each"
    part = peer.ask(m.PoolChanges, m.PoolEvents(layout, after, 0))
    assert part.descriptions == texts(1) and part.cursor == 1


def test_engines_hear_of_tenants_that_they_may_name(world: World) -> None:
    a, b = tenant_of("a"), tenant_of("b")
    anyone, bound = world.peer(), world.peer(Caller("k" * 40, "bound", (b,)))
    layout = bound.open_layout(64)
    after = bound.ask(m.PoolChanges, m.PoolEvents(layout)).after
    for tenant, keys in ((a, chain("x", 2)), (b, chain("y", 2))):
        world.store(anyone, keys, tenant)
        anyone.ask(m.Done, m.DescribeBlocks(tenant, layout, keys, texts(2, tenant.encode())))
    changes = bound.ask(m.PoolChanges, m.PoolEvents(layout, after))
    assert changes.addresses == addresses(chain("y", 2), FINGERPRINT)
    assert set(world.described(bound).values()) == set(texts(2, b.encode()))
    assert bound.refusal(m.DescribeBlocks(a, layout, chain("x", 2), texts(2))) == "forbidden_tenant"
    world.server.store.drop_blocks(a, split_keys(addresses(chain("x", 2), FINGERPRINT)))
    gone = bound.ask(m.PoolChanges, m.PoolEvents(layout, changes.after))
    assert gone.addresses == b"", "nor of what goes"


def test_a_tenant_cannot_describe_another_ones_blocks(world: World) -> None:
    peer, other = world.peer(), tenant_of("other")
    layout = peer.open_layout(64)
    world.store(peer)
    assert peer.ask(m.Done, m.DescribeBlocks(other, layout, KEYS, texts(4))).count == 0
    assert set(world.described(peer).values()) == {b""}


def test_a_session_on_the_network_hears_nothing_and_describes_nothing(world: World) -> None:
    peer = world.peer(plane=m.NETWORK)
    layout = peer.open_layout(64)
    assert peer.refusal(m.PoolEvents(layout)) == "not_local"
    assert peer.refusal(m.DescribeBlocks("default", layout, KEYS, texts(4))) == "not_local"
    assert world.service.events is None


@pytest.mark.parametrize(
    ("keys", "said", "code"),
    [
        (KEYS, texts(3), "bad_descriptions"),
        (KEYS[:-1], texts(4), "bad_keys"),
        (b"", [b"one"], "bad_descriptions"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    world: World, keys: bytes, said: list[bytes], code: str
) -> None:
    peer = world.peer()
    layout = peer.open_layout(64)
    assert peer.refusal(m.DescribeBlocks("default", layout, keys, said)) == code


@pytest.mark.parametrize(
    "said", [[b"x" * (m.MAX_DESCRIPTION_BYTES + 1)], [b""] * (m.MAX_DESCRIPTIONS + 1)]
)
def test_a_message_of_descriptions_is_bounded(world: World, said: list[bytes]) -> None:
    peer = world.peer()
    frames = encode(Header(peer.session, 99), m.DescribeBlocks("default", 1, KEYS, said))
    reply = world.service.handle([bytes(frame) for frame in frames], 0)
    assert reply is not None
    answer = decode_reply(decode_header(reply), [bytes(frame) for frame in reply])
    assert isinstance(answer, m.Refused) and answer.field.startswith("descriptions")


@pytest.mark.parametrize("cursor", [1 << 39, 1 << 40, (1 << 62) + 5])
def test_a_cursor_beyond_the_end_ends(world: World, cursor: int) -> None:
    peer = world.peer()
    layout = peer.open_layout(64)
    world.store(peer)
    assert peer.ask(m.PoolChanges, m.PoolEvents(layout, 3, cursor)) == m.PoolChanges(3)


def test_descriptions_are_in_no_recording(world: World) -> None:
    recorder = Recorder(world.server.store, [], KeptQuotas(), 60, 1 << 20, 0)
    world.service.recorder = recorder
    peer = world.peer()
    layout = peer.open_layout(64)
    world.store(peer)
    peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS, texts(4, b"a secret salt")))
    world.described(peer)
    collected = recorder.collect(1)
    assert not any(isinstance(note.request, m.DescribeBlocks) for note in collected.notes)
    lines = recorder.describe(collected).lines
    assert any("store" in line for line in lines)
    assert not any("describe" in line or "events" in line or "secret" in line for line in lines)


def test_descriptions_are_in_no_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    peer = world.peer()
    layout = peer.open_layout(64)
    world.store(peer)
    peer.ask(m.Done, m.DescribeBlocks("default", layout, KEYS, texts(4, b"a secret salt")))
    peer.refusal(m.DescribeBlocks("default", layout, KEYS, texts(3, b"a secret salt")))
    with pytest.raises(RequestError) as refused:
        world.service.events.describe(  # type: ignore[union-attr]
            "default", world.server.store.layouts.get(layout), KEYS, texts(3, b"a secret salt")
        )
    shown = f"{caplog.text} {refused.value} {world.service!r} {world.service.events!r}"
    assert "a secret salt" not in shown and "session" in caplog.text
