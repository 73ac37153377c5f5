"""Bad blocks that several requests share: the first recomputes, the others keep their count and
wait (M5).

Only requests of one step can share a block that turns out bad: its load is part of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.request import Request, Status

Rigs = Callable[..., Any]

BLOCK_TOKENS = 4


def blocks_computed(*requests: Request) -> list[float]:
    return [each.num_computed_tokens / BLOCK_TOKENS for each in requests]


def sharing(rig: Rigs, requests: int = 3, blocks: int = 8, bad: int = 2, **options: Any) -> Any:
    """A rig in which the first request loads, the others share, and block `bad` has just failed."""
    r = rig(sync_loads=True, **options)
    r.seed(r.prompt(blocks))
    r.cache.fail(bad)
    for end in range(requests):
        r.add(r.prompt(blocks, end=end), f"r{end}", max_tokens=4)
    r.step()
    assert len(r.cache.loads) == 1 and len(r.steps[0].segments) == requests
    return r


def test_the_first_recomputes_the_others_keep_their_count(rig: Rigs) -> None:
    r = sharing(rig)
    assert blocks_computed(*r.requests) == [2, 8, 8]
    assert [each.output_tokens for each in r.requests] == [[], [], []]
    assert [each.metrics.failed_loads for each in r.requests] == [1, 1, 1]
    assert len({tuple(each.block_ids[:8]) for each in r.requests}) == 1
    assert not r.scheduler.planner.jobs, "nobody stores what counts as computed and is bad"
    r.step()
    assert r.steps[-1].num_scheduled_tokens == {"r0": 6 * BLOCK_TOKENS + 2}, (
        "the others wait until it is good"
    )
    r.step()
    assert r.steps[-1].num_scheduled_tokens == {"r0": 1, "r1": 2, "r2": 2}
    r.run()


def test_the_others_wait_while_the_first_needs_several_steps(rig: Rigs) -> None:
    r = sharing(rig, bad=6, max_num_batched_tokens=6)
    first, second, third = r.requests
    assert blocks_computed(first, second, third) == [6, 8, 8]
    r.step()
    assert r.steps[-1].num_scheduled_tokens == {"r0": 6} and blocks_computed(first) == [7.5]
    r.step()
    assert r.steps[-1].num_scheduled_tokens == {"r0": 4, "r1": 2}, (
        "block 6 is good again, whoever shares goes on"
    )
    r.run()


def test_the_others_wait_over_many_steps(rig: Rigs) -> None:
    r = sharing(rig, bad=0, max_num_batched_tokens=6)
    r.add(r.prompt(1, which="other"), "other", max_tokens=9)
    first, second, third, _ = r.requests
    while first.num_computed_tokens < 8 * BLOCK_TOKENS:
        assert blocks_computed(second, third) == [8, 8]
        r.step()
        assert next(iter(r.steps[-1].num_scheduled_tokens)) == "r0"
    assert len(r.steps) > 5
    r.run()


def test_several_bad_blocks_are_good_one_by_one(rig: Rigs) -> None:
    r = rig(sync_loads=True, max_num_batched_tokens=12)
    r.seed(r.prompt(8))
    r.cache.fail(1, 6)
    first, second = r.add(r.prompt(8, end=1), "first"), r.add(r.prompt(8, end=2), "second")
    short = r.add(r.prompt(5, end=3), "short")
    r.step()
    assert blocks_computed(first, second, short) == [1, 8, 5]
    r.step()
    assert r.steps[-1].num_scheduled_tokens == {"first": 12} and blocks_computed(first) == [4]
    assert r.scheduler._rebuilding.blocks(
        second, BLOCK_TOKENS
    ) and not r.scheduler._rebuilding.blocks(short, BLOCK_TOKENS)
    r.run()


@pytest.mark.parametrize("bad", [0, 3, 7])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_another_takes_over(rig: Rigs, how: str, steps: int, bad: int) -> None:
    """The first leaves before, in the middle of, or after its recomputation."""
    r = sharing(rig, bad=bad, max_num_batched_tokens=7)
    first, second, third = r.requests
    r.step(steps)
    getattr(r.scheduler, how)(first)
    if steps == 0:
        assert blocks_computed(second, third) == [bad, 8], (
            "the next one recomputes, the last keeps its count"
        )
    r.run()
    assert second.finish_reason == third.finish_reason == "length"
    assert first.finish_reason == ("abort" if how == "abort" else "length")


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("hook", ["before_run", "after_run"])
def test_another_takes_over_in_the_middle_of_a_step(rig: Rigs, hook: str, how: str) -> None:
    r = sharing(rig, bad=1, max_num_batched_tokens=7)
    setattr(r, hook, lambda *_: getattr(r.scheduler, how)(r.requests[0]))
    r.step()
    r.run()
    assert r.requests[1].finish_reason == r.requests[2].finish_reason == "length"


def test_all_who_share_leave_one_after_the_other(rig: Rigs) -> None:
    r = sharing(rig, requests=4, bad=1, max_num_batched_tokens=9)
    for request in r.requests[:3]:
        r.engine.abort(request.id)
        r.step()
    assert not r.scheduler._rebuilding.blocks(r.requests[3], BLOCK_TOKENS)
    r.run()
    assert r.requests[3].finish_reason == "length"


def test_the_first_is_aborted_in_the_step_that_fails(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    r.seed(r.prompt(8))
    r.cache.fail(2)
    first, second, third = (r.add(r.prompt(8, end=end)) for end in range(3))
    r.before_run = lambda: r.engine.abort(first.id)
    r.step()
    assert blocks_computed(second, third) == [2, 8]
    r.run()
    assert second.finish_reason == third.finish_reason == "length"


def test_another_shares_less_than_what_failed(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    r.seed(r.prompt(8))
    r.cache.fail(5)
    first, short = r.add(r.prompt(8)), r.add(r.prompt(4))
    r.step()
    assert (
        blocks_computed(first) == [5]
        and short.metrics.failed_loads == 0
        and len(short.output_tokens) == 1
    )
    r.run()


def test_one_recomputes_what_it_shares_and_one_what_is_its_own(rig: Rigs) -> None:
    r = rig(sync_loads=True)
    long = r.prompt(8)
    r.seed(long)
    r.cache.fail(1, 6)
    first, second = r.add(long[: 5 * BLOCK_TOKENS + 1]), r.add(long)
    r.step()
    assert [load.skip for load in r.cache.loads] == [0, 5]
    assert blocks_computed(first, second) == [1, 6]
    r.step()
    assert list(r.steps[-1].num_scheduled_tokens) == [first.id]
    r.run()
    assert first.finish_reason == second.finish_reason == "length"


# -- blocks that the failed step was to compute are shared as well ---------------------------------


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_blocks_of_a_void_step_are_not_taken_for_computed(rig: Rigs, how: str, steps: int) -> None:
    """The second shares blocks 8 and 9, which the first was to compute in the step that failed. The
    first leaves when the bad block is good again, and those are not."""
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
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_void_blocks_of_one_who_has_nothing_to_recompute(rig: Rigs, how: str, steps: int) -> None:
    """First loads 0 to 7, second shares them and was to compute 8 and 9, third shares all ten;
    second leaves."""
    r = rig(sync_loads=True)
    r.seed(r.prompt(8))
    r.cache.fail(3)
    first = r.add(r.prompt(8, tail=3, end=0), max_tokens=5)
    second, third = (
        r.add(r.prompt(10, end=1), max_tokens=5),
        r.add(r.prompt(10, end=2), max_tokens=5),
    )
    r.step()
    assert (
        third.block_ids[:10] == second.block_ids[:10] and third.block_ids[:8] == first.block_ids[:8]
    )
    r.step(steps)
    getattr(r.scheduler, how)(second)
    r.run()
    assert first.finish_reason == third.finish_reason == "length"


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("how", ["abort", "preempt", "stays"])
def test_one_without_room_shares_a_bad_block(rig: Rigs, how: str, bad: int) -> None:
    """The second has found the first's blocks and loaded more, but does not fit into the step. It
    waits with them."""
    r = rig(sync_loads=True, enable_chunked_prefill=False, max_num_batched_tokens=60)
    r.seed(r.prompt(8))
    r.cache.fail(bad)
    r.add(r.prompt(5, which="other"))
    first, second = r.add(r.prompt(6, tail=33, end=1)), r.add(r.prompt(8, tail=25, end=2))
    r.step()
    assert [(load.skip, len(load.block_ids)) for load in r.cache.loads] == [(0, 6), (6, 2)]
    assert first.status is Status.RUNNING and second.status is Status.WAITING
    if how != "stays":
        getattr(r.scheduler, how)(first)
    r.run()
    assert second.finish_reason == "length"
