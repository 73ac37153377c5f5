"""A replay of recorded requests gives what the server gave, and a file that is no recording is
refused with its line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvkeep.bench.plan import Costs, plan
from kvkeep.bench.recordings import Recording, replay, summarize
from kvkeep.bench.traces import read_trace
from kvkeep.errors import SettingsError
from kvkeep.kv.checksum import checksum
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.quotas import KeptQuotas
from kvkeep.server.recording import STOPPED, Recorder
from kvkeep.store.operators import set_limit
from kvkeep.store.plans import Limits
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

TENANTS = ("default", tenant_of("one"), tenant_of("two"))
LIMITED_BYTES = 24 * 4096


class World:
    """A small server that is recorded, and what it gave meanwhile. Its loop tidies after each
    request."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.path = str(folder / "recording.jsonl")
        self.server = SimulatedServer(96 * 4096, 16 * 4096, limits=limits)
        set_limit(self.server.store, TENANTS[1], LIMITED_BYTES, 0)
        self.now_ms = 1_000

    def peer(self) -> Peer:
        return Peer(self._exchange)

    def _exchange(self, frames: list[bytes]) -> list[bytes] | None:
        reply = self.server.service.handle(frames, self.now_ms)
        while self.server.store.has_to_tidy:
            self.server.store.tidy(self.now_ms)
        return reply

    def record(self) -> None:
        kept = KeptQuotas(limits={TENANTS[1]: LIMITED_BYTES})
        service = self.server.service
        self.evicted = self.server.store.eviction.evictions
        self.hits = service.counters.hit_blocks
        self.recorder = service.recorder = Recorder(
            self.server.store, service.sessions.all(), kept, 3600, 1 << 30, self.now_ms
        )
        self.lines = ""

    def end(self) -> Recording:
        """What was counted meanwhile is in `hits` and `evicted`."""
        counters = self.server.service.counters
        self.hits = counters.hit_blocks - self.hits
        self.evicted = self.server.store.eviction.evictions - self.evicted
        self.recorder.end(STOPPED)
        ended = ""
        while not ended:
            more, ended = self.recorder.describe(self.recorder.collect(self.now_ms))
            self.lines += "".join(f"{line}\n" for line in more)
        Path(self.path).write_text(self.lines)
        return Recording(self.path)


