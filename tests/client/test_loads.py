"""Loads from slots in two steps: the pool stays ours until all has arrived, whatever happens
between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.client.conftest import Transfer

from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m

Make = Callable[..., Any]
SIZES = (700, 300)
BLOCKS = 20
STORED = [[0, 1, 2, 3], [4, 5, 6, 7]]
TWO_SHARDS = ModelIdentity(model="l", revision="1", kv_dtype="|u1", block_tokens=4, content="l")


def keys(count: int) -> bytes:
    return b"".join(f"k{at}".encode().ljust(16, b".") for at in range(count))


class World:
    """Four blocks of two pieces in a server, and an engine like a GPU's to load them into."""

    def __init__(self, simulation: Make, late_copier: Any, breaks: str = "") -> None:
        self.sim = simulation(shared_memory=True)
        self.connection = self.sim.connected(*SIZES, identity=TWO_SHARDS)
        rng = np.random.default_rng(1)
        self.engine = [rng.integers(1, 256, (BLOCKS, nbytes), dtype=np.uint8) for nbytes in SIZES]
        store = StoreRequest("default", b"", keys(4), np.array(STORED))
        assert Transfer(self.connection, self._pieces(self.engine), 0).store(store) == 4
        self.target = [np.zeros_like(memory) for memory in self.engine]
        pieces = self._pieces(self.target)
        self.copier = late_copier([piece.runs for piece in pieces], breaks)
        self.transfer = Transfer(self.connection, pieces, 0, self.copier)
        self.fence = self.connection.shared_pool

    def _pieces(self, memory: Any) -> list[GroupMemory]:
        return [
            GroupMemory(BlockRuns.of([area]), may_lack=at > 0) for at, area in enumerate(memory)
        ]

    def request(self, ids: Any) -> LoadRequest:
        call = self.connection.call(
            m.Lookup("default", self.connection.layout.layout, keys(4)), 200
        )
        found = self.connection.wait(call)
        assert isinstance(found, m.Found)
        slots, checksums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 2),
        )
        return LoadRequest("default", keys(4), 0, np.array(ids), call.epoch, slots, checksums)

    def under_way(self) -> bool:
        return any(each.on_the_way for each in self.copier.scatterings)


IDS = [[10, 11, 12, 13], [14, 15, 16, 17]]


@pytest.fixture
def world(simulation: Make, late_copier: Any) -> World:
    return World(simulation, late_copier)


def test_all_of_it_is_begun_before_any_of_it_is_waited_for(world: World) -> None:
    loading = world.transfer.loading([world.request(IDS)], ["mark"])
    assert (
        world.copier.names == ["scatter 0", "scatter 1"]
        and world.copier.waited_for == [["mark"]] * 2
    )
    assert world.under_way() and world.fence.holders == 3
    assert [each.tolist() for each in loading.finish()] == [[True] * 4]
    assert world.fence.holders == 1 and not world.under_way()
    assert all(
        (world.target[piece][IDS[piece]] == world.engine[piece][STORED[piece]]).all()
        for piece in (0, 1)
    )


def test_the_engine_was_ready_when_the_last_piece_had_it(world: World) -> None:
    loading = world.transfer.loading([world.request(IDS)], ["mark"])
    assert loading.ready_s == 0
    for scattering, ready_s in zip(world.copier.scatterings, (7.0, 3.0), strict=True):
        scattering.ready_s = ready_s
    assert loading.ready_s == 7
    loading.finish()


def test_memory_stays_ours_until_all_has_arrived_though_the_session_is_over(world: World) -> None:
    lock = world.sim.server.service.sessions.all()[0].watch
    loading = world.transfer.loading([world.request(IDS)])
    world.connection.start_over()  # as when the server is another one
    assert lock.is_held(), "the server may not take a slot that is being read"
    assert [each.tolist() for each in loading.finish()] == [[True] * 4], (
        "the bytes were there, and are verified"
    )
    assert not lock.is_held() and world.fence.holders == 0


