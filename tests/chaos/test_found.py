"""What chaos runs have found, each as a test of its own: seeds change their meaning with every
change of the code."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.client.connection import Connection
from kvkeep.client.copier import HostCopier
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.transfer import Transfer
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.store.adopt import adopt
from kvkeep.store.store import Store
from kvkeep.store.table import PlainColumns
from kvkeep_lab.simulation.peer import chain
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity
from kvkeep_lab.simulation.wire import SimulatedNetwork


def test_a_copy_that_fails_on_the_network_plane_gives_its_lease_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker looks up for itself there, and the lease was kept if putting the blocks in place
    raised."""
    network, server = SimulatedNetwork(1), SimulatedServer(64 * 4096, 4 * 4096)
    network.serve(server.service)
    identity = ModelIdentity(model="m", revision="1", kv_dtype="|u1", block_tokens=4, content="l")
    connection = Connection(
        BlockShape(identity, (64,)), ClientOptions(), network.transport(), network.clock
    )
    assert connection.wait_until_up(1_000)
    memory, keys = np.arange(3 * 64, dtype=np.uint8).reshape(3, 64), chain("a", 3)
    transfer = Transfer(connection, [GroupMemory(BlockRuns.of([memory]))], 0)
    assert transfer.store(StoreRequest("default", b"", keys, np.arange(3))).written == 3

    def fail(*_: object) -> None:
        raise OSError("no such memory")

    monkeypatch.setattr(HostCopier, "begin_load", fail)
    nothing = np.empty(0, dtype=np.int64)
    load = LoadRequest(
        "default", keys, 0, np.arange(3), connection.epoch, nothing, np.zeros((3, 1), np.uint64)
    )
    with pytest.raises(OSError):
        transfer.load(load)
    for _ in range(3):
        connection.poll()
        network.run_until(network.clock.now_ms + 50)
    assert [session.leases for session in server.store.sessions.values()] == [{}]


def test_what_hangs_above_a_lease_that_cannot_be_proven_is_held_for_old_processes() -> None:
    """A lease pins the last block of a chain. With that one dropped at adoption, those above it
    could be evicted while a process of the old server read them."""
    columns, slab_bytes = PlainColumns(), 4 * 4096
    old = Store(slab_bytes, slab_bytes, columns=columns)
    old.add_slabs(0, 1)
    old.open_session(1)
    layout = old.open_layout(1, b"a test's layout.", (4096,))
    plan = old.prepare_store(1, 1, "default", layout.number, 0, b"", chain("a", 3), 0)
    old.complete_store(1, 1, np.array([7, 8, 9], dtype=np.uint64), 0)
    assert old.lookup(1, 2, "default", layout.number, chain("a", 3), 0, 0).blocks == 3
    deepest = old.sessions[1].leases[2]
    old.blocks.table.many.seal[deepest] ^= 1

    new = Store(slab_bytes, slab_bytes, columns=columns)
    adoption = adopt(new, 1, old_sessions=True, now_ms=0)
    assert (adoption.blocks, adoption.dropped) == (2, 1)
    new.open_session(1)
    layout = new.open_layout(1, b"a test's layout.", (4096,))
    other = new.prepare_store(1, 1, "default", layout.number, 0, b"", chain("b", 4), 0)
    assert not set(other.slots.tolist()) & set(plan.slots.tolist()), (
        "a slot that the old process reads"
    )
    assert other.refused == 3
    check_integrity(new)
