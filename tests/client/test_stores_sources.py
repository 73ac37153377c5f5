"""The blocks that a store reads: copied as they were when the engine took them back, or not at
all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkeep.client import copier as module
from kvkeep.client.copier import HostCopier, HostStoreCopy, row_addresses
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import NO_BLOCK
from kvkeep.client.stores import SourceBlocks
from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT, checksum
from kvkeep.kv.runs import BlockRuns

BLOCKS = 12
SIZES = (100, 60, 4097)  # bytes of each piece
PLENTY = 1 << 30


class World:
    """Engine memory in several pieces, one store of it, and slots to copy into."""

    def __init__(
        self, ids: list[list[int]], may_lack: tuple[bool, ...] = (False, True, True), seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        sizes = SIZES[: len(ids)]
        self.engine = [rng.integers(0, 256, (BLOCKS, nbytes), dtype=np.uint8) for nbytes in sizes]
        self.before = [memory.copy() for memory in self.engine]
        self.ids = np.array(ids, dtype=np.int64)
        pieces = [
            GroupMemory(BlockRuns.of([memory]), lack)
            for memory, lack in zip(self.engine, may_lack, strict=False)
        ]
        self.sources = SourceBlocks(pieces, self.ids)
        self.slots = [
            np.full((self.ids.shape[1], nbytes), 0xEE, dtype=np.uint8) for nbytes in sizes
        ]

    def evacuate(self, ids: list[int], allowance: int = PLENTY) -> tuple[int, int]:
        """Takes back, and then overwrites, as an engine does."""
        result = self.sources.evacuate(np.array(ids, dtype=np.int64), allowance)
        self.overwrite(ids)
        return result

    def overwrite(self, ids: list[int]) -> None:
        for memory in self.engine:
            memory[ids] = 0xAA

    def copy(
        self, piece: int, positions: list[int], *, verify: bool = True
    ) -> NDArray[np.uint64] | None:
        """When all has arrived: its checksums. None if a block is lost."""
        rows = row_addresses(self.slots[piece])
        copy = self.sources.copy(
            piece, np.array(positions, dtype=np.int64), rows[positions], verify=verify
        )
        return None if copy is None else copy.checksums()

    def old(self, piece: int, position: int) -> NDArray[np.uint8]:
        """What the engine had there in the beginning."""
        old: NDArray[np.uint8] = self.before[piece][self.ids[piece, position]]
        return old

    def check(self, piece: int, positions: list[int], sums: NDArray[np.uint64] | None) -> None:
        """Every slot holds what the engine had, and its checksum says so; where it had nothing,
        nothing came."""
        assert sums is not None and len(sums) == len(positions)
        for position, value in zip(positions, sums.tolist(), strict=True):
            slot = self.slots[piece][position]
            if value == ABSENT:
                assert (slot == 0xEE).all(), "nothing is written where there is nothing"
            else:
                assert (slot == self.old(piece, position)).all()
                assert value == checksum(slot)


# -- copies


@pytest.mark.parametrize("positions", [[0, 1, 2, 3], [3], [1, 3], []])
def test_pieces_are_copied_to_the_addresses_of_their_own_positions(positions: list[int]) -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    for piece in (0, 1):
        sums = world.copy(piece, positions)
        world.check(piece, positions, sums)
        assert sums is not None and ABSENT not in sums
        untouched = [at for at in range(4) if at not in positions]
        assert (world.slots[piece][untouched] == 0xEE).all()
    assert all(
        (now == before).all() for now, before in zip(world.engine, world.before, strict=True)
    )


def read_at_most(monkeypatch: pytest.MonkeyPatch, blocks: int, copier: Any = HostCopier) -> None:
    """So many are read with the lock held."""
    begin_store = copier.begin_store

    def begin(*given: Any, **named: Any) -> Any:
        made = begin_store(*given, **named)
        made.at_a_time = blocks
        return made

    monkeypatch.setattr(copier, "begin_store", begin)


@pytest.mark.parametrize("at_a_time", [1, 2, PLENTY])
def test_a_block_without_a_piece_is_absent_whatever_goes_in_one_batch(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    read_at_most(monkeypatch, at_a_time)
    world = World([[0, 1, 2, 3, 4], [NO_BLOCK, 6, NO_BLOCK, NO_BLOCK, 7]])
    sums = world.copy(1, [0, 1, 2, 3, 4])
    world.check(1, [0, 1, 2, 3, 4], sums)
    assert sums is not None and (sums == ABSENT).tolist() == [True, False, True, True, False]
    world.check(0, [0, 1, 2, 3, 4], world.copy(0, [0, 1, 2, 3, 4]))


def test_without_verification_checksums_are_zero_and_what_is_absent_stays_absent() -> None:
    world = World([[0, 1, 2], [5, NO_BLOCK, 6]])
    assert world.evacuate([6]) == (1, 60)
    assert world.copy(0, [0, 1, 2], verify=False) is not None
    sums = world.copy(1, [0, 1, 2], verify=False)
    assert sums is not None and sums.tolist() == [0, ABSENT, 0], "the one that was set aside too"
    assert (world.slots[1][2] == world.old(1, 2)).all() and (world.slots[1][1] == 0xEE).all()


def test_the_callers_table_is_neither_kept_nor_changed() -> None:
    world = World([[0, 1, 2]])
    table = world.ids
    world.ids = table.copy()
    world.evacuate([1])
    assert table.tolist() == [[0, 1, 2]]
    table[:] = 9
    world.check(0, [0, 1, 2], world.copy(0, [0, 1, 2]))


def test_a_block_that_the_engine_does_not_have_is_an_error_of_the_request() -> None:
    world = World([[0, BLOCKS]])
    with pytest.raises(RequestError, match=f"block {BLOCKS} does not exist"):
        world.copy(0, [0, 1])


# -- taken back


def test_what_was_not_copied_is_set_aside_as_it_was() -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    assert world.evacuate([0, 3, 5, 9]) == (3, 2 * 100 + 60)
    for piece in (0, 1):
        world.check(piece, [0, 1, 2, 3], world.copy(piece, [0, 1, 2, 3]))
        assert (world.slots[piece] == world.before[piece][world.ids[piece]]).all()


def test_a_block_is_taken_back_once_however_often_the_engine_says_so() -> None:
    world = World([[7, 0, 11, 3]])
    assert world.evacuate([0, 0, 3]) == (2, 200)
    assert world.evacuate([0, 3]) == (0, 0), "else the new content would be set aside"
    world.check(0, [0, 1, 2, 3], world.copy(0, [0, 1, 2, 3]))


def test_what_is_copied_already_is_nobodys_concern() -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    first = world.copy(0, [0, 1])
    assert world.evacuate([7, 0]) == (0, 0)
    assert world.evacuate([7, 0, 11], allowance=0) == (1, 0), "nor does it cost anything"
    assert world.sources.stop == 2
    world.check(0, [0, 1], first)
    world.check(1, [0, 1], world.copy(1, [0, 1]))


def test_an_engine_block_in_several_places_is_taken_back_from_all() -> None:
    world = World([[7, 7, 0], [7, 2, 7]])
    assert world.evacuate([7]) == (4, 2 * 100 + 2 * 60)
    for piece in (0, 1):
        world.check(piece, [0, 1, 2], world.copy(piece, [0, 1, 2]))
        assert (world.slots[piece] == world.before[piece][world.ids[piece]]).all()


def test_blocks_that_the_store_does_not_read_cost_nothing() -> None:
    world = World([[7, 0], [NO_BLOCK, 2]])
    assert world.evacuate([1, 3, 11]) == (0, 0)
    assert world.evacuate([]) == (0, 0)


# -- without room to set aside


@pytest.mark.parametrize("allowance", [0, 99, -1])
def test_without_an_allowance_a_store_ends_before_what_it_must_have(allowance: int) -> None:
    world = World([[7, 0, 11, 3]])
    assert world.evacuate([11], allowance) == (1, 0)
    assert world.sources.stop == 2
    world.check(0, [0, 1], world.copy(0, [0, 1]))
    assert world.copy(0, [2, 3]) is None
    assert world.copy(0, [3]) is None, "nothing after a block that is lost is stored either"
    assert (world.slots[0][2:] == 0xEE).all()


def test_a_batch_that_reaches_a_lost_block_writes_nothing_of_it() -> None:
    world = World([[7, 0, 11, 3]])
    world.evacuate([11], allowance=0)
    assert world.copy(0, [0, 1, 2]) is None
    assert (world.slots[0][2] == 0xEE).all()


def test_a_piece_that_a_block_may_lack_is_absent_and_the_store_goes_on() -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    assert world.evacuate([2, 4], allowance=59) == (2, 0)
    sums = world.copy(1, [0, 1, 2, 3])
    world.check(1, [0, 1, 2, 3], sums)
    assert sums is not None and (sums == ABSENT).tolist() == [False, True, False, True]
    world.check(0, [0, 1, 2, 3], world.copy(0, [0, 1, 2, 3]))


def test_what_must_be_there_is_saved_before_what_may_lack() -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    assert world.evacuate([*range(BLOCKS)], allowance=400 + 60 + 59) == (8, 460)
    assert world.sources.stop == 4
    sums = world.copy(1, [0, 1, 2, 3])
    assert sums is not None and (sums == ABSENT).tolist() == [False, True, True, True]
    world.check(1, [0, 1, 2, 3], sums)
    world.check(0, [0, 1, 2, 3], world.copy(0, [0, 1, 2, 3]))


def test_an_allowance_saves_the_first_blocks_and_the_store_ends_after_them() -> None:
    world = World([[7, 0, 11, 3]])
    assert world.evacuate([*range(BLOCKS)], allowance=250) == (4, 200)
    assert world.sources.stop == 2
    world.check(0, [0, 1], world.copy(0, [0, 1]))
    assert world.copy(0, [2]) is None


@pytest.mark.parametrize("ids", [[[7, 0, 11, 3], [1, 2, 5, 4]], [[1, 2, 5, 4], [7, 0, 11, 3]]])
def test_of_several_pieces_that_must_be_there_the_first_that_is_lost_ends_the_store(
    ids: list[list[int]],
) -> None:
    world = World(ids, may_lack=(False, False))
    assert world.evacuate([0, 4], allowance=0) == (2, 0)
    assert world.sources.stop == 1


def test_what_lies_behind_a_lost_block_is_not_set_aside_any_more() -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    assert world.evacuate([0], allowance=0) == (1, 0)
    assert world.evacuate([11, 3, 4, 5]) == (0, 0)
    assert world.evacuate([7]) == (1, 100)
    world.check(0, [0], world.copy(0, [0]))


def test_memory_that_is_not_there_is_an_allowance_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([[7, 0, 11], [1, 2, 5]])

    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HostCopier, "evacuate", none_left)
    assert world.evacuate([11, 2]) == (2, 0)
    assert world.sources.stop == 2
    sums = world.copy(1, [0, 1])
    assert sums is not None and (sums == ABSENT).tolist() == [False, True]
    world.check(0, [0, 1], world.copy(0, [0, 1]))


def test_a_store_that_is_given_up_reads_nothing_more() -> None:
    world = World([[7, 0, 11, 3], [1, 2, 5, 4]])
    world.check(1, [0, 1], world.copy(1, [0, 1]))
    world.sources.give_up()
    world.overwrite([*range(BLOCKS)])
    assert world.copy(0, [0]) is None and world.copy(1, [2, 3]) is None
    assert (world.slots[0] == 0xEE).all() and (world.slots[1][2:] == 0xEE).all()
    assert world.evacuate([7]) == (0, 0)


# -- any order of it all


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_the_order_a_slot_holds_the_old_content_or_is_said_to_hold_none(
    data: st.DataObject,
) -> None:
    """Against a model that knows, for each place, whether it was copied, saved, lost or never
    there."""
    blocks, pieces = data.draw(st.integers(1, 6), "blocks"), data.draw(st.integers(1, 3), "pieces")
    one_id = st.one_of(st.integers(0, BLOCKS - 1), st.just(NO_BLOCK))
    ids = data.draw(
        st.lists(
            st.lists(one_id, min_size=blocks, max_size=blocks), min_size=pieces, max_size=pieces
        ),
        "ids",
    )
    may_lack = data.draw(st.tuples(*[st.booleans()] * pieces), "may lack")
    world = World(ids, may_lack, seed=1)
    state = {
        (p, b): "gone" if ids[p][b] == NO_BLOCK else "there"
        for p in range(pieces)
        for b in range(blocks)
    }
    must_be_there = [row for row, lacks in zip(ids, may_lack, strict=True) if not lacks]
    stop = min((row.index(NO_BLOCK) for row in must_be_there if NO_BLOCK in row), default=blocks)
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        if data.draw(st.booleans(), "copy"):
            piece = data.draw(st.integers(0, pieces - 1), "piece")
            left = [b for b in range(blocks) if state[piece, b] != "copied"]
            positions = (
                sorted(data.draw(st.sets(st.sampled_from(left)), "positions")) if left else []
            )
            sums = world.copy(piece, positions)
            assert (sums is None) == bool(positions and positions[-1] >= stop)
            if sums is not None:
                world.check(piece, positions, sums)
                assert [value == ABSENT for value in sums.tolist()] == [
                    state[piece, b] == "gone" for b in positions
                ]
                state |= {(piece, b): "copied" for b in positions}
        else:
            taken = data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=6), "taken")
            allowance = data.draw(
                st.sampled_from([0, 60, 100, 160, 220, 5000, PLENTY]), "allowance"
            )
            count = spent = 0
            new_stop = stop
            for (p, b), was in sorted(state.items()):
                if was != "there" or ids[p][b] not in taken or b >= stop:
                    continue
                count += 1
                saved = spent + SIZES[p] <= allowance
                spent += SIZES[p] * saved
                state[p, b] = "saved" if saved else "gone"
                if not saved and not may_lack[p]:
                    new_stop = min(new_stop, b)
            stop = new_stop
            assert world.evacuate(taken, allowance) == (count, spent)
            assert world.sources.stop == stop


def test_a_block_that_is_being_read_is_read_to_its_end_before_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([[7, 0]])
    engine = threading.Thread(target=world.evacuate, args=([7, 0],))

    def gather_slowly(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "gather", gather)
        engine.start()
        engine.join(0.1)  # time enough to get the blocks back, if it could
        return gather(*arguments, **options)

    gather = module.gather
    monkeypatch.setattr(module, "gather", gather_slowly)
    sums = world.copy(0, [0, 1])
    engine.join()
    assert (world.engine[0][[7, 0]] == 0xAA).all(), "now it has them"
    world.check(0, [0, 1], sums)


@pytest.mark.parametrize("allowance", [PLENTY, 20 * 4096])
@pytest.mark.parametrize("seed", range(4))
def test_no_new_byte_reaches_a_slot_while_one_thread_copies_and_another_overwrites(
    monkeypatch: pytest.MonkeyPatch, allowance: int, seed: int
) -> None:
    """Nothing is torn: each slot is the old block whole, or its store has ended before it."""
    read_at_most(monkeypatch, 3)
    count, nbytes = 200, 4096
    rng = np.random.default_rng(seed)
    engine = rng.integers(0, 128, (count, nbytes), dtype=np.uint8)  # new content is above that
    before, order = engine.copy(), rng.permutation(count)
    store = SourceBlocks([GroupMemory(BlockRuns.of([engine]))], order[np.newaxis])
    slots, results = np.zeros((count, nbytes), dtype=np.uint8), []
    begin = threading.Barrier(2)

    def copy() -> None:
        begin.wait()
        for start in range(0, count, 20):
            positions = np.arange(start, start + 20)
            made = store.copy(0, positions, row_addresses(slots)[positions], verify=True)
            results.append(None if made is None else made.checksums())

    thread = threading.Thread(target=copy)
    thread.start()
    begin.wait()
    spent = 0
    for block in rng.permutation(count).tolist():
        spent += store.evacuate(np.array([block]), allowance - spent)[1]
        engine[block] = 255
    thread.join()
    assert spent <= allowance and (allowance < PLENTY or store.stop == count)
    assert len(results) == 10
    for start, sums in zip(range(0, count, 20), results, strict=True):
        if sums is None:
            assert start + 20 > store.stop
            continue
        for at in range(20):
            assert (slots[start + at] == before[order[start + at]]).all()
            assert int(sums[at]) == checksum(slots[start + at])
    assert (slots < 128).all(), "a part that was not finished has no new byte either"


# -- with a copier whose copies arrive later


class Freed:
    """A copy that was set aside, and how often it was let go of."""

    nbytes = SIZES[0]

    def __init__(self) -> None:
        self.times = 0

    def free(self) -> None:
        self.times += 1


def late_world(late_copier: Any, breaks: str = "") -> tuple[World, Any]:
    world = World([[7, 0, 11, 3]])
    pieces = [GroupMemory(BlockRuns.of([world.engine[0]]))]
    copier = late_copier([piece.runs for piece in pieces], breaks)
    world.sources = SourceBlocks(pieces, world.ids, copier)
    return world, copier


def copy_of(world: World, positions: list[int]) -> Any:
    at = np.array(positions, dtype=np.int64)
    return world.sources.copy(0, at, row_addresses(world.slots[0])[at], verify=True)


def test_a_store_is_ordered_after_what_the_engine_did_when_it_was_made(late_copier: Any) -> None:
    world, copier = late_world(late_copier)
    assert copier.names == ["mark"]
    copy_of(world, [0, 1]).close()
    copy_of(world, [2, 3]).close()
    assert copier.waited_for == [copier.marks, copier.marks] and len(copier.marks) == 1


def test_a_copy_has_arrived_when_its_checksums_are_known_or_it_is_closed(late_copier: Any) -> None:
    world, _ = late_world(late_copier)
    world.evacuate([0], PLENTY)
    first, second = copy_of(world, [0, 1]), copy_of(world, [2, 3])
    assert (world.slots[0] == 0xEE).all()
    world.overwrite([*range(BLOCKS)])
    world.check(0, [0, 1], first.checksums())
    assert (world.slots[0][2:] == 0xEE).all()
    second.close()
    assert all((world.slots[0][at] == world.old(0, at)).all() for at in (2, 3))


def test_when_a_block_is_lost_nothing_is_on_its_way_any_more(
    late_copier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at_most(monkeypatch, 1, late_copier)
    world, copier = late_world(late_copier)
    world.evacuate([11], 0)
    assert copy_of(world, [0, 1, 2]) is None
    assert copier.names == ["mark", "set aside []", "gather 0", "gather 0", "close 0"]
    assert not copier.readings[0].on_the_way


def test_when_a_copy_fails_nothing_is_on_its_way_any_more(late_copier: Any) -> None:
    world, copier = late_world(late_copier, breaks="gather 0")
    with pytest.raises(RuntimeError, match="gather 0 broke"):
        copy_of(world, [0, 1])
    assert copier.names[-1] == "close 0"
    assert world.evacuate([7]) == (1, 100), "and nobody has the lock"


def test_what_was_set_aside_is_let_go_of_once_when_it_is_not_needed(late_copier: Any) -> None:
    world, copier = late_world(late_copier)
    saved = {block: Freed() for block in (7, 0, 11, 3)}
    copier.evacuate = lambda piece, block_ids: [saved[block] for block in block_ids.tolist()]
    assert world.evacuate([7, 0, 11]) == (3, 300)
    assert world.sources.evacuated_bytes == 300
    world.sources.skip(0, 0, 2, np.array([1]))
    assert [saved[block].times for block in (7, 0, 11)] == [1, 0, 0], "the server has the first one"
    assert world.sources.evacuated_bytes == 200
    for _ in range(2):
        world.sources.close()
        assert [saved[block].times for block in (7, 0, 11)] == [1, 1, 1]
    assert world.sources.evacuated_bytes == 0 and copy_of(world, [3]) is None


def test_who_takes_blocks_back_need_not_wait_until_a_store_that_lost_one_has_arrived(
    late_copier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at_most(monkeypatch, 1, late_copier)
    world, copier = late_world(late_copier)
    world.evacuate([11], 0)
    reading = late_copier.begin_store(copier, 0, verify=True, ready=None)
    got: list[tuple[int, int]] = []
    arrive = reading.close

    def close() -> None:
        engine = threading.Thread(target=lambda: got.append(world.evacuate([3])), daemon=True)
        engine.start()
        engine.join(10)  # the engine's thread gets through meanwhile
        assert got, "a wait for the GPU, with the lock held"
        arrive()

    reading.close = close
    copier.begin_store = lambda piece, *, verify, ready: reading
    assert copy_of(world, [0, 1, 2]) is None
    assert got == [(0, 0)] and copier.names[-1] == "close 0"


@pytest.mark.parametrize("breaks", ["", "close 0"])
def test_what_was_set_aside_is_let_go_of_when_a_copy_fails_before_it_was_put(
    late_copier: Any, breaks: str
) -> None:
    """Even if then nothing can be waited for."""
    world, copier = late_world(late_copier, breaks)
    saved = {block: Freed() for block in (7, 0, 11)}
    copier.evacuate = lambda piece, block_ids: [saved[block] for block in block_ids.tolist()]
    assert world.evacuate([7, 0, 11]) == (3, 300)
    reading = late_copier.begin_store(copier, 0, verify=True, ready=None)

    def deliver() -> None:
        raise RuntimeError("deliver broke")

    reading.deliver = deliver
    copier.begin_store = lambda piece, *, verify, ready: reading
    with pytest.raises(RuntimeError, match=breaks or "deliver broke"):
        copy_of(world, [0, 1, 3])
    assert copier.names[-1] == "close 0"
    assert [saved[block].times for block in (7, 0, 11)] == [
        1,
        1,
        0,
    ] and world.sources.evacuated_bytes == 100
    world.sources.close()
    assert [saved[block].times for block in (7, 0, 11)] == [1, 1, 1]


# -- readings that ask nobody before each few blocks


class ByItself(HostStoreCopy):
    """Reads block by block until it is halted; `look` is what others do before it reads that
    one."""

    look: Callable[[int], None]

    def __init__(self, runs: BlockRuns, verify: bool) -> None:
        super().__init__(runs, verify)
        self.at_a_time, self.read_blocks, self.halts = 2, 0, 0

    def read(self, block_ids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int:
        for at in range(len(block_ids)):
            self.look(at)
            if self.halts:
                break
            self.gather(block_ids[at : at + 1], addresses[at : at + 1])
            self.read_blocks += 1
        return self.read_blocks

    def halt(self) -> int:
        self.halts += 1
        return self.read_blocks


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[ByItself]:
    made: list[ByItself] = []

    def make(runs: BlockRuns, verify: bool) -> ByItself:
        made.append(ByItself(runs, verify))
        return made[-1]

    monkeypatch.setattr(module, "HostStoreCopy", make)
    return made


@pytest.mark.parametrize("taken", [[4], [9], [4, 7], [5, 9], [4, 5, 6, 7, 8, 9], [11]])
@pytest.mark.parametrize("when", range(6))
def test_what_is_taken_back_while_a_reading_goes_on_by_itself(
    monkeypatch: pytest.MonkeyPatch, reading: list[ByItself], when: int, taken: list[int]
) -> None:
    world = World([[4, 5, 6, 7, 8, 9]])
    monkeypatch.setattr(
        ByItself,
        "look",
        lambda self, at: world.evacuate(taken) if at == when else None,
        raising=False,
    )
    world.check(0, list(range(6)), world.copy(0, list(range(6))))
    assert reading[0].halts == (taken != [11]), "others' blocks are no reason to halt"
    assert reading[0].read_blocks == (when if taken != [11] else 6)
    assert world.evacuate([4, 5, 6, 7, 8, 9])[0] == 0, "all are copied"
    assert world.sources.evacuated_bytes == 0


@pytest.mark.parametrize("when", range(6))
def test_a_store_that_is_given_up_halts_its_reading(
    monkeypatch: pytest.MonkeyPatch, reading: list[ByItself], when: int
) -> None:
    world = World([[4, 5, 6, 7, 8, 9]])

    def give_up(self: ByItself, at: int) -> None:
        if at == when:
            world.sources.give_up()
            world.overwrite(list(range(BLOCKS)))

    monkeypatch.setattr(ByItself, "look", give_up, raising=False)
    assert world.copy(0, list(range(6))) is None
    assert reading[0].read_blocks == when and (world.slots[0][when:] == 0xEE).all()


def test_what_is_lost_or_was_set_aside_is_not_read_by_itself(
    monkeypatch: pytest.MonkeyPatch, reading: list[ByItself]
) -> None:
    monkeypatch.setattr(ByItself, "look", lambda self, at: None, raising=False)
    world = World([[4, 5, 6, 7]])
    world.evacuate([6])
    world.check(0, [0, 1, 2, 3], world.copy(0, [0, 1, 2, 3]))
    lost = World([[4, 5, 6, 7]])
    lost.evacuate([6], allowance=0)
    assert lost.copy(0, [0, 1, 2, 3]) is None
    assert [each.read_blocks for each in reading] == [0, 0]
