"""Where a rank's part of blocks lies. What follows for stores and loads is in test_transfer.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkeep.client.rank_memory import GroupMemory, RankMemory
from kvkeep.errors import PoolError, RequestError
from kvkeep.kv.runs import BlockRuns

Make = Callable[..., Any]


def rank_memory(connection: Any, *nbytes: int) -> RankMemory:
    engine = [np.zeros((8, each), dtype=np.uint8) for each in nbytes]
    return RankMemory(connection, [GroupMemory(BlockRuns.of([each])) for each in engine], 0)


def test_each_piece_of_a_slot_has_an_address_of_its_own(simulation: Make) -> None:
    connection = simulation(shared_memory=True).connected(600, 400)
    memory, slots = rank_memory(connection, 600, 400), np.array([0, 4096])
    with (
        memory.addresses(0, slots, connection.epoch) as first,
        memory.addresses(1, slots, connection.epoch) as second,
    ):
        assert first is not None and second is not None
        assert first[1] - first[0] == second[1] - second[0] == 4096
        assert (second - first == connection.layout.shard_offsets[1]).all() and second[0] > first[0]


def test_without_the_pool_there_are_no_addresses(simulation: Make) -> None:
    connection = simulation(shared_memory=True).connected(1000)
    memory = rank_memory(connection, 1000)
    with memory.addresses(0, np.array([0]), connection.epoch + 1) as of_another_epoch:
        assert of_another_epoch is None
    with memory.addresses(0, np.array([1 << 40]), connection.epoch) as outside:
        assert outside is None
    assert connection.counters.failures == {"stale_epoch": 1, "pool": 1}
    assert connection.refusal


def test_memory_that_was_cut_off_is_logged_once(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    connection = simulation(shared_memory=True).connected(1000)
    for _ in range(2):
        rank_memory(connection, 1000).was_cut_off(PoolError("cut off", "see who did it"))
    assert caplog.messages == [
        "kvkeep: blocks are computed or not stored: cut off (see who did it)"
    ]
    assert connection.counters.failures == {"pool": 2}


def test_block_ids_have_a_row_for_each_piece(simulation: Make) -> None:
    memory = rank_memory(simulation().connected(600, 400), 600, 400)
    assert memory.table(np.array([[1, 2], [3, 4]])).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(RequestError, match="block ids for 1 groups"):
        memory.table(np.array([1, 2]))
    memory.relocate(())
    with pytest.raises(RequestError, match="the engine's blocks have 0"):
        memory.table(np.array([[1, 2], [3, 4]]))


@pytest.mark.parametrize(("frame_bytes", "blocks"), [(1500, 1), (3500, 3), (1 << 20, 64)])
def test_a_message_carries_what_a_frame_takes(
    simulation: Make, frame_bytes: int, blocks: int
) -> None:
    sim = simulation(frame_bytes=frame_bytes)
    assert rank_memory(sim.connected(1000), 1000).blocks_per_message(0) == blocks
