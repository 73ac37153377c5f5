"""Scheduling step by step: which requests run, what each cache gives them, and the limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.config import EngineConfig
from kvkeep.engine.request import Status
from kvkeep.engine.scheduler import Scheduler
from kvkeep.errors import RequestError

Rigs = Callable[..., Any]

BLOCK_TOKENS = 4
both_modes = pytest.mark.parametrize("sync_loads", [False, True], ids=["async", "sync"])


# -- batches and budgets ---------------------------------------------------------------------------


def test_one_request_runs_to_its_end(rig: Rigs) -> None:
    r = rig(cache=False)
    assert not r.engine.busy and r.step() == []
    request = r.add(r.prompt(3), max_tokens=3)
    assert r.engine.busy and request.status is Status.WAITING
    assert [r.step() for _ in range(4)] == [[], [], [request], []]
    counts = [list(step.num_scheduled_tokens.values()) for step in r.steps]
    assert counts == [[], [14], [1], [1], []]
    assert (request.status, request.finish_reason) == (Status.FINISHED, "length")
    assert request.metrics.first_token_s is not None and request.metrics.finished_s is not None


def test_requests_join_and_leave_a_running_batch(rig: Rigs) -> None:
    r = rig(cache=False)
    for which in range(6):
        r.add(r.prompt(which, which=which), max_tokens=3 + which)
        r.step()
    assert len(r.scheduled) > 2


def test_a_long_prompt_is_computed_over_several_steps(rig: Rigs) -> None:
    r = rig(max_num_batched_tokens=10)
    request = r.add(r.prompt(8, tail=3))
    r.step(3)
    assert request.output_tokens == [] and request.num_computed_tokens == 30
    r.step()
    assert [list(step.num_scheduled_tokens.values()) for step in r.steps] == [[10], [10], [10], [5]]
    assert len(request.output_tokens) == 1


def test_the_budget_is_shared_and_running_requests_come_first(rig: Rigs) -> None:
    r = rig(max_num_batched_tokens=16)
    r.add(r.prompt(2, which=1), "a", max_tokens=9)
    r.step()
    r.add(r.prompt(3, which=2), "b", max_tokens=9)
    r.add(r.prompt(3, which=3), "c", max_tokens=9)
    r.step()
    assert r.scheduled == {"a": 1, "b": 14, "c": 1}
    r.step()
    assert r.scheduled == {"a": 1, "b": 1, "c": 13}


def test_without_chunked_prefill_a_prompt_is_computed_at_once_or_waits(rig: Rigs) -> None:
    r = rig(max_num_batched_tokens=20, enable_chunked_prefill=False)
    for name, blocks in [("a", 3), ("b", 3), ("c", 0)]:
        r.add(r.prompt(blocks, which=name), name)
    r.step()
    assert r.scheduled == {"a": 14}, "others wait behind the one that does not fit"
    r.step()
    assert r.scheduled == {"a": 1, "b": 14, "c": 2}
    assert all(step.segments[0].start == 0 or step.segments[0].count == 1 for step in r.steps)


def test_at_most_max_num_seqs_run_at_once(rig: Rigs) -> None:
    r = rig(max_num_seqs=2)
    for which in range(5):
        r.add(r.prompt(1, which=which))
    most = 0
    while r.engine.busy:
        r.step()
        most = max(most, len(r.scheduler.running), len(r.scheduled))
    assert most == 2


def test_a_stop_token_ends_a_request(rig: Rigs) -> None:
    r = rig()
    tokens = r.answer(r.add(r.prompt(2), max_tokens=8))
    stop = tokens[3]
    request = r.add(r.prompt(2), max_tokens=8, stop=[stop])
    r.run()
    assert request.finish_reason == "stop"
    assert request.output_tokens == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize(
    ("options", "prompt", "hint"),
    [
        ({"num_blocks": 5}, 14, "num_blocks"),
        ({"max_num_batched_tokens": 20, "enable_chunked_prefill": False}, 18, "batched_tokens"),
    ],
)
def test_a_request_that_can_never_fit_is_refused(
    rig: Rigs, options: dict[str, Any], prompt: int, hint: str
) -> None:
    r = rig(**options)
    fits = r.add(r.words(prompt - 1), max_tokens=3)
    with pytest.raises(RequestError) as refusal:
        r.engine.add(r.words(prompt), fits.sampling)
    assert refusal.value.code == "too_long" and hint in refusal.value.hint
    assert r.scheduler.unfinished == [fits] and len(r.cache.leases) == 1
    assert r.run() == {"length"}


# -- order and preemption --------------------------------------------------------------------------


def test_lower_priorities_are_served_first(rig: Rigs) -> None:
    r = rig(max_num_seqs=1)
    for name, priority in [("a", 1), ("b", 0), ("c", -5), ("d", 0)]:
        r.add(r.prompt(1, which=name), name, priority=priority, max_tokens=1)
    r.run()
    assert [name for step in r.steps for name in step.num_scheduled_tokens] == [*"cbda"]


def test_the_latest_request_of_the_last_priority_is_preempted_first(rig: Rigs) -> None:
    r = rig(num_blocks=10)
    for name, priority in [("a", 1), ("b", 0), ("c", 0)]:
        r.add(r.prompt(2, tail=3, which=name), name, priority=priority, max_tokens=16)
    order = []
    while r.engine.busy:
        before = {each.request_id: each.metrics.preemptions for each in r.requests}
        r.step()
        order += [
            each.request_id
            for each in r.requests
            if each.metrics.preemptions > before[each.request_id]
        ]
    assert order[:2] == ["a", "c"] and "b" not in order
    assert r.requests[0].metrics.preemptions == order.count("a")


def test_a_preempted_request_finds_its_own_blocks(rig: Rigs) -> None:
    r = rig(cache=False)
    request = r.add(r.prompt(4), max_tokens=6)
    r.step(4)
    r.scheduler.preempt(request)
    r.step()
    assert request.local_blocks == 5, "one of generated tokens"
    assert r.scheduled == {request.request_id: 2}
    assert request.metrics.preemptions == 1 and r.cached(request) == (0, 0)
    assert r.run() == {"length"}


def test_many_requests_in_a_tiny_pool(rig: Rigs) -> None:
    r = rig(num_blocks=8, max_num_batched_tokens=9)
    for which in range(7):
        r.add(r.prompt(which % 4, which=which % 3, end=which), max_tokens=10)
    assert r.run(limit=400) == {"length"}
    assert sum(each.metrics.preemptions for each in r.requests) > 0


# -- the prefix cache ------------------------------------------------------------------------------


def test_a_second_request_finds_the_first_ones_blocks(rig: Rigs) -> None:
    r = rig(cache=False)
    r.add(r.prompt(5, end=1))
    r.run()
    second = r.add(r.prompt(5, end=2))
    r.step()
    assert r.scheduled == {second.request_id: 2} and r.cached(second) == (5, 0)


def test_requests_of_one_step_share_what_it_computes(rig: Rigs) -> None:
    r = rig(cache=False)
    first, second = r.add(r.prompt(5, end=1), "a"), r.add(r.prompt(5, end=2), "b")
    r.step()
    assert r.scheduled == {"a": 22, "b": 2} and first.block_ids[:5] == second.block_ids[:5]


def test_at_least_one_token_is_computed(rig: Rigs) -> None:
    r = rig(cache=False)
    prompt = r.prompt(4, tail=0)
    r.add(prompt)
    r.run()
    second = r.add(prompt)
    r.step()
    assert r.scheduled == {second.request_id: BLOCK_TOKENS} and second.local_blocks == 3


def test_prefix_caching_can_be_off(rig: Rigs) -> None:
    r = rig(cache=False, enable_prefix_caching=False)
    r.add(r.prompt(3, end=1), "a")
    r.add(r.prompt(3, end=2), "b")
    r.step()
    assert r.scheduled == {"a": 14, "b": 14} and r.pool.num_remembered == 0


def test_local_hits_are_counted_at_admission_and_not_at_a_failed_try(rig: Rigs) -> None:
    r = rig(cache=False, enable_chunked_prefill=False, max_num_batched_tokens=40)
    r.add(r.prompt(2), max_tokens=1)
    r.run()
    r.add(r.prompt(7, which="other"))
    request = r.add(r.prompt(6, end="late"))
    r.step()
    assert request.status is Status.WAITING and request.block_ids == [], "found two, did not fit"
    r.add(r.prompt(6), priority=-1)
    r.run()
    assert r.cached(request) == (6, 0)


# -- the external cache ----------------------------------------------------------------------------


@both_modes
def test_a_prefix_is_loaded(rig: Rigs, sync_loads: bool) -> None:
    r = rig(sync_loads=sync_loads)
    request = r.add_stored(6)
    r.step()
    if not sync_loads:
        assert r.scheduled == {} and request.status is Status.WAITING
        r.step()
    assert r.scheduled == {request.request_id: 2}
    r.run()
    assert r.cached(request) == (0, 6) and r.stored == []


@both_modes
def test_of_a_prompt_that_is_stored_whole_one_block_is_computed(
    rig: Rigs, sync_loads: bool
) -> None:
    r = rig(sync_loads=sync_loads)
    request = r.add_stored(6, tail=0)
    r.run()
    assert r.cached(request) == (0, 5) and r.stored == []
    assert [segment.count for step in r.steps for segment in step.segments] == [BLOCK_TOKENS, 1, 1]


@both_modes
@pytest.mark.parametrize("known", [1, 3, 5])
def test_a_prompt_that_is_stored_in_part(rig: Rigs, sync_loads: bool, known: int) -> None:
    r = rig(sync_loads=sync_loads)
    r.seed(r.prompt(known))
    request = r.add(r.prompt(6))
    r.run()
    assert r.cached(request) == (0, known) and r.stored == [6 - known]


def test_others_run_while_one_request_waits_for_its_lookup(rig: Rigs) -> None:
    r = rig()
    r.cache.hold_lookups = True
    request = r.add_stored(4)
    r.step()
    other = r.add(r.prompt(1, which="other"), max_tokens=9)
    r.cache.answer_now(2)
    r.step(2)
    assert request.status is Status.WAITING and len(other.output_tokens) == 2
    assert len(r.cache.lookups) == 2, "the server is asked once"
    r.cache.hold_lookups = False
    r.step(2)
    assert request.status is Status.RUNNING


@pytest.mark.parametrize("prefix_caching", [True, False])
@both_modes
def test_requests_with_one_prefix_load_it_once(
    rig: Rigs, sync_loads: bool, prefix_caching: bool
) -> None:
    """Without a prefix cache, the second loads after the first. Other requests run meanwhile."""
    r = rig(sync_loads=sync_loads, enable_prefix_caching=prefix_caching)
    r.cache.hold_loads = set() if sync_loads else None
    first, second = r.add_stored(6, end=1, max_tokens=9), r.add(r.prompt(6, end=2), max_tokens=9)
    other = r.add(r.prompt(1, which="other"), max_tokens=9)
    r.step(2)
    assert len(other.output_tokens) == 2
    if not sync_loads:
        assert (first.status, second.status) == (Status.LOADING, Status.WAITING)
        r.cache.let_go()
        r.step(3)
    assert (first.block_ids[:6] == second.block_ids[:6]) == prefix_caching
    assert r.loads == [(0, 6)] * (1 if prefix_caching else 2)
    assert r.cached(second) == ((6, 0) if prefix_caching else (0, 6))


def test_the_local_prefix_grows_between_lookup_and_admission(rig: Rigs) -> None:
    r = rig(max_num_seqs=1)
    r.add(r.prompt(3), max_tokens=1)
    request = r.add_stored(6)
    r.run()
    assert [lookup.skip for lookup in r.cache.lookups] == [0, 0]
    assert r.loads[-1] == (3, 3) and r.cached(request) == (3, 3)


def test_the_local_prefix_grows_over_all_that_was_found(rig: Rigs) -> None:
    r = rig(max_num_seqs=1)
    r.add(r.prompt(6, end="first"), max_tokens=1)
    r.seed(r.prompt(2))
    request = r.add(r.prompt(6))
    assert 2 in r.cache.leases
    r.step(3)
    assert request.local_blocks == 6 and 2 not in r.cache.leases, "without a load the lease ends"


def test_the_local_prefix_shrinks_between_lookup_and_admission(rig: Rigs) -> None:
    r = rig(max_num_seqs=1)
    r.add(r.prompt(4), max_tokens=1)
    r.run()
    r.add(r.prompt(2, which="other"), max_tokens=2)
    request = r.add_stored(6)
    r.pool.forget_all()
    r.run()
    skips = [lookup.skip for lookup in r.cache.lookups[2:]]
    assert skips == [4, 0], "the scheduler asks anew, from further back"
    assert r.loads[-1] == (0, 6) and r.cached(request) == (0, 6)


def test_generated_tokens_are_stored_and_hit_by_the_next_turn(rig: Rigs) -> None:
    r = rig()
    first = r.add(r.prompt(3), max_tokens=11)
    r.run()
    r.step(2)
    r.pool.forget_all()
    second = r.add([*first.tokens, *r.words(6, "question")])
    r.run()
    assert len(first.tokens) == 25 and r.cached(second) == (0, 6)


def test_a_stored_block_is_not_stored_again(rig: Rigs) -> None:
    r = rig()
    r.add(r.prompt(4), max_tokens=6)
    r.run()
    r.step(2)
    assert r.stored == [4, 1]
    ends = {key for store in r.cache.stores for key in (store.keys[:16], store.keys[-16:])}
    assert len(ends) == 3


# -- little room -----------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("num_blocks", [9, 10, 13, 17])
def test_loaded_requests_do_not_keep_each_other_from_running(
    rig: Rigs, sync_loads: bool, num_blocks: int
) -> None:
    r = rig(sync_loads=sync_loads, num_blocks=num_blocks, max_num_batched_tokens=8)
    for which in range(4):
        r.add_stored(5, which=which, max_tokens=8)
    assert r.run(limit=400) == {"length"}


def test_of_two_loaded_requests_that_fill_the_pool_the_later_gives_its_blocks_up(rig: Rigs) -> None:
    r = rig(num_blocks=9)
    r.cache.hold_loads = None
    first, second = r.add_stored(4, which=0), r.add_stored(4, which=1)
    r.step(2)
    assert r.pool.num_free == 0 and len(r.scheduler.loading) == 2
    r.cache.let_go()
    r.step(2)
    assert first.status is Status.RUNNING and second.metrics.preemptions == 1
    r.run(limit=20)


def test_a_loaded_request_that_waits_gives_way_to_one_that_runs(rig: Rigs) -> None:
    r = rig(num_blocks=9, max_num_seqs=1)
    r.cache.hold_loads = None
    waiting = r.add_stored(4, priority=1)
    r.step()
    running = r.add(r.prompt(3, tail=3, which="other"), max_tokens=8)
    r.cache.let_go()
    r.step(2)
    assert waiting.status is Status.WAITING and len(waiting.block_ids) == 4
    r.run()
    assert (running.metrics.preemptions, waiting.metrics.preemptions) == (0, 1)


def test_a_loaded_request_without_room_keeps_its_blocks(rig: Rigs) -> None:
    r = rig(enable_chunked_prefill=False, max_num_batched_tokens=45)
    request = r.add_stored(6, tail=12)
    r.step()
    blocks = list(request.block_ids)
    r.add(r.prompt(9, which="other"), priority=-1)
    r.step()
    assert request.status is Status.WAITING and request.block_ids == blocks and len(blocks) == 6
    r.run()
    assert request.metrics.preemptions == 0 and len(r.loads) == 1


def test_a_load_that_finds_no_room_waits_without_blocks(rig: Rigs) -> None:
    r = rig(num_blocks=9)
    running = r.add(r.prompt(4, which="other"), max_tokens=6)
    r.step()
    request = r.add_stored(5)
    r.step()
    assert request.status is Status.WAITING and request.block_ids == [] and r.loads == []
    r.run()
    assert running.metrics.preemptions == 0 and r.cached(request) == (0, 5)


# -- all of it at random ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_random_schedules(rig: Rigs, seed: int) -> None:
    draw = random.Random(seed)
    tp_size = draw.choice([1, 1, 2])
    chunked = seed % 4 != 0
    r = rig(
        num_blocks=draw.choice([14, 20, 40]),
        max_num_batched_tokens=draw.choice([5, 9, 30] if chunked else [40, 60, 200]),
        max_num_seqs=draw.choice([2, 4, 8]),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw.random() < 0.8,
        sync_loads=seed % 2 == 0,
        tensor_parallel_size=tp_size,
        kv_load_failure_policy=draw.choice(["recompute", "recompute", "fail"]),
    )
    for which in range(2):
        r.seed(r.prompt(draw.randrange(2, 7), which=which))
    ends = itertools.count()
    for _ in range(60):
        if draw.random() < 0.35:
            sizes = draw.randrange(7), draw.randrange(1, 6)
            prompt = r.prompt(*sizes, draw.randrange(3), next(ends) % 5)
            r.add(prompt, max_tokens=draw.randrange(1, 7), priority=draw.randrange(2))
        if draw.random() < 0.3 and r.scheduler.unfinished:
            victim = draw.choice(r.scheduler.unfinished)
            leave = draw.choice([r.scheduler.abort, r.scheduler.preempt, r.scheduler.preempt])
            when = draw.randrange(3)
            if when == 0:
                leave(victim)
            elif when == 1:
                r.before_run = lambda leave=leave, victim=victim: leave(victim)
            else:
                r.after_run = lambda output, leave=leave, victim=victim: leave(victim)
        r.cache.failing.clear()
        if draw.random() < 0.6:
            r.cache.fail(*draw.sample(range(7), draw.randrange(1, 4)), rank=draw.randrange(tp_size))
        r.cache.hold_lookups = draw.random() < 0.3
        if seed % 2:
            r.cache.hold_loads = {rank for rank in range(tp_size) if draw.random() < 0.5}
            r.cache.release_loads(draw.randrange(tp_size))
        r.cache.hold_stores = {rank for rank in range(tp_size) if draw.random() < 0.5}
        r.cache.release_stores(draw.randrange(tp_size))
        r.step()
        if draw.random() < 0.05:
            r.pool.forget_all()
    r.cache.failing.clear()
    r.done(limit=600)


def test_integrity_check_can_fail() -> None:
    scheduler = Scheduler(EngineConfig(num_blocks=8))
    scheduler.check_integrity()
    scheduler.pool.take(1)
    with pytest.raises(AssertionError, match="held by others"):
        scheduler.check_integrity()
