"""A recording has what the service did and nothing of whose it was; it is bounded, off by default,
and only the operator has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.conftest import Running, Start

from kvkeep.bench.recordings import Recording, summarize
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.quotas import KeptQuotas
from kvkeep.server.recording import DESERTED, FULL, STOPPED, TIME_OVER, TOO_FAST, Recorder
from kvkeep.units import MIB
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

BLOCK_BYTES = 64
SALT, NAME, MODEL = "salt-of-a-lighthouse", "engine-of-a-lighthouse", "/models/lighthouse-70b"
REQUEST, ROLE, TEXT = "cmpl-lighthouse", "worker lighthouse", "lighthouse-plane"


class World:
    """A server of this process whose requests are recorded from its start on."""

    def __init__(self, seconds: float = 60, most_bytes: int = 1 << 30) -> None:
        self.server = SimulatedServer(64 * 4096, 16 * 4096)
        self.service, self.now_ms = self.server.service, 5_000
        self.recorder = Recorder(
            self.server.store, [], KeptQuotas(), seconds, most_bytes, self.now_ms
        )
        self.service.recorder = self.recorder
        self.text = self.ended = ""

    def peer(self) -> Peer:
        return Peer(lambda frames: self.service.handle(frames, self.now_ms))

    def take(self) -> list[dict[str, Any]]:
        more, self.ended = self.recorder.describe(self.recorder.collect(self.now_ms))
        self.text += "".join(f"{line}\n" for line in more)
        return [json.loads(line) for line in more]


@pytest.fixture
def world() -> World:
    return World()


def test_every_request_has_a_line_with_what_came_of_it(world: World) -> None:
    peer = world.peer().attach()
    parts = {"block_tokens": "16", "model": MODEL}
    opened = m.OpenLayout(b"f" * 16, [BLOCK_BYTES], parts=parts, role=m.SCHEDULER)
    layout = peer.ask(m.LayoutOpened, opened).layout
    keys, tenant = chain("a", 3), tenant_of(SALT)
    world.now_ms += 7
    peer.store(layout, keys, [bytes(BLOCK_BYTES)] * 3, tenant=tenant)
    write = peer.number - 2
    peer.ask(m.Found, m.Lookup(tenant, layout, keys + bytes(KEY_BYTES), 1))
    lease = peer.number
    peer.ask(m.Done, m.Release([lease]))
    peer.refusal(m.Lookup("default", 99, keys))
    peer.ask(m.Done, m.Goodbye())
    first, *lines = world.take()
    assert (first["kvkeep_recording"], first["pool_bytes"]) == (1, 64 * 4096)
    ops = [line["op"] for line in lines]
    assert ops == [
        "hello",
        "attach",
        "layout",
        "store",
        "put",
        "complete",
        "lookup",
        "release",
        "lookup",
        "gone",
    ]
    by_op = {line["op"]: line for line in lines[:-2]}
    assert by_op["layout"] | {"us": 0} == {
        "timestamp": 0,
        "op": "layout",
        "session": 1,
        "number": 3,
        "layout": layout,
        "role": "scheduler",
        "shard_bytes": [BLOCK_BYTES],
        "block_bytes": 4096,
        "shard": -1,
        "block_tokens": 16,
        "us": 0,
    }
    store, lookup = by_op["store"], by_op["lookup"]
    assert (store["timestamp"], store["number"], store["to_write"]) == (7, write, 3)
    assert by_op["complete"]["numbers"] == [write] and by_op["complete"]["count"] == 3
    assert lookup["hash_ids"][:3] == store["hash_ids"] and len(set(lookup["hash_ids"])) == 4
    assert (lookup["found"], lookup["skip"], lookup["input_length"]) == (3, 1, 64)
    assert lookup["number"] == lease == by_op["release"]["numbers"][0]
    assert lines[-2]["refused"] == "unknown_layout" and lines[-2]["tenant"] != lookup["tenant"]
    assert all(line["us"] > 0 for line in lines[:-1])


def test_tenants_share_no_numbers_of_blocks_and_recordings_share_none_either() -> None:
    hashes = []
    for _ in range(2):
        world = World()
        peer = world.peer().attach()
        layout = peer.open_layout(BLOCK_BYTES)
        for tenant in ("default", tenant_of(SALT)):
            peer.ask(m.Found, m.Lookup(tenant, layout, chain("a", 3)))
        hashes += [line["hash_ids"] for line in world.take() if line.get("op") == "lookup"]
    assert len({each for ids in hashes for each in ids}) == 12


def identifying(peer: Peer, keys: bytes, tenant: str, sums: bytes, fingerprint: bytes) -> list[Any]:
    """What must not be in a recording, as texts and as bytes."""
    words = np.frombuffer(keys + sums + fingerprint, "<u8").tolist()
    pieces = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    pieces += [fingerprint, sums]
    numbers = [
        *words,
        *(int.from_bytes(each, order) for each in pieces for order in ("big", "little")),
    ]
    raw = [*pieces, *(each[:8] for each in pieces), *(each[8:] for each in pieces)]
    return [
        *(SALT, "lighthouse", tenant, tenant[2:12], "987654321", str(peer.session)),
        *(f"{peer.session:x}", *map(str, numbers), *(f"{each:x}" for each in numbers)),
        *raw,
        *(each.hex() for each in raw),
    ]


def test_nothing_that_identifies_is_in_a_recording(world: World) -> None:
    random = np.random.default_rng(4)
    keys, fingerprint = random.bytes(6 * KEY_BYTES), random.bytes(16)
    tenant, peer = tenant_of(SALT), world.peer()
    peer.session = peer.ask(m.Welcome, m.Hello(NAME, 987654321)).session
    peer.refusal(m.Attach(TEXT))
    peer.ask(m.Done, m.Attach(m.NETWORK))
    parts = {"model": MODEL, "lighthouse": "x", "block_tokens": "lighthouse"}
    opened = m.OpenLayout(fingerprint, [BLOCK_BYTES], parts=parts, role=ROLE)
    layout = peer.ask(m.LayoutOpened, opened).layout
    blocks = [random.bytes(BLOCK_BYTES) for _ in range(4)]
    peer.store(layout, keys[: 4 * KEY_BYTES], blocks, tenant=tenant)
    found = peer.ask(m.Found, m.Lookup(tenant, layout, keys))
    peer.ask(m.Done, m.Fetch(peer.number, 0, 0, 4))
    parent, last = keys[3 * KEY_BYTES : 4 * KEY_BYTES], keys[4 * KEY_BYTES :]
    peer.ask(m.Prepared, m.PrepareStore(tenant, layout, 0, parent, last))
    peer.ask(m.Done, m.AbandonStore([peer.number]))
    peer.ask(m.Done, m.Finish(tenant, layout, parent))
    peer.ask(m.Done, m.Prefetch(tenant, layout, keys))
    peer.ask(m.Done, m.ReportBad(tenant, layout, parent))
    report = m.RequestReport(REQUEST, tenant, [("never_stored", 6)], 96, keys=keys, probes=keys[:8])
    peer.ask(m.Done, m.ReportRequests([report]))
    peer.refusal(m.Lookup(SALT, layout, keys))
    peer.refusal(m.Lookup(tenant, layout, keys[:-3]))
    peer.ask(m.Done, m.Goodbye())
    world.recorder.end(STOPPED)
    lines = world.take()
    assert {line.get("op") for line in lines} >= {"store", "lookup", "fetch", "bad", "report"}
    secrets = identifying(peer, keys, tenant, found.checksums, fingerprint)
    written = world.text.encode()
    assert [
        each
        for each in secrets
        if (each if isinstance(each, bytes) else each.encode()).lower() in written.lower()
    ] == []


def test_it_begins_with_the_layouts_and_sessions_that_are_there(world: World) -> None:
    peer = world.peer().attach()
    layout = peer.open_layout(BLOCK_BYTES)
    kept = KeptQuotas({tenant_of(SALT): 4096}, limits={tenant_of("other"): 8192})
    later = Recorder(
        world.server.store, world.service.sessions.all(), kept, 60, MIB, world.now_ms + 500
    )
    said, ended = later.describe(later.collect(world.now_ms + 501))
    first, *lines = map(json.loads, said)
    assert (first["quotas"], first["tenant_limits"]) == ({"1": 4096}, {"2": 8192})
    assert [(line["op"], line["timestamp"]) for line in lines] == [("layout", 0), ("session", 0)]
    assert lines[0]["layout"] == layout and lines[1]["plane"] == m.NETWORK and not ended


def test_long_turns_have_lines(world: World) -> None:
    for us in (900.0, 1_500.0):
        world.recorder.note_turn(world.now_ms, us)
    assert [line["us"] for line in world.take()[1:]] == [1_500.0]


# -- its end


def test_it_ends_with_its_time(world: World) -> None:
    peer = world.peer().attach()
    world.take()
    world.now_ms += 9_000
    world.take()
    world.now_ms += 50_999
    world.take()
    assert not world.ended
    world.now_ms += 2
    peer.ask(m.Done, m.Ping())
    assert [line["op"] for line in world.take()] == ["end"] and world.ended == TIME_OVER


def test_it_ends_with_its_bytes_at_a_whole_line() -> None:
    world = World(most_bytes=2_000)
    peer = world.peer().attach()
    for _ in range(100):
        peer.ask(m.Done, m.Ping())
    lines = world.take()
    assert world.ended == FULL == lines[-1]["reason"] and lines[-2]["op"] == "ping"
    assert 1_800 < len(world.text) < 2_200
    peer.ask(m.Done, m.Ping())
    assert world.recorder.collect(world.now_ms).notes == []


def test_it_ends_when_no_program_takes_its_lines(world: World) -> None:
    peer = world.peer().attach()
    world.now_ms += 10_001
    peer.ask(m.Done, m.Ping())
    assert world.recorder.ended == DESERTED and world.recorder.is_over(world.now_ms)
    assert world.recorder.collect(world.now_ms).notes == [], "what waited is gone"


def test_it_ends_when_requests_come_faster_than_they_are_taken(world: World) -> None:
    for _ in range(3):
        world.recorder.note(world.now_ms, 1, 1, m.Ping(), m.Done(), 1.0, 40 * MIB)
    assert world.recorder.ended == TOO_FAST
    assert len(world.recorder.collect(world.now_ms).notes) == 1, "those that fit can be taken"


def test_an_answer_has_some_of_many_lines(world: World) -> None:
    for _ in range(3):
        world.recorder.note(world.now_ms, 1, 1, m.Ping(), m.Done(), 1.0, 3 * MIB)
    world.recorder.end(STOPPED)
    assert [line["op"] for line in world.take()[1:]] == ["ping", "ping"] and not world.ended
    assert [line["op"] for line in world.take()] == ["ping", "end"] and world.ended == STOPPED


# -- over HTTP

WANTED = {"seconds": 60, "most_bytes": MIB}


@pytest.fixture
def running(start: Start) -> Running:
    return start()


def test_an_operator_records_and_stops(running: Running) -> None:
    status, begun = running.ask("/v1/recording", "POST", WANTED)
    assert status == 201
    path = f"/v1/recording/{begun['recording']}"
    status, said = running.ask(f"{path}/lines", "POST")
    assert status == 200 and said["ended"] == "" and '"kvkeep_recording":1' in said["lines"][0]
    peer = Peer(running.handle)
    peer.hello()
    assert running.ask(path, "DELETE")[0] == 204
    status, said = running.ask(f"{path}/lines", "POST")
    assert said["ended"] == STOPPED and '"op":"hello"' in said["lines"][0]
    assert running.daemon.service.recorder is None, "it costs nothing any more"
    assert running.ask(f"{path}/lines", "POST")[1]["error"] == "unknown_recording"


def test_a_second_recorder_is_refused(running: Running) -> None:
    begun = running.ask("/v1/recording", "POST", WANTED)[1]
    status, refused = running.ask("/v1/recording", "POST", WANTED)
    assert (status, refused["error"]) == (409, "recording") and "ended" in refused["hint"]
    number = begun["recording"]
    assert running.ask(f"/v1/recording/{number + 1}/lines", "POST")[0] == 404
    running.ask(f"/v1/recording/{number}", "DELETE")
    assert running.ask("/v1/recording", "POST", WANTED)[0] == 201, "the first has ended"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seconds": 0}, "seconds"),
        ({"seconds": 3601}, "seconds"),
        ({"most_bytes": 1}, "most_bytes"),
    ],
)
def test_a_recording_is_bounded(running: Running, change: dict[str, int], field: str) -> None:
    status, refused = running.ask("/v1/recording", "POST", WANTED | change)
    assert (status, refused["error"], refused["field"]) == (422, "bad_request", field)


def test_a_recording_needs_the_token(running: Running) -> None:
    wrong = {"authorization": "Bearer wrong"}
    for path, method in (
        ("/v1/recording", "POST"),
        ("/v1/recording/1/lines", "POST"),
        ("/v1/recording/1", "DELETE"),
    ):
        assert running.ask(path, method, WANTED, wrong)[0] == 401
    assert running.daemon.service.recorder is None


def test_a_client_can_neither_swell_nor_spoil_a_recording(world: World, tmp_path: Path) -> None:
    peer = world.peer().attach()
    asked = m.Finish("x" * 1_000_000, 1, b"k" * 16)
    assert peer.refusal(asked, number=2**63 + 5) == "bad_tenant"
    assert peer.refusal(m.Finish("y", 1, b"k" * 16)) == "bad_tenant"
    world.recorder.end(STOPPED)
    said = [line for line in world.take() if line.get("op") == "finish"]
    assert [line["tenant"] for line in said] == [1, 1], "names that are refused are not kept"
    file = tmp_path / "requests.jsonl"
    file.write_text(world.text)
    assert summarize(Recording(str(file))).tenants == 1