def test_of_those_begun_together_each_has_its_own_blocks(world: World) -> None:
    stale = replace(world.request(IDS), epoch=99)
    good, bad = world.request(IDS), world.request([[1, 2, 3, 4], [5, 6, 7, 8]])
    bad = replace(
        bad, checksums=bad.checksums ^ np.array([[0, 0], [0, 1], [0, 0], [0, 0]], dtype=np.uint64)
    )
    loaded = world.transfer.load_all([bad, stale, good])
    assert [each.tolist() for each in loaded] == [
        [True, False, True, True],
        [False] * 4,
        [True] * 4,
    ]


def test_several_can_be_under_way_and_end_in_any_order(world: World) -> None:
    other = [[1, 2, 3, 4], [5, 6, 7, 8]]
    first, second = (world.transfer.loading([world.request(ids)]) for ids in (IDS, other))
    assert second.finish()[0].all() and first.finish()[0].all()
    for ids in (IDS, other):
        assert all(
            (world.target[piece][ids[piece]] == world.engine[piece][STORED[piece]]).all()
            for piece in (0, 1)
        )
    assert world.fence.holders == 1


@pytest.mark.parametrize("breaks", ["scatter 0", "scatter 1"])
def test_when_it_cannot_be_begun_nothing_is_under_way(
    simulation: Make, late_copier: Any, breaks: str
) -> None:
    world = World(simulation, late_copier, breaks)
    with pytest.raises(RuntimeError, match=f"{breaks} broke"):
        world.transfer.loading([world.request(IDS)])
    assert not world.under_way() and world.fence.holders == 1


@pytest.mark.parametrize("breaks", ["good 0", "good 1"])
def test_when_a_device_fails_nothing_is_under_way(
    simulation: Make, late_copier: Any, breaks: str
) -> None:
    world = World(simulation, late_copier, breaks)
    loading = world.transfer.loading([world.request(IDS)])
    with pytest.raises(RuntimeError, match=f"{breaks} broke"):
        loading.finish()
    assert not world.under_way() and world.fence.holders == 1


@pytest.mark.parametrize("broken", [0, 1])
def test_what_cannot_be_waited_for_does_not_end_the_wait_for_the_others(
    world: World, broken: int
) -> None:
    loading = world.transfer.loading([world.request(IDS)])
    other, holders = world.copier.scatterings[1 - broken], []
    arrive = other.close

    def fail() -> None:
        raise RuntimeError("the device is gone")

    def close() -> None:
        holders.append(world.fence.holders)
        arrive()

    world.copier.scatterings[broken].close, other.close = fail, close
    with pytest.raises(RuntimeError, match="the device is gone"):
        loading.finish()
    assert not other.on_the_way, "else it would be written while somebody else has those blocks"
    assert holders[-1] == 3 and world.fence.holders == 1, "the pool goes after that"


def test_a_pool_that_goes_between_two_pieces_costs_the_load_and_is_let_go(world: World) -> None:
    request, begin_load = world.request(IDS), world.copier.begin_load

    def scatter_and_lose_the_session(*arguments: Any) -> Any:
        made = begin_load(*arguments)
        world.connection.start_over()
        return made

    world.copier.begin_load = scatter_and_lose_the_session
    loading = world.transfer.loading([request])
    assert world.copier.names == ["scatter 0"]
    assert [each.tolist() for each in loading.finish()] == [[False] * 4]
    assert not world.under_way() and world.fence.holders == 0


def test_another_number_of_pieces_is_refused_before_anything_is_begun(world: World) -> None:
    requests = [world.request(IDS), world.request(IDS[0])]
    with pytest.raises(
        RequestError, match="block ids for 1 groups, but the engine's blocks have 2"
    ):
        world.transfer.loading(requests)
    assert world.copier.names == [] and world.fence.holders == 1
