"""The pool's events on an engine's side: a reader has exactly what the server has, whatever became
of the server, the engine or the messages in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.client.conftest import PASS, Simulation, Transfer
from tests.client.test_connection_hostile import Hostile

from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.pool_events import Descriptions, PoolFeed
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import StoreRequest
from kvkeep.kv.keys import addresses
from kvkeep.kv.runs import BlockRuns
from kvkeep.server import pool_events
from kvkeep.store.table import READY
from kvkeep.store.tree import split_keys
from kvkeep.testing.clock import eventually
from kvkeep.wire import messages as m
from kvkeep.wire.frames import decode_header, decode_reply, encode

Make = Callable[..., Any]


class Reader:
    """Knows where blocks are and what was said of them, and what it has to say."""

    def __init__(self) -> None:
        self.there: dict[bytes, tuple[int, bytes]] = {}
        self.to_say: list[Descriptions] = []
        self.contents = 0
        self.is_full = False
        self.fails = False
        self._before: dict[bytes, tuple[int, bytes]] = {}

    def describe(self, most: int) -> Descriptions | None:
        return self.to_say.pop(0) if self.to_say else None

    def forget_notes(self) -> None:
        self.to_say.clear()

    def begin_content(self) -> None:
        self._before, self.there = self._before | self.there, {}
        self.contents += 1

    def place(self, address: bytes, media: int, text: bytes) -> None:
        if self.fails:
            raise RuntimeError("the reader broke")
        self._before.pop(address, None)
        self.there.pop(address, None)
        if media:
            self.there[address] = media, text

    def end_content(self) -> None:
        self._before = {}

    def tidy(self) -> None: ...

    @property
    def known(self) -> set[bytes]:
        return {*self.there, *self._before}


class Engine:
    """One that stores and one that reads, in turn."""

    def __init__(self, sim: Simulation, **options: Any) -> None:
        self.connection = sim.connected(1000, **options)
        self.reader = Reader()
        self.feed = PoolFeed(self.reader)
        self.connection.background = self.feed.turn
        memory = np.zeros((8, 1000), dtype=np.uint8)
        self.transfer = Transfer(self.connection, [GroupMemory(BlockRuns.of([memory]))], 0)

    def store(self, keys: bytes) -> None:
        blocks = len(keys) // 16
        self.transfer.store(StoreRequest("default", b"", keys, np.arange(blocks)))
        texts = [b"of " + key for key in split_keys(keys)]
        self.reader.to_say.append(Descriptions("default", keys, texts))


def run(sim: Simulation, for_ms: int, *engines: Engine) -> None:
    for _ in range(for_ms // 50):
        sim.run(50)
        for engine in engines:
            engine.feed.turn(engine.connection)


def keys_of(rng: random.Random) -> bytes:
    path, keys = "", b""
    for _ in range(rng.randint(1, 6)):
        path += rng.choice("xyz")
        keys += path.encode().rjust(16, b".")
    return keys


def in_server(sim: Simulation) -> set[bytes]:
    store = sim.store
    table = store.blocks.table
    return {
        key
        for owner in store.tenants
        for key, row in owner.index.items()
        if table.state[row] == READY
    }


@pytest.mark.parametrize("changes", [1 << 17, 20], ids=["all", "overflows"])
@pytest.mark.parametrize("seed", range(6))
def test_after_a_random_run_a_reader_has_what_the_server_has(
    simulation: Make, seed: int, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evictions, drops, servers that are replaced, engines that come anew, outages."""
    monkeypatch.setattr(pool_events, "MOST_CHANGES", changes)
    monkeypatch.setattr(pool_events, "_BLOCKS_A_REPLY", 5)
    rng, sim = random.Random(seed), simulation(shared_memory=True, slots=24)
    one, other = Engine(sim), Engine(sim)
    contents = 0
    for turn in range(60):
        rng.choice([one, other]).store(keys_of(rng))
        if rng.random() < 0.2:
            sim.store.drop_blocks("default", [rng.choice(sorted(in_server(sim)) or [b""])])
        run(sim, rng.choice([0, 50, 50, 1_000]), *rng.sample([one, other], rng.randint(0, 2)))
        if turn in (20, 40):
            sim.replace_server(epoch=turn)
            run(sim, 2_000, one)
        if turn == 30:
            contents, other = other.reader.contents, Engine(sim)
    run(sim, 8_000, one, other)
    while sim.store.tidy(0):
        pass
    run(sim, 2_000, one, other)
    assert in_server(sim), "something is there"
    for engine in (one, other):
        assert engine.reader.known == in_server(sim)
        assert "internal_error" not in engine.connection.counters.failures
        assert "protocol" not in engine.connection.counters.failures
    fingerprint = one.connection.shape.fingerprint
    for address, (media, text) in other.reader.there.items():
        assert media == m.IN_MEMORY and text in (b"", b"of " + addresses(address, fingerprint))
    assert any(text for _, text in other.reader.there.values())
    contents += other.reader.contents
    assert contents >= 3 and one.reader.contents >= 3, "of three servers"
    if changes == 20:
        assert contents + one.reader.contents > 7, "some came too late"


