"""Blocks between engine memory and the server, on both data planes: in parts, verified, and nothing
left behind."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.client.conftest import Transfer

import kvkeep.client
from kvkeep.client import rank_memory
from kvkeep.client.connection import Connection
from kvkeep.client.loads import report_bad
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.errors import RequestError
from kvkeep.kv import native
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m

Make = Callable[..., Any]
NBYTES = 1000
TWO_SHARDS = ModelIdentity(model="s", revision="1", kv_dtype="|u1", block_tokens=4, content="l")


def keys(count: int, name: str = "k") -> bytes:
    return b"".join(f"{name}{at}".encode().ljust(16, b".") for at in range(count))


def memory(blocks: int = 40, seed: int = 0, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (blocks, nbytes), dtype=np.uint8)


def transfer(connection: Connection, engine: NDArray[np.uint8], shard: int = 0) -> Transfer:
    return Transfer(connection, [GroupMemory(BlockRuns.of([engine]))], shard)


def storing(ids: list[int], name: str = "k", parent: bytes = b"", **hints: int) -> StoreRequest:
    return StoreRequest(
        "default", parent, keys(len(ids), name), np.array(ids, dtype=np.int64), **hints
    )


def look_up(
    connection: Connection, count: int, ids: list[int], skip: int = 0, name: str = "k"
) -> LoadRequest:
    """A lookup as a scheduler does it, and the load that follows from it. The lease stays."""
    assert connection.layout is not None
    message = m.Lookup("default", connection.layout.layout, keys(count, name), skip)
    call = connection.call(message, 200)
    found = connection.wait(call)
    assert isinstance(found, m.Found)
    shards = len(connection.shape.shard_bytes)
    return LoadRequest(
        "default",
        keys(count, name),
        skip,
        np.array(ids, dtype=np.int64),
        call.epoch,
        np.frombuffer(found.slots, "<i8"),
        np.frombuffer(found.checksums, "<u8").reshape(-1, shards),
    )


@pytest.fixture(params=["network", "shared_memory"])
def sim(request: pytest.FixtureRequest, simulation: Make) -> Iterator[Any]:
    return simulation(shared_memory=request.param == "shared_memory")


def test_blocks_come_back_as_they_were_stored_from_and_to_any_block_ids(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    stored = engine.copy()
    assert transfer(connection, engine).store(storing([3, 17, 0, 39])) == 4
    assert (engine == stored).all()
    request = look_up(connection, 4, [5, 1, 20, 8])
    assert transfer(connection, engine).load(request).all()
    assert (engine[[5, 1, 20, 8]] == stored[[3, 17, 0, 39]]).all()
    untouched = [block for block in range(40) if block not in (5, 1, 20, 8)]
    assert (engine[untouched] == stored[untouched]).all()
    sim.run(20)
    assert sim.held() == [(1, 0)], "the lookup's own lease"


def test_skipped_blocks_are_not_loaded(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1, 2, 3]))
    target = np.zeros_like(engine)
    assert transfer(connection, target).load(look_up(connection, 4, [7, 9], skip=2)).tolist() == [
        True,
        True,
    ]
    assert (target[[7, 9]] == engine[[2, 3]]).all()
    assert not target[[0, 1, 2, 3]].any()


def test_what_is_there_is_not_stored_again(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    assert transfer(connection, engine).store(storing([0, 1])) == 2
    assert transfer(connection, engine).store(storing([0, 1, 2])) == 1
    assert transfer(connection, engine).store(storing([0, 1, 2])) == 0
    assert transfer(connection, engine).store(storing([])) == 0
    assert sim.held() == [(0, 0)]


def test_blocks_without_their_parent_are_not_stored(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    assert transfer(connection, engine).store(storing([0, 1], parent=b"nobody knows it.")) == 0
    assert sim.server.service.counters.orphan_blocks == 2
    transfer(connection, engine).store(storing([0, 1]))
    assert transfer(connection, engine).store(storing([2], name="tail", parent=keys(2)[16:])) == 1


def test_each_shard_lies_where_its_rank_finds_it(sim: Any) -> None:
    first, second = memory(seed=1, nbytes=300), memory(seed=2, nbytes=700)
    connection = sim.connected(300, 700, identity=TWO_SHARDS)
    assert transfer(connection, first, shard=0).store(storing([0, 1])) == 2
    assert len(look_up(connection, 2, []).checksums) == 0, (
        "a block is visible when all its shards are in"
    )
    assert transfer(connection, second, shard=1).store(storing([4, 5])) == 2
    for shard, engine, ids in ((0, first, [0, 1]), (1, second, [4, 5])):
        target = np.zeros_like(engine)
        assert transfer(connection, target, shard).load(look_up(connection, 2, [2, 3])).all()
        assert (target[[2, 3]] == engine[ids]).all()


# -- several loads at once


def test_loads_of_several_requests_end_each_with_its_own_result(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    for name, ids in (("a", [0, 1, 2]), ("b", [3]), ("c", [4, 5])):
        assert transfer(connection, engine).store(storing(ids, name=name)) == len(ids)
    requests = [
        look_up(connection, 3, [20, 21], skip=1, name="a"),
        look_up(connection, 0, [], name="none"),
        look_up(connection, 1, [22], name="b"),
        look_up(connection, 2, [24, 23], name="c"),
    ]
    target = np.zeros_like(engine)
    loaded = transfer(connection, target).load_all(requests)
    assert [each.tolist() for each in loaded] == [[True, True], [], [True], [True, True]]
    assert (target[20:25] == engine[[1, 2, 3, 5, 4]]).all()
    assert not target[:20].any() and not target[25:].any()
    assert transfer(connection, target).load_all([]) == []


def test_a_stale_request_fails_alone(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1]))
    good = [look_up(connection, 2, ids) for ids in ([10, 11], [14, 15])]
    stale = LoadRequest(**(vars(look_up(connection, 2, [12, 13])) | {"epoch": 99}))
    target = np.zeros_like(engine)
    loaded = transfer(connection, target).load_all([good[0], stale, good[1]])
    assert [each.tolist() for each in loaded] == [[True, True], [False, False], [True, True]]
    assert (target[[10, 11, 14, 15]] == engine[[0, 1, 0, 1]]).all() and not target[[12, 13]].any()
    assert connection.counters.failures == {"stale_epoch": 1}


def test_a_request_without_slots_fails_alone(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    far, near, engine = sim.connected(shared_memory=False), sim.connected(), memory()
    transfer(near, engine).store(storing([0, 1]))
    requests = [look_up(far, 2, [10, 11]), look_up(near, 2, [12, 13])]
    assert [each.tolist() for each in transfer(near, engine).load_all(requests)] == [
        [False] * 2,
        [True] * 2,
    ]
    assert near.counters.failures == {"no_slots": 1}


def test_a_bad_block_is_reported_by_the_key_of_the_request_that_it_is_of(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    for name, ids in (("a", [0, 1]), ("b", [2, 3, 4]), ("c", [5, 6])):
        transfer(connection, engine).store(storing(ids, name=name))
    for block in (1, 4, 5):
        flip_a_byte(sim, engine[block])
    requests = [
        look_up(connection, 2, [10, 11], name="a"),
        look_up(connection, 3, [12, 13], skip=1, name="b"),
        look_up(connection, 2, [14, 15], name="c"),
    ]
    loaded = transfer(connection, engine).load_all(requests)
    assert [each.tolist() for each in loaded] == [[True, False], [True, False], [False, True]]
    sim.run(20)
    reports = [request.key for request in sim.recorder.came if isinstance(request, m.ReportBad)]
    assert sorted(reports) == [keys(2, "a")[16:], keys(3, "b")[32:], keys(1, "c")]
    assert connection.counters.failures["bad_block"] == 3
    assert sim.server.service.counters.bad_blocks == 3


def test_when_the_pool_is_gone_none_of_them_is_loaded(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1]))
    good = look_up(connection, 2, [10, 11])
    outside = LoadRequest(
        **(vars(look_up(connection, 2, [12, 13])) | {"slots": np.array([0, 1 << 40])})
    )
    target = np.zeros_like(engine)
    assert not any(each.any() for each in transfer(connection, target).load_all([good, outside]))
    assert not target.any() and connection.counters.failures == {"pool": 1}


def test_loads_wait_for_what_their_engine_did_before(sim: Any, late_copier: Any) -> None:
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1]))
    copier = late_copier([BlockRuns.of([engine])])
    moving = Transfer(connection, [GroupMemory(BlockRuns.of([engine]))], 0, copier)
    requests = [look_up(connection, 2, [10, 11]), look_up(connection, 2, [12, 13])]
    assert all(each.all() for each in moving.load_all(requests, ["first", "second"]))
    scatters = 1 if connection.segments is not None else 2
    assert copier.waited_for == [["first", "second"]] * scatters


# -- what must not be used


def test_slots_of_another_epoch_are_not_read(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1]))
    request = look_up(connection, 2, [4, 5])
    sim.replace_server(epoch=2)
    sim.run(1_000)
    assert connection.epoch == 2
    kept = engine.copy()
    assert not transfer(connection, engine).load(request).any()
    assert (engine == kept).all()
    assert connection.counters.failures["stale_epoch"] == 1


def test_slots_given_in_a_session_that_is_over_are_not_written(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection = sim.connected()

    wait = connection.wait

    def wait_and_lose_the_session(call: Any) -> Any:
        answer = wait(call)
        if isinstance(answer, m.Prepared):
            sim.replace_server(epoch=2)
            sim.run(1_000)
            assert connection.epoch == 2
        return answer

    connection.wait = wait_and_lose_the_session  # type: ignore[method-assign]
    assert transfer(connection, memory()).store(storing([0, 1])) == 0
    assert not sim.pools[0].segments.view(0, 64 * 4096).any(), "not a byte in the new server's pool"
    assert sim.held() == [(0, 0)]


def flip_a_byte(sim: Any, block: NDArray[np.uint8]) -> None:
    pool = sim.pools[0].segments.view(0, 64 * 4096) if sim.pools else sim.server.memory.bytes
    pool[pool.tobytes().index(block.tobytes()) + 17] ^= 4


def test_a_block_that_does_not_match_is_not_used_and_is_reported(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1, 2, 3]))
    flip_a_byte(sim, engine[2])
    request = look_up(connection, 4, [10, 11, 12, 13])
    assert transfer(connection, engine).load(request).tolist() == [True, True, False, True]
    assert (engine[[10, 11, 13]] == engine[[0, 1, 3]]).all()
    sim.run(20)
    (report,) = [request for request in sim.recorder.came if isinstance(request, m.ReportBad)]
    assert report.key == keys(4)[32:48]
    assert sim.server.service.counters.bad_blocks == 1
    assert len(look_up(connection, 4, [20, 21]).checksums) == 2, (
        "the bad block and what hung on it are gone"
    )


def test_a_load_that_only_got_no_answer_accuses_no_block(simulation: Make, passing: object) -> None:
    sim = simulation()
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1, 2]))
    sim.recorder.instead = lambda header, request: None if isinstance(request, m.Fetch) else passing
    assert not transfer(connection, engine).load(look_up(connection, 3, [5, 6, 7])).any()
    sim.run(1_000)
    assert sim.recorder.count(m.ReportBad) == 0
    assert "bad_block" not in connection.counters.failures


def test_blocks_stored_unverified_are_taken_by_those_who_do_not_verify_only(
    simulation: Make,
) -> None:
    sim = simulation(shared_memory=True)
    careless, careful, engine = sim.connected(verify=False), sim.connected(verify=True), memory()
    assert transfer(careless, engine).store(storing([0, 1])) == 2
    request = look_up(careless, 2, [4, 5])
    assert request.checksums.tolist() == [[0], [0]]
    assert transfer(careless, engine).load(request).all()
    assert not transfer(careful, engine).load(look_up(careful, 2, [6, 7])).any()
    assert transfer(careful, engine).store(storing([0, 1], name="v")) == 2
    assert transfer(careless, engine).load(look_up(careless, 2, [8, 9], name="v")).all()


@pytest.mark.parametrize(("client", "server", "both"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)])
def test_a_server_may_raise_verification_and_never_lower_it(
    simulation: Make, client: int, server: int, both: int
) -> None:
    sim = simulation(shared_memory=True)
    sim.server.service.verify = bool(server)
    connection = sim.connected(verify=bool(client))
    assert connection.welcome is not None and connection.welcome.verify is bool(server)
    assert connection.verify is bool(both)


def test_without_a_word_to_the_contrary_a_client_verifies(simulation: Make) -> None:
    """Also one whose server would have it otherwise: a flipped bit is a failed load."""
    sim, engine = simulation(shared_memory=True), memory()
    assert sim.server.service.verify is False
    connection = sim.connected()
    assert transfer(connection, engine).store(storing([0, 1])) == 2
    sim.pools[0].segments.view(0, 1000)[17] ^= 4
    assert transfer(connection, engine).load(look_up(connection, 2, [4, 5])).tolist() == [
        False,
        True,
    ]
    assert not sim.connection(verify=False).options.verify
    assert sim.connection(verify=False).verify, "no server has said yet that it does without"


# -- a pool whose files somebody makes shorter


needs_kernel = pytest.mark.skipif(not native.available, reason="only the C kernel survives it")


def cut_off(sim: Any, left_bytes: int) -> None:
    os.truncate(sim.pools[0].directory / "segment-00000", left_bytes)


@needs_kernel
@pytest.mark.parametrize("verify", [True, False])
def test_a_pool_that_shrinks_under_a_load_is_a_failed_load(
    simulation: Make, verify: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sim, engine = simulation(shared_memory=True), memory()
    connection = sim.connected(verify=verify)
    assert transfer(connection, engine).store(storing([0, 1, 2])) == 3
    before = engine[[0, 1, 2]].copy()
    request = look_up(connection, 3, [4, 5, 6])
    cut_off(sim, 0)
    caplog.clear()
    for _ in range(3):
        assert transfer(connection, engine).load(request).tolist() == [False] * 3
    assert connection.counters.failures == {"pool": 3} and sim.recorder.count(m.ReportBad) == 0
    assert (engine[[0, 1, 2]] == before).all()
    [told] = caplog.messages
    assert told.startswith(
        "kvkeep: blocks are computed or not stored: a segment of the pool was cut off"
    )
    assert connection.shared_pool.holders == 1, "no copy holds the pool"


@needs_kernel
@pytest.mark.parametrize("verify", [True, False])
def test_a_pool_that_shrinks_under_a_store_ends_the_store(simulation: Make, verify: bool) -> None:
    sim, engine = simulation(shared_memory=True), memory()
    connection = sim.connected(verify=verify)
    assert transfer(connection, engine).store(storing([0])) == 1
    cut_off(sim, 0)
    outcome = transfer(connection, engine).offer(storing([1, 2], name="v"))
    assert outcome == (0, False)
    sim.run(100)
    assert connection.counters.failures == {"pool": 1} and sim.held() == [(0, 0)], (
        "its slots are given back"
    )
    assert connection.shared_pool.holders == 1
    cut_off(sim, sim.pools[0].segment_bytes)
    assert transfer(connection, engine).store(storing([1, 2], name="v")) == 2, (
        "and the next one goes through"
    )


@needs_kernel
def test_a_server_drops_a_block_whose_memory_is_gone(simulation: Make) -> None:
    sim, engine = simulation(shared_memory=True), memory()
    connection = sim.connected()
    assert transfer(connection, engine).store(storing([0, 1])) == 2
    request = look_up(connection, 2, [4, 5])
    cut_off(sim, 0)
    report_bad(connection, request, np.array([0]))
    sim.run(100)
    assert (
        sim.server.service.counters.bad_blocks == 1
        and len(look_up(connection, 2, [4, 5]).checksums) == 0
    )


# -- faults


def test_a_request_that_is_wrong_in_itself_raises_and_leaves_nothing_behind(sim: Any) -> None:
    connection, engine = sim.connected(), memory(blocks=4)
    with pytest.raises(RequestError, match="block 4 does not exist"):
        transfer(connection, engine).store(storing([0, 1, 4]))
    sim.run(100)
    assert sim.held() == [(0, 0)]
    assert transfer(connection, engine).store(storing([0, 1, 3])) == 3


def test_without_a_session_nothing_is_stored_or_loaded_and_it_is_counted(sim: Any) -> None:
    connection, engine = sim.connected(), memory()
    transfer(connection, engine).store(storing([0, 1]))
    request = look_up(connection, 2, [4, 5])
    connection.close()
    assert transfer(connection, engine).store(storing([0, 1])) == 0
    assert not transfer(connection, engine).load(request).any()
    assert connection.counters.failures["not_connected"] == 1
    assert connection.counters.failures["stale_epoch"] == 1


def test_a_load_without_slots_is_a_counted_miss(simulation: Make) -> None:
    """The scheduler has no shared memory with the server, the worker has."""
    sim = simulation(shared_memory=True)
    far, near, engine = sim.connected(shared_memory=False), sim.connected(), memory()
    transfer(near, engine).store(storing([0, 1]))
    assert not transfer(near, engine).load(look_up(far, 2, [4, 5])).any()
    assert near.counters.failures["no_slots"] == 1


def test_slots_outside_the_pool_are_not_touched(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection, engine = sim.connected(), memory()
    slots, checksums = np.array([1 << 40], dtype=np.int64), np.zeros((1, 1), dtype=np.uint64)
    request = LoadRequest("default", keys(1), 0, np.array([0]), connection.epoch, slots, checksums)
    assert not transfer(connection, engine).load(request).any()
    assert connection.counters.failures["pool"] == 1


def test_large_blocks_go_through_the_socket_a_few_at_a_time(simulation: Make) -> None:
    sim = simulation(frame_bytes=3 * 4096)
    connection, engine = sim.connected(4096), memory(blocks=300, nbytes=4096)
    assert transfer(connection, engine).store(storing([*range(8)])) == 8
    assert sim.recorder.count(m.Put) == 3
    target = np.zeros_like(engine)
    assert transfer(connection, target).load(look_up(connection, 8, [*range(8)])).all()
    assert sim.recorder.count(m.Fetch) == 3
    assert (target[:8] == engine[:8]).all()


def test_a_missing_kernel_is_said_once(
    simulation: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(kvkeep.client, "rank_memory", rank_memory)  # as it is, when this ends
    monkeypatch.delitem(sys.modules, rank_memory.__name__)
    new_process = importlib.import_module(rank_memory.__name__)  # as one where nothing was said
    for _ in range(3):
        groups = [rank_memory.GroupMemory(BlockRuns.of([memory()]))]
        new_process.RankMemory(simulation().connection(), groups, 0)
    assert len([record for record in caplog.records if "C compiler" in record.getMessage()]) == 1
