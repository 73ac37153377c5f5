"""The simulated tier: it gives back what it took, in time, and as the store's own session."""

from __future__ import annotations

from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.tiers import SimulatedTiers

KEYS = chain("a", 4)
BLOCKS = [bytes([at + 1]) * 64 for at in range(4)]


class World:
    def __init__(self) -> None:
        self.now_ms = 0
        self.server = SimulatedServer(16 * 4096, 4 * 4096)
        self.tiers = SimulatedTiers(self.server, block_ms=10)

    def peer(self) -> Peer:
        return Peer(lambda frames: self.tiers.handle(frames, self.now_ms)).attach()


def test_blocks_come_up_one_after_another_as_they_were() -> None:
    world = World()
    peer = world.peer()
    layout = peer.open_layout(64)
    peer.store(layout, KEYS, BLOCKS)
    assert world.tiers.take_down() == 4
    found = peer.ask(m.Found, m.Lookup("default", layout, KEYS, 0, 100))
    assert (found.blocks, found.coming, found.again_ms) == (0, 4, 40)
    world.now_ms = 25
    assert peer.load(layout, KEYS) == BLOCKS[:2], "usable as soon as they are in memory"
    world.now_ms = 40
    assert peer.load(layout, KEYS) == BLOCKS
    assert world.tiers.promoted == 4
    world.server.check_integrity()


def test_a_stalled_tier_promises_and_never_delivers() -> None:
    world = World()
    peer = world.peer()
    layout = peer.open_layout(64)
    peer.store(layout, KEYS, BLOCKS)
    world.tiers.take_down()
    world.tiers.stalled = True
    for world.now_ms in (0, 1_000, 100_000):
        found = peer.ask(m.Found, m.Lookup("default", layout, KEYS, 0, 100))
        assert (found.blocks, found.coming, found.again_ms) == (0, 4, 40)


def test_what_it_keeps_outlives_the_server() -> None:
    world = World()
    peer = world.peer()
    layout = peer.open_layout(64)
    peer.store(layout, KEYS, BLOCKS)
    world.tiers.take_down()
    world.server = SimulatedServer(16 * 4096, 4 * 4096, epoch=2)
    world.tiers.attach(world.server)
    peer = world.peer()
    layout = peer.open_layout(64)
    assert peer.ask(m.Done, m.Prefetch("default", layout, KEYS)).count == 4
    world.now_ms = 40
    assert peer.load(layout, KEYS) == BLOCKS
