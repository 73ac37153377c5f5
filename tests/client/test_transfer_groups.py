"""Blocks that come in several pieces, on both data planes: each in a shard of its own, some of them
missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.client.conftest import Transfer

from kvkeep.client.connection import Connection
from kvkeep.client.copier import HostCopier
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import NO_BLOCK, LoadRequest, StoreRequest
from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m

Make = Callable[..., Any]
SIZES = (700, 300, 1000)
BLOCKS = 30
NOTHING = 0xEE  # what memory holds that nobody wrote to


def keys(count: int) -> bytes:
    return b"".join(f"k{at}".encode().ljust(16, b".") for at in range(count))


class Engine:
    """One rank with its pieces; all but the first may be missing."""

    def __init__(
        self, connection: Connection, sizes: Sequence[int] = SIZES, first_shard: int = 0
    ) -> None:
        rng = np.random.default_rng(first_shard)
        self.connection = connection
        self.first_shard = first_shard
        self.memory = [rng.integers(0, 256, (BLOCKS, nbytes), dtype=np.uint8) for nbytes in sizes]
        self.before = [memory.copy() for memory in self.memory]
        self.transfer = self.transfer_of(self.memory)
        self.target: list[NDArray[np.uint8]] = []

    def transfer_of(self, memory: list[NDArray[np.uint8]]) -> Transfer:
        pieces = [
            GroupMemory(BlockRuns.of([area]), may_lack=at > 0) for at, area in enumerate(memory)
        ]
        return Transfer(self.connection, pieces, self.first_shard)

    def request(self, ids: Any) -> StoreRequest:
        table = np.array(ids, dtype=np.int64)
        return StoreRequest("default", b"", keys(table.shape[-1]), table)

    def store(self, ids: Any) -> tuple[int, bool]:
        return self.transfer.offer(self.request(ids))

    def ask(self, count: int, skip: int = 0) -> tuple[int, m.Found]:
        """As a scheduler does it: the epoch, and what is found. The lease stays."""
        assert self.connection.layout is not None
        call = self.connection.call(
            m.Lookup("default", self.connection.layout.layout, keys(count), skip), 200
        )
        found = self.connection.wait(call)
        assert isinstance(found, m.Found)
        return call.epoch, found

    def found(self, count: int) -> int:
        return self.ask(count)[1].blocks

    def look_up(self, count: int, ids: Any, skip: int = 0) -> LoadRequest:
        epoch, found = self.ask(count, skip)
        slots = np.frombuffer(found.slots, "<i8")
        checksums = np.frombuffer(found.checksums, "<u8").reshape(
            -1, len(self.connection.shape.shard_bytes)
        )
        return LoadRequest(
            "default", keys(count), skip, np.array(ids, dtype=np.int64), epoch, slots, checksums
        )

    def load(self, ids: Any, skip: int = 0) -> list[bool]:
        """Loads into memory of another engine of the same kind."""
        self.target = [np.full_like(area, NOTHING) for area in self.memory]
        count = skip + np.array(ids).shape[-1]
        return self.transfer_of(self.target).load(self.look_up(count, ids, skip)).tolist()  # type: ignore[no-any-return]

    def has(self, piece: int, into: int, source: int) -> bool:
        return bool((self.target[piece][into] == self.before[piece][source]).all())

    def untouched(self, piece: int, besides: Sequence[int] = ()) -> bool:
        others = [block for block in range(BLOCKS) if block not in besides]
        return bool((self.target[piece][others] == NOTHING).all())


@pytest.fixture(params=["network", "shared_memory"])
def sim(request: pytest.FixtureRequest, simulation: Make) -> Any:
    return simulation(shared_memory=request.param == "shared_memory")


def connected(sim: Any, *sizes: int, **options: Any) -> Connection:
    """To a server a shard is a shard, whether a rank has several or each rank has one."""
    fields: dict[str, Any] = {
        "model": "p",
        "revision": "1",
        "kv_dtype": "|u1",
        "block_tokens": 4,
        "content": "l",
    }
    made = sim.connected(*sizes, identity=ModelIdentity(**fields), **options)
    assert isinstance(made, Connection)
    return made


@pytest.fixture
def engine(sim: Any) -> Engine:
    return Engine(connected(sim, *SIZES))


def flip_a_byte(sim: Any, shard: NDArray[np.uint8]) -> None:
    pool = sim.pools[0].segments.view(0, 64 * 4096) if sim.pools else sim.server.memory.bytes
    pool[pool.tobytes().index(shard.tobytes()) + 17] ^= 4


STORED = [[3, 17, 0, 29], [5, 6, 7, 8], [10, 12, 11, 3]]
TARGETS = [[20, 21, 22, 23], [1, 0, 3, 2], [9, 8, 7, 6]]


# -- all pieces


@pytest.mark.parametrize("pieces", [2, 3])
def test_every_piece_comes_back_from_and_to_any_block_ids(sim: Any, pieces: int) -> None:
    engine = Engine(connected(sim, *SIZES[:pieces]), SIZES[:pieces])
    assert engine.store(STORED[:pieces]) == (4, True)
    assert engine.load(TARGETS[:pieces]) == [True] * 4
    for piece in range(pieces):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in range(4))
        assert engine.untouched(piece, besides=TARGETS[piece])
    assert all((now == old).all() for now, old in zip(engine.memory, engine.before, strict=True))
    sim.run(20)
    assert sim.held() == [(1, 0)], "the lookup's own lease"


def test_skipped_blocks_are_skipped_in_every_piece(engine: Engine) -> None:
    engine.store(STORED)
    assert engine.load([ids[2:] for ids in TARGETS], skip=2) == [True, True]
    for piece in range(3):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in (2, 3))
        assert engine.untouched(piece, besides=TARGETS[piece][2:])


def test_blocks_are_counted_and_what_is_there_is_not_stored_again(engine: Engine) -> None:
    assert engine.store([ids[:2] for ids in STORED]) == (2, True)
    assert engine.store([ids[:3] for ids in STORED]) == (1, True)
    assert engine.store([ids[:3] for ids in STORED]) == (0, True)


@pytest.mark.parametrize("blocks_a_part", [1, 3])
def test_a_store_in_parts_is_the_same_as_one_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, blocks_a_part: int
) -> None:
    for name in ("whole_bytes", "part_bytes"):
        monkeypatch.setattr(HostCopier, name, blocks_a_part * 1000)
    monkeypatch.setattr(HostCopier, "first_bytes", blocks_a_part * 1000)
    assert engine.store(STORED) == (4, True)
    assert engine.load(TARGETS) == [True] * 4
    for piece in range(3):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in range(4))


def test_what_an_engine_needs_back_soonest_goes_first(sim: Any, engine: Engine) -> None:
    engine.store(STORED)
    prepared = [
        request.shard for request in sim.recorder.came if isinstance(request, m.PrepareStore)
    ]
    assert prepared == [1, 2, 0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_block_is_visible_when_all_its_pieces_are_in(
    sim: Any, engine: Engine, passing: object, missing: int
) -> None:
    refused = m.Refused("cross", "no")

    def refuse_one(header: Any, request: m.Request) -> object:
        return (
            refused if isinstance(request, m.PrepareStore) and request.shard == missing else passing
        )

    sim.recorder.instead = refuse_one
    assert not engine.store(STORED)[1]
    assert engine.found(4) == 0
    sim.recorder.instead = None
    sim.run(100)
    assert sim.held()[0][1] == 0
    assert engine.store(STORED) == (4, True)
    assert engine.load(TARGETS) == [True] * 4
    assert all(engine.has(piece, TARGETS[piece][0], STORED[piece][0]) for piece in range(3))


def test_a_store_ends_with_the_first_piece_that_is_not_taken(
    sim: Any, engine: Engine, passing: object
) -> None:
    refused = m.Refused("cross", "no")
    sim.recorder.instead = lambda header, request: (
        refused if isinstance(request, m.PrepareStore) else passing
    )
    assert engine.store(STORED) == (0, False)
    assert sim.recorder.count(m.PrepareStore) == 1


def test_each_rank_finds_its_own_pieces(sim: Any) -> None:
    connection = connected(sim, 700, 300, 500, 200)
    ranks = [Engine(connection, (700, 300), 0), Engine(connection, (500, 200), 2)]
    assert ranks[0].store(STORED[:2]) == (4, True)
    assert ranks[0].found(4) == 0, "the other rank's pieces are not in"
    assert ranks[1].store(STORED[1:]) == (4, True)
    for rank, sources in zip(ranks, (STORED[:2], STORED[1:]), strict=True):
        assert rank.load(TARGETS[:2]) == [True] * 4
        for piece in (0, 1):
            assert all(rank.has(piece, TARGETS[piece][at], sources[piece][at]) for at in range(4))


@pytest.mark.parametrize("ids", [[0, 1], [[0, 1]], [[0, 1], [2, 3]], [[0, 1]] * 4], ids=str)
def test_another_number_of_pieces_is_refused(sim: Any, engine: Engine, ids: Any) -> None:
    count = len(np.atleast_2d(ids))
    with pytest.raises(
        RequestError, match=f"block ids for {count} groups, but the engine's blocks have 3"
    ) as caught:
        engine.store(ids)
    assert caught.value.field == "block_ids"
    engine.store([each[:2] for each in STORED])
    with pytest.raises(RequestError, match=f"block ids for {count} groups"):
        engine.load(ids)
    assert all(engine.untouched(piece) for piece in range(3))
    assert sim.held()[0][1] == 0


# -- pieces that are missing


ABSENT_IN_SOME = [[3, 17, 0, 29], [NO_BLOCK, NO_BLOCK, 7, 8], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 3]]


def test_a_missing_piece_cannot_be_loaded_and_all_others_can(sim: Any, engine: Engine) -> None:
    assert engine.store(ABSENT_IN_SOME) == (4, True)
    absent = engine.look_up(4, TARGETS).checksums == ABSENT
    assert absent.T.tolist() == [[False] * 4, [True, True, False, False], [True, True, True, False]]
    assert engine.load(TARGETS) == [False, False, False, True]
    assert all(engine.has(piece, TARGETS[piece][3], ABSENT_IN_SOME[piece][3]) for piece in range(3))
    wanted = np.where(absent.T, NO_BLOCK, TARGETS)
    assert engine.load(wanted) == [True] * 4
    for piece in range(3):
        there = [at for at in range(4) if ABSENT_IN_SOME[piece][at] != NO_BLOCK]
        assert all(engine.has(piece, TARGETS[piece][at], ABSENT_IN_SOME[piece][at]) for at in there)
        assert engine.untouched(piece, besides=[TARGETS[piece][at] for at in there])
    sim.run(50)
    assert sim.recorder.count(m.ReportBad) == 0, "that it was never written is nobody's fault"
    assert "bad_block" not in engine.connection.counters.failures
    assert engine.found(4) == 4


def test_loads_at_once_keep_their_pieces_apart_whichever_of_them_are_wanted(
    sim: Any, engine: Engine
) -> None:
    engine.store(ABSENT_IN_SOME)
    engine.target = [np.full_like(area, NOTHING) for area in engine.memory]
    tables = [
        [[20, 21, 22, 23], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 2], [NO_BLOCK] * 4],
        [[NO_BLOCK] * 4, [5, NO_BLOCK, 6, NO_BLOCK], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 9]],
        [[NO_BLOCK] * 4, [NO_BLOCK] * 4, [NO_BLOCK] * 4],
        [[24, 25, 26, 27], [NO_BLOCK] * 4, [NO_BLOCK, 10, NO_BLOCK, 11]],
    ]
    loaded = engine.transfer_of(engine.target).load_all(
        [engine.look_up(4, table) for table in tables]
    )
    assert [each.tolist() for each in loaded] == [
        [True] * 4,
        [False, True, True, True],
        [True] * 4,
        [True, False, True, True],
    ]
    came = [
        {20: 3, 21: 17, 22: 0, 23: 29, 24: 3, 25: 17, 26: 0, 27: 29},
        {2: 8, 6: 7},
        {9: 3, 11: 3},
    ]
    for piece, places in enumerate(came):
        assert all(engine.has(piece, into, source) for into, source in places.items())
    assert engine.untouched(0, besides=[*came[0]])
    sim.run(50)
    assert sim.recorder.count(m.ReportBad) == 0


def test_a_piece_that_is_not_wanted_is_not_touched_whatever_the_server_has(
    sim: Any, engine: Engine
) -> None:
    engine.store(STORED)
    flip_a_byte(sim, engine.memory[1][STORED[1][0]])
    none = [NO_BLOCK] * 4
    assert engine.load([TARGETS[0], none, [NO_BLOCK, NO_BLOCK, 7, NO_BLOCK]]) == [True] * 4
    assert all(engine.has(0, TARGETS[0][at], STORED[0][at]) for at in range(4))
    assert engine.untouched(1) and engine.untouched(2, besides=[7])
    assert engine.has(2, 7, STORED[2][2])
    sim.run(50)
    assert sim.recorder.count(m.ReportBad) == 0


def test_a_shard_of_which_nothing_is_wanted_is_not_fetched(simulation: Make) -> None:
    sim = simulation()
    engine = Engine(connected(sim, *SIZES))
    engine.store(STORED)
    assert engine.load([TARGETS[0], [NO_BLOCK] * 4, TARGETS[2]]) == [True] * 4
    assert {request.shard for request in sim.recorder.came if isinstance(request, m.Fetch)} == {
        0,
        2,
    }


def test_a_piece_that_does_not_come_is_no_fault_of_a_block(
    simulation: Make, passing: object
) -> None:
    sim = simulation()
    engine = Engine(connected(sim, *SIZES))
    engine.store(STORED)

    def lose_one(header: Any, request: m.Request) -> object:
        return None if isinstance(request, m.Fetch) and request.shard == 1 else passing

    sim.recorder.instead = lose_one
    assert engine.load(TARGETS) == [False] * 4
    sim.run(1_000)
    assert sim.recorder.count(m.ReportBad) == 0


def test_a_piece_that_does_not_match_costs_its_block_and_is_reported(
    sim: Any, engine: Engine
) -> None:
    engine.store(STORED)
    flip_a_byte(sim, engine.memory[2][STORED[2][1]])
    assert engine.load(TARGETS) == [True, False, True, True]
    sim.run(50)
    (report,) = [request for request in sim.recorder.came if isinstance(request, m.ReportBad)]
    assert report.key == keys(4)[16:32]
    assert engine.found(4) == 1


def test_what_came_over_the_network_is_checked_before_it_touches_engine_memory(
    simulation: Make,
) -> None:
    sim = simulation()
    engine = Engine(connected(sim, *SIZES))
    engine.store(ABSENT_IN_SOME)
    flip_a_byte(sim, engine.memory[1][ABSENT_IN_SOME[1][2]])
    assert engine.load(TARGETS) == [False, False, False, True]
    assert engine.untouched(1, besides=[TARGETS[1][3]]) and engine.untouched(
        2, besides=[TARGETS[2][3]]
    )


def report_bad(engine: Engine, block: int) -> int:
    report = m.ReportBad("default", engine.connection.layout_number, keys(4)[block * 16 :][:16])
    reply = engine.connection.wait(engine.connection.call(report, 200))
    assert isinstance(reply, m.Done)
    return reply.count


def test_a_block_with_a_missing_piece_is_no_bad_block(sim: Any, engine: Engine) -> None:
    engine.store(ABSENT_IN_SOME)
    assert [report_bad(engine, block) for block in range(4)] == [0, 0, 0, 0]
    assert engine.found(4) == 4
    assert sim.server.service.counters.bad_blocks == 0


def test_a_bad_piece_is_found_behind_a_missing_one(sim: Any, engine: Engine) -> None:
    engine.store([STORED[0], [NO_BLOCK] * 4, STORED[2]])
    flip_a_byte(sim, engine.memory[2][STORED[2][1]])
    assert report_bad(engine, 0) == 0 and report_bad(engine, 1) == 3
    assert engine.found(4) == 1


@pytest.mark.parametrize(("piece", "block"), [(0, 1), (1, 2), (2, 3)])
def test_a_block_with_a_missing_piece_goes_when_one_that_is_there_is_bad(
    sim: Any, engine: Engine, piece: int, block: int
) -> None:
    engine.store(ABSENT_IN_SOME)
    flip_a_byte(sim, engine.memory[piece][ABSENT_IN_SOME[piece][block]])
    assert [report_bad(engine, other) for other in range(4) if other != block] == [0, 0, 0]
    assert report_bad(engine, block) == 4 - block, "and all that hangs on it"
    assert engine.found(4) == block
    assert sim.server.service.counters.bad_blocks == 1


def test_without_verification_a_missing_piece_is_missing_all_the_same(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    engine = Engine(connected(sim, *SIZES, verify=False))
    assert engine.store(ABSENT_IN_SOME) == (4, True)
    sums = engine.look_up(4, TARGETS).checksums.T.tolist()
    assert sums == [[0] * 4, [ABSENT, ABSENT, 0, 0], [ABSENT, ABSENT, ABSENT, 0]]
    assert engine.load(TARGETS) == [False, False, False, True]
    assert all(engine.has(piece, TARGETS[piece][3], ABSENT_IN_SOME[piece][3]) for piece in range(3))


def test_what_one_engine_left_out_another_adds(sim: Any, engine: Engine) -> None:
    engine.store(ABSENT_IN_SOME)
    early = engine.look_up(4, TARGETS)
    assert engine.store(STORED) == (3, True), "three blocks lacked something"
    assert engine.store(ABSENT_IN_SOME) == engine.store(STORED) == (0, True), (
        "and lose nothing again"
    )
    assert engine.load(TARGETS) == [True] * 4
    for piece in range(3):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in range(4))
    if len(
        early.slots
    ):  # in shared memory, whoever found the block before goes by what was there then
        assert engine.transfer.load(early).tolist() == [False, False, False, True]
    sim.run(50)
    assert sim.recorder.count(m.ReportBad) == 0


def test_an_addition_that_is_not_finished_leaves_the_block_as_it_was(
    sim: Any, engine: Engine, passing: object
) -> None:
    engine.store(ABSENT_IN_SOME)
    refused = m.Refused("cross", "no")
    sim.recorder.instead = lambda header, request: (
        refused if isinstance(request, m.CompleteStore) else passing
    )
    assert not engine.store(STORED)[1]
    sim.recorder.instead = None
    sim.run(100)
    assert sim.held()[0][1] == 0
    assert engine.load(TARGETS) == [False, False, False, True]
    wanted = np.where(np.array(ABSENT_IN_SOME) == NO_BLOCK, NO_BLOCK, TARGETS)
    assert engine.load(wanted) == [True] * 4
    assert engine.store(STORED) == (3, True)
    assert engine.load(TARGETS) == [True] * 4


# -- blocks that the engine takes back


def when_asked(
    sim: Any, passing: object, shard: int, number: int, then: Callable[[], object]
) -> None:
    """Does something while the client waits for its `number`-th PrepareStore of a shard."""
    seen = []

    def hook(header: Any, request: m.Request) -> object:
        if isinstance(request, m.PrepareStore) and request.shard == shard:
            seen.append(request)
            if len(seen) == number:
                then()
        return passing

    sim.recorder.instead = hook


def evacuate(engine: Engine, sources: Any, ids: list[int], allowance: int) -> None:
    sources.evacuate(np.array(ids), allowance)
    for memory in engine.memory:
        memory[ids] = 0xAA


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_what_is_taken_back_under_way_is_stored_as_it_was(
    sim: Any, engine: Engine, passing: object, shard: int
) -> None:
    request = engine.request(STORED)
    sources = engine.transfer.sources([request])[0]
    when_asked(sim, passing, shard, 1, lambda: evacuate(engine, sources, [*range(BLOCKS)], 1 << 20))
    assert engine.transfer.offer(request, sources=sources) == (4, True)
    assert engine.load(TARGETS) == [True] * 4
    for piece in range(3):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in range(4))


def test_without_room_to_set_aside_pieces_go_missing_and_no_new_byte_is_stored(
    sim: Any, engine: Engine, passing: object
) -> None:
    request = engine.request(STORED)
    sources = engine.transfer.sources([request])[0]
    when_asked(sim, passing, 1, 1, lambda: evacuate(engine, sources, STORED[1][:2], 0))
    assert engine.transfer.offer(request, sources=sources) == (4, True)
    assert engine.load(TARGETS) == [False, False, True, True]
    for piece in range(3):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in (2, 3))


def test_without_room_to_set_aside_a_store_ends_before_the_block_and_leaves_nothing_behind(
    sim: Any, engine: Engine, passing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole_bytes", "part_bytes"):
        monkeypatch.setattr(HostCopier, name, 1400)  # two blocks of the first piece
    monkeypatch.setattr(HostCopier, "first_bytes", 1400)
    request = engine.request(STORED)
    sources = engine.transfer.sources([request])[0]
    when_asked(sim, passing, 0, 2, lambda: evacuate(engine, sources, [STORED[0][2]], 0))
    outcome = engine.transfer.offer(request, sources=sources)
    assert not outcome[1]
    assert engine.connection.counters.failures["withdrawn"] == 1
    sim.run(200)
    assert sim.held()[0][1] == 0
    assert engine.found(4) == 2, "those before it are whole"
    assert engine.load([ids[:2] for ids in TARGETS]) == [True, True]
    for piece in range(3):
        assert all(engine.has(piece, TARGETS[piece][at], STORED[piece][at]) for at in (0, 1))


def test_a_store_that_is_given_up_stores_nothing_more(
    sim: Any, engine: Engine, passing: object
) -> None:
    request = engine.request(STORED)
    sources = engine.transfer.sources([request])[0]
    when_asked(sim, passing, 2, 1, sources.give_up)
    assert not engine.transfer.offer(request, sources)[1]
    sim.run(200)
    assert sim.held()[0][1] == 0 and engine.found(4) == 0


@pytest.fixture
def in_parts_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the second piece; the others one by one."""
    for name, value in {"part_bytes": 600, "whole_bytes": 600, "first_bytes": 600}.items():
        monkeypatch.setattr(HostCopier, name, value)


