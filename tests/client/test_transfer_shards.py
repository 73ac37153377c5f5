"""Ranks that hold several shards of each block, on both data planes: one rank that holds all heads
and ranks that hold some store and load the same shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.client.conftest import Transfer

from kvkeep.client.connection import Connection
from kvkeep.client.copier import HostCopier
from kvkeep.client.rank_memory import GroupMemory, physical_fingerprint_of_each
from kvkeep.client.requests import NO_BLOCK, LoadRequest, StoreRequest
from kvkeep.errors import RequestError
from kvkeep.kv.runs import BlockRuns, cut_heads
from kvkeep.wire import messages as m

Make = Callable[..., Any]
BLOCKS, HEADS, TOKENS, WIDTH = 20, 4, 3, 50  # of engines, and of a block of one layer
SHARD_BYTES = (TOKENS * WIDTH,) * HEADS
NOTHING = 0xEE
KEYS = b"".join(b"k%d" % at + bytes(14) for at in range(4))
IDS = [3, 17, 0, 11]


class Rank:
    """Holds some heads of every block: [blocks, tokens, heads, width]."""

    def __init__(self, connection: Connection, kv: NDArray[np.uint8], heads: range) -> None:
        self.kv = np.ascontiguousarray(kv[:, :, heads.start : heads.stop])
        self.connection = connection
        views = cut_heads({"layer": self.kv}, -2, len(heads))
        groups = [GroupMemory(BlockRuns.of(each)) for each in views]
        self.transfer = Transfer(connection, groups, heads.start, shards_per_rank=len(heads))

    def store(self, ids: list[int] = IDS) -> tuple[int, bool]:
        request = StoreRequest("default", b"", KEYS[: 16 * len(ids)], np.array(ids))
        return self.transfer.offer(request)

    def load(self, ids: list[int] = IDS) -> list[bool]:
        assert self.connection.layout is not None
        call = self.connection.call(m.Lookup("default", self.connection.layout.layout, KEYS), 200)
        found = self.connection.wait(call)
        assert isinstance(found, m.Found)
        request = LoadRequest(
            "default",
            KEYS,
            0,
            np.array(ids),
            call.epoch,
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, HEADS),
        )
        loaded = self.transfer.load(request).tolist()
        self.connection.give_up(call)
        self.connection.poll()
        return list(loaded)


class Engine:
    """All ranks of one size."""

    def __init__(self, connection: Connection, size: int, kv: NDArray[np.uint8]) -> None:
        each = HEADS // size
        self.ranks = [
            Rank(connection, kv, range(each * rank, each * (rank + 1))) for rank in range(size)
        ]

    @property
    def kv(self) -> NDArray[np.uint8]:
        return np.concatenate([rank.kv for rank in self.ranks], axis=2)


@pytest.fixture(params=["network", "shared_memory"])
def sim(request: pytest.FixtureRequest, simulation: Make) -> Any:
    return simulation(shared_memory=request.param == "shared_memory")


@pytest.fixture
def connection(sim: Any) -> Connection:
    made = sim.connected(*SHARD_BYTES)
    assert isinstance(made, Connection)
    return made


@pytest.fixture
def kv() -> NDArray[np.uint8]:
    shape = (BLOCKS, TOKENS, HEADS, WIDTH)
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def loaded(connection: Connection, size: int) -> NDArray[np.uint8]:
    """What an engine of that size has after it loaded everything."""
    blank = np.full((BLOCKS, TOKENS, HEADS, WIDTH), NOTHING, dtype=np.uint8)
    engine = Engine(connection, size, blank)
    assert [rank.load() for rank in engine.ranks] == [[True] * 4] * size
    others = [block for block in range(BLOCKS) if block not in IDS]
    assert (engine.kv[others] == NOTHING).all()
    return engine.kv


@pytest.mark.parametrize("stores", [1, 2, 4])
@pytest.mark.parametrize("loads", [1, 2, 4])
def test_engines_of_every_size_have_the_same_bytes(
    sim: Any, connection: Connection, kv: NDArray[np.uint8], stores: int, loads: int
) -> None:
    assert [rank.store() for rank in Engine(connection, stores, kv).ranks] == [(4, True)] * stores
    assert sim.recorder.count(m.PrepareStore) == sim.recorder.count(m.CompleteStore) == stores
    assert (loaded(connection, loads)[IDS] == kv[IDS]).all()
    sim.run(20)
    assert sim.held() == [(0, 0)]


def test_in_parts_it_is_the_same(
    connection: Connection, kv: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopier, "whole_bytes", 1)
    monkeypatch.setattr(HostCopier, "first_bytes", 1)
    monkeypatch.setattr(HostCopier, "part_bytes", sum(SHARD_BYTES))
    assert Engine(connection, 1, kv).ranks[0].store() == (4, True)
    assert (loaded(connection, 2)[IDS] == kv[IDS]).all()


@pytest.mark.parametrize("stored", [[0], [3], [1, 2]], ids=str)
def test_a_rank_completes_what_engines_of_another_size_have_begun(
    sim: Any, connection: Connection, kv: NDArray[np.uint8], stored: list[int]
) -> None:
    """It stores the shards that are missing, and no other."""
    four = Engine(connection, 4, kv)
    for rank in stored:
        assert four.ranks[rank].store(IDS[:3]) == (3, True)
    other = kv.copy()
    other[:, :, stored] ^= 1  # what is there is not written again
    assert Engine(connection, 1, other).ranks[0].store() == (4, True)
    held = loaded(connection, 2)
    assert (held[IDS[:3]] == kv[IDS[:3]]).all() and (held[IDS[3]] == other[IDS[3]]).all()
    sim.run(20)
    assert sim.held() == [(0, 0)]


def test_what_another_engine_is_writing_is_left_to_it(
    sim: Any, connection: Connection, kv: NDArray[np.uint8]
) -> None:
    assert connection.layout is not None
    number = connection.layout.layout
    call = connection.call(m.PrepareStore("default", number, 2, b"", KEYS), 200)
    assert isinstance(connection.wait(call), m.Prepared)
    assert Engine(connection, 2, kv).ranks[1].store() == (4, True), "its other shard"
    prepared = [each for each in sim.recorder.came if isinstance(each, m.PrepareStore)][1:]
    assert [(each.shard, each.further_shards) for each in prepared] == [(2, [3]), (2, []), (3, [])]
    assert set(sim.store.blocks.shards_in.values()) == {0b1000}
    connection.give_up(call)


def test_a_shard_that_is_bad_fails_its_block_on_the_rank_that_holds_it(
    sim: Any, connection: Connection, kv: NDArray[np.uint8]
) -> None:
    assert Engine(connection, 1, kv).ranks[0].store() == (4, True)
    pool = sim.pools[0].segments.view(0, 64 * 4096) if sim.pools else sim.server.memory.bytes
    shard = np.ascontiguousarray(kv[IDS[2], :, 3]).tobytes()
    pool[pool.tobytes().index(shard) + 7] ^= 4
    blank = np.full_like(kv, NOTHING)
    first, second = Engine(connection, 2, blank).ranks
    assert first.load() == [True] * 4
    assert second.load() == [True, True, False, True] and connection.counters.failures == {
        "bad_block": 1
    }


def test_a_block_that_the_engine_lacks_ends_the_store_of_every_shard(
    sim: Any, connection: Connection, kv: NDArray[np.uint8]
) -> None:
    assert Engine(connection, 1, kv).ranks[0].store([*IDS[:2], NO_BLOCK, IDS[3]])[1] is False
    sim.run(20)
    assert sim.held() == [(0, 0)]


def test_blocks_are_asked_for_once_for_all_shards(
    connection: Connection, kv: NDArray[np.uint8]
) -> None:
    with pytest.raises(
        RequestError, match="block ids for 2 groups, but the engine's blocks have 1"
    ):
        Engine(connection, 1, kv).ranks[0].transfer.table(np.array([IDS, IDS]))


def test_shards_lie_alike_or_are_refused(kv: NDArray[np.uint8]) -> None:
    groups = [GroupMemory(BlockRuns.of({"layer": kv[:, :, at : at + 2]})) for at in (0, 2)]
    assert physical_fingerprint_of_each(groups, 2) == bytes.fromhex(groups[0].runs.fingerprint)
    groups[1] = GroupMemory(BlockRuns.of({"layer": kv[:, :, 2:].transpose(0, 2, 1, 3)}))
    with pytest.raises(RequestError, match="do not lie in memory alike"):
        physical_fingerprint_of_each(groups, 2)


def test_a_server_that_knows_no_such_ranks_is_not_used(sim: Any) -> None:
    connection = sim.connection(*SHARD_BYTES)
    connection.physical, connection.further_shards = (0, b"x"), [1]
    welcome = m.Welcome(1, 1, "kvkeep 0", *_places(sim), [m.NETWORK, m.SHARED_MEMORY], verify=True)
    sim.recorder.instead = lambda header, request: (
        welcome if isinstance(request, m.Hello) else m.Done()
    )
    assert not connection.wait_until_up(1_000)
    assert connection.counters.failures["old_server"] > 0
    assert "upgrade it before the engines" in connection.outage.trouble[1]


def _places(sim: Any) -> tuple[m.PoolPlace, m.WireLimits]:
    other = sim.connected(100)
    return other.welcome.pool, other.welcome.limits
