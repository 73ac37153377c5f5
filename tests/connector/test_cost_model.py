"""What is loaded and what is computed, on machines whose speed the test decides, in time that it
lets pass."""

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

    step_ms: float = 10.0  # a step that computes next to nothing
    token_ms: float = 0.1
    load_ms: float = 2.0
    block_ms: float = 0.2
    in_step: bool = False
    now_ms: float = 0.0
    jobs: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.worth = CostModel(in_step=self.in_step, clock=lambda: self.now_ms / 1e3)

    def computes_ms(self, tokens: int, requests: int) -> float:
        return self.step_ms + self.token_ms * (tokens - requests) if tokens else 1.0

    def step(self, tokens: int = 0, requests: int = 1) -> None:
        self.worth.begin_step(tokens, requests if tokens else 0)
        self.now_ms += self.computes_ms(tokens, requests)
        self.worth.end_step()

    def serve(self, steps: int = 4) -> None:
        """Prompts are computed, and tokens generated, without any load."""
        for tokens in range(100, 100 * (steps + 1), 100):
            self.step(tokens)
            self.step(1)
        self.step()

    def load(self, blocks: int, tokens: int = 0, requests: int = 1) -> None:
        """One load, beside steps of so many tokens of others, until a step's end tells of it."""
        job = next(self.jobs)
        self.worth.begin_load(job, blocks, blocks * BLOCK_TOKENS)
        ends_ms = self.now_ms + self.load_ms + self.block_ms * blocks
        while True:
            self.worth.begin_step(tokens, requests if tokens else 0)
            if self.in_step:
                self.now_ms = ends_ms
            self.now_ms += self.computes_ms(tokens, requests)
            if self.now_ms >= ends_ms:
                break
            self.worth.end_step()
        if not tokens and not self.in_step:
            self.now_ms = ends_ms
        self.worth.end_load(job, good=True)
        self.worth.end_step()

    def learn(self) -> Machine:
        self.serve()
        for blocks in (4, 8, 16, 32, 64):
            self.load(blocks)
        return self

    def decide(self, blocks: int) -> bool:
        return self.worth.decide(blocks, blocks * BLOCK_TOKENS)

    def is_faster(self, blocks: int) -> bool:
        return self.worth.is_faster(blocks, blocks * BLOCK_TOKENS)


def slow(**speeds: Any) -> Machine:
    """One that computes a block in 1.6 ms and loads it in 5."""
    return Machine(block_ms=5.0, **speeds).learn()


# -- what is measured


def test_what_was_measured_is_what_the_machine_does() -> None:
    assert Machine().learn().worth.figures() == {
        "prefill_tokens_per_s": 10_000,
        "load_fixed_us": 2_000,
        "load_block_us": 200,
    }


def test_what_is_not_known_is_not_claimed() -> None:
    machine = Machine()
    assert machine.worth.figures() == {}
    machine.serve(LEAST_SAMPLES)
    assert machine.worth.figures() == {"prefill_tokens_per_s": 10_000}
    loads = Machine()
    for _ in range(LEAST_SAMPLES):
        loads.load(10)
    assert loads.worth.figures() == {"load_fixed_us": 0, "load_block_us": 400}, (
        "all of one length: no fixed part"
    )


def test_compilations_and_pauses_among_the_samples_count_for_nothing() -> None:
    machine = Machine(step_ms=5_000.0, load_ms=3_000.0)
    machine.step(300)
    machine.load(8)
    machine.step_ms, machine.load_ms = 10.0, 2.0
    machine.learn()
    assert machine.worth.figures() == Machine().learn().worth.figures()


def test_long_prompts_say_more_about_the_rate_than_short_ones() -> None:
    machine = Machine()
    machine.serve()
    machine.token_ms = 5.0
    for _ in range(6):
        machine.step(90)
    assert machine.worth.figures()["prefill_tokens_per_s"] == 10_000, (
        "the tail of a prompt is mostly the step itself"
    )


def test_but_long_prompts_are_not_remembered_for_ever() -> None:
    machine = Machine()
    machine.serve()
    machine.token_ms = 0.5
    for _ in range(100):
        machine.step(90)
    assert machine.worth.figures()["prefill_tokens_per_s"] == 2_000


def test_one_slow_load_of_a_new_length_is_no_slow_bus() -> None:
    """Sixteen loads of one block in 2.2 ms each, and then one of two that some pause has met."""
    machine = Machine()
    machine.serve()
    for _ in range(16):
        machine.load(1)
    machine.load_ms = 20.0
    machine.load(2)
    assert machine.worth.figures()["load_block_us"] == pytest.approx(2_200, rel=0.01)
    assert machine.worth.figures()["load_fixed_us"] == 0


