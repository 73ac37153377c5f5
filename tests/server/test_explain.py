"""Tests for what the server says of requests: it fills in why it lacked blocks, believes no more than
is plausible, and tells only who has the token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.kv.identity import tenant_of
from kvkeep.kv.outcomes import NAMES, probed_blocks
from kvkeep.server.explain import MOST_BLOCKS, REQUESTS_KEPT, Explanations, RequestShown
from kvkeep.server.service import Service
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

Start = Callable[..., Any]
PARTS = {"model": "llama", "attention": "flash", "block_tokens": "16"}


class World:
    """A server, its time, and schedulers of engines."""

    def __init__(self) -> None:
        self.server = SimulatedServer(64 * 4096, 4 * 4096)
        self.now_ms = 1_000

    @property
    def service(self) -> Service:
        return self.server.service

    @property
    def explanations(self) -> Explanations:
        return self.service.explanations

    def scheduler(self, fingerprint: bytes = b"a test's layout.", **parts: str) -> Peer:
        peer = Peer(lambda frames: self.service.handle(frames, self.now_ms)).attach()
        opening = m.OpenLayout(fingerprint, [64], parts=PARTS | parts, role=m.SCHEDULER)
        peer.ask(m.LayoutOpened, opening)
        return peer

    def report(self, peer: Peer, *runs: tuple[str, int], **fields: Any) -> RequestShown:
        report = m.RequestReport(fields.pop("request", "r"), "default", list(runs), **fields)
        assert peer.ask(m.Done, m.ReportRequests([report])).count == 1
        return self.explanations.last(1)[0]

    def missed(self, peer: Peer, keys: bytes, **fields: Any) -> RequestShown:
        """Looks these up, and reports that they were lacking."""
        peer.ask(m.Found, m.Lookup("default", 1, keys))
        lookups = [peer.number]
        runs = ("lacked", len(keys) // 16)
        return self.report(peer, runs, lookups=lookups, keys=keys, **fields)


@pytest.fixture
def world() -> World:
    return World()


def test_what_it_lacked_is_explained_as_it_was_at_the_lookup(world: World) -> None:
    peer = world.scheduler()
    keys = chain("a", 4)
    peer.ask(m.Found, m.Lookup("default", 1, keys))
    lookup = peer.number
    peer.store(1, keys, [bytes(64)] * 4)
    world.server.store.drop_blocks("default", [])
    shown = world.report(peer, ("lacked", 4), ("last", 1), lookups=[lookup], keys=keys)
    assert shown.outcomes == {"never_stored": 4, "last": 1} and shown.blocks == 5
    assert (shown.engine, shown.model, shown.tenant) == ("peer", "llama", "default")


def test_a_lookup_that_it_does_not_know_explains_nothing(world: World) -> None:
    peer = world.scheduler()
    assert world.report(peer, ("lacked", 3)).outcomes == {"not_known": 3}
    assert world.report(peer, ("lacked", 3), lookups=[99]).outcomes == {"not_known": 3}
    other = world.scheduler()
    other.ask(m.Found, m.Lookup("default", 1, chain("a", 3)))
    shown = world.report(peer, ("lacked", 3), lookups=[other.number + 1], keys=chain("a", 3))
    assert shown.outcomes == {"not_known": 3}


def test_blocks_beyond_the_lookup_are_not_known(world: World) -> None:
    peer = world.scheduler()
    peer.ask(m.Found, m.Lookup("default", 1, chain("a", 2)))
    shown = world.report(
        peer,
        ("loaded", 1),
        ("lacked", 4),
        lookups=[peer.number],
        keys=chain("a", 5)[16:],
        keys_from=1,
    )
    assert shown.runs == [("loaded", 1), ("never_stored", 1), ("not_known", 3)]


def test_a_server_that_stops_refuses(world: World) -> None:
    peer = world.scheduler()
    world.service.draining = True
    assert world.missed(peer, chain("a", 3)).outcomes == {"refused": 3}


def test_what_the_engine_saw_explains_only_what_was_never_stored(world: World) -> None:
    peer = world.scheduler()
    keys = chain("a", 4)
    peer.ask(m.Found, m.Lookup("default", 1, keys))
    shown = world.report(peer, ("other_salt", 2), ("lacked", 2), lookups=[peer.number], keys=keys)
    assert shown.runs == [("other_salt", 2), ("never_stored", 2)]
    peer.store(1, keys, [bytes(64)] * 4)
    world.server.store.drop_blocks("default", [])
    store = world.server.store
    layout = store.layouts.get(1)
    table = store.blocks.table
    root = next(row for row in table.live_rows().tolist() if table.parent[row] < 0)
    assert layout.blocks == 4
    store.blocks.drop([root])
    peer.ask(m.Found, m.Lookup("default", 1, keys))
    shown = world.report(peer, ("other_salt", 4), lookups=[peer.number], keys=keys)
    assert shown.outcomes == {"dropped": 4}


def test_engines_with_another_identity_are_named_by_what_differs(world: World) -> None:
    probes = b"".join(bytes([at]) * m.PROBE_BYTES for at in range(len(probed_blocks(5))))
    one = world.scheduler(attention="flash")
    world.missed(one, chain("a", 5), probes=probes)
    two = world.scheduler(b"another layout..", attention="triton")
    two.ask(m.Found, m.Lookup("default", 2, chain("b", 5)))
    shown = world.report(
        two, ("lacked", 5), lookups=[two.number], probes=probes, keys=chain("b", 5)
    )
    assert shown.outcomes == {"other_identity": 5} and shown.differs == ["attention"]
    other_model = world.scheduler(b"a third layout..", model="phi")
    other_model.ask(m.Found, m.Lookup("default", 3, chain("c", 5)))
    shown = world.report(
        other_model, ("lacked", 5), lookups=[other_model.number], probes=probes, keys=chain("c", 5)
    )
    assert shown.outcomes == {"never_stored": 5}, "another model shares nothing anyway"


@pytest.mark.parametrize(
    "runs",
    [
        [("lacked", 1 << 62)],
        [("loaded", -5), ("local", 3)],
        [("no such outcome", 4), ("evicted", 2), ("loaded", 1)],
        [("loaded", MOST_BLOCKS), ("lacked", MOST_BLOCKS)],
        [],
    ],
)
def test_reports_that_cannot_be_meant_do_no_harm(world: World, runs: Any) -> None:
    shown = world.report(world.scheduler(), *runs, probes=b"12345", lookups=[1, -1])
    assert sum(shown.outcomes.values()) == shown.blocks <= MOST_BLOCKS
    assert shown.outcomes.keys() <= set(NAMES)
    assert "evicted" not in shown.outcomes, "an engine cannot know that"
    assert sum(world.explanations.outcomes.values()) == shown.blocks


def test_a_report_for_an_unknown_kind_of_tenant_is_refused(world: World) -> None:
    report = m.RequestReport("r", "a raw salt", [("loaded", 1)])
    assert world.scheduler().refusal(m.ReportRequests([report])) == "bad_tenant"
    assert not world.explanations.last(1)


def test_the_last_requests_are_bounded_and_found_by_name(world: World) -> None:
    peer = world.scheduler()
    for number in range(REQUESTS_KEPT + 10):
        world.report(peer, ("loaded", 1), request=f"cmpl-{number}-0")
    assert len(world.explanations.last(10_000)) == REQUESTS_KEPT
    assert world.explanations.find("cmpl-500").request == "cmpl-500-0"
    with pytest.raises(Exception, match="no request of that name"):
        world.explanations.find("cmpl-5-")


def test_debug_logs_one_line_a_request(world: World, caplog: pytest.LogCaptureFixture) -> None:
    peer = world.scheduler()
    with caplog.at_level(logging.DEBUG, logger="kvkeep.server.service"):
        world.report(peer, ("local", 1), ("loaded", 2), ("not_worth", 3), request="a\nb")
    [line] = [each.getMessage() for each in caplog.records if "request" in each.getMessage()]
    assert line.startswith("request a?b of tenant default in session 1 (peer, pid 1): ")
    assert line.endswith("6 blocks: 1 local, 2 loaded, 3 not worth")


def test_over_http_only_with_the_token(start: Start) -> None:
    running = start()
    status, said = running.ask("/v1/explain", headers={"authorization": ""})
    assert (status, said["error"]) == (401, "unauthorized")
    assert running.ask("/v1/explain?last=5") == (200, [])
    status, said = running.ask("/v1/explain?request=cmpl-1")
    assert (status, said["error"]) == (404, "unknown_request")
    assert running.ask("/v1/explain?last=0")[0] == 422

    def report() -> None:
        service = running.daemon.service
        peer = Peer(lambda frames: service.handle(frames, 0)).attach()
        peer.ask(m.LayoutOpened, m.OpenLayout(b"f" * 16, [64], parts=PARTS, role=m.SCHEDULER))
        tenant = tenant_of("alice")
        one = m.RequestReport(
            "cmpl-1-0", tenant, [("loaded", 3), ("last", 1)], 60, 48, 0, 12, 410_000
        )
        peer.ask(m.Done, m.ReportRequests([one]))

    running.in_loop(report)
    status, [shown] = running.ask("/v1/explain?request=cmpl-1")
    assert status == 200 and shown["outcomes"] == {"loaded": 3, "last": 1}
    assert shown["tokens_loaded"] == 48 and shown["saved_s"] == 0.0
    assert shown["prompt_s"] == 0.41
    status, said = running.ask("/v1/status")
    assert said["prompt_blocks"] == {"loaded": 3, "last": 1}
    assert said["figures"]["requests"] == 1 and said["figures"]["tokens_computed"] == 12
    assert said["models"][0]["model"] == "llama"
    [session] = said["sessions"]
    assert (session["engine"], session["role"]) == ("peer", "scheduler")
    assert session["bytes_per_token"] == 256.0, "a slot of 4 KiB for 16 tokens"
