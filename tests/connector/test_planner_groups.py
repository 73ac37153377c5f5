"""The scheduler's side for engines that give blocks away before they are stored, and for models of
several pieces."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from planning import ScriptedCache, Side

from kvkeep.client.requests import NO_BLOCK, Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.planner import BLOCKS_TOGETHER
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES

WHOLE = GroupLayout([CacheGroup("full", 4)])
WINDOW = GroupLayout([CacheGroup("full", 4), CacheGroup("window", 4, reach=6)])
NAME = "num_kvkeep_extra_cached_tokens"


def keys(count: int, name: int = 1, start: int = 0) -> bytes:
    return b"".join(bytes([name, at]) + bytes(KEY_BYTES - 2) for at in range(start, start + count))


def stored(*jobs: Any, incomplete: bool = False, rank: int = 0) -> Finished:
    numbers = [job.number for job in jobs]
    return Finished(
        rank, stored=dict.fromkeys(numbers, 1), incomplete=numbers if incomplete else []
    )


def loaded(job: Any, *failed: int, rank: int = 0) -> Finished:
    return Finished(rank, loads={job.number: LoadOutcome(frozenset(failed))})


def several(cache: Any, absent: Any, world_size: int = 1) -> Side:
    cache.absent = np.array(absent, dtype=np.bool_)
    cache.blocks = len(cache.absent)
    return Side(cache, WINDOW, world_size)


def rows(first: int, second: int) -> Any:
    """A table whose rows begin at these ids; in the window group only the last two blocks are
    there."""

    def table(start: int, stop: int) -> NDArray[np.int64]:
        ids = np.arange(start, stop)
        return np.stack([first + ids, np.where(ids >= stop - 2, second + ids, NO_BLOCK)])

    return table


# -- requests that must not read


def test_a_request_that_must_not_read_asks_nobody_and_stores_all(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("r", "alice", {NAME: None}, keys(5), reads=False)
    assert [side.lookup("r", local, 5) for local in (0, 0, 2)] == [0, 0, 0]
    side.extend("r", keys(1, start=5))
    assert side.lookup("r", 0, 6) == 0
    side.no_load("r")
    assert cache.asked == [] and cache.released == 0
    job = side.prepare_store("r", [*range(10, 16)], 6)
    assert job is not None and (job.first_block, job.block_ids) == (0, [*range(10, 16)])
    step = side.build_step()
    assert step.stores[job.number].keys == keys(6) and not step.loads
    side.complete([stored(job)])
    assert side.end("r") == {NAME: 0}


def test_that_one_request_must_not_read_is_no_concern_of_others(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("not", None, None, keys(5), reads=False)
    side.arrive("may", None, None, keys(5))
    assert (side.lookup("not", 0, 5), side.lookup("may", 0, 5)) == (0, 5)


# -- what is known of a request


def test_known_blocks_have_keys_and_stored_blocks_need_no_store(side: Side, cache: Any) -> None:
    cache.blocks = 2
    state = side.arrive("r", None, None, keys(3))
    assert (state.num_blocks, state.stored) == (3, 0)
    assert side.lookup("r", 0, 3) == 2
    assert side.states["r"].stored == 2, "the server has them"
    side.extend("r", keys(2, start=3))
    assert state.num_blocks == 5
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 4)
    assert job is not None and side.states["r"].stored == 4, "on their way is as good as there"
    side.build_step()
    side.complete([stored(job, incomplete=True)])
    assert side.states["r"].stored == 0, "all are offered again"


def test_a_table_is_asked_for_once_and_only_for_what_is_stored(side: Side, cache: Any) -> None:
    cache.blocks = 2
    side.arrive("r", None, None, keys(5))
    side.lookup("r", 0, 5)
    asked: list[tuple[int, int]] = []

    def table(start: int, stop: int) -> NDArray[np.int64]:
        asked.append((start, stop))
        return np.arange(start, stop)[np.newaxis] + 100

    assert side.prepare_store("r", table, 2) is None and asked == []
    job = side.prepare_store("r", table, 4)
    assert job is not None and asked == [(2, 4)]
    request = side.build_step().stores[job.number]
    assert request.block_ids.tolist() == [102, 103], (
        "one piece: a plain list, as engines of one group expect"
    )
    assert (job.block_ids, job.blocks, job.first_block) == ([102, 103], 2, 2)


# -- stores that begin when the step is over


def test_stores_of_what_the_step_computes_begin_after_it(side: Side) -> None:
    side.arrive("r", None, {"kvkeep_priority": 70}, keys(5))
    before = side.prepare_store("r", [10, 11, 12, 13, 14], 2)
    after = side.prepare_store("r", [10, 11, 12, 13, 14], 5, after_step=True)
    assert before is not None and after is not None
    step = side.build_step()
    assert (list(step.stores), list(step.stores_after)) == ([before.number], [after.number])
    assert step.stores_after[after.number].priority == 70
    assert step.stores_after[after.number].parent == keys(1, start=1)
    again = side.build_step()
    assert not (again.stores or again.stores_after or again.loads)
    completed = side.complete([stored(before, after)])
    assert completed.stores == [before, after] and side.idle


def test_a_step_names_whose_loads_it_begins(side: Side, cache: Any) -> None:
    cache.blocks = 2
    jobs = {}
    for number, name in enumerate(("a", "b")):
        side.arrive(name, None, None, keys(3, name=number))
        assert side.lookup(name, 0, 3) == 2
        jobs[side.prepare_load(name, 0, [number * 10 + 1, number * 10 + 2]).number] = name
    store = side.prepare_store("a", [1, 2, 3], 3)
    step = side.build_step()
    assert step.requests == jobs and store is not None and store.number not in step.requests
    assert side.build_step().requests == {}


# -- blocks that the step writes into


def test_a_step_withdraws_what_stores_under_way_may_not_have_read(side: Side, cache: Any) -> None:
    for number in range(4):
        side.arrive(str(number), None, None, keys(2, name=number))
    done = side.prepare_store("0", [1, 2], 2)
    side.build_step()
    under_way = side.prepare_store("1", [3, 4], 2, after_step=True)
    assert side.build_step({1, 3}).withdrawn == [1], "that one begins after this step"
    side.complete([stored(done)])
    new = side.prepare_store("2", [5, 6], 2)
    after = side.prepare_store("3", [7, 8], 2, after_step=True)
    step = side.build_step({1, 2, 3, 5, 7, 9})
    assert step.withdrawn == [3, 5]
    assert new is not None and after is not None and under_way is not None
    assert not side.build_step().withdrawn
    assert side.build_step({7}).withdrawn == [7], "by now it has begun"
    side.complete([stored(under_way, new, after)])
    assert not side.build_step({*range(20)}).withdrawn and side.idle


def test_a_block_that_one_store_reads_and_another_will_is_withdrawn_from_the_first(
    side: Side,
) -> None:
    for number in range(2):
        side.arrive(str(number), None, None, keys(2, name=number))
    side.prepare_store("0", [1, 2], 2)
    side.build_step()
    side.prepare_store("1", [2, 3], 2, after_step=True)
    assert side.build_step({2, 3}).withdrawn == [2]


def test_loads_are_never_withdrawn(side: Side, cache: Any) -> None:
    cache.blocks = 3
    side.arrive("r", None, None, keys(3))
    assert side.lookup("r", 0, 3) == 3
    side.prepare_load("r", 0, [1, 2, 3])
    assert side.build_step({1, 2, 3}).withdrawn == []


def test_a_store_is_under_way_until_every_rank_has_reported_it(cache: Any) -> None:
    side = Side(cache, WHOLE, world_size=2)
    side.arrive("r", None, None, keys(2))
    job = side.prepare_store("r", [1, 2], 2)
    side.build_step()
    side.complete([stored(job, rank=1)])
    assert side.build_step({2}).withdrawn == [2], "the other rank may not have read it"
    side.complete([stored(job, rank=0)])
    assert not side.build_step({2}).withdrawn


def test_every_piece_is_withdrawn_and_what_is_no_block_is_not(cache: Any) -> None:
    side = several(cache, np.zeros((0, 2)))
    side.arrive("r", None, None, keys(4))
    side.lookup("r", 0, 4)
    job = side.prepare_store("r", rows(10, 20), 4)
    assert job is not None and job.block_ids == [10, 11, 12, 13, 22, 23] and job.blocks == 4
    assert side.build_step({10, 21, 23, NO_BLOCK}).withdrawn == [10, 23]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_withdrawn_is_exactly_what_is_written_and_may_be_unread(data: st.DataObject) -> None:
    """Random lives of stores against a set of those that have begun and are not over."""
    side = Side(ScriptedCache(), WHOLE, world_size=1)
    begun: dict[int, set[int]] = {}
    number = itertools.count()
    jobs = {}
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        later: dict[int, set[int]] = {}
        for _ in range(data.draw(st.integers(0, 3), "stores")):
            name, after = next(number), data.draw(st.booleans(), "after")
            ids = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3), "ids")
            side.arrive(str(name), None, None, keys(len(ids), name=name), reads=False)
            job = side.prepare_store(str(name), ids, len(ids), after_step=after)
            assert job is not None
            jobs[job.number] = job
            (later if after else begun)[job.number] = set(ids)
        written = data.draw(st.sets(st.integers(0, 8)), "written")
        expected = written & {block for blocks in begun.values() for block in blocks}
        assert list(side.build_step(written).withdrawn) == sorted(expected)
        begun |= later
        for over in data.draw(st.sets(st.sampled_from(sorted(begun))), "over") if begun else ():
            del begun[over]
            side.complete([stored(jobs[over])])


# -- several pieces


def test_the_offer_is_what_is_of_use(cache: Any) -> None:
    side = several(cache, [[0, 1], [0, 1], [0, 0], [0, 0], [0, 1]])
    side.arrive("r", None, None, keys(6))
    assert side.lookup("r", 0, 6) == 4, "the fifth block has no window"
    assert side.lookup("r", 0, 3) == 0, "nor is there one for three"
    assert side.lookup("r", 1, 3) == 0
    assert side.lookup("r", 2, 3) == 1, "what the engine has needs no window of the server's"
    assert side.lookup("r", 4, 6) == 0


def test_a_load_goes_out_as_a_table_with_what_the_server_has_of_it(cache: Any) -> None:
    side = several(cache, [[0, 1], [0, 1], [0, 0], [0, 0]])
    side.arrive("r", None, None, keys(4), local_blocks=1)
    assert side.lookup("r", 1, 4) == 3
    table = [[11, 12, 13], [NO_BLOCK, 22, 23]]
    job = side.prepare_load("r", 1, np.array(table))
    assert (job.block_ids, job.blocks, job.first_block, job.whole) == (
        [11, 12, 13, 22, 23],
        3,
        1,
        False,
    )
    request = side.build_step().loads[job.number]
    assert isinstance(request, LoadRequest)
    assert request.block_ids.tolist() == table and request.keys == keys(4) and request.skip == 1
    assert request.slots.tolist() == [1001, 1002, 1003]
    assert request.checksums.tolist() == [[2, ABSENT], [4, 5], [6, 7]]
    side.complete([loaded(job)])
    assert side.states["r"].loaded == 3, "blocks, not pieces"


def test_while_blocks_are_loaded_others_wait_for_each_of_them_and_no_longer(cache: Any) -> None:
    side = several(cache, [[0, 0]] * 4)
    for name in ("r", "s"):
        side.arrive(name, None, None, keys(4))
    assert side.lookup("r", 0, 4) == 4
    job = side.prepare_load("r", 0, np.array([[1, 2, 3, 4], [NO_BLOCK, NO_BLOCK, 7, 8]]))
    assert [side.lookup("s", local, 4) for local in range(5)] == [None, None, None, None, 0]
    side.build_step()
    side.complete([loaded(job)])
    assert [side.lookup("s", local, 4) for local in range(5)] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("failed", [1, 3, 22])
def test_a_load_that_failed_anywhere_gave_nothing(cache: Any, failed: int) -> None:
    """Its first blocks have no window at their end: the engine computes all of it."""
    side = several(cache, [[0, 0]] * 3)
    side.arrive("r", None, {NAME: None}, keys(3))
    assert side.lookup("r", 0, 3) == 3
    job = side.prepare_load("r", 0, np.array([[1, 2, 3], [NO_BLOCK, 21, 22]]))
    side.build_step()
    completed = side.complete([loaded(job, failed)])
    assert completed.invalid_block_ids == {failed} and job.good_blocks() == 0
    assert side.states["r"].loaded == 0 and side.states["r"].stored == 0
    assert side.lookup("r", 0, 3) == 0, "it is not offered again"
    assert side.end("r") == {NAME: 0}


def test_a_store_goes_out_as_a_table(cache: Any) -> None:
    side = several(cache, np.zeros((0, 2)))
    side.arrive("r", None, None, keys(4))
    side.lookup("r", 0, 4)
    job = side.prepare_store("r", rows(10, 20), 3, after_step=True)
    assert job is not None
    request = side.build_step().stores_after[job.number]
    assert isinstance(request, StoreRequest)
    assert request.block_ids.tolist() == [
        [10, 11, 12],
        [NO_BLOCK, 21, 22],
    ] and request.keys == keys(3)


def test_an_incomplete_store_is_the_requests_last(cache: Any) -> None:
    """Windows of the earlier blocks are gone: stored again without them, they would be in
    everybody's way."""
    side = several(cache, np.zeros((0, 2)))
    for name in ("r", "other"):
        side.arrive(name, None, None, keys(4, name=len(name)))
        side.lookup(name, 0, 4)
    job = side.prepare_store("r", rows(10, 20), 2)
    side.build_step()
    side.complete([stored(job, incomplete=True)])
    side.extend("r", keys(20, start=4))
    assert side.prepare_store("r", rows(10, 20), 4) is None
    assert side.prepare_store("r", rows(10, 20), 4, at_once=False) is None
    assert side.prepare_store("r", rows(10, 20), 24, after_step=True) is None
    assert side.prepare_store("other", rows(10, 20), 4) is not None, "that is no concern of others"


