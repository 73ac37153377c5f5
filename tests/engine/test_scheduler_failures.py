"""Loads fail, in every place, at every moment: answers stay right and nobody meets a bad block
(M5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.request import Request, Status

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


def loaded_tokens(request: Request) -> int:
    return request.metrics.external_cached_tokens


# -- at each place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_async_failure_at_each_place(rig: Rigs, places: list[int]) -> None:
    r = rig()
    prompt = r.prompt(8)
    r.seed(prompt)
    r.cache.fail(*places)
    request = r.add(prompt)
    r.step()
    good = min(places)
    assert request.status is Status.WAITING and request.num_computed_tokens == good * BLOCK_TOKENS
    assert loaded_tokens(request) == good * BLOCK_TOKENS and request.metrics.failed_loads == 1
    assert r.found(prompt) == good
    r.step()
    assert r.steps[-1].segments[0].start == good * BLOCK_TOKENS
    r.run()
    assert request.finish_reason == "length" and len(r.cache.loads) == 1


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_sync_failure_at_each_place(rig: Rigs, places: list[int]) -> None:
    r = rig(sync_loads=True)
    prompt = r.prompt(8)
    r.seed(prompt)
    r.cache.fail(*places)
    request = r.add(prompt)
    r.step()
    good = min(places)
    assert r.steps[-1].num_scheduled_tokens == {request.id: 2}
    assert request.status is Status.RUNNING and request.num_computed_tokens == good * BLOCK_TOKENS
    assert loaded_tokens(request) == good * BLOCK_TOKENS and request.metrics.failed_loads == 1
    assert request.output_tokens == [] and r.found(prompt) == good
    r.step()
    assert r.steps[-1].segments[0].start == good * BLOCK_TOKENS
    r.run()
    assert request.finish_reason == "length" and len(r.cache.loads) == 1


@pytest.mark.parametrize("sync_loads", [False, True])
@pytest.mark.parametrize("place", [3, 5, 7])
def test_failure_behind_a_local_prefix(rig: Rigs, sync_loads: bool, place: int) -> None:
    r = rig(sync_loads=sync_loads)
    prompt = r.prompt(8)
    r.add(prompt[: 3 * BLOCK_TOKENS + 1], max_tokens=1)
    r.run()
    r.seed(prompt)
    r.cache.fail(0, place)  # block 0 is not loaded at all
    request = r.add(prompt)
    r.step()
    assert r.cache.loads[-1].skip == 3
    assert request.num_computed_tokens == place * BLOCK_TOKENS
    assert request.metrics.local_cached_tokens == 3 * BLOCK_TOKENS
    assert loaded_tokens(request) == (place - 3) * BLOCK_TOKENS
    r.run()
    assert request.finish_reason == "length"


@pytest.mark.parametrize("sync_loads", [False, True])
def test_what_was_computed_before_this_step_is_one_rule(rig: Rigs, sync_loads: bool) -> None:
    """A sync load's request, and who shares with it, ran in the step; an async one's did not."""
    r = rig(sync_loads=sync_loads)
    r.seed(r.prompt(6))
    r.cache.fail(5)
    requests = [r.add(r.prompt(6, tail=3, end=1)), r.add(r.prompt(6, tail=7, end=2))]
    before: list[int] = []
    r.after_run = lambda output: before.extend(each.num_computed_tokens for each in requests)
    r.step()
    scheduled = [r.steps[-1].num_scheduled_tokens.get(each.id, 0) for each in requests]
    assert scheduled == ([3, 7] if sync_loads else [0, 0])
    assert before == (
        [6 * BLOCK_TOKENS + 3, 6 * BLOCK_TOKENS + 7] if sync_loads else [6 * BLOCK_TOKENS, 0]
    )
    assert requests[0].num_computed_tokens == 5 * BLOCK_TOKENS, "to just before the bad block"
    assert requests[1].num_computed_tokens == before[1] - scheduled[1], (
        "its own count, less what this step computed"
    )


@pytest.mark.parametrize("sync_loads", [False, True])
def test_others_in_the_step_are_not_disturbed(rig: Rigs, sync_loads: bool) -> None:
    r = rig(sync_loads=sync_loads)
    bad, good = r.prompt(6, which="bad"), r.prompt(4, which="good")
    r.seed(bad)
    r.cache.fail(2)
    other = r.add(good, max_tokens=8)
    r.step(2)
    request = r.add(bad)
    r.step()
    assert (
        len(other.output_tokens) == 3
        and request.metrics.failed_loads == 1
        and other.metrics.failed_loads == 0
    )
    r.run()
    assert {request.finish_reason, other.finish_reason} == {"length"}


# -- over several steps ----------------------------------------------------------------------------


def test_progressive_failures_keep_the_smallest(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=4)
    prompt = r.prompt(8)
    r.seed(prompt)
    for rank, place in [(0, 5), (1, 2), (2, 7)]:
        r.cache.fail(place, rank=rank)
    r.cache.hold_loads = None
    request = r.add(prompt)
    r.step(2)
    assert request.num_computed_tokens == 8 * BLOCK_TOKENS
    counts = []
    for rank in range(4):
        r.cache.release_loads(rank)
        r.step()
        counts.append(request.num_computed_tokens // BLOCK_TOKENS)
        assert request.status is (Status.WAITING if rank == 3 else Status.LOADING)
    assert counts == [5, 2, 2, 2]
    assert r.found(prompt) == 2 and loaded_tokens(request) == 2 * BLOCK_TOKENS
    r.run()
    assert request.finish_reason == "length"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_fails_and_the_other_does_not(rig: Rigs, rank: int) -> None:
    r = rig(tensor_parallel_size=2)
    prompt = r.prompt(5)
    r.seed(prompt)
    r.cache.fail(1, rank=rank)
    request = r.add(prompt)
    r.step()
    assert request.num_computed_tokens == BLOCK_TOKENS
    r.run()
    assert request.finish_reason == "length"


def test_all_ranks_fail_the_first_block_one_after_the_other(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    prompt = r.prompt(5)
    r.seed(prompt)
    r.cache.fail(0, rank=0)
    r.cache.fail(0, rank=1)
    r.cache.hold_loads = None
    request = r.add(prompt)
    r.step()
    r.cache.release_loads(0)
    r.step(3)
    assert (
        request.status is Status.LOADING
        and request.num_computed_tokens == 0
        and len(request.block_ids) == 5
    )
    r.cache.release_loads(1)
    r.step()
    assert request.status is Status.WAITING and request.block_ids == []
    r.run()
    assert request.finish_reason == "length"


def test_two_loads_fail_in_one_step(rig: Rigs) -> None:
    r = rig()
    first, second = r.prompt(4, which=1), r.prompt(4, which=2)
    r.seed(first)
    r.seed(second)
    r.cache.fail(1)
    requests = [r.add(first), r.add(second)]
    r.step()
    assert [each.num_computed_tokens for each in requests] == [BLOCK_TOKENS] * 2
    r.run()
    assert {each.finish_reason for each in requests} == {"length"}


def test_a_failed_load_is_counted_once_for_each_report_that_set_it_back(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    prompt = r.prompt(4)
    r.seed(prompt)
    r.cache.fail(3, rank=0)
    r.cache.fail(3, rank=1)
    request = r.add(prompt)
    r.run()
    assert request.metrics.failed_loads == 1


def test_what_failed_is_stored_again_and_not_counted_as_loaded(rig: Rigs) -> None:
    r = rig()
    prompt = r.prompt(6)
    r.seed(prompt)
    r.cache.fail(4)
    name = "num_kvkeep_extra_cached_tokens"
    request = r.add(prompt, kv_transfer_params={name: None})
    r.run()
    assert request.reply_params == {name: 4 * BLOCK_TOKENS}
    assert [len(store.block_ids) for store in r.cache.stores] == [2]
    assert r.cache.stores[0].parent == request.chain.key(3)


# -- policy fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync_loads", [False, True])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_policy_fail_ends_with_an_error(rig: Rigs, sync_loads: bool, places: list[int]) -> None:
    r = rig(sync_loads=sync_loads, kv_load_failure_policy="fail")
    prompt, other_prompt = r.prompt(8), r.prompt(3, which="other")
    r.seed(prompt)
    other = r.add(other_prompt, max_tokens=6)
    r.step()
    r.cache.fail(*places)
    request = r.add(prompt)
    finished = r.step()
    assert finished == [request] and request.finish_reason == "error"
    assert f"block {min(places)} " in request.error and "kv_load_failure_policy" in request.error
    assert request.output_tokens == [] and request.block_ids == []
    assert r.found(prompt) == (min(places) if sync_loads else 0)
    r.run()
    assert other.finish_reason == "length" and other.error == ""


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_policy_fail_leaves_a_local_prefix_alone(rig: Rigs, places: list[int]) -> None:
    r = rig(sync_loads=True, kv_load_failure_policy="fail")
    prompt = r.prompt(10)
    r.add(prompt[: 2 * BLOCK_TOKENS + 1], max_tokens=1)
    r.run()
    r.seed(prompt)
    r.cache.fail(*(2 + place for place in places))
    request = r.add(prompt)
    r.run()
    assert request.finish_reason == "error" and r.found(prompt) == 2 + min(places)
    r.cache.failing.clear()
    again = r.add(prompt)
    r.run()
    assert again.finish_reason == "length"


def test_policy_fail_ends_everybody_who_shares_and_nobody_else(rig: Rigs) -> None:
    r = rig(sync_loads=True, kv_load_failure_policy="fail")
    text = r.prompt(8)
    r.seed(text)
    r.cache.fail(3)
    first, second = r.add(r.prompt(8, end=1)), r.add(r.prompt(8, end=2))
    short, other = r.add(r.prompt(3, end=3)), r.add(r.prompt(5, which="other"))
    finished = r.step()
    assert finished == [first, second]
    assert first.finish_reason == second.finish_reason == "error"
    r.run()
    assert short.finish_reason == other.finish_reason == "length"


def test_policy_fail_when_one_rank_still_loads(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2, kv_load_failure_policy="fail")
    prompt = r.prompt(6)
    r.seed(prompt)
    r.cache.hold_loads = {1}
    r.cache.fail(4, rank=0)
    request = r.add(prompt)
    assert r.step() == [request]
    assert request.finish_reason == "error"
    assert r.pool.num_free == 63 - 6 and len(r.cache.leases) == 1, (
        "rank 1 still writes there, and reads under it"
    )
    r.step(3)
    assert r.pool.num_free == 63 - 6 and len(r.cache.leases) == 1 and not r.cache.finished
    r.cache.release_loads(1)
    r.step()
    assert r.pool.num_free == 63 and len(r.cache.finished) == 1


# -- no pollution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("sync_loads", [False, True])
@pytest.mark.parametrize("place", [0, 2, 7])
def test_nobody_finds_a_bad_block(rig: Rigs, sync_loads: bool, policy: str, place: int) -> None:
    """Requests with the same prefix come before, in the same step, in the next ones and after."""
    r = rig(sync_loads=sync_loads, kv_load_failure_policy=policy, max_num_batched_tokens=20)
    text = r.prompt(8)
    r.seed(text)
    r.cache.fail(place)
    for end in range(3):
        r.add(r.prompt(8, end=end))
    for end in range(3, 9):
        r.step()
        r.add(r.prompt(8, end=end))
    r.cache.failing.clear()
    r.run()
    late = r.add(r.prompt(8, end="late"))
    r.run()
    assert late.finish_reason == "length"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("hook", ["before_run", "after_run"])
def test_nobody_finds_a_bad_block_of_a_request_aborted_in_the_step(
    rig: Rigs, policy: str, hook: str
) -> None:
    """Also not the blocks that were computed on top of it."""
    r = rig(sync_loads=True, kv_load_failure_policy=policy)
    r.seed(r.prompt(5))
    r.cache.fail(3)
    prompt = r.prompt(8)
    request = r.add(prompt)
    setattr(r, hook, lambda *_: r.engine.abort(request.id))
    assert r.step() == [request]
    assert r.steps[-1].num_scheduled_tokens == {request.id: 3 * BLOCK_TOKENS + 2}
    assert request.finish_reason == "abort" and r.found(prompt) == 3
    again = r.add(prompt)
    r.cache.failing.clear()
    r.run()
    assert again.finish_reason == "length"


def test_nobody_finds_a_bad_block_of_a_request_preempted_in_the_step(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    r.seed(r.prompt(5))
    r.cache.fail(3)
    prompt = r.prompt(8)
    request = r.add(prompt)
    r.before_run = lambda: r.scheduler.preempt(request)
    r.step()
    assert r.found(prompt) == 3 and request.block_ids == []
    r.run()
    assert request.finish_reason == "length"


def test_blocks_computed_on_a_bad_one_are_not_found(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    r.seed(r.prompt(4))
    r.cache.fail(1)
    prompt = r.prompt(8)
    request = r.add(prompt)
    r.after_run = lambda output: seen.append(r.found(prompt))
    seen: list[int] = []
    r.step()
    assert seen == [8], "they were promised to requests of the same step"
    assert r.found(prompt) == 1 and request.remembered_blocks == 1
    r.step()
    assert r.found(prompt) == 8


def test_a_bad_block_is_never_stored(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    r.seed(r.prompt(4))
    r.cache.fail(1)
    request = r.add(r.prompt(8))
    r.step()
    assert r.cache.stores == [] and not r.scheduler.planner.jobs
    r.run()
    first = request.chain.key(0)
    assert (
        r.cache.stores[0].parent == first
    )  # from the bad block on; the bytes are checked at the end


# -- no livelock -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync_loads", [False, True])
@pytest.mark.parametrize("place", [0, 3])
def test_a_failed_load_is_not_offered_again(rig: Rigs, sync_loads: bool, place: int) -> None:
    r = rig(sync_loads=sync_loads)
    prompt = r.prompt(6)
    r.seed(prompt)
    r.cache.fail(place)
    request = r.add(prompt, max_tokens=4)
    r.step(2)
    r.scheduler.preempt(request)
    r.pool.forget_all()
    r.step()
    assert request.status is Status.RUNNING and request.num_computed_tokens > 0
    r.run(limit=5)
    assert request.finish_reason == "length" and len(r.cache.loads) == 1


@pytest.mark.parametrize("sync_loads", [False, True])
def test_first_block_fails_for_ever_and_all_are_served(rig: Rigs, sync_loads: bool) -> None:
    """The cache repeats the same hit to everybody, also when nothing is found locally."""
    r = rig(sync_loads=sync_loads, enable_prefix_caching=False)
    r.seed(r.prompt(8))
    r.cache.fail(0)
    requests = [r.add(r.prompt(8, end=end)) for end in range(5)]
    r.run(limit=25)
    assert {each.finish_reason for each in requests} == {"length"}
    assert len(r.cache.loads) <= 5 and all(each.metrics.failed_loads <= 1 for each in requests)


def test_the_one_that_waited_for_a_failed_load(rig: Rigs) -> None:
    r = rig()
    r.seed(r.prompt(6))
    r.cache.fail(2)
    r.cache.hold_loads = None
    first, second = r.add(r.prompt(6, end=1)), r.add(r.prompt(6, end=2))
    r.step(3)
    assert (
        first.status is Status.LOADING
        and second.status is Status.WAITING
        and second.block_ids == []
    )
    r.cache.release_loads()
    r.step()
    r.step()
    assert {first.status, second.status} == {Status.RUNNING}, (
        "the first recomputes, the second finds it"
    )
    assert (
        second.metrics.local_cached_tokens == 6 * BLOCK_TOKENS and second.metrics.failed_loads == 0
    )
    r.run()
    assert len(r.cache.loads) == 1


def test_the_one_that_waited_when_the_first_is_gone(rig: Rigs) -> None:
    r = rig()
    r.seed(r.prompt(6))
    r.cache.fail(2)
    r.cache.hold_loads = None
    first, second = r.add(r.prompt(6, end=1)), r.add(r.prompt(6, end=2))
    r.step(2)
    r.engine.abort(first.id)
    r.step(2)
    assert second.status is Status.WAITING
    r.cache.release_loads()
    r.cache.failing.clear()
    r.step(2)
    assert second.status is Status.LOADING, "it loads for itself"
    r.cache.let_go()
    r.run()
    assert len(r.cache.loads) == 2 and second.metrics.external_cached_tokens == 6 * BLOCK_TOKENS