def test_a_copy_that_fails_in_a_piece_before_the_last_leaves_nothing_behind(
    engine: Engine, sim: Any, in_parts_of_two: None
) -> None:
    """Parts that were handed over before it are waited for, and told to the server or given
    back."""
    fence = engine.connection.shared_pool
    with pytest.raises(RequestError, match="block 999"):
        engine.store([[0, 1, 2, 3], [4, 5, 6, 999], [8, 9, 10, 11]])
    assert fence is None or fence.holders == 1, "the session's own"
    sim.run(5_000)
    ended = engine.connection.call(m.AbandonStore(list(range(1, 50))), 200)
    assert engine.connection.wait(ended) == m.Done(0), "no write is held any more"


def test_a_second_fault_on_the_way_out_does_not_hide_the_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, in_parts_of_two: None
) -> None:
    right, met = engine.connection.wait, []

    def wait(*given: Any) -> Any:
        if (first := sys.exc_info()[1]) is None:
            return right(*given)
        met.append(first)
        raise ConnectionError("second")

    monkeypatch.setattr(engine.connection, "wait", wait)
    with pytest.raises(RequestError, match="block 999"):
        engine.store([[0, 1, 2, 3], [4, 5, 6, 999], [8, 9, 10, 11]])
    assert len(met) == 1