def test_an_incomplete_store_of_whole_blocks_is_offered_again_from_the_beginning(
    side: Side,
) -> None:
    count = 4 + 2 * BLOCKS_TOGETHER
    side.arrive("r", None, None, keys(count), reads=False)
    job = side.prepare_store("r", range(count), 4)
    side.build_step()
    side.complete([stored(job, incomplete=True)])
    early = 4 + BLOCKS_TOGETHER - 1
    assert side.prepare_store("r", range(count), early, at_once=False) is None, (
        "a server that is full is not hammered"
    )
    again = side.prepare_store("r", range(count), early + 1, at_once=False)
    assert again is not None and (again.first_block, again.blocks) == (0, early + 1)


# -- reports


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_reports_come_in_any_order_and_number(data: st.DataObject) -> None:
    """A job is over with the first report of its last rank: told once, whatever comes again or
    after."""
    ranks = data.draw(st.integers(1, 4), "ranks")
    side = Side(ScriptedCache(), WHOLE, world_size=ranks)
    jobs = []
    for name in range(3):
        side.arrive(str(name), None, None, keys(2, name=name), reads=False)
        jobs.append(side.prepare_store(str(name), [2 * name, 2 * name + 1], 2))
    side.build_step()
    reported: list[set[int]] = [set() for _ in jobs]
    one = st.tuples(st.integers(0, ranks - 1), st.lists(st.integers(0, 2), max_size=3))
    for batch in data.draw(st.lists(st.lists(one, max_size=4), max_size=8), "batches"):
        over = []
        for rank, which in batch:
            for at in dict.fromkeys(which):
                if len(reported[at]) < ranks:
                    reported[at].add(rank)
                    if len(reported[at]) == ranks:
                        over.append(jobs[at])
        completed = side.complete(
            [stored(*(jobs[at] for at in which), rank=rank) for rank, which in batch]
        )
        assert completed.stores == over and not completed.loads
    assert side.jobs == [job for job, seen in zip(jobs, reported, strict=True) if len(seen) < ranks]
    assert side.idle == all(len(seen) == ranks for seen in reported)


