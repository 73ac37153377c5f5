"""Requests leave at any moment, by abort or preemption: no block, job, lease or session is lost or
used too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.request import Status
from kvkeep.engine.step import StepOutput

Rigs = Callable[..., Any]

BLOCK_TOKENS = 4
ALL_FREE = 63


# -- abort -----------------------------------------------------------------------------------------


def test_abort_before_it_was_ever_scheduled(rig: Rigs) -> None:
    r = rig()
    name = "num_lmcache_extra_cached_tokens"
    request = r.add(r.prompt(4), kv_transfer_params={name: None})
    assert len(r.cache.leases) == 1
    r.engine.abort(request.id)
    assert not r.cache.leases
    assert r.step() == [request]
    assert request.finish_reason == "abort" and request.reply_params == {name: 0}
    assert r.cache.loads == [] and r.pool.num_free == ALL_FREE


def test_abort_while_waiting_for_the_lookup(rig: Rigs) -> None:
    r = rig()
    r.seed(r.prompt(4))
    r.cache.hold_lookups = True
    request = r.add(r.prompt(4))
    r.step(3)
    assert request.status is Status.WAITING and not r.cache.finished
    r.engine.abort(request.id)
    assert len(r.cache.finished) == 1 and not r.cache.leases
    r.cache.hold_lookups = False
    r.step(2)
    assert r.cache.loads == []


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_abort_during_load(rig: Rigs, tp_size: int) -> None:
    """Until every rank has reported, its blocks are nobody's and the lease is held."""
    r = rig(tensor_parallel_size=tp_size, num_blocks=20)
    r.seed(r.prompt(8))
    r.cache.hold_loads = None
    request = r.add(r.prompt(8))
    r.step(2)
    being_written = set(request.block_ids)
    r.engine.abort(request.id)
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
    r.run()
    assert {other.finish_reason for other in others} == {"length"}


@pytest.mark.parametrize("place", [0, 3])
def test_abort_during_a_load_that_then_fails(rig: Rigs, place: int) -> None:
    r = rig(tensor_parallel_size=2)
    r.seed(r.prompt(6))
    r.cache.hold_loads = None
    r.cache.fail(place, rank=1)
    request = r.add(r.prompt(6))
    r.step()
    r.engine.abort(request.id)
    r.step()
    r.cache.release_loads(1)
    r.step()
    assert len(r.cache.leases) == 1
    r.cache.release_loads(0)
    r.step()
    assert not r.cache.leases and r.found(r.prompt(6)) == 0 and request.metrics.failed_loads == 0


@pytest.mark.parametrize("sync_loads", [False, True])
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
    setattr(r, hook, lambda *_: r.engine.abort(request.id))
    assert request in r.step()
    assert request.finish_reason == "abort" and request.tokens == tokens
    r.run()
    assert other.finish_reason == "length"


def test_abort_after_finish_is_nothing(rig: Rigs) -> None:
    r = rig()
    request = r.add(r.prompt(2), max_tokens=1)
    r.run()
    r.engine.abort(request.id)
    r.scheduler.abort(request)
    r.scheduler.preempt(request)
    r.step()
    assert request.finish_reason == "length" and request.status is Status.FINISHED
    assert request.metrics.preemptions == 0 and r.scheduler.unfinished == []


def test_abort_twice_is_abort_once(rig: Rigs) -> None:
    r = rig()
    request = r.add(r.prompt(2))
    r.step()
    r.engine.abort(request.id)
    r.engine.abort(request.id)
    assert r.step() == [request] and r.step() == []


def test_abort_of_an_unknown_id_is_nothing(rig: Rigs) -> None:
    r = rig()
    request = r.add(r.prompt(2))
    r.engine.abort("nobody")
    r.run()
    assert request.finish_reason == "length"


def test_abort_during_store(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2, num_blocks=12)
    r.cache.hold_stores = None
    request = r.add(r.prompt(4), max_tokens=8)
    r.step(2)
    sources = set(request.block_ids[:4])
    r.engine.abort(request.id)
    other = r.add(r.prompt(5, which="other"))
    r.step(2)
    assert sources.isdisjoint(other.block_ids) and not r.cache.finished
    r.cache.let_go()
    r.run()
    assert r.cache.finished[:1] == [request.chain.key(3)]


def test_abort_of_all_in_every_state(rig: Rigs) -> None:
    r = rig(max_num_seqs=2)
    r.seed(r.prompt(4, which="loads"))
    r.cache.hold_loads = None
    for which in range(4):
        r.add(r.prompt(3, which=which), max_tokens=9)
    r.step()
    r.add(r.prompt(4, which="loads"))
    r.step()
    r.engine.abort(r.requests[0].id)
    r.step()
    for request in r.requests:
        r.engine.abort(request.id)
    r.step()
    assert {request.finish_reason for request in r.requests} == {"abort"} and not r.engine.busy


