"""Loads fail, in every place, at every moment: answers stay right and no request uses a bad block.

The second half is about bad blocks that several requests share: the first request recomputes them,
the others keep their count and wait. Only requests of one step can share a block that turns out
bad, since its load is part of that step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.request import Status

Rigs = Callable[..., Any]

BLOCK_TOKENS = 4
PLACES = {
    "first": [0],
    "second": [1],
    "middle": [4],
    "last": [7],
    "several": [6, 2, 3],
    "all": list(range(8)),
}
each_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
both_modes = pytest.mark.parametrize("sync_loads", [False, True], ids=["async", "sync"])
both_policies = pytest.mark.parametrize("policy", ["recompute", "fail"])
abort_or_preempt = pytest.mark.parametrize("how", ["abort", "preempt"])


# -- at each place ---------------------------------------------------------------------------------


@both_modes
@each_place
def test_failure_at_each_place(rig: Rigs, places: list[int], sync_loads: bool) -> None:
    r = rig(sync_loads=sync_loads)
    request = r.add_stored(8, fail=places)
    r.step()
    good = min(places)
    assert r.scheduled == ({request.request_id: 2} if sync_loads else {})
    assert request.status is (Status.RUNNING if sync_loads else Status.WAITING)
    assert r.computed() == [good] and r.cached(request) == (0, good)
    assert request.metrics.failed_loads == 1 and request.output_tokens == []
    assert r.found(r.prompt(8)) == good
    r.step()
    assert r.steps[-1].segments[0].start == good * BLOCK_TOKENS
    assert r.run() == {"length"} and len(r.loads) == 1


@both_modes
@pytest.mark.parametrize("place", [3, 5, 7])
def test_failure_behind_a_local_prefix(rig: Rigs, sync_loads: bool, place: int) -> None:
    r = rig(sync_loads=sync_loads)
    r.add(r.prompt(3), max_tokens=1)
    r.run()
    request = r.add_stored(8, fail=[0, place])  # block 0 is not loaded at all
    r.step()
    assert r.loads[-1] == (3, 5)
    assert r.computed(request) == [place] and r.cached(request) == (3, place - 3)
    assert r.run() == {"length"}


@both_modes
def test_one_rule_says_what_was_computed_before_the_step(rig: Rigs, sync_loads: bool) -> None:
    """The request of a sync load, and those that share with it, ran in the step. That of an async
    load did not."""
    r = rig(sync_loads=sync_loads)
    requests = r.add_stored(6, tail=3, end=1, fail=[5]), r.add(r.prompt(6, tail=7, end=2))
    before: list[int] = []
    r.after_run = lambda output: before.extend(each.num_computed_tokens for each in requests)
    r.step()
    loaded = 6 * BLOCK_TOKENS
    scheduled = [r.scheduled.get(each.request_id, 0) for each in requests]
    assert scheduled == ([3, 7] if sync_loads else [0, 0])
    assert before == ([loaded + 3, loaded + 7] if sync_loads else [loaded, 0])
    assert requests[0].num_computed_tokens == 5 * BLOCK_TOKENS, "to just before the bad block"
    assert requests[1].num_computed_tokens == before[1] - scheduled[1], "less this step's tokens"


@both_modes
def test_others_in_the_step_are_not_disturbed(rig: Rigs, sync_loads: bool) -> None:
    r = rig(sync_loads=sync_loads)
    other = r.add(r.prompt(4, which="good"), max_tokens=8)
    r.step(2)
    request = r.add_stored(6, which="bad", fail=[2])
    r.step()
    assert len(other.output_tokens) == 3
    assert (request.metrics.failed_loads, other.metrics.failed_loads) == (1, 0)
    assert r.run() == {"length"}


# -- over several steps and ranks ------------------------------------------------------------------


def test_of_several_failures_the_first_place_counts(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=4)
    for rank, place in [(0, 5), (1, 2), (2, 7)]:
        r.cache.fail(place, rank=rank)
    r.cache.hold_loads = None
    request = r.add_stored(8)
    r.step(2)
    assert r.computed() == [8]
    counts = []
    for rank in range(4):
        r.cache.release_loads(rank)
        r.step()
        counts += r.computed()
        assert request.status is (Status.WAITING if rank == 3 else Status.LOADING)
    assert counts == [5, 2, 2, 2]
    assert r.found(r.prompt(8)) == 2 and r.cached(request) == (0, 2)
    assert r.run() == {"length"}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_a_block_fails_on_some_ranks(rig: Rigs, ranks: list[int]) -> None:
    """However many ranks say so, the load counts as failed once."""
    r = rig(tensor_parallel_size=2)
    for rank in ranks:
        r.cache.fail(1, rank=rank)
    request = r.add_stored(5)
    r.step()
    assert r.computed() == [1] and request.metrics.failed_loads == 1
    assert r.run() == {"length"} and request.metrics.failed_loads == 1


def test_all_ranks_fail_the_first_block_one_after_the_other(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    for rank in range(2):
        r.cache.fail(0, rank=rank)
    r.cache.hold_loads = None
    request = r.add_stored(5)
    r.step()
    r.cache.release_loads(0)
    r.step(3)
    assert request.status is Status.LOADING and r.computed() == [0]
    assert len(request.block_ids) == 5
    r.cache.release_loads(1)
    r.step()
    assert request.status is Status.WAITING and request.block_ids == []
    assert r.run() == {"length"}


def test_two_loads_fail_in_one_step(rig: Rigs) -> None:
    r = rig()
    for which in range(2):
        r.add_stored(4, which=which, fail=[1])
    r.step()
    assert r.computed() == [1, 1]
    assert r.run() == {"length"}


def test_a_failed_block_is_stored_again_and_not_counted_as_loaded(rig: Rigs) -> None:
    r = rig()
    name = "num_kvkeep_extra_cached_tokens"
    request = r.add_stored(6, fail=[4], kv_transfer_params={name: None})
    r.run()
    assert request.reply_params == {name: 4 * BLOCK_TOKENS}
    assert r.stored == [2] and r.cache.stores[0].parent == request.chain.key(3)


# -- policy fail -----------------------------------------------------------------------------------


@both_modes
@each_place
def test_policy_fail_ends_with_an_error(rig: Rigs, sync_loads: bool, places: list[int]) -> None:
    r = rig(sync_loads=sync_loads, kv_load_failure_policy="fail")
    other = r.add(r.prompt(3, which="other"), max_tokens=6)
    r.step()
    request = r.add_stored(8, fail=places)
    assert r.step() == [request] and request.finish_reason == "error"
    assert f"block {min(places)} " in request.error and "kv_load_failure_policy" in request.error
    assert request.output_tokens == [] and request.block_ids == []
    assert r.found(r.prompt(8)) == (min(places) if sync_loads else 0)
    r.run()
    assert other.finish_reason == "length" and other.error == ""


@each_place
def test_policy_fail_leaves_a_local_prefix_alone(rig: Rigs, places: list[int]) -> None:
    r = rig(sync_loads=True, kv_load_failure_policy="fail")
    r.add(r.prompt(2), max_tokens=1)
    r.run()
    request = r.add_stored(10, fail=[2 + place for place in places])
    r.run()
    assert request.finish_reason == "error" and r.found(r.prompt(10)) == 2 + min(places)
    r.cache.failing.clear()
    again = r.add(r.prompt(10))
    r.run()
    assert again.finish_reason == "length"


def test_policy_fail_ends_the_requests_that_share_and_no_others(rig: Rigs) -> None:
    r = rig(sync_loads=True, kv_load_failure_policy="fail")
    first, second = r.add_stored(8, end=1, fail=[3]), r.add(r.prompt(8, end=2))
    short, other = r.add(r.prompt(3, end=3)), r.add(r.prompt(5, which="other"))
    assert r.step() == [first, second]
    assert first.finish_reason == second.finish_reason == "error"
    r.run()
    assert short.finish_reason == other.finish_reason == "length"


def test_policy_fail_when_one_rank_still_loads(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2, kv_load_failure_policy="fail")
    r.cache.hold_loads = {1}
    request = r.add_stored(6, fail=[4])
    assert r.step() == [request] and request.finish_reason == "error"
    for _ in range(3):  # rank 1 still writes the blocks, and reads under the lease
        assert r.pool.num_free == 63 - 6 and len(r.cache.leases) == 1 and not r.cache.finished
        r.step()
    r.cache.release_loads(1)
    r.step()
    assert r.pool.num_free == 63 and len(r.cache.finished) == 1


# -- no pollution ----------------------------------------------------------------------------------


@both_policies
@both_modes
@pytest.mark.parametrize("place", [0, 2, 7])
def test_no_request_finds_a_bad_block(rig: Rigs, sync_loads: bool, policy: str, place: int) -> None:
    """Requests with the same prefix come in the same step, in the next ones and after."""
    r = rig(sync_loads=sync_loads, kv_load_failure_policy=policy, max_num_batched_tokens=20)
    r.add_stored(8, end=0, fail=[place])
    for end in range(1, 3):
        r.add(r.prompt(8, end=end))
    for end in range(3, 9):
        r.step()
        r.add(r.prompt(8, end=end))
    r.cache.failing.clear()
    r.run()
    late = r.add(r.prompt(8, end="late"))
    r.run()
    assert late.finish_reason == "length"


@pytest.mark.parametrize("hook", ["before_run", "after_run"])
@pytest.mark.parametrize(
    ("how", "policy"), [("abort", "recompute"), ("abort", "fail"), ("preempt", "recompute")]
)
def test_no_request_finds_a_bad_block_of_one_that_left_in_the_step(
    rig: Rigs, how: str, policy: str, hook: str
) -> None:
    """Nor the blocks that were computed on top of it."""
    r = rig(sync_loads=True, kv_load_failure_policy=policy)
    r.seed(r.prompt(5))
    r.cache.fail(3)
    prompt = r.prompt(8)
    request = r.add(prompt)
    setattr(r, hook, lambda *_: getattr(r.scheduler, how)(request))
    assert r.step() == ([request] if how == "abort" else [])
    assert r.scheduled == {request.request_id: 3 * BLOCK_TOKENS + 2}
    assert r.found(prompt) == 3 and request.block_ids == []
    r.cache.failing.clear()
    again = r.add(prompt)
    r.run()
    assert request.finish_reason == ("abort" if how == "abort" else "length")
    assert again.finish_reason == "length"


def test_blocks_computed_on_a_bad_one_are_neither_found_nor_stored(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    r.seed(r.prompt(4))
    r.cache.fail(1)
    prompt = r.prompt(8)
    request = r.add(prompt)
    seen: list[int] = []
    r.after_run = lambda output: seen.append(r.found(prompt))
    r.step()
    assert seen == [8], "they were promised to requests of the same step"
    assert r.found(prompt) == 1 and request.remembered_blocks == 1
    assert r.stored == [] and not r.engine.has_jobs
    r.step()
    assert r.found(prompt) == 8
    r.run()
    assert r.cache.stores[0].parent == request.chain.key(0), "stored from the bad block on"


# -- no livelock -----------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("place", [0, 3])
def test_a_failed_load_is_not_offered_again(rig: Rigs, sync_loads: bool, place: int) -> None:
    r = rig(sync_loads=sync_loads)
    request = r.add_stored(6, fail=[place], max_tokens=4)
    r.step(2)
    r.scheduler.preempt(request)
    r.pool.forget_all()
    r.step()
    assert request.status is Status.RUNNING and request.num_computed_tokens > 0
    assert r.run(limit=5) == {"length"} and len(r.loads) == 1


@both_modes
def test_all_requests_are_served_when_the_first_block_always_fails(
    rig: Rigs, sync_loads: bool
) -> None:
    """The external cache repeats the same hit to each request, and none finds anything locally."""
    r = rig(sync_loads=sync_loads, enable_prefix_caching=False)
    r.seed(r.prompt(8))
    r.cache.fail(0)
    requests = [r.add(r.prompt(8, end=end)) for end in range(5)]
    assert r.run(limit=25) == {"length"}
    assert len(r.loads) <= 5 and all(each.metrics.failed_loads <= 1 for each in requests)


def test_a_request_that_waited_for_a_failed_load(rig: Rigs) -> None:
    r = rig()
    r.cache.hold_loads = None
    first, second = r.add_stored(6, end=1, fail=[2]), r.add(r.prompt(6, end=2))
    r.step(3)
    assert (first.status, second.status) == (Status.LOADING, Status.WAITING)
    assert second.block_ids == []
    r.cache.release_loads()
    r.step(2)
    assert {first.status, second.status} == {Status.RUNNING}, "the first recomputes for both"
    assert r.cached(second) == (6, 0) and second.metrics.failed_loads == 0
    r.run()
    assert len(r.loads) == 1


def test_a_request_that_waited_for_the_load_of_an_aborted_one(rig: Rigs) -> None:
    r = rig()
    r.cache.hold_loads = None
    first, second = r.add_stored(6, end=1, fail=[2]), r.add(r.prompt(6, end=2))
    r.step(2)
    r.engine.abort(first.request_id)
    r.step(2)
    assert second.status is Status.WAITING
    r.cache.release_loads()
    r.cache.failing.clear()
    r.step(2)
    assert second.status is Status.LOADING, "it loads for itself"
    r.cache.let_go()
    r.run()
    assert len(r.loads) == 2 and r.cached(second) == (0, 6)


# -- bad blocks that several requests share --------------------------------------------------------


def sharing(rig: Rigs, requests: int = 3, bad: int = 2, **options: Any) -> Any:
    """A rig in which the first request loads eight blocks, the others share them, and block `bad`
    has just failed."""
    r = rig(sync_loads=True, **options)
    r.add_stored(8, "r0", end=0, fail=[bad], max_tokens=4)
    for end in range(1, requests):
        r.add(r.prompt(8, end=end), f"r{end}", max_tokens=4)
    r.step()
    assert len(r.loads) == 1 and len(r.steps[0].segments) == requests
    return r


def test_the_first_recomputes_and_the_others_keep_their_count(rig: Rigs) -> None:
    r = sharing(rig)
    assert r.computed() == [2, 8, 8]
    assert [each.output_tokens for each in r.requests] == [[], [], []]
    assert [each.metrics.failed_loads for each in r.requests] == [1, 1, 1]
    assert len({tuple(each.block_ids[:8]) for each in r.requests}) == 1
    assert not r.engine.has_jobs, "no request stores a bad block that counts as computed"
    r.step()
    assert r.scheduled == {"r0": 6 * BLOCK_TOKENS + 2}, "the others wait until it is good"
    r.step()
    assert r.scheduled == {"r0": 1, "r1": 2, "r2": 2}


def test_a_request_that_shares_a_bad_block_does_not_store_it(rig: Rigs) -> None:
    """The server tells the second request that it has none of the blocks."""
    r = rig(sync_loads=True)
    r.cache.hold_lookups = True
    r.add_stored(8, end=0, fail=[2])
    r.add(r.prompt(8, end=1))
    r.cache.answer_now(1)
    r.cache.most_blocks = 0
    r.cache.answer_now(2)
    r.step()
    assert r.computed() == [2, 8] and not r.engine.has_jobs


def test_the_others_wait_while_the_first_needs_several_steps(rig: Rigs) -> None:
    r = sharing(rig, bad=6, max_num_batched_tokens=6)
    assert r.computed() == [6, 8, 8]
    r.step()
    assert r.scheduled == {"r0": 6} and r.computed()[0] == 7.5
    r.step()
    assert r.scheduled == {"r0": 4, "r1": 2}, "block 6 is good again"


def test_the_others_wait_over_many_steps(rig: Rigs) -> None:
    r = sharing(rig, bad=0, max_num_batched_tokens=6)
    r.add(r.prompt(1, which="other"), "other", max_tokens=9)
    while r.requests[0].num_computed_tokens < 8 * BLOCK_TOKENS:
        assert r.computed()[1:3] == [8, 8]
        r.step()
        assert next(iter(r.scheduled)) == "r0"
    assert len(r.steps) > 5


def test_several_bad_blocks_become_good_one_by_one(rig: Rigs) -> None:
    r = rig(sync_loads=True, max_num_batched_tokens=12)
    r.add_stored(8, "first", end=1, fail=[1, 6])
    r.add(r.prompt(8, end=2), "second")
    r.add(r.prompt(5, end=3), "short")
    r.step()
    assert r.computed() == [1, 8, 5]
    r.step()
    assert r.scheduled == {"first": 12} and r.computed() == [4, 8, 5]
    r.step(2)
    assert r.scheduled == {"first": 6, "second": 2, "short": 2}


@pytest.mark.parametrize("bad", [0, 3, 7])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@abort_or_preempt
def test_another_takes_over(rig: Rigs, how: str, steps: int, bad: int) -> None:
    """The first request leaves before, in the middle of, or after its recomputation."""
    r = sharing(rig, bad=bad, max_num_batched_tokens=7)
    first, second, third = r.requests
    r.step(steps)
    getattr(r.scheduler, how)(first)
    if steps == 0:
        assert r.computed(second, third) == [bad, 8], "the next recomputes, the last waits"
    r.run()
    assert second.finish_reason == third.finish_reason == "length"
    assert first.finish_reason == ("abort" if how == "abort" else "length")


@abort_or_preempt
@pytest.mark.parametrize("hook", ["before_run", "after_run"])
def test_another_takes_over_in_the_middle_of_a_step(rig: Rigs, hook: str, how: str) -> None:
    r = sharing(rig, bad=1, max_num_batched_tokens=7)
    setattr(r, hook, lambda *_: getattr(r.scheduler, how)(r.requests[0]))
    r.run()
    assert r.requests[1].finish_reason == r.requests[2].finish_reason == "length"


def test_requests_that_share_leave_one_after_the_other(rig: Rigs) -> None:
    r = sharing(rig, requests=4, bad=1, max_num_batched_tokens=9)
    for request in r.requests[:3]:
        r.engine.abort(request.request_id)
        r.step()
    r.step()
    assert "r3" in r.scheduled, "it waits for none of them"
    r.run()
    assert r.requests[3].finish_reason == "length"


def test_the_first_is_aborted_in_the_step_that_fails(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    first = r.add_stored(8, end=0, fail=[2])
    others = [r.add(r.prompt(8, end=end)) for end in (1, 2)]
    r.before_run = lambda: r.engine.abort(first.request_id)
    r.step()
    assert r.computed(*others) == [2, 8]
    assert r.run() == {"abort", "length"}


def test_another_shares_only_blocks_before_the_bad_one(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    first, short = r.add_stored(8, fail=[5]), r.add(r.prompt(4))
    r.step()
    assert r.computed(first) == [5]
    assert short.metrics.failed_loads == 0 and len(short.output_tokens) == 1


def test_one_recomputes_what_it_shares_and_one_its_own(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    long = r.prompt(8)
    r.seed(long)
    r.cache.fail(1, 6)
    first, second = r.add(long[: 5 * BLOCK_TOKENS + 1]), r.add(long)
    r.step()
    assert r.loads == [(0, 5), (5, 3)] and r.computed(first, second) == [1, 6]
    r.step()
    assert list(r.scheduled) == [first.request_id]
    assert r.run() == {"length"}


@pytest.mark.parametrize("steps", range(5))
@abort_or_preempt
def test_blocks_of_a_void_step_do_not_count_as_computed(rig: Rigs, how: str, steps: int) -> None:
    """The second shares blocks 8 and 9, which the first was to compute in the step that failed. The
    first leaves when the bad block is good again, and those two are not."""
    r = rig(sync_loads=True, max_num_batched_tokens=16)
    r.seed(r.prompt(8))
    r.cache.fail(3)
    first, second = r.add(r.prompt(10, end=1)), r.add(r.prompt(10, end=2))
    r.step()
    assert first.block_ids[:10] == second.block_ids[:10]
    r.step(steps)
    getattr(r.scheduler, how)(first)
    r.run()
    assert second.finish_reason == "length"


@pytest.mark.parametrize("steps", range(4))
@abort_or_preempt
def test_void_blocks_of_a_request_that_has_nothing_to_recompute(
    rig: Rigs, how: str, steps: int
) -> None:
    """The first loads 0 to 7, the second shares them and was to compute 8 and 9, the third shares
    all ten; the second leaves."""
    r = rig(sync_loads=True)
    first = r.add_stored(8, tail=3, end=0, fail=[3], max_tokens=5)
    second, third = (r.add(r.prompt(10, end=end), max_tokens=5) for end in (1, 2))
    r.step()
    assert third.block_ids[:10] == second.block_ids[:10]
    assert third.block_ids[:8] == first.block_ids[:8]
    r.step(steps)
    getattr(r.scheduler, how)(second)
    r.run()
    assert first.finish_reason == third.finish_reason == "length"


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("how", ["abort", "preempt", "stays"])
def test_a_request_without_room_shares_a_bad_block(rig: Rigs, how: str, bad: int) -> None:
    """The second has found the first's blocks and loaded more, but does not fit into the step. It
    waits with them."""
    r = rig(sync_loads=True, enable_chunked_prefill=False, max_num_batched_tokens=60)
    r.seed(r.prompt(8))
    r.cache.fail(bad)
    r.add(r.prompt(5, which="other"))
    first, second = r.add(r.prompt(6, tail=33, end=1)), r.add(r.prompt(8, tail=25, end=2))
    r.step()
    assert r.loads == [(0, 6), (6, 2)]
    assert first.status is Status.RUNNING and second.status is Status.WAITING
    if how != "stays":
        getattr(r.scheduler, how)(first)
    r.run()
    assert second.finish_reason == "length"