def test_one_rank_that_left_something_out_is_enough(cache: Any) -> None:
    side = Side(cache, WHOLE, world_size=3)
    side.arrive("r", None, None, keys(2))
    job = side.prepare_store("r", [1, 2], 2)
    side.build_step()
    side.complete([stored(job, rank=2), stored(job, rank=0, incomplete=True), stored(job, rank=1)])
    assert side.states["r"].stored == 0 and side.idle


# -- lookups that failed


def test_a_failed_lookup_is_counted_once_however_often_it_is_asked(side: Side, cache: Any) -> None:
    nothing = np.empty((0, 1), dtype=np.uint64)
    cache.found = lambda *_: Answer(
        0, 0, 0, np.empty(0, dtype=np.int64), nothing, failure="deadline"
    )
    side.arrive("r", None, None, keys(5))
    assert side.counts["lookup_failures"] == 0, "nobody has looked yet"
    for _ in range(3):
        assert side.lookup("r", 0, 5) == 0
    assert side.counts["lookup_failures"] == 1
    side.no_load("r")
    assert side.lookup("r", 0, 5) == 0
    assert side.counts["lookup_failures"] == 2, "asked anew"


def test_a_miss_is_no_failed_lookup(side: Side, cache: Any) -> None:
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 0
    assert side.counts["lookup_failures"] == 0