# -- an id used again ------------------------------------------------------------------------------


def test_an_id_is_used_again_while_the_old_load_runs(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    r.seed(r.prompt(6))
    r.cache.hold_loads = None
    r.cache.fail(1, rank=1)
    old = r.add(r.prompt(6), "same")
    r.step()
    r.engine.abort("same")
    r.step()
    new = r.add(r.prompt(6, end="new"), "same")
    r.cache.release_loads(0)
    r.step(2)
    assert new.status is Status.WAITING, (
        "the load under way is not its own, but it may have what it needs"
    )
    r.cache.release_loads(1)
    r.step()
    assert new.metrics.failed_loads == 0 and old.metrics.failed_loads == 0
    assert len(r.cache.finished) == 1 and 2 in r.cache.leases
    r.cache.failing.clear()
    r.cache.let_go()
    r.run()
    assert new.finish_reason == "length" and new.metrics.external_cached_tokens == 6 * BLOCK_TOKENS


def test_an_id_is_used_again_in_the_middle_of_a_step(rig: Rigs) -> None:
    """The old one's scheduled tokens are not the new one's."""
    r = rig(sync_loads=True)
    r.seed(r.prompt(6))
    r.cache.fail(1)
    old = r.add(r.prompt(6), "same")

    def swap() -> None:
        r.engine.abort("same")
        r.engine._requests.pop("same")
        r.scheduler.take_finished()
        r.add(r.prompt(6, end="new"), "same")

    r.before_run = swap
    r.step()
    new = r.requests[1]
    assert (
        new.num_computed_tokens == 0
        and new.tokens == r.prompt(6, end="new")
        and old.finish_reason == "abort"
    )
    r.run()
    assert new.finish_reason == "length"


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [None, 0, 3])
def test_preemption_during_load(rig: Rigs, place: int | None) -> None:
    """It waits until the load is over, and then finds what is good of it."""
    r = rig(tensor_parallel_size=2)
    r.seed(r.prompt(6))
    r.cache.hold_loads = None
    if place is not None:
        r.cache.fail(place, rank=1)
    request = r.add(r.prompt(6))
    r.step(2)
    r.scheduler.preempt(request)
    assert (
        request.status is Status.WAITING
        and request.block_ids == []
        and r.pool.num_free == ALL_FREE - 6
    )
    r.cache.release_loads(0)
    r.step(2)
    assert request.status is Status.WAITING and len(r.cache.leases) == 1
    r.cache.release_loads(1)
    r.step()
    assert r.found(r.prompt(6)) == (6 if place is None else place)
    r.step()
    assert request.status is Status.RUNNING
    r.run()
    assert request.finish_reason == "length" and len(r.cache.loads) == 1


def test_preemption_during_a_load_that_has_failed_on_one_rank(rig: Rigs) -> None:
    """No hit is offered any more, so it begins at once; the other rank still reads under the
    lease."""
    r = rig(tensor_parallel_size=2)
    r.seed(r.prompt(6))
    r.cache.hold_loads = None
    r.cache.fail(2, rank=0)
    request = r.add(r.prompt(6), max_tokens=5)
    r.step()
    r.cache.release_loads(0)
    r.step()
    r.scheduler.preempt(request)
    r.step(2)
    assert r.cache.leases, "rank 1 still reads"
    r.cache.release_loads(1)
    r.run()
    assert request.finish_reason == "length"


def test_preemption_during_a_load_that_nobody_needs_any_more(rig: Rigs) -> None:
    """Another request generates the same text meanwhile: the lease is still held until the load is
    over."""
    r = rig(tensor_parallel_size=2)
    other = r.add(r.prompt(2, tail=0), max_tokens=20)
    text = [*other.tokens, *r.answer(other)]
    r.step(6)
    r.cache.hold_loads = None
    r.seed(text[: 5 * BLOCK_TOKENS])
    request = r.add(text[: 5 * BLOCK_TOKENS + 1])
    r.step()
    assert request.status is Status.LOADING and r.cache.loads[-1].skip == 3
    r.scheduler.preempt(request)
    r.step(12)
    assert request.local_blocks == 5
    assert r.cache.leases, "the load is still under way"
    r.cache.let_go()
    r.run()
    assert request.finish_reason == other.finish_reason == "length"


def test_preemption_during_load_and_the_local_prefix_is_lost(rig: Rigs) -> None:
    """It would have to ask anew, from further back. Not before the load is over that reads under
    the first answer."""
    r = rig()
    r.add(r.prompt(3), max_tokens=1)
    r.run()
    r.seed(r.prompt(6))
    r.cache.hold_loads = None
    request = r.add(r.prompt(6))
    r.step()
    assert request.status is Status.LOADING and r.cache.loads[-1].skip == 3
    r.scheduler.preempt(request)
    r.pool.forget_all()
    r.step(2)
    assert request.status is Status.WAITING and [lookup.skip for lookup in r.cache.lookups] == [
        0,
        3,
    ]
    r.cache.let_go()
    r.run()
    assert r.cache.loads[-1].skip == 0, "it loads all six"
    assert (
        request.metrics.local_cached_tokens
        == request.metrics.external_cached_tokens
        == 3 * BLOCK_TOKENS
    )


