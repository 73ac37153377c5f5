"""What is loaded and what is computed, for machines whose speeds the test sets, in simulated
time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvkeep.connector.cost_model import LEAST_SAMPLES, SKIPS_BEFORE_TRIAL, CostModel

BLOCK_TOKENS = 16


@dataclass
class Machine:
    """An engine and its bus; times are in milliseconds."""

    step_ms: float = 10.0  # a step that computes one token
    token_ms: float = 0.1
    load_ms: float = 2.0
    block_ms: float = 0.2
    loads_in_step: bool = False
    now_ms: float = 0.0
    jobs: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.costs = CostModel(loads_in_step=self.loads_in_step, clock=lambda: self.now_ms / 1e3)

    def computes_ms(self, tokens: int, requests: int = 1) -> float:
        return self.step_ms + self.token_ms * (tokens - requests) if tokens else 1.0

    def step(self, tokens: int = 0, requests: int = 1) -> None:
        self.costs.begin_step(tokens, requests if tokens else 0)
        self.now_ms += self.computes_ms(tokens, requests)
        self.costs.end_step()

    def serve(self, steps: int = 4) -> None:
        """Computes prompts and generates tokens, without any load."""
        for tokens in range(100, 100 * (steps + 1), 100):
            self.step(tokens)
            self.step(1)
        self.step()

    def load(self, blocks: int, tokens: int = 0) -> None:
        """Loads, with a step that computes `tokens` tokens."""
        job, took_ms = next(self.jobs), self.load_ms + self.block_ms * blocks
        self.costs.begin_load(job, blocks, blocks * BLOCK_TOKENS)
        self.costs.begin_step(tokens, min(tokens, 1))
        self.now_ms += took_ms + self.computes_ms(tokens)
        self.costs.end_load(job, took_ms / 1e3)
        self.costs.end_step()

    def learn(self) -> Machine:
        self.serve()
        for blocks in (4, 8, 16, 32, 64):
            self.load(blocks)
        return self

    def decide(self, blocks: int) -> bool:
        return self.costs.decide(blocks, blocks * BLOCK_TOKENS)

    def is_faster(self, blocks: int) -> bool:
        return self.costs.is_faster(blocks, blocks * BLOCK_TOKENS)


def slow(**speeds: Any) -> Machine:
    """One that computes a block in 1.6 ms and loads it in 5."""
    return Machine(block_ms=5.0, **speeds).learn()


# -- what is measured


def test_what_was_measured_is_what_the_machine_does() -> None:
    assert Machine().learn().costs.figures() == {
        "prefill_tokens_per_s": 10_000,
        "load_fixed_us": 2_000,
        "load_block_us": 200,
    }


def test_what_is_not_known_is_not_claimed() -> None:
    machine = Machine()
    assert machine.costs.figures() == {}
    machine.serve(LEAST_SAMPLES)
    assert machine.costs.figures() == {"prefill_tokens_per_s": 10_000}
    loads = Machine()
    for _ in range(LEAST_SAMPLES):
        loads.load(10)
    assert loads.costs.figures() == {"load_fixed_us": 0, "load_block_us": 400}, (
        "all of one length: no fixed part"
    )


def test_compilations_and_pauses_among_the_samples_count_for_nothing() -> None:
    machine = Machine(step_ms=5_000.0, load_ms=3_000.0)
    machine.step(300)
    machine.load(8)
    machine.step_ms, machine.load_ms = 10.0, 2.0
    machine.learn()
    assert machine.costs.figures() == Machine().learn().costs.figures()


def test_long_prompts_say_more_about_the_rate_than_short_ones() -> None:
    machine = Machine()
    machine.serve()
    machine.token_ms = 5.0
    for _ in range(6):
        machine.step(90)
    assert machine.costs.figures()["prefill_tokens_per_s"] == 10_000, (
        "the tail of a prompt is mostly the step itself"
    )


def test_but_long_prompts_are_not_remembered_for_ever() -> None:
    machine = Machine()
    machine.serve()
    machine.token_ms = 0.5
    for _ in range(100):
        machine.step(90)
    assert machine.costs.figures()["prefill_tokens_per_s"] == 2_000


def test_one_slow_load_of_a_new_length_is_no_slow_bus() -> None:
    """Sixteen loads of one block in 2.2 ms each, and then one of two that some pause has met."""
    machine = Machine()
    machine.serve()
    for _ in range(16):
        machine.load(1)
    machine.load_ms = 20.0
    machine.load(2)
    assert machine.costs.figures()["load_block_us"] == pytest.approx(2_200, rel=0.01)
    assert machine.costs.figures()["load_fixed_us"] == 0


def test_with_several_steps_under_way_each_begins_when_the_one_before_it_has_ended() -> None:
    machine = Machine()
    costs = machine.costs
    machine.serve()
    costs.begin_step(1_000, 1)
    for _ in range(20):
        costs.begin_step(1_000, 1)
        machine.now_ms += machine.computes_ms(1_000, 1)
        costs.end_step()
    costs.end_step()
    assert costs.figures()["prefill_tokens_per_s"] == 10_000


def test_time_without_a_step_is_no_time_of_a_step() -> None:
    machine = Machine()
    for _ in range(5):
        machine.serve()
        machine.now_ms += 60_000
    assert machine.costs.figures()["prefill_tokens_per_s"] == 10_000


def test_an_end_that_nobody_waits_for_and_a_job_that_nobody_knows_do_nothing() -> None:
    machine = Machine().learn()
    before = machine.costs.figures()
    machine.costs.end_step()
    machine.costs.drop_step()
    machine.costs.end_load(99, 0.1)
    assert machine.costs.figures() == before


# -- what is decided


def test_one_small_block_is_computed_with_the_rest_unless_all_is_to_be_loaded() -> None:
    assert not any(Machine().decide(1) for _ in range(100)), "not even to try"
    assert CostModel("always").decide(1, 16)
    assert CostModel().decide(1, 4096), "a block of a hybrid can be large"


@pytest.mark.parametrize(("blocks", "loaded"), [(1, False), (2, True), (64, True)])
def test_short_prefixes_are_computed_where_every_load_has_its_price(
    blocks: int, loaded: bool
) -> None:
    """2.2 ms against 1.6, 2.4 against 3.2, and so on."""
    assert Machine().learn().is_faster(blocks) is loaded


@pytest.mark.parametrize("blocks", [1, 8, 64, 128])
def test_nothing_is_loaded_over_a_bus_that_is_slower_than_the_engine(blocks: int) -> None:
    assert not slow().is_faster(blocks)


def test_a_longer_prefix_is_never_refused_where_a_shorter_one_is_not() -> None:
    for block_ms, load_ms in itertools.product((0.1, 0.5, 1.5, 1.7, 5.0), (0.0, 1.0, 20.0)):
        machine = Machine(block_ms=block_ms, load_ms=load_ms).learn()
        verdicts = [machine.is_faster(blocks) for blocks in range(1, 129)]
        assert verdicts == sorted(verdicts), (block_ms, load_ms)


def test_more_tokens_in_as_many_blocks_are_never_refused_where_fewer_are_not() -> None:
    machine = Machine().learn()
    verdicts = [machine.costs.is_faster(8, tokens) for tokens in range(200)]
    assert verdicts == sorted(verdicts) and verdicts[0] is False and verdicts[-1] is True


def test_a_load_far_longer_than_any_before_is_tried() -> None:
    machine = slow()
    assert not machine.is_faster(128)
    assert machine.is_faster(129)
    machine.load(200)
    assert not machine.is_faster(200)


def test_what_is_expected_of_a_load_is_what_such_loads_took_or_nothing() -> None:
    machine = Machine().learn()
    assert Machine().costs.expected_s(8) is None
    assert 0 < (machine.costs.expected_s(8) or 0) < (machine.costs.expected_s(128) or 0)
    assert machine.costs.expected_s(100_000) is None, "none was half as long"


def test_the_step_that_a_load_misses_is_weighed_against_the_wait_of_all_others() -> None:
    machine = Machine(load_ms=0.5, block_ms=0.1).learn()
    assert machine.is_faster(2), "0.7 ms against 3.2, and nobody else is there"
    machine.step(1, requests=1)
    assert not machine.is_faster(2), "a step of 10 ms later, to spare two requests 3.2 ms each"
    machine.step(4, requests=4)
    assert machine.is_faster(2), "to spare five requests 3.2 ms each"


# -- changes


def test_skipped_loads_are_tried_again_now_and_then() -> None:
    machine = slow()
    for _ in range(3):
        decisions = [machine.decide(16) for _ in range(SKIPS_BEFORE_TRIAL + 1)]
        assert decisions == [False] * SKIPS_BEFORE_TRIAL + [True]
        machine.load(16)
    assert not machine.decide(16), "tried, and still slow"


def test_a_load_that_is_done_counts_as_a_trial() -> None:
    machine = Machine().learn()
    for _ in range(5):
        assert not any(machine.decide(1) for _ in range(SKIPS_BEFORE_TRIAL))
        assert machine.decide(32)
        machine.load(32)


def test_one_trial_is_enough_to_see_that_the_slowness_has_passed() -> None:
    machine = slow()
    machine.block_ms = 0.2
    while not machine.decide(16):
        pass
    machine.load(16)
    for blocks in (8, 16, 24, 32, 16, 24):
        assert machine.decide(blocks)
        machine.load(blocks)
    assert not machine.decide(1), "and short ones are computed as before"


def test_a_bus_that_becomes_slow_is_noticed_after_some_loads() -> None:
    machine = Machine().learn()
    machine.block_ms = 8.0
    done = 0
    while machine.decide(16):
        machine.load(16)
        done += 1
        assert done <= 16
    assert done >= 2, "one slow load is not yet a slow bus"


def test_an_engine_that_becomes_faster_is_noticed() -> None:
    machine = Machine(block_ms=0.5).learn()
    assert machine.is_faster(32)
    machine.token_ms = 0.01
    machine.serve(steps=20)
    assert not machine.is_faster(32)


# -- failures, queues and steps that load


def test_an_engine_that_does_not_report_the_ends_of_steps_is_measured_when_it_does_again() -> None:
    machine = Machine()
    for _ in range(1_000):
        machine.costs.begin_step(100, 1)
    for _ in range(16):  # more steps are never remembered
        machine.costs.drop_step()
    assert machine.learn().costs.figures() == Machine().learn().costs.figures()


def test_a_step_that_failed_and_a_load_that_failed_are_no_samples() -> None:
    machine = Machine().learn()
    before = machine.costs.figures()
    for _ in range(40):
        machine.costs.begin_load(7, 8, 8 * BLOCK_TOKENS)
        machine.costs.begin_step(500, 1)
        machine.now_ms += 9_000
        machine.costs.end_load(7, None)
        machine.costs.drop_step()
    assert machine.costs.figures() == before
    assert machine.costs.expected_s(8) == Machine().learn().costs.expected_s(8)


def test_while_little_is_known_everything_is_loaded() -> None:
    machine = Machine(block_ms=50.0)
    for _ in range(LEAST_SAMPLES - 1):
        machine.load(4)
        assert machine.decide(2)
    machine.serve()
    assert machine.decide(2)
    machine.load(4)
    assert not machine.decide(2)


def test_a_load_waits_for_those_that_are_under_way() -> None:
    machine = Machine(block_ms=1.0).learn()
    assert machine.is_faster(8), "10 ms against 12.8"
    machine.costs.begin_load(99, 20, 20 * BLOCK_TOKENS)
    assert not machine.is_faster(8), "30 ms, against 12.8 for each of two requests"
    machine.costs.end_load(99, None)
    assert machine.is_faster(8)


@pytest.mark.parametrize(("loads_in_step", "loaded"), [(False, 12), (True, 6)])
def test_requests_that_come_together_are_loaded_unless_a_step_waits_for_all(
    loads_in_step: bool, loaded: int
) -> None:
    machine, began = Machine(loads_in_step=loads_in_step).learn(), 0
    for job in range(100, 112):
        if machine.is_faster(8):  # 3.6 ms alone and 21.2 as the twelfth, against 12.8
            machine.costs.begin_load(job, 8, 8 * BLOCK_TOKENS)
            began += 1
    assert began == loaded


def test_loads_that_queue_up_are_measured_with_those_before_them() -> None:
    machine = Machine(block_ms=1.0).learn()
    before = machine.costs.figures()
    for _ in range(16):
        for job in (101, 102):
            machine.costs.begin_load(job, 20, 20 * BLOCK_TOKENS)
        machine.costs.end_load(101, 0.022)
        machine.costs.end_load(102, 0.042)
    assert machine.costs.figures() == before


def test_always_loads_what_is_computed_faster() -> None:
    machine = slow()
    machine.costs = CostModel("always", clock=lambda: machine.now_ms / 1e3)
    machine.learn()
    assert not machine.is_faster(1)
    assert all(machine.decide(1) for _ in range(100))


def test_a_step_that_waits_for_its_loads_is_no_sample_of_computing() -> None:
    machine = Machine(loads_in_step=True)
    machine.serve()
    for blocks in (4, 8, 16, 32, 64):
        machine.load(blocks, tokens=100)
    assert machine.costs.figures() == Machine().learn().costs.figures()
    assert not machine.is_faster(1) and machine.is_faster(2), "no request misses a step"


# -- waiting for a tier


def test_blocks_from_a_tier_are_waited_for_no_longer_than_computing_takes() -> None:
    machine = Machine(token_ms=1.0, load_ms=2.0, block_ms=0.5).learn()
    most_s = machine.costs.most_wait_s(10, 160)
    assert most_s == pytest.approx(0.160 - 0.007, rel=0.1), "the load comes after the wait"


def test_a_wait_has_no_limit_by_cost_while_nothing_is_known_or_every_hit_is_loaded() -> None:
    assert Machine().costs.most_wait_s(10, 160) is None
    always = Machine()
    always.costs = CostModel("always", clock=lambda: always.now_ms / 1e3)
    assert always.learn().costs.most_wait_s(10, 160) is None


def test_where_a_load_takes_longer_than_computing_nothing_is_waited_for() -> None:
    assert Machine(token_ms=0.1, block_ms=20.0).learn().costs.most_wait_s(10, 160) == 0.0
