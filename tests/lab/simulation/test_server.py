"""Tests for the whole server in one process."""

from __future__ import annotations

import pytest

from kvkeep.store.plans import Limits
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import PlainMemory, SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (4094, 4), (4096, 1)])
def test_memory_outside_the_pool_is_our_bug(offset: int, nbytes: int) -> None:
    with pytest.raises(AssertionError):
        PlainMemory(4096).view(offset, nbytes)


def test_the_whole_pool_can_be_used() -> None:
    server = SimulatedServer(16 * 4096, 4 * 4096)
    peer = Peer(lambda frames: server.service.handle(frames, 0)).attach()
    layout = peer.open_layout(4096)
    blocks = [bytes([at]) * 4096 for at in range(16)]
    assert peer.store(layout, chain("a", 16), blocks) == 16
    assert peer.load(layout, chain("a", 16)) == blocks
    check_integrity(server.store)


def test_limits_reach_both_the_store_and_the_client() -> None:
    limits = Limits(blocks_per_request=5, leases_per_session=6, writing_blocks_per_session=7)
    server = SimulatedServer(16 * 4096, 4 * 4096, epoch=9, limits=limits, frame_bytes=12_345)
    welcome = Peer(lambda frames: server.service.handle(frames, 0)).hello()
    assert welcome.epoch == 9
    assert welcome.limits.frame_bytes == 12_345
    assert welcome.limits.blocks_per_request == server.store.limits.blocks_per_request == 5
    assert welcome.limits.leases_per_session == 6
    assert welcome.limits.writing_blocks_per_session == 7
