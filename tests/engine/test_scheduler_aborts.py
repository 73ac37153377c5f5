"""Requests leave at any moment, by abort or preemption: no block, job, lease or session is lost or
used too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.client.requests import LoadOutcome
from kvkeep.engine.request import Status
from kvkeep.engine.step import StepOutput

Rigs = Callable[..., Any]

BLOCK_TOKENS = 4
ALL_FREE = 63
NAME = "num_kvkeep_extra_cached_tokens"
both_modes = pytest.mark.parametrize("sync_loads", [False, True], ids=["async", "sync"])


# -- abort -----------------------------------------------------------------------------------------


def test_abort_before_the_first_step(rig: Rigs) -> None:
    r = rig()
    name = "num_lmcache_extra_cached_tokens"
    request = r.add(r.prompt(4), kv_transfer_params={name: None})
    assert len(r.cache.leases) == 1
    r.engine.abort(request.request_id)
    assert not r.cache.leases and r.engine.busy, "a step hands the request out"
    assert r.step() == [request]
    assert request.finish_reason == "abort" and request.reply_params == {name: 0}
    assert request.metrics.ttft_ms is None and request.metrics.finished_s is not None
    assert r.loads == [] and r.pool.num_free == ALL_FREE


def test_abort_while_waiting_for_the_lookup(rig: Rigs) -> None:
    r = rig()
    r.cache.hold_lookups = True
    request = r.add_stored(4)
    r.step(3)
    assert request.status is Status.WAITING and not r.cache.finished
    r.engine.abort(request.request_id)
    assert len(r.cache.finished) == 1 and not r.cache.leases
    r.cache.hold_lookups = False
    r.step(2)
    assert r.loads == []


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_abort_during_load(rig: Rigs, tp_size: int) -> None:
    """Until every rank has reported, no request gets the blocks and the lease is held."""
    r = rig(tensor_parallel_size=tp_size, num_blocks=20)
    r.cache.hold_loads = None
    request = r.add_stored(8)
    r.step(2)
    being_written = set(request.block_ids)
    r.engine.abort(request.request_id)
    assert r.step() == [request] and request.finish_reason == "abort"
    others = [r.add(r.prompt(2, which=which), max_tokens=9) for which in range(1, 5)]
    for rank in range(tp_size):
        r.step(2)
        assert r.pool.num_free <= 19 - 8 and len(r.cache.leases) >= 1 and not r.cache.finished
        assert all(being_written.isdisjoint(other.block_ids) for other in others)
        r.cache.release_loads(rank)
    r.step()
    assert len(r.cache.finished) >= 1 and 1 not in r.cache.leases
    r.cache.let_go()
    assert r.run() == {"abort", "length"}


@pytest.mark.parametrize("place", [0, 3])
def test_abort_during_a_load_that_then_fails(rig: Rigs, place: int) -> None:
    r = rig(tensor_parallel_size=2)
    r.cache.hold_loads = None
    r.cache.fail(place, rank=1)
    request = r.add_stored(6)
    r.step()
    r.engine.abort(request.request_id)
    r.step()
    r.cache.release_loads(1)
    r.step()
    assert len(r.cache.leases) == 1
    r.cache.release_loads(0)
    r.step()
    assert not r.cache.leases and r.found(r.prompt(6)) == 0 and request.metrics.failed_loads == 0


@both_modes
@pytest.mark.parametrize("hook", ["before_run", "after_run"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_between_schedule_and_update(
    rig: Rigs, steps: int, hook: str, sync_loads: bool
) -> None:
    r = rig(sync_loads=sync_loads)
    r.seed(r.prompt(3))
    request, other = r.add(r.prompt(5), max_tokens=4), r.add(r.prompt(5, end="other"), max_tokens=4)
    r.step(steps)
    tokens = list(request.tokens)
    setattr(r, hook, lambda *_: r.engine.abort(request.request_id))
    assert request in r.step()
    assert request.finish_reason == "abort" and request.tokens == tokens
    r.run()
    assert other.finish_reason == "length"


def test_an_abort_of_no_unfinished_request_does_nothing(rig: Rigs) -> None:
    r = rig()
    done, aborted = r.add(r.prompt(2), max_tokens=1), r.add(r.prompt(2, which=1))
    r.step()
    for _ in range(2):
        r.engine.abort(aborted.request_id)
    r.engine.abort("unknown")
    assert r.step() == [aborted] and r.step() == []
    r.engine.abort(done.request_id)
    r.scheduler.abort(done)
    r.scheduler.preempt(done)
    assert r.step() == [] and r.scheduler.unfinished == []
    assert done.finish_reason == "length" and done.status is Status.FINISHED
    assert done.metrics.preemptions == 0


def test_abort_during_store(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2, num_blocks=12)
    r.cache.hold_stores = None
    request = r.add(r.prompt(4), max_tokens=8)
    r.step(2)
    sources = set(request.block_ids[:4])
    r.engine.abort(request.request_id)
    other = r.add(r.prompt(5, which="other"))
    r.step(2)
    assert sources.isdisjoint(other.block_ids) and not r.cache.finished
    r.cache.let_go()
    r.run()
    assert r.cache.finished[:1] == [request.chain.key(3)]


def test_abort_of_all_requests_in_every_state(rig: Rigs) -> None:
    r = rig(max_num_seqs=2)
    r.cache.hold_loads = None
    for which in range(4):
        r.add(r.prompt(3, which=which), max_tokens=9)
    r.step()
    r.add_stored(4, which="loads")
    r.step()
    r.engine.abort(r.requests[0].request_id)
    r.step()
    for request in r.requests:
        r.engine.abort(request.request_id)
    r.step()
    assert r.run() == {"abort"}


# -- an id used again ------------------------------------------------------------------------------


def test_an_id_is_used_again_while_the_old_load_runs(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    r.cache.hold_loads = None
    r.cache.fail(1, rank=1)
    old = r.add_stored(6, "same")
    r.step()
    r.engine.abort("same")
    r.step()
    new = r.add(r.prompt(6, end="new"), "same")
    r.cache.release_loads(0)
    r.step(2)
    assert new.status is Status.WAITING, "the old load may bring what the new request needs"
    r.cache.release_loads(1)
    r.step()
    assert new.metrics.failed_loads == 0 and old.metrics.failed_loads == 0
    assert len(r.cache.finished) == 1 and 2 in r.cache.leases
    r.cache.failing.clear()
    r.cache.let_go()
    r.run()
    assert new.finish_reason == "length" and r.cached(new) == (0, 6)


def test_an_id_is_used_again_in_the_middle_of_a_step(rig: Rigs) -> None:
    """The step's tokens are the old request's, not the new one's."""
    r = rig(sync_loads=True)
    old = r.add_stored(6, "same", fail=[1])

    def swap() -> None:
        r.engine.abort("same")
        r.add(r.prompt(6, end="new"), "same")

    r.before_run = swap
    r.step()
    new = r.requests[1]
    assert new.num_computed_tokens == 0 and new.tokens == r.prompt(6, end="new")
    r.run()
    assert (old.finish_reason, new.finish_reason) == ("abort", "length")


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [None, 0, 3])
def test_preemption_during_load(rig: Rigs, place: int | None) -> None:
    """The request waits until the load is over, and then finds the good blocks of it."""
    r = rig(tensor_parallel_size=2)
    r.cache.hold_loads = None
    if place is not None:
        r.cache.fail(place, rank=1)
    request = r.add_stored(6)
    r.step(2)
    r.scheduler.preempt(request)
    assert request.status is Status.WAITING and request.block_ids == []
    assert r.pool.num_free == ALL_FREE - 6
    r.cache.release_loads(0)
    r.step(2)
    assert request.status is Status.WAITING and len(r.cache.leases) == 1
    r.cache.release_loads(1)
    r.step()
    assert r.found(r.prompt(6)) == (6 if place is None else place)
    r.step()
    assert request.status is Status.RUNNING
    assert r.run() == {"length"} and len(r.loads) == 1


