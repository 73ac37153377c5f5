"""What the scheduler's side does with a load that is not worth its time, and what it tells whoever
decides."""

from __future__ import annotations

from typing import Any

import pytest
from planning import LAYOUT, Side

from kvkeep.client.requests import Finished, LoadOutcome
from kvkeep.connector.cost_model import SKIPS_BEFORE_TRIAL, CostModel
from kvkeep.kv.keys import KEY_BYTES

NAME = "num_kvkeep_extra_cached_tokens"


def keys(count: int, name: int = 1) -> bytes:
    return b"".join(bytes([name, at]) + bytes(KEY_BYTES - 2) for at in range(count))


class Judge(CostModel):
    """Decides as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = False
        self.asked: list[tuple[int, int]] = []

    def decide(self, blocks: int, tokens: int) -> bool:
        self.asked.append((blocks, tokens))
        return self.loads


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def judged(cache: Any, judge: Judge) -> Side:
    """A side whose server has five blocks of everybody."""
    cache.blocks = 5
    return Side(cache, LAYOUT, 1, judge)


def load(side: Side, request_id: str, blocks: int) -> None:
    job = side.prepare_load(request_id, 0, range(10, 10 + blocks))
    side.build_step()
    side.complete([Finished(loads={job.number: LoadOutcome()})])
    side.costs.end_step()


def test_a_load_that_is_not_worth_it_is_not_offered_and_its_lease_goes_back(
    judged: Side, judge: Judge, cache: Any
) -> None:
    judged.arrive("r", None, {NAME: None}, keys(8))
    for _ in range(5):
        assert judged.lookup("r", 0, 8) == 0
    judged.no_load("r")
    assert judge.asked == [(5, 20)], "decided once"
    assert cache.asked == [(None, 8, 0)], "asked once"
    assert cache.released == 1, "given back once"
    assert (judged.counts["skipped_loads"], judged.counts["skipped_tokens"]) == (1, 20)
    assert judged.states["r"].skipped == 5
    assert judged.end("r") == {NAME: 0}, "what was computed was not given"
    assert cache.leases == 0


def test_blocks_that_are_computed_although_the_server_has_them_are_not_stored_again(
    judged: Side,
) -> None:
    judged.arrive("r", None, None, keys(8))
    assert judged.lookup("r", 0, 8) == 0
    assert judged.states["r"].stored == 5
    assert judged.prepare_store("r", range(20, 25), 5) is None
    job = judged.prepare_store("r", range(20, 28), 8)
    assert job is not None and (job.first_block, job.block_ids) == (5, [25, 26, 27])


def test_a_load_that_is_worth_it_is_decided_on_once(judged: Side, judge: Judge, cache: Any) -> None:
    judge.loads = True
    judged.arrive("r", None, {NAME: None}, keys(5))
    assert judged.lookup("r", 0, 5) == 5
    judge.loads = False  # there is no room for it yet, and meanwhile others load
    assert judged.lookup("r", 0, 5) == 5
    assert judge.asked == [(5, 20)]
    load(judged, "r", 5)
    assert cache.released == 1
    assert (judged.counts["skipped_loads"], judged.states["r"].skipped) == (0, 0)
    assert judged.end("r") == {NAME: 20}


def test_nothing_to_load_is_nothing_to_decide(judged: Side, judge: Judge, cache: Any) -> None:
    cache.blocks = 2
    judged.arrive("r", None, None, keys(5))
    assert judged.lookup("r", 2, 5) == 0
    assert judged.lookup("r", 5, 5) == 0
    assert judge.asked == [] and judged.counts["skipped_loads"] == 0


def test_a_request_that_has_more_itself_by_now_stays_with_computing(
    judged: Side, judge: Judge, cache: Any
) -> None:
    judged.arrive("r", None, None, keys(5))
    assert judged.lookup("r", 1, 5) == 0
    judge.loads = True
    assert judged.lookup("r", 3, 5) == 0
    assert len(judge.asked) == 1 and len(cache.asked) == 1


def test_a_preempted_request_that_has_less_is_decided_about_anew(
    judged: Side, judge: Judge, cache: Any
) -> None:
    judged.arrive("r", None, {NAME: None}, keys(5), local_blocks=3)
    assert judged.lookup("r", 3, 5) == 0
    judge.loads = True
    assert judged.lookup("r", 0, 5) == 5
    assert judge.asked == [(2, 8), (5, 20)]
    assert cache.asked == [(None, 5, 3), (None, 5, 0)]
    assert judged.states["r"].skipped == 0
    load(judged, "r", 5)
    assert judged.end("r") == {NAME: 20}


def test_after_a_load_the_next_one_is_decided_on_anew(judged: Side, judge: Judge) -> None:
    judge.loads = True
    judged.arrive("r", None, None, keys(5))
    assert judged.lookup("r", 0, 5) == 5
    load(judged, "r", 5)
    judge.loads = False
    assert judged.lookup("r", 0, 5) == 0
    assert len(judge.asked) == 2


def test_a_decision_for_fewer_blocks_is_another_one(judged: Side, judge: Judge) -> None:
    judge.loads = True
    judged.arrive("r", None, None, keys(5))
    assert judged.lookup("r", 0, 5) == 5
    judge.loads = False
    assert judged.lookup("r", 3, 5) == 0
    assert judge.asked == [(5, 20), (2, 8)]


# -- with a clock


class Timed:
    """A side with the real judgement, in time that passes as the test says."""

    def __init__(self, cache: Any, world_size: int = 1) -> None:
        self.now_s = 0.0
        self.side = Side(cache, LAYOUT, world_size, CostModel(clock=lambda: self.now_s))
        self.number = 0

    def compute(self, tokens: int, took_s: float) -> None:
        self.side.build_step(tokens=tokens, requests=1)
        self.now_s += took_s
        self.side.complete([])
        self.side.costs.end_step()

    def serve(self, blocks: int, loading_s: float, failed: tuple[int, ...] = ()) -> int | None:
        """A request of its own prefix; how many of its blocks were loaded, one load taking so
        long."""
        self.number += 1
        name = f"r{self.number}"
        self.side.arrive(name, None, None, keys(blocks, name=self.number))
        found = self.side.lookup(name, 0, blocks)
        if found:
            job = self.side.prepare_load(name, 0, range(10, 10 + found))
            self.side.build_step()
            self.now_s += loading_s
            outcome = LoadOutcome(frozenset(10 + each for each in failed or ()), loading_s)
            self.side.complete([Finished(loads={job.number: outcome})])
            self.side.costs.end_step()
        self.side.end(name)
        return found


def test_slow_loads_are_given_up_and_taken_up_again_when_they_are_fast(cache: Any) -> None:
    cache.blocks = 100
    timed = Timed(cache)
    for _ in range(4):
        timed.compute(400, took_s=0.4)
    assert [timed.serve(10, loading_s=1.0) for _ in range(4)] == [10] * 4, "that is how one learns"
    skipped = [timed.serve(10, loading_s=1.0) for _ in range(SKIPS_BEFORE_TRIAL)]
    assert skipped == [0] * SKIPS_BEFORE_TRIAL
    assert timed.side.counts["skipped_tokens"] == 40 * SKIPS_BEFORE_TRIAL
    assert [timed.serve(10, loading_s=0.001) for _ in range(20)] == [10] * 20
    assert timed.side.idle and cache.leases == 0


def test_loads_that_failed_say_nothing_of_how_long_loads_take(cache: Any) -> None:
    cache.blocks = 100
    timed = Timed(cache)
    for _ in range(4):
        timed.compute(400, took_s=0.4)
    for _ in range(10):
        assert timed.serve(10, loading_s=5.0, failed=(3,)) == 10
    assert "load_block_us" not in timed.side.costs.figures()


def test_a_load_takes_as_long_as_its_last_rank(cache: Any) -> None:
    cache.blocks = 100
    timed = Timed(cache, world_size=2)
    for number in range(4):
        timed.side.arrive(f"r{number}", None, None, keys(10, name=number))
        assert timed.side.lookup(f"r{number}", 0, 10) == 10
        job = timed.side.prepare_load(f"r{number}", 0, range(10, 20))
        timed.side.build_step()
        for rank, took_s in enumerate((1.0, 0.5)):
            outcome = LoadOutcome(seconds=took_s)
            timed.side.complete([Finished(rank, loads={job.number: outcome})])
    assert timed.side.costs.figures() == {"load_fixed_us": 0, "load_block_us": 100_000}


def test_nobody_waits_for_an_answer_about_less_than_is_ever_loaded(
    judged: Side, cache: Any
) -> None:
    cache.silent = True
    judged.arrive("r", None, None, keys(5))
    assert judged.lookup("r", 3, 5) is None
    assert judged.lookup("r", 4, 5) == 0
    judged.no_load("r")
    cache.silent = False
    assert judged.knows_stored("r") and cache.released == 1, (
        "what the server may have promised goes back"
    )


# -- blocks that a tier brings up


@pytest.mark.parametrize(
    ("local", "limit", "waits"), [(0, 8, True), (6, 8, True), (7, 8, False), (0, 5, False)]
)
def test_only_blocks_that_the_request_lacks_and_wants_are_waited_for(
    side: Side, cache: Any, local: int, limit: int, waits: bool
) -> None:
    """The server has five blocks in memory, and two more are coming."""
    cache.blocks, cache.coming, cache.waits = 5, 2, True
    side.arrive("r", None, None, keys(8))
    assert (side.lookup("r", local, limit) is None) is waits
    assert bool(cache.waited) is waits


def test_a_request_takes_what_has_come_when_it_waits_no_longer(side: Side, cache: Any) -> None:
    cache.blocks, cache.coming, cache.waits = 5, 2, True
    side.arrive("r", None, None, keys(8))
    assert [side.lookup("r", 0, 8) for _ in range(3)] == [None] * 3
    cache.waits = False
    assert side.lookup("r", 0, 8) == 5
    side.end("r")
    assert cache.leases == 0 and len(cache.asked) == 1


def test_a_request_that_ends_while_it_waits_leaves_no_lease(side: Side, cache: Any) -> None:
    cache.blocks, cache.coming, cache.waits = 5, 2, True
    side.arrive("r", None, None, keys(8))
    assert side.lookup("r", 0, 8) is None
    side.end("r")
    assert cache.leases == 0


def test_the_cost_model_limits_the_wait(cache: Any) -> None:
    cache.blocks, cache.coming = 5, 20
    timed = Timed(cache)
    timed.side.arrive("r", None, None, keys(25))
    timed.side.lookup("r", 0, 25)
    for _ in range(4):
        timed.compute(400, took_s=0.4)
    timed.side.arrive("s", None, None, keys(25, 2))
    timed.side.lookup("s", 0, 25)
    timed.side.lookup("s", 0, 10)
    assert cache.waited[0] is None, "nothing is known yet"
    assert cache.waited[1:] == pytest.approx([80, 20], rel=0.1), "4 tokens a block, 1 ms each"


def test_a_request_that_announces_its_prompt_does_not_wait(side: Side, cache: Any) -> None:
    cache.blocks, cache.coming, cache.waits = 5, 2, True
    side.arrive("r", "salt", {"kvkeep_prefetch": True}, keys(8))
    assert cache.prefetched == [("salt", 8)]
    assert side.lookup("r", 0, 8) == 5
    side.arrive("other", "salt", {"kvkeep_prefetch": False}, keys(8))
    side.arrive("wrong", 5, {"kvkeep_prefetch": True}, keys(8))  # type: ignore[arg-type]
    assert len(cache.prefetched) == 1