def test_with_several_steps_under_way_each_begins_when_the_one_before_it_has_ended() -> None:
    machine = Machine()
    worth = machine.worth
    machine.serve()
    worth.begin_step(1_000, 1)
    for _ in range(20):
        worth.begin_step(1_000, 1)
        machine.now_ms += machine.computes_ms(1_000, 1)
        worth.end_step()
    worth.end_step()
    assert worth.figures()["prefill_tokens_per_s"] == 10_000


def test_time_without_a_step_is_no_time_of_a_step() -> None:
    machine = Machine()
    for _ in range(5):
        machine.serve()
        machine.now_ms += 60_000
    assert machine.worth.figures()["prefill_tokens_per_s"] == 10_000


def test_an_end_that_nobody_waits_for_and_a_job_that_nobody_knows_do_nothing() -> None:
    machine = Machine().learn()
    before = machine.worth.figures()
    machine.worth.end_step()
    machine.worth.drop_step()
    machine.worth.end_load(99, good=True)
    assert machine.worth.figures() == before


def test_an_engine_that_never_tells_of_an_end_costs_no_memory() -> None:
    machine = Machine()
    for _ in range(1_000):
        machine.worth.begin_step(100, 1)
    assert len(machine.worth._steps) <= 16
    machine.worth._steps.clear()
    machine.learn()
    assert machine.worth.figures()["prefill_tokens_per_s"] == 10_000


def test_a_step_that_failed_and_a_load_that_failed_say_nothing() -> None:
    machine = Machine().learn()
    before = machine.worth.figures()
    for _ in range(40):
        machine.worth.begin_load(7, 8, 8 * BLOCK_TOKENS)
        machine.worth.begin_step(500, 1)
        machine.now_ms += 9_000
        machine.worth.end_load(7, good=False)
        machine.worth.drop_step()
    assert machine.worth.figures() == before
    assert machine.worth._loading_blocks == 0


# -- what is decided


def test_while_little_is_known_everything_is_loaded() -> None:
    machine = Machine(block_ms=50.0)
    for _ in range(LEAST_SAMPLES - 1):
        machine.load(4)
        machine.load(4, tokens=100)
        assert machine.decide(2)
        machine.worth._took.clear()
    machine.serve()
    assert machine.decide(2)


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
    verdicts = [machine.worth.is_faster(8, tokens) for tokens in range(200)]
    assert verdicts == sorted(verdicts) and verdicts[0] is False and verdicts[-1] is True


def test_a_load_far_longer_than_any_before_is_tried() -> None:
    machine = slow()
    assert not machine.is_faster(128)
    assert machine.is_faster(129)
    machine.load(200)
    assert not machine.is_faster(200)


def test_what_is_expected_of_a_load_is_what_such_loads_took_or_nothing() -> None:
    machine = Machine().learn()
    assert Machine().worth.expected_s(8) is None
    assert 0 < (machine.worth.expected_s(8) or 0) < (machine.worth.expected_s(128) or 0)
    assert machine.worth.expected_s(100_000) is None, "none was half as long"


def test_a_load_that_is_over_before_its_step_is_made_counts_with_what_it_took() -> None:
    worth = CostModel()
    for job in range(4):
        worth.begin_load(job, 8, 128)
        worth.end_load(job, good=True, took_s=0.25)
        worth.begin_step(16, 1)
        worth.end_step()
    assert worth.expected_s(8) == pytest.approx(0.25)
    worth.begin_load(4, 8, 128)
    worth.end_load(4, good=True)
    assert worth.expected_s(8) == pytest.approx(0.25), "how long nobody knows"


def test_who_comes_behind_other_loads_waits_for_them() -> None:
    machine = Machine(block_ms=1.0).learn()
    assert machine.is_faster(8), "10 ms against 12.8"
    machine.worth.begin_load(99, 4, 4 * BLOCK_TOKENS)
    assert not machine.is_faster(8), "14 ms"
    machine.worth.begin_step(0, 0)
    machine.worth.end_load(99, good=True)
    machine.worth.end_step()
    assert machine.is_faster(8)


def test_loads_that_queue_up_are_measured_with_those_before_them() -> None:
    machine = Machine(block_ms=1.0).learn()
    before = machine.worth.figures()
    for _ in range(16):
        first_ms = machine.now_ms
        for job in (101, 102):
            machine.worth.begin_load(job, 20, 20 * BLOCK_TOKENS)
        for job in (101, 102):
            machine.worth.begin_step(0, 0)
            machine.now_ms = first_ms + 2 + (20 if job == 101 else 40)
            machine.worth.end_load(job, good=True)
            machine.worth.end_step()
    assert machine.worth.figures() == before


