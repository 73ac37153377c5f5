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


def test_an_answer_of_another_kind_fails_the_test(peer: Peer) -> None:
    with pytest.raises(AssertionError, match="Ping was answered by Refused"):
        peer.ask(m.Done, m.Ping())


def test_a_refusal_gives_its_code(peer: Peer) -> None:
    assert peer.refusal(m.Ping()) == "unknown_session"


def test_chains_of_one_name_share_their_beginning() -> None:
    assert chain("a", 5).startswith(chain("a", 3))
    assert chain("a", 1) != chain("b", 1)
    assert len(chain("a" * 40, 7)) == 7 * 16