def test_preemption_during_a_load_that_has_failed_on_one_rank(rig: Rigs) -> None:
    """The cache offers no hit any more, so the request begins at once. The other rank still reads
    under the lease."""
    r = rig(tensor_parallel_size=2)
    r.cache.hold_loads = None
    request = r.add_stored(6, fail=[2], max_tokens=5)
    r.step()
    r.cache.release_loads(0)
    r.step()
    r.scheduler.preempt(request)
    r.step(2)
    assert r.cache.leases, "rank 1 still reads"
    r.cache.release_loads(1)
    assert r.run() == {"length"}


def test_preemption_during_a_load_that_is_no_longer_needed(rig: Rigs) -> None:
    """Another request generates the same text meanwhile. The lease is held until the load is
    over."""
    r = rig(tensor_parallel_size=2)
    other = r.add(r.prompt(2, tail=0), max_tokens=20)
    text = [*other.tokens, *r.answer(other)]
    r.step(6)
    r.cache.hold_loads = None
    r.seed(text[: 5 * BLOCK_TOKENS])
    request = r.add(text[: 5 * BLOCK_TOKENS + 1])
    r.step()
    assert request.status is Status.LOADING and r.loads[-1] == (3, 2)
    r.scheduler.preempt(request)
    r.step(12)
    assert request.local_blocks == 5
    assert r.cache.leases, "the load is still under way"
    r.cache.let_go()
    assert r.run() == {"length"}