def test_preemption_right_after_a_load(rig: Rigs) -> None:
    r = rig()
    r.seed(r.prompt(6))
    request = r.add(r.prompt(6))
    r.step()
    assert request.status is Status.WAITING and len(request.block_ids) == 6
    r.scheduler.preempt(request)
    r.step()
    assert (
        request.status is Status.RUNNING and request.local_blocks == 6 and len(r.cache.loads) == 1
    )
    r.run()
    assert (
        request.metrics.local_cached_tokens == 0
        and request.metrics.external_cached_tokens == 6 * BLOCK_TOKENS
    )


def test_preemption_and_a_second_load_count_each_block_once(rig: Rigs) -> None:
    r = rig()
    r.seed(r.prompt(6))
    name = "num_kvkeep_extra_cached_tokens"
    request = r.add(r.prompt(6), kv_transfer_params={name: None})
    r.step(2)
    r.scheduler.preempt(request)
    r.pool.forget_all()
    r.run()
    assert len(r.cache.loads) == 2 and request.reply_params == {name: 6 * BLOCK_TOKENS}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_preemption_during_store(rig: Rigs, tp_size: int) -> None:
    """The store copies as late as it can; others want the blocks, and get them at once: what they
    held is set aside."""
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
    keys = [
        ("default", request.chain.key(at), shard) for at in range(5) for shard in range(tp_size)
    ]
    assert all(r.cache.blocks[key] == r.truth.contents[key[1]][key[2]] for key in keys)
    r.cache.let_go()
    r.run()
    assert request.finish_reason == other.finish_reason == "length"


def test_finish_during_store(rig: Rigs) -> None:
    r = rig(num_blocks=10)
    r.cache.hold_stores = None
    request = r.add(r.prompt(4), max_tokens=2)
    r.run()
    assert not r.cache.finished and r.pool.num_free == 9, "no block is held for it"
    others = [r.add(r.prompt(3, which=which), max_tokens=4) for which in (1, 2)]
    r.step(4)
    assert any(other.output_tokens for other in others)
    r.cache.release_stores()
    r.step()
    assert r.cache.finished[:1] == [request.chain.key(3)]
    r.cache.let_go()
    r.run()


# -- reports ---------------------------------------------------------------------------------------


def test_unknown_and_late_reports_are_harmless(rig: Rigs) -> None:
    r = rig()
    r.seed(r.prompt(5))
    request = r.add(r.prompt(5))
    running = r.add(r.prompt(3, which="other"), max_tokens=9)
    r.step()
    (load,) = r.cache.loads

    def say_it_again(output: StepOutput) -> None:
        output.reports[0].loaded += [1, 77, "nobody's"]
        output.reports[0].stored[78] = 3
        output.reports[0].failed.update({1: load.block_ids.tolist(), 79: running.block_ids[:1]})

    for _ in range(3):
        r.after_run = say_it_again
        r.step()
    assert request.metrics.failed_loads == running.metrics.failed_loads == 0
    r.run()
    assert request.metrics.external_cached_tokens == 5 * BLOCK_TOKENS


def test_a_rank_that_reports_a_load_twice_does_not_stand_for_another(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2)
    r.seed(r.prompt(5))
    r.cache.hold_loads = {1}
    request = r.add(r.prompt(5))
    r.after_run = lambda output: output.reports[0].loaded.append(1)  # in one report
    r.step()
    r.after_run = lambda output: output.reports[0].loaded.append(1)  # and in the next
    r.step()
    assert request.status is Status.LOADING and [
        job.number for job in r.scheduler.planner.jobs
    ] == [1]
    r.cache.let_go()
    r.run()
    assert request.finish_reason == "length"


def test_a_rank_that_reports_a_store_twice_does_not_stand_for_another(rig: Rigs) -> None:
    r = rig(tensor_parallel_size=2, num_blocks=12)
    r.cache.hold_stores = {1}
    request, other = (
        r.add(r.prompt(5), max_tokens=1),
        r.add(r.prompt(6, which="other"), max_tokens=1),
    )
    r.step(2)
    r.after_run = lambda output: output.reports[0].stored.update({1: 5})
    r.step()
    assert 1 in [job.number for job in r.scheduler.planner.jobs], "rank 1 still reads these blocks"
    r.cache.let_go()
    r.run()
    assert request.finish_reason == other.finish_reason == "length"