def test_an_engine_with_nothing_new_asks_ten_times_a_second(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    engine = Engine(sim)
    run(sim, 1_000, engine)
    before = sim.recorder.count(m.PoolEvents)
    run(sim, 10_000, engine)
    assert 50 < sim.recorder.count(m.PoolEvents) - before <= 100


def test_an_engine_that_has_enough_to_publish_asks_for_no_more(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    engine = Engine(sim)
    run(sim, 1_000, engine)
    engine.reader.is_full = True
    run(sim, 200, engine)
    before = sim.recorder.count(m.PoolEvents)
    engine.store(b"k" * 16)
    run(sim, 2_000, engine)
    assert sim.recorder.count(m.PoolEvents) == before and not engine.reader.there
    engine.reader.is_full = False
    run(sim, 500, engine)
    assert engine.reader.known == in_server(sim) != set()


def test_a_reader_that_starts_over_is_given_all_blocks_again(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    engine = Engine(sim)
    engine.store(b"k" * 16)
    run(sim, 1_000, engine)
    assert engine.reader.contents == 1
    engine.reader.there = {}
    engine.feed.must_restart = True
    run(sim, 1_000, engine)
    assert engine.reader.contents == 2 and engine.reader.known == in_server(sim) != set()


def test_nothing_is_asked_over_the_network(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(shared_memory=False)
    engine = Engine(sim)
    engine.store(b"k" * 16)
    run(sim, 1_000, engine)
    assert not sim.recorder.count(m.PoolEvents) and not sim.recorder.count(m.DescribeBlocks)
    assert not engine.feed.is_allowed
    told = [each.message for each in caplog.records if "routers hear nothing" in each.message]
    assert len(told) == 1 and "does not share memory with the server" in told[0]


def test_nothing_is_asked_of_a_server_without_events(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(shared_memory=True)

    def old(header: Any, request: m.Request) -> Any:
        if not isinstance(request, m.Hello):
            return PASS
        frames = sim.recorder.service.handle([bytes(each) for each in encode(header, request)], 0)
        welcome = decode_reply(decode_header(frames), frames)
        capabilities = [each for each in welcome.capabilities if each != m.EVENTS]
        return msgspec.structs.replace(welcome, capabilities=capabilities)

    sim.recorder.instead = old
    engine = Engine(sim)
    engine.store(b"k" * 16)
    run(sim, 1_000, engine)
    assert not sim.recorder.count(m.PoolEvents) and not sim.recorder.count(m.DescribeBlocks)
    assert "of a release without events" in caplog.text
    sim.replace_server(epoch=2)
    run(sim, 3_000, engine)
    assert engine.feed.is_allowed and engine.reader.contents == 1


def test_a_reader_that_breaks_breaks_nothing_else(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(shared_memory=True)
    engine = Engine(sim)
    engine.reader.fails = True
    engine.store(b"k" * 16)
    run(sim, 5_000, engine)
    assert engine.connection.counters.failures["internal_error"] > 1
    assert caplog.text.count("could not be taken in") == 1
    engine.reader.fails = False
    run(sim, 3_000, engine)
    assert engine.reader.known == in_server(sim) != set()


@pytest.mark.parametrize(
    "answer",
    [
        m.Done(3),
        m.PoolChanges(5, b"k" * 16, b"", []),
        m.PoolChanges(5, b"k" * 15, b"\x01", [b""]),
        m.PoolChanges(5, b"k" * 16, b"\x04", [b""]),
        m.PoolChanges(5, b"k" * 16, b"\x01", []),
        m.PoolChanges(-9, b"k" * 16, b"\x01", [b""]),
        m.PoolChanges(0, b"k" * 16, b"\x01", [b""], 9),
        m.Refused("not_local", "no"),
    ],
)
def test_an_answer_that_cannot_be_one_is_none(simulation: Make, answer: m.Reply) -> None:
    sim = simulation(shared_memory=True)
    engine = Engine(sim)
    engine.store(b"a" * 16)
    run(sim, 1_000, engine)
    sim.recorder.instead = lambda header, request: (
        answer if isinstance(request, m.PoolEvents) else PASS
    )
    before = sim.recorder.count(m.PoolEvents)
    engine.store(b"b" * 16)
    run(sim, 3_000, engine)
    assert len(engine.reader.there) == 1
    assert sim.recorder.count(m.PoolEvents) - before <= 4, "it does not insist"
    sim.recorder.instead = None
    run(sim, 3_000, engine)
    assert engine.reader.known == in_server(sim) and len(in_server(sim)) == 2


@pytest.mark.parametrize("seed", range(10))
def test_a_hostile_server_is_survived_and_forgotten(simulation: Make, seed: int) -> None:
    sim, rng = simulation(shared_memory=True), random.Random(seed)
    engine = Engine(sim)
    engine.store(keys_of(rng))
    sim.network.serve(Hostile(sim.recorder, rng))
    for _ in range(30):
        engine.reader.to_say.append(Descriptions("default", b"k" * 16, [b"text"]))
        run(sim, 300, engine)
    assert "internal_error" not in engine.connection.counters.failures
    sim.replace_server(epoch=2)
    run(sim, 4_000, engine)
    engine.store(keys_of(rng))
    run(sim, 2_000, engine)
    assert engine.reader.known == in_server(sim) != set()


def test_a_heartbeat_does_the_work(simulation: Make) -> None:
    beats: list[Connection] = []
    connection = simulation(shared_memory=True).connected(1000)
    connection.background = beats.append
    heartbeat = Heartbeat()
    heartbeat.add(connection)
    assert eventually(lambda: len(beats) > 1) and set(beats) == {connection}
    connection.background = None