def test_always_is_always() -> None:
    worth = CostModel("always", clock=lambda: 0.0)
    worth._took.extend([(1, 9.0)] * 8)
    worth._prefills.extend([(100, 0.001)] * 8)
    assert not worth.is_faster(1, 16)
    assert all(worth.decide(1, 16) for _ in range(100))


# -- beside others


def test_a_load_that_is_over_before_the_step_of_others_is_costs_none_of_that_time() -> None:
    """Steps of 210 ms: a load of 8 ms is reported after 210."""
    machine = Machine(block_ms=0.1)
    machine.serve()
    for blocks in (4, 8, 16, 32, 64) * 4:
        machine.load(blocks, tokens=2_001)
        machine.step()
    assert machine.is_faster(8)


def test_what_is_known_better_is_not_forgotten_among_long_steps() -> None:
    machine = Machine().learn()
    before = machine.worth.figures()
    for blocks in (4, 8, 16, 32, 64) * 4:
        machine.load(blocks, tokens=2_001)
    after = machine.worth.figures()
    assert after["load_block_us"] == pytest.approx(before["load_block_us"], rel=0.01)
    assert after["load_fixed_us"] == pytest.approx(before["load_fixed_us"], rel=0.01)


def test_loads_that_outlast_the_steps_of_others_are_seen_to_be_slow() -> None:
    machine = Machine().learn()
    machine.block_ms = 20.0
    for blocks in (8, 16, 24, 32) * 4:
        machine.load(blocks, tokens=20)
    machine.step()
    assert not machine.is_faster(16), "it takes 320 ms, and computing 25.6"


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


def test_a_trial_beside_long_steps_of_others_is_enough_too() -> None:
    machine = slow()
    machine.block_ms = 0.2
    machine.load(16, tokens=2_001)
    machine.step()
    assert machine.decide(16)


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


# -- loads inside the step


def test_loads_inside_a_step_are_told_from_what_it_computes() -> None:
    machine = Machine(in_step=True)
    machine.serve()
    for blocks in (4, 8, 16, 32, 64):
        machine.load(blocks, tokens=blocks, requests=1)
    figures = machine.worth.figures()
    assert figures["prefill_tokens_per_s"] == 10_000
    assert (figures["load_fixed_us"], figures["load_block_us"]) == (2_000, 200)
    assert not machine.is_faster(1) and machine.is_faster(2), "nobody misses a step"


def test_before_the_rate_is_known_a_load_inside_a_step_says_nothing() -> None:
    machine = Machine(in_step=True)
    for blocks in (4, 8, 16, 32, 64):
        machine.load(blocks, tokens=100)
    assert machine.worth.figures() == {}
    assert machine.decide(2)


def test_loads_of_one_step_are_one_load() -> None:
    machine = Machine(in_step=True)
    machine.serve()
    for blocks in (4, 8, 16, 32, 64):
        jobs = [next(machine.jobs) for _ in range(2)]
        for job in jobs:
            machine.worth.begin_load(job, blocks // 2, blocks // 2 * BLOCK_TOKENS)
        machine.worth.begin_step(2, 2)
        machine.now_ms += machine.load_ms + machine.block_ms * blocks + machine.computes_ms(2, 2)
        for job in jobs:
            machine.worth.end_load(job, good=True)
        machine.worth.end_step()
    figures = machine.worth.figures()
    assert (figures["load_fixed_us"], figures["load_block_us"]) == (2_000, 200)


def test_what_workers_tell_counts_however_late_the_engine_hears_of_it() -> None:
    """An engine with long steps hears of a load a step later; that is no reason to believe that
    loads are slow."""
    told, guessed = (CostModel(clock=lambda: clock[0]) for _ in range(2))
    clock = [0.0]
    for worth in (told, guessed):
        for job in range(LEAST_SAMPLES):
            worth.begin_step(8_000, 1)
            clock[0] += 0.4
            worth.end_step()
            worth.begin_load(job, 256, 4_096)
            for _ in range(2):
                worth.begin_step(8_000, 8)
            clock[0] += 0.4
            worth.end_step()
            clock[0] += 0.4
            worth.end_load(job, good=True, took_s=0.01 if worth is told else None)
            worth.end_step()
    assert told.is_faster(256, 4_096), "ten milliseconds instead of two hundred"
    assert not guessed.is_faster(256, 4_096), "this is what it would believe otherwise"
