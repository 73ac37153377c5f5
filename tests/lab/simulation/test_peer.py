"""Tests for the client that says exactly what it is told."""

from __future__ import annotations

import pytest

from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(16 * 4096, 4 * 4096)


@pytest.fixture
def peer(server: SimulatedServer) -> Peer:
    return Peer(lambda frames: server.service.handle(frames, 0))


def test_what_it_stores_it_loads(peer: Peer) -> None:
    layout = peer.attach().open_layout(64)
    blocks = [bytes([at]) * 64 for at in range(3)]
    assert peer.store(layout, chain("a", 3), blocks) == 3
    assert peer.load(layout, chain("a", 5)) == blocks


def test_what_is_there_is_not_stored_again(peer: Peer) -> None:
    layout = peer.attach().open_layout(64)
    peer.store(layout, chain("a", 2), [bytes(64)] * 2)
    assert peer.store(layout, chain("a", 2), [bytes(64)] * 2) == 0
    assert peer.load(layout, chain("b", 2)) == []


def test_an_answer_of_another_kind_fails_the_test(peer: Peer) -> None:
    with pytest.raises(AssertionError, match="Ping was answered by Refused"):
        peer.ask(m.Done, m.Ping())


def test_a_refusal_gives_its_code(peer: Peer) -> None:
    assert peer.refusal(m.Ping()) == "unknown_session"


def test_silence_is_none() -> None:
    assert Peer(lambda frames: None).say(m.Ping()) is None


def test_chains_of_one_name_share_their_beginning() -> None:
    assert chain("a", 5).startswith(chain("a", 3))
    assert chain("a", 1) != chain("b", 1)
    assert len(chain("a" * 40, 7)) == 7 * 16
