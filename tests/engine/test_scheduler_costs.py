"""Loads that take longer than computing are left out, and the answers stay right. The test says how
fast time passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvkeep.connector.cost_model import SKIPS_BEFORE_TRIAL, CostModel
from kvkeep.engine.request import Request
from kvkeep.engine.step import Step, StepOutput
from kvkeep_lab.fuzz.engine import Fuzz
from kvkeep_lab.simulation.oracle import OracleModel

NAME = "num_kvkeep_extra_cached_tokens"
BLOCKS = 5
TOKEN_S = 0.001


class Slow:
    """An engine whose tokens take a millisecond each, and whose loads take `block_s` a block."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.now_s, self.block_s = 0.0, 0.02
        self.texts = 0
        self.planner = rig.scheduler.planner
        in_step = rig.config.sync_loads
        self.planner.costs = CostModel(loads_in_step=in_step, clock=lambda: self.now_s)
        self.loads_s: dict[Any, float] = {}  # how long each load under way takes
        self._run, rig.engine.workers.run = rig.engine.workers.run, self._run_in_time

    def _run_in_time(self, step: Step) -> StepOutput:
        output: StepOutput = self._run(step)
        self.now_s += TOKEN_S * sum(step.num_scheduled_tokens.values())
        loads = step.metadata.loads.items()
        self.loads_s |= {job: self.block_s * load.blocks for job, load in loads}
        self.now_s += sum(self.loads_s[job] for job, _ in loads)
        for report in output.reports:
            report.loads.update(
                {
                    job: replace(outcome, seconds=self.loads_s[job])
                    for job, outcome in report.loads.items()
                }
            )
        return output

    def serve(self, *, stored: bool = True) -> Request:
        """Serves a new prompt, of which the cache has all blocks or none."""
        self.texts += 1
        tokens = self.rig.prompt(BLOCKS, which=self.texts)
        if stored:
            self.rig.seed(tokens)
        request: Request = self.rig.add(tokens, max_tokens=2, kv_transfer_params={NAME: None})
        self.rig.run()
        return request

    def serve_many(self, count: int) -> set[tuple[float, float]]:
        """What these requests loaded and what they skipped, in blocks."""
        served = [self.serve() for _ in range(count)]
        return {(self.rig.cached(each)[1], each.metrics.skipped_tokens / 4) for each in served}


@pytest.fixture(params=[False, True], ids=["async", "sync"])
def slow(request: Any, rig: Callable[..., Any]) -> Slow:
    """One that has computed some prompts."""
    made = Slow(rig(sync_loads=request.param, num_blocks=512))
    for _ in range(4):
        made.serve(stored=False)
    return made


def test_slow_loads_are_left_out_and_the_answers_are_the_same(slow: Slow) -> None:
    assert slow.serve_many(4) == {(BLOCKS, 0)}, "it learns how slow they are"
    before = slow.rig.loads, slow.rig.stored
    assert slow.serve_many(5) == {(0, BLOCKS)}
    assert slow.rig.requests[-1].reply_params == {NAME: 0}
    assert (slow.rig.loads, slow.rig.stored) == before, "the cache has these blocks"
    assert not slow.rig.cache.leases
    counts = slow.planner.counts
    assert (counts["skipped_loads"], counts["skipped_tokens"]) == (5, 5 * BLOCKS * 4)


def test_fast_loads_are_done(slow: Slow) -> None:
    slow.block_s = 0.0001
    assert slow.serve_many(12) == {(BLOCKS, 0)}
    assert slow.planner.counts["skipped_loads"] == 0


def test_when_loads_are_fast_again_they_are_done_again(slow: Slow) -> None:
    while not slow.serve().metrics.skipped_tokens:
        pass
    slow.block_s = 0.0001
    skipped = 1
    while slow.serve().metrics.skipped_tokens:
        skipped += 1
    assert skipped == SKIPS_BEFORE_TRIAL
    assert slow.serve_many(8) == {(BLOCKS, 0)}


def test_a_step_that_fails_is_no_measure(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        slow.now_s += 60.0
        raise RuntimeError("the step")

    before = slow.planner.costs.figures()
    for at in range(20):
        slow.rig.add(slow.rig.prompt(BLOCKS, which=f"failing {at}"), max_tokens=1)
        with monkeypatch.context() as broken:
            broken.setattr(OracleModel, "forward", fail)
            with pytest.raises(RuntimeError, match="the step"):
                slow.rig.step()
        slow.rig.run()
    assert slow.planner.costs.figures() == before


def test_whatever_is_decided_the_answers_are_those_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions: list[bool] = []
    chance = random.Random(7)

    def decide(costs: CostModel, blocks: int, tokens: int) -> bool:
        decisions.append(chance.random() < 0.5)
        return decisions[-1]

    monkeypatch.setattr(CostModel, "decide", decide)
    loaded = sum(Fuzz(seed).run().external_cached_tokens for seed in range(2, 8))
    assert loaded and {*decisions} == {False, True}
