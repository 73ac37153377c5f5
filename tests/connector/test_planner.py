"""The scheduler's side of the seam against a cache that answers as the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning import LAYOUT, Side

from kvkeep.client.requests import Finished, LoadOutcome
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.kv.keys import KEY_BYTES

NAME = "num_kvkeep_extra_cached_tokens"


def keys(count: int, name: int = 1, start: int = 0) -> bytes:
    """Keys of a prompt; prompts of one name begin alike."""
    return b"".join(bytes([name, at]) + bytes(KEY_BYTES - 2) for at in range(start, start + count))


def loaded(*jobs: int, failed: dict[int, list[int]] | None = None) -> Finished:
    bad = failed or {}
    return Finished(loads={job: LoadOutcome(frozenset(bad.get(job, ()))) for job in jobs})


def stored(*jobs: int) -> Finished:
    return Finished(stored=dict.fromkeys(jobs, 1))


def ranks(*reports: Finished) -> list[Finished]:
    """One report of each rank."""
    return [replace(report, rank=rank) for rank, report in enumerate(reports)]


def load_all(side: Side, request_id: str = "r", blocks: int = 5, **failed: Any) -> None:
    """Looks up, loads into blocks 10, 11, … and reports."""
    assert side.lookup(request_id, 0, blocks) == blocks
    job = side.prepare_load(request_id, 0, range(10, 10 + blocks))
    side.build_step()
    side.complete(
        ranks(loaded(job.number, **{name: {job.number: bad} for name, bad in failed.items()}))
    )


# -- lookups


def test_a_lookup_is_sent_on_arrival_and_only_once(side: Side, cache: Any) -> None:
    cache.silent = True
    side.arrive("r", "salt", None, keys(5))
    assert cache.asked == [("salt", 5, 0)]
    for _ in range(3):
        assert side.lookup("r", 0, 5) is None
    cache.silent, cache.blocks = False, 3
    for _ in range(3):
        assert side.lookup("r", 0, 5) == 3
    assert cache.asked == [("salt", 5, 0)]


def test_nobody_waits_to_hear_of_what_the_server_surely_lacks(side: Side, cache: Any) -> None:
    cache.silent, cache.blocks = True, 3
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) is None
    cache.surely_lacking.add(keys(1, start=2))
    assert side.lookup("r", 0, 5) is None, "the blocks before it may be there"
    assert side.lookup("r", 2, 5) == 0
    cache.silent = False
    assert side.lookup("r", 2, 5) == 1, "stored meanwhile: who is still waiting for its turn has it"
    assert cache.asked == [(None, 5, 0)] and cache.released == 0


def test_with_windows_the_answer_about_what_the_engine_has_is_waited_for(cache: Any) -> None:
    """It tells what of that need not be stored again, and nothing else does."""
    side = Side(
        cache, GroupLayout([CacheGroup("full", 4), CacheGroup("window", 4, 8)]), world_size=1
    )
    cache.silent = True
    cache.surely_lacking |= {keys(1), keys(1, start=2)}
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 2, 5) is None
    assert side.lookup("r", 0, 5) == 0


def test_what_the_server_surely_lacks_is_stored_without_waiting_either(
    side: Side, cache: Any
) -> None:
    cache.silent = True
    cache.surely_lacking.add(keys(1))
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 0
    side.no_load("r")
    assert not cache.released, "the server may still tell"
    times, cache.silent = cache.looked_at, False
    assert side.knows_stored("r") and cache.released == 1, (
        "no lease comes of an answer that nobody waits for"
    )
    assert cache.looked_at == times, "nor does anybody look whether it has come"
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 5)
    assert job is not None and (job.first_block, job.block_ids) == (0, [1, 2, 3, 4, 5])


def test_what_the_engine_has_is_not_asked_for(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("some", None, None, keys(5), local_blocks=2)
    assert cache.asked == [(None, 5, 2)]
    assert side.lookup("some", 2, 5) == 3
    side.arrive("all", None, None, keys(5), local_blocks=5)
    side.arrive("none", None, None, b"")
    assert side.lookup("all", 5, 5) == 0
    assert side.lookup("none", 0, 0) == 0
    assert len(cache.asked) == 1


@pytest.mark.parametrize(
    ("has", "local", "limit", "extra"), [(5, 0, 4, 4), (3, 4, 5, 0), (3, 3, 5, 0), (9, 1, 5, 4)]
)
def test_the_offer_is_what_lies_between_the_engines_blocks_and_the_limit(
    side: Side, cache: Any, has: int, local: int, limit: int, extra: int
) -> None:
    cache.blocks = has
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", local, limit) == extra


def test_more_local_blocks_than_on_arrival_need_no_new_lookup(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("r", None, None, keys(5), local_blocks=1)
    assert side.lookup("r", 3, 5) == 2
    assert cache.asked == [(None, 5, 1)]
    epoch, slots = side.states["r"].slots(3, 2)
    assert (epoch, slots.tolist()) == (7, [1003, 1004]), "before the engine has blocks for them"
    assert side.states["r"].slots(3, 1)[1].tolist() == [1003]
    job = side.prepare_load("r", 3, [10, 11])
    [request] = side.build_step().loads.values()
    assert request.slots.tolist() == [1003, 1004], "described from block 1, loaded from block 3"
    assert request.checksums.ravel().tolist() == [2, 3]
    assert (job.first_block, request.skip, len(request.keys)) == (3, 3, 5 * KEY_BYTES)


def test_fewer_local_blocks_than_on_arrival_ask_again(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("r", None, None, keys(5), local_blocks=4)
    assert side.lookup("r", 1, 5) == 4
    assert cache.asked == [(None, 5, 4), (None, 5, 1)]


def test_a_request_that_has_grown_asks_again_for_all(side: Side, cache: Any) -> None:
    cache.blocks = 9
    side.arrive("r", None, None, keys(3))
    side.extend("r", keys(2, start=3))
    assert side.lookup("r", 0, 3) == 3, "within what was asked"
    assert len(cache.asked) == 1
    assert side.lookup("r", 0, 5) == 5
    assert cache.asked == [(None, 3, 0), (None, 5, 0)]


def test_a_request_that_loads_is_not_offered_more_meanwhile(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 5
    side.prepare_load("r", 0, range(5))
    assert side.lookup("r", 0, 5) is None


def test_a_block_that_another_request_loads_is_waited_for(side: Side, cache: Any) -> None:
    cache.blocks = 5
    for name in ("first", "second"):
        side.arrive(name, None, None, keys(5))
    side.arrive("stranger", None, None, keys(5, name=2))
    assert side.lookup("first", 0, 5) == 5
    job = side.prepare_load("first", 0, [10, 11, 12])
    assert side.lookup("second", 0, 5) is None
    assert side.lookup("second", 2, 5) is None
    assert side.lookup("second", 3, 5) == 2, "the first one loads three"
    assert side.lookup("stranger", 0, 5) == 5, "the same place in another prompt is another block"
    side.build_step()
    side.complete([loaded(job.number)])
    assert side.lookup("second", 0, 5) == 5


def test_a_store_of_the_same_block_keeps_nobody_waiting(side: Side, cache: Any) -> None:
    for name in ("first", "second"):
        side.arrive(name, None, None, keys(5))
    assert side.prepare_store("first", [1, 2, 3], 3) is not None
    cache.blocks = 5
    assert side.lookup("second", 0, 5) == 5


def test_a_request_without_a_load_gives_its_lease_back(side: Side, cache: Any) -> None:
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 0
    side.no_load("r")
    side.no_load("r")
    assert cache.released == 1


def test_a_salt_that_is_none_is_served_without_the_cache(
    side: Side, cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    side.arrive("r", 5, {NAME: None}, keys(5))  # type: ignore[arg-type]
    assert side.lookup("r", 0, 5) == 0
    assert side.prepare_store("r", [1, 2], 2) is None
    assert side.end("r") == {NAME: 0}
    assert not cache.asked
    assert "without the cache" in caplog.text


# -- jobs


def test_a_step_takes_the_jobs_that_were_prepared_since_the_last(side: Side, cache: Any) -> None:
    cache.blocks = 2
    side.arrive("r", "alice", None, keys(5))
    side.arrive("s", None, None, keys(5, name=2))
    assert side.lookup("r", 0, 5) == 2
    load = side.prepare_load("r", 0, [10, 11])
    store = side.prepare_store("s", [4, 5, 6], 3)
    assert store is not None
    step = side.build_step()
    assert (set(step.loads), set(step.stores)) == ({load.number}, {store.number})
    assert (
        step.loads[load.number].tenant.startswith("t-")
        and step.stores[store.number].tenant == "default"
    )
    assert step.loads[load.number].epoch == 7
    again = side.build_step()
    assert not again.loads and not again.stores
    assert not side.idle, "begun is not done"


def test_a_job_is_over_when_every_rank_has_reported_it(cache: Any) -> None:
    side = Side(cache, LAYOUT, world_size=3)
    cache.blocks = 5
    side.arrive("r", None, {NAME: None}, keys(5))
    assert side.lookup("r", 0, 5) == 5
    job = side.prepare_load("r", 0, range(10, 15))
    side.build_step()
    assert side.complete(ranks(loaded(job.number), Finished(), Finished())).loads == []
    assert side.complete(ranks(Finished(), loaded(job.number), Finished())).loads == []
    assert not side.idle and cache.released == 0
    assert side.complete(ranks(Finished(), Finished(), loaded(job.number))).loads == [job]
    assert side.idle and cache.released == 1
    assert side.end("r") == {NAME: 20}


def test_a_rank_that_reports_twice_does_not_stand_for_another(cache: Any) -> None:
    """Else a job would end, and its blocks be given away, while a rank still writes to them."""
    side = Side(cache, LAYOUT, world_size=2)
    cache.blocks = 5
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 5
    job = side.prepare_load("r", 0, range(10, 15))
    side.build_step()
    assert side.complete(ranks(loaded(job.number), Finished())).loads == []
    assert side.complete(ranks(loaded(job.number), Finished())).loads == []
    assert side.complete(ranks(Finished(), loaded(job.number))).loads == [job]


def test_reports_of_jobs_that_nobody_knows_or_that_are_over_do_nothing(
    side: Side, cache: Any
) -> None:
    completed = side.complete([loaded(99, failed={99: [1]}), stored(98)])
    assert (completed.loads, completed.stores, completed.invalid_block_ids) == ([], [], set())
    cache.blocks = 2
    side.arrive("r", None, {NAME: None}, keys(5))
    load_all(side, blocks=2)
    again = side.complete(ranks(loaded(1, failed={1: [10]}), stored(1)))
    assert (again.loads, again.stores, again.invalid_block_ids) == ([], [], set())
    assert side.end("r") == {NAME: 8}


def test_failed_blocks_are_known_with_the_first_report(cache: Any) -> None:
    side = Side(cache, LAYOUT, world_size=2)
    cache.blocks = 5
    side.arrive("r", None, {NAME: None}, keys(5))
    assert side.lookup("r", 0, 5) == 5
    job = side.prepare_load("r", 0, range(10, 15))
    side.build_step()
    first = side.complete(ranks(loaded(job.number, failed={job.number: [13]}), Finished()))
    assert (first.loads, first.invalid_block_ids) == ([], {13})
    second = side.complete(ranks(Finished(), loaded(job.number, failed={job.number: [11]})))
    assert (second.loads, second.invalid_block_ids) == ([job], {11})
    assert side.states["r"].loaded == 1 and side.end("r") == {NAME: 4}


def test_the_server_is_told_how_many_tokens_were_loaded_and_are_used(
    side: Side, cache: Any
) -> None:
    cache.blocks = 5
    side.arrive("r", None, None, keys(5))
    load_all(side)
    assert cache.loaded_tokens == 5 * 4
    side.end("r")
    assert cache.loaded_tokens == 5 * 4, "once"


def test_tokens_of_a_request_that_ended_before_its_load_are_not_used(
    side: Side, cache: Any
) -> None:
    cache.blocks = 5
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 5
    job = side.prepare_load("r", 0, range(10, 15))
    side.build_step()
    side.end("r")
    side.complete(ranks(loaded(job.number)))
    assert cache.released and cache.loaded_tokens == 0


def test_tokens_from_the_first_bad_block_on_are_not_used(side: Side, cache: Any) -> None:
    cache.blocks = 5
    side.arrive("r", None, None, keys(5))
    load_all(side, failed=[12])
    assert cache.loaded_tokens == 2 * 4


def test_a_request_whose_load_failed_is_not_offered_a_hit_again(side: Side, cache: Any) -> None:
    cache.blocks = 5
    for name in ("r", "other"):
        side.arrive(name, None, None, keys(5))
    load_all(side, failed=[12])
    asked = len(cache.asked)
    assert [side.lookup("r", 0, 5), side.lookup("r", 2, 5)] == [0, 0]
    assert len(cache.asked) == asked
    assert side.lookup("other", 0, 5) == 5, "that one has not failed yet"


# -- stores


def test_what_the_server_has_is_not_stored_and_the_rest_is_in_order(side: Side, cache: Any) -> None:
    cache.blocks = 2
    side.arrive("r", None, None, keys(5))
    load_all(side, blocks=2)
    ids = [10, 11, 20, 21, 22]
    assert side.prepare_store("r", ids, 2) is None
    first = side.prepare_store("r", ids, 3)
    second = side.prepare_store("r", ids, 5)
    assert first is not None and second is not None
    assert side.prepare_store("r", ids, 5) is None
    stores = side.build_step().stores
    assert [(each.first_block, each.block_ids, each.is_load) for each in (first, second)] == [
        (2, [20], False),
        (3, [21, 22], False),
    ]
    assert stores[first.number].parent == keys(2)[-KEY_BYTES:]
    assert stores[first.number].keys == keys(1, start=2)
    assert stores[second.number].parent == keys(3)[-KEY_BYTES:]
    assert stores[second.number].keys == keys(2, start=3)
    assert stores[second.number].block_ids.tolist() == [21, 22]


def test_local_blocks_that_the_server_lacks_are_stored_too(side: Side, cache: Any) -> None:
    cache.blocks = 1
    side.arrive("r", None, None, keys(5), local_blocks=3)
    assert side.lookup("r", 3, 5) == 0
    side.no_load("r")
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 4)
    assert job is not None
    assert (job.first_block, job.block_ids) == (1, [2, 3, 4])
    assert side.build_step().stores[job.number].parent == keys(1)


def test_what_was_never_asked_for_again_is_not_stored_again_either(side: Side, cache: Any) -> None:
    """The engine has all that it needs, so nobody waits for the server's answer. It still tells
    what to store."""
    cache.blocks, cache.silent = 4, True
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 5, 5) == 0
    side.no_load("r")
    assert not side.knows_stored("r") and not cache.released
    cache.silent = False
    assert side.knows_stored("r") and side.knows_stored("r") and cache.released == 1
    assert side.states["r"].stored == 4 and len(cache.asked) == 1
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 5)
    assert job is not None and (job.first_block, job.block_ids) == (4, [5])


def test_who_cannot_wait_for_that_answer_stores_all(side: Side, cache: Any) -> None:
    cache.blocks, cache.silent = 4, True
    side.arrive("r", None, None, keys(5))
    side.no_load("r")
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 5)
    assert job is not None and job.first_block == 0
    assert cache.released == 1, "an engine that is idle would hear of the store's end much later"
    side.end("r")
    side.build_step()
    side.complete([stored(job.number)])
    assert side.idle and cache.released == 1


def test_who_has_ended_holds_no_lease_while_it_is_stored(side: Side, cache: Any) -> None:
    side.arrive("r", None, None, keys(5))
    assert side.lookup("r", 0, 5) == 0
    job = side.prepare_store("r", [1, 2, 3, 4, 5], 5)
    cache.silent = True
    side.extend("r", keys(3, start=5))
    assert job is not None and side.lookup("r", 5, 8) is None, "preempted, and asks again"
    side.end("r")
    assert cache.leases == 0, "an engine that is idle would hear of the store's end much later"


def test_after_a_failed_load_all_from_the_bad_block_on_is_stored_again(
    side: Side, cache: Any
) -> None:
    cache.blocks = 5
    side.arrive("r", None, {NAME: None}, keys(5))
    load_all(side, failed=[12, 14])
    assert side.states["r"].loaded == 2
    job = side.prepare_store("r", [10, 11, 12, 13, 14], 5)
    assert job is not None and (job.first_block, job.block_ids) == (2, [12, 13, 14])
    assert side.end("r") == {NAME: 8}


def test_generated_blocks_are_stored_with_the_keys_that_came_later(side: Side, cache: Any) -> None:
    side.arrive("r", None, None, keys(2))
    assert side.lookup("r", 0, 2) == 0
    assert side.prepare_store("r", [1, 2], 2) is not None
    side.extend("r", keys(1, start=2))
    job = side.prepare_store("r", [1, 2, 3], 3)
    assert job is not None
    store = side.build_step().stores[job.number]
    assert (store.parent, store.keys) == (keys(1, start=1), keys(1, start=2))


@pytest.mark.parametrize(
    ("params", "priority", "ttl_ms"),
    [
        (None, 50, 0),
        ({}, 50, 0),
        ({"kvkeep_priority": 90, "kvkeep_ttl_ms": 1500}, 90, 1500),
        ({"kvkeep_priority": "90"}, 50, 0),
    ],
    ids=str,
)
def test_hints_go_with_every_store(side: Side, params: Any, priority: int, ttl_ms: int) -> None:
    side.arrive("r", None, params, keys(5))
    side.lookup("r", 0, 5)
    for computed in (2, 5):
        side.prepare_store("r", [1, 2, 3, 4, 5], computed)
    for store in side.build_step().stores.values():
        assert (store.priority, store.ttl_ms) == (priority, ttl_ms)


# -- the end


def test_an_aborted_request_keeps_its_lease_until_the_last_rank_has_read(cache: Any) -> None:
    side = Side(cache, LAYOUT, world_size=2)
    cache.blocks = 5
    side.arrive("r", None, {NAME: None}, keys(5))
    assert side.lookup("r", 0, 5) == 5
    job = side.prepare_load("r", 0, range(10, 15))
    side.build_step()
    assert side.end("r") == {NAME: 0}, "nothing has come yet"
    assert cache.leases == 1
    side.complete(ranks(loaded(job.number), Finished()))
    assert cache.leases == 1
    assert side.complete(ranks(Finished(), loaded(job.number))).loads == [job]
    assert cache.leases == 0 and side.idle


def test_a_finished_conversation_is_said_with_its_last_key_after_the_last_store(
    side: Side, cache: Any
) -> None:
    side.arrive("r", "alice", {"kvkeep_session_finished": True}, keys(5))
    side.lookup("r", 0, 5)
    jobs = [side.prepare_store("r", [1, 2, 3, 4, 5], computed) for computed in (2, 4)]
    side.build_step()
    assert side.end("r") == {}
    assert jobs[0] is not None and jobs[1] is not None
    side.complete([stored(jobs[0].number)])
    assert cache.finished == [], "a store is under way: its blocks would come after the end"
    side.complete([stored(jobs[1].number)])
    assert cache.finished == [("alice", keys(1, start=3))]


def test_a_request_id_that_is_used_again_is_another_request(side: Side, cache: Any) -> None:
    cache.blocks = 3
    side.arrive("r", None, {NAME: None}, keys(3))
    assert side.lookup("r", 0, 3) == 3
    old = side.prepare_load("r", 0, [10, 11, 12])
    assert side.end("r") == {NAME: 0}
    side.arrive("r", "bob", {NAME: None}, keys(3, name=2))
    assert side.lookup("r", 0, 3) == 3
    new = side.prepare_load("r", 0, [20, 21, 22])
    side.build_step()
    side.complete(ranks(loaded(old.number, failed={old.number: [10]})))
    assert side.states["r"].loaded == 0, "what the old one loaded is not the new one's"
    side.complete([loaded(new.number)])
    assert side.end("r") == {NAME: 12}, "nor what it failed at"
    assert cache.leases == 0


def test_preempted_and_loaded_again_counts_once_and_asks_anew(side: Side, cache: Any) -> None:
    cache.blocks = 4
    side.arrive("r", None, {NAME: None}, keys(5))
    load_all(side, blocks=4)
    cache.asked.clear()
    cache.blocks = 5
    load_all(side, blocks=5)
    assert cache.asked == [(None, 5, 0)], "its first lease is gone"
    assert cache.released == 2
    assert side.states["r"].loaded == 5
    assert side.end("r") == {NAME: 20}


def test_close_closes_the_cache(side: Side, cache: Any) -> None:
    side.close()
    assert cache.closed == 1


def test_stores_that_wait_for_a_step_end_undone_when_they_are_dropped(
    side: Side, cache: Any
) -> None:
    for name in ("under way", "over", "waits", "after"):
        side.arrive(name, None, {"kvkeep_session_finished": True}, keys(5))
    first = side.prepare_store("under way", [1, 2, 3, 4, 5], 5)
    side.build_step()
    jobs = [
        side.prepare_store("over", [6, 7, 8, 9, 10], 5),
        side.prepare_store("waits", [11, 12, 13, 14, 15], 5),
        side.prepare_store("after", [16, 17, 18, 19, 20], 5, after_step=True),
    ]
    side.end("over")
    assert not cache.finished
    assert side.drop_stores().stores == jobs and all(
        job is not None and job.incomplete for job in jobs
    )
    assert side.jobs == [first] and len(cache.finished) == 1, "its last job has ended"
    assert side.build_step(range(21)).withdrawn == [1, 2, 3, 4, 5], "nobody reads the others"
    assert not side.drop_stores().stores
    again = side.prepare_store("waits", [11, 12, 13, 14, 15], 5)
    assert again is not None and again.blocks == 5, "they are offered again"