def test_preemption_during_load_after_which_the_local_prefix_is_lost(rig: Rigs) -> None:
    """The request asks anew, from further back, but only when the load is over that reads under
    the first answer."""
    r = rig()
    r.add(r.prompt(3), max_tokens=1)
    r.run()
    r.cache.hold_loads = None
    request = r.add_stored(6)
    r.step()
    assert request.status is Status.LOADING and r.loads[-1] == (3, 3)
    r.scheduler.preempt(request)
    r.pool.forget_all()
    r.step(2)
    assert request.status is Status.WAITING
    assert [lookup.skip for lookup in r.cache.lookups] == [0, 3]
    r.cache.let_go()
    r.run()
    assert r.loads[-1] == (0, 6) and r.cached(request) == (3, 3)


def test_preemption_right_after_a_load(rig: Rigs) -> None:
    r = rig()
    request = r.add_stored(6)
    r.step()
    assert request.status is Status.WAITING and len(request.block_ids) == 6
    r.scheduler.preempt(request)
    r.step()
    assert request.status is Status.RUNNING and request.local_blocks == 6 and len(r.loads) == 1
    r.run()
    assert r.cached(request) == (0, 6)


def test_a_second_load_after_a_preemption_counts_each_block_once(rig: Rigs) -> None:
    r = rig()
    request = r.add_stored(6, kv_transfer_params={NAME: None})
    r.step(2)
    r.scheduler.preempt(request)
    r.pool.forget_all()
    r.run()
    assert len(r.loads) == 2 and request.reply_params == {NAME: 6 * BLOCK_TOKENS}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_preemption_during_store(rig: Rigs, tp_size: int) -> None:
    """The store reads its blocks as late as it can. Another request gets them at once, and the
    workers save their content first."""
    r = rig(tensor_parallel_size=tp_size, num_blocks=12)
    r.cache.hold_stores = None
    request = r.add(r.prompt(5), max_tokens=4)
    r.step(2)
    sources = set(request.block_ids[:5])
    r.scheduler.preempt(request)
    r.pool.forget_all()
    assert r.pool.num_free == 11
    other = r.add(r.prompt(5, which="other"), priority=-1, max_tokens=2)
    r.step()
    assert sources & set(other.block_ids) and not r.cache.blocks
    for rank in range(tp_size):
        r.step()
        r.cache.release_stores(rank)
    r.step()
    for at in range(5):
        key = request.chain.key(at)
        shards = [r.cache.blocks["default", key, shard] for shard in range(tp_size)]
        assert shards == r.truth.contents[key]
    r.cache.let_go()
    assert r.run() == {"length"}


def test_finish_during_store(rig: Rigs) -> None:
    r = rig(num_blocks=10)
    r.cache.hold_stores = None
    request = r.add(r.prompt(4), max_tokens=2)
    r.run()
    assert not r.cache.finished and r.pool.num_free == 9, "a store holds no block"
    others = [r.add(r.prompt(3, which=which), max_tokens=4) for which in (1, 2)]
    r.step(4)
    assert any(other.output_tokens for other in others)
    r.cache.release_stores()
    r.step()
    assert r.cache.finished[:1] == [request.chain.key(3)]


# -- reports ---------------------------------------------------------------------------------------


def test_unknown_and_late_reports_are_harmless(rig: Rigs) -> None:
    r = rig()
    request = r.add_stored(5)
    running = r.add(r.prompt(3, which="other"), max_tokens=9)
    r.step()
    (load,) = r.cache.loads

    def report_again(output: StepOutput) -> None:
        again = LoadOutcome(frozenset(load.block_ids.tolist()))
        other = LoadOutcome(frozenset(running.block_ids[:1]))
        output.reports[0].loads.update({1: again, 77: other, "unknown": other})
        output.reports[0].stored[78] = 3

    for _ in range(3):
        r.after_run = report_again
        r.step()
    assert request.metrics.failed_loads == running.metrics.failed_loads == 0
    r.run()
    assert r.cached(request) == (0, 5)


def test_a_rank_that_reports_a_load_twice_does_not_stand_for_another(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    r.cache.hold_loads = {1}
    request = r.add_stored(5)
    for _ in range(2):
        r.after_run = lambda output: output.reports[0].loads.update({1: LoadOutcome()})
        r.step()
    assert request.status is Status.LOADING and r.engine.has_jobs
    r.cache.let_go()
    assert r.run() == {"length"}


def test_a_rank_that_reports_a_store_twice_does_not_stand_for_another(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2, num_blocks=12)
    r.cache.hold_stores = {1}
    for which in (0, 1):
        r.add(r.prompt(5 + which, which=which), max_tokens=1)
    r.step(2)
    r.after_run = lambda output: output.reports[0].stored.update({1: 5})
    r.step()
    assert 1 in [job.number for job in r.scheduler.planner.jobs], "rank 1 still reads these blocks"
    r.cache.let_go()
    assert r.run() == {"length"}