class Client:
    """An engine with two shards that looks up, stores what is missing, and loads."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world, self.draw = world, draw
        self.leases: list[int] = []
        self._connect()

    def _connect(self) -> None:
        self.peer = self.world.peer().attach()
        parts = {"block_tokens": "16", "model": "m"}
        opened = m.OpenLayout(b"a test's layout.", [512, 256], parts=parts, role=m.SCHEDULER)
        self.layout = self.peer.ask(m.LayoutOpened, opened).layout

    def act(self) -> None:
        draw, tenant = self.draw, self.draw.choice(TENANTS)
        keys = chain(f"c{draw.randrange(12)}", draw.randrange(2, 14))
        found = self.peer.say(m.Lookup(tenant, self.layout, keys, draw.choice((0, 0, 2))))
        if isinstance(found, m.Found):
            self.leases.append(self.peer.number)
            first = found.blocks * KEY_BYTES
            if draw.random() < 0.8 and keys[first:]:
                self._store(tenant, keys[max(0, first - KEY_BYTES) : first], keys[first:])
        if draw.random() < 0.1:
            self.peer.say(m.Finish(tenant, self.layout, keys[-KEY_BYTES:]))
        if self.leases and draw.random() < 0.7:
            self.peer.say(m.Release([self.leases.pop(0)], [32]))
        if draw.random() < 0.03:
            self.peer.ask(m.Done, m.Goodbye())
            self.leases = []
            self._connect()

    def _store(self, tenant: str, parent: bytes, keys: bytes) -> None:
        draw = self.draw
        hints = draw.choice((0, 50, 100)), draw.choice((0, 0, 400))
        store = m.PrepareStore(tenant, self.layout, 0, parent, keys, *hints, further_shards=[1])
        prepared = self.peer.say(store)
        if not isinstance(prepared, m.Prepared) or not prepared.positions:
            return
        write, blocks = self.peer.number, len(prepared.positions) // 4
        if draw.random() < 0.1:
            self.peer.ask(m.Done, m.AbandonStore([write]))
            return
        for shard, nbytes in enumerate((512, 256)):
            self.peer.ask(m.Done, m.Put(write, 0, shard), [bytes(nbytes)] * blocks)
        sums = [checksum(bytes(nbytes)) for nbytes in (512, 256)]
        self.peer.ask(m.Done, m.CompleteStore(write, np.array(sums * blocks, "<u8").tobytes()))


def live(world: World, seed: int, steps: int, clients: list[Client] | None = None) -> list[Client]:
    draw = random.Random(seed)
    clients = clients or [Client(world, draw) for _ in range(3)]
    for _ in range(steps):
        world.now_ms += draw.randrange(40)
        draw.choice(clients).act()
    return clients


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_of_a_random_run_gives_the_same_hits_evictions_and_refusals(
    tmp_path: Path, seed: int
) -> None:
    world = World(tmp_path, Limits(leases_per_session=5))
    world.record()
    live(world, seed, 400)
    recording = world.end()
    summary = replay(recording)
    recorded, replayed = summary.recorded, summary.replayed
    assert replayed is not None
    assert world.hits > 200 and world.evicted > 50 and recorded.refusals, "the run has some of all"
    assert (recorded.hit_blocks, recorded.evictions) == (world.hits, world.evicted)
    same = ("lookups", "lookup_blocks", "hit_blocks", "stored_blocks", "evictions")
    for name in (*same, "without_room_blocks", "refusals"):
        assert getattr(replayed, name) == getattr(recorded, name), name
    assert summary.stored_before_blocks == 0 and summary.reason == STOPPED
    assert set(summary.as_json()["replayed"]["times"]) >= {"lookup", "store", "complete"}


def test_what_was_in_the_pool_before_is_stored_first(tmp_path: Path) -> None:
    world = World(tmp_path)
    peer = world.peer().attach()
    layout = peer.open_layout(64)
    keys = chain("a", 4)
    peer.store(layout, keys, [bytes(64)] * 4)
    world.record()
    peer.ask(m.Found, m.Lookup("default", layout, keys))
    summary = replay(world.end())
    assert summary.stored_before_blocks == 4 and summary.replayed is not None
    assert summary.replayed.hit_blocks == summary.recorded.hit_blocks == 4


def test_a_bad_block_is_dropped_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.record()
    peer = world.peer().attach()
    layout = peer.open_layout(64)
    peer.store(layout, chain("a", 4), [bytes(64)] * 4)
    world.server.memory.bytes[:] = 1
    third = chain("a", 3)[-KEY_BYTES:]
    assert peer.ask(m.Done, m.ReportBad("default", layout, third)).count == 2
    peer.ask(m.Found, m.Lookup("default", layout, chain("a", 4)))
    summary = replay(world.end())
    assert summary.replayed is not None
    assert summary.recorded.hit_blocks == summary.replayed.hit_blocks == 2


def test_a_question_that_is_asked_again_counts_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.record()
    peer = world.peer().attach()
    layout, keys = peer.open_layout(64), chain("a", 4)
    peer.store(layout, keys[: 2 * KEY_BYTES], [bytes(64)] * 2)
    for before in (-1, 1):
        peer.ask(m.Found, m.Lookup("default", layout, keys, patience_ms=5, found_before=before))
    summary = replay(world.end())
    for sums in (summary.recorded, summary.replayed):
        assert sums is not None
        assert (sums.lookups, sums.lookup_blocks, sums.hit_blocks) == (1, 4, 3)


def test_a_recording_is_a_trace_for_a_plan(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.record()
    live(world, 1, 200)
    recording = world.end()
    trace = read_trace(world.path)
    sums = summarize(recording).recorded
    assert (trace.requests, trace.references) == (sums.lookups, sums.lookup_blocks)
    assert trace.block_tokens == 16 and trace.block_bytes == 4096
    made = plan(world.path, trace, Costs(block_tokens=16), [trace.distinct], [trace.distinct])
    assert made.rows[0].hit_rate > 0.5


def rewritten(world: World, change: Callable[[list[str]], list[str]]) -> str:
    lines = Path(world.path).read_text().splitlines(keepends=True)
    Path(world.path).write_text("".join(change(lines)))
    return world.path


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.record()
    live(world, 2, 50)
    world.end()
    summary = replay(Recording(rewritten(world, lambda lines: lines[:-1])))
    assert summary.reason == "it was cut off" and summary.recorded.evictions is None
    assert summary.replayed is not None
    assert summary.replayed.hit_blocks == summary.recorded.hit_blocks > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3: "),
        ('{"timestamp": -1, "op": "ping"}', "line 3: Expected `int` >= 0 - at `$.timestamp`"),
        ('{"timestamp": 1, "op": "lookup", "hash_ids": ["a"]}', "line 3: Expected `int`"),
        ('{"op": "ping"}', "line 3: Object missing required field `timestamp`"),
        (b"\xff".decode("latin-1"), "line 3: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    world = World(tmp_path)
    world.record()
    world.end()
    recording = Recording(rewritten(world, lambda lines: [*lines, line]))
    with pytest.raises(SettingsError) as refused:
        replay(recording)
    assert said in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pool_bytes": -1}, "is no recording"),
        ({"slab_bytes": 0}, "line 1: "),
        ({"limits": {"cows": 1}}, "line 1: "),
        ({"kvkeep_recording": 2}, "is a recording of version 2"),
        ({"kvkeep_recording": "one"}, "is no recording"),
    ],
)
def test_a_beginning_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    world = World(tmp_path)
    world.record()
    world.end()

    def edit(lines: list[str]) -> list[str]:
        return [json.dumps(json.loads(lines[0]) | change) + "\n", *lines[1:]]

    with pytest.raises(SettingsError) as refused:
        replay(Recording(rewritten(world, edit)))
    assert said in refused.value.message


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*No such file"):
        Recording(str(tmp_path / "none.jsonl"))
