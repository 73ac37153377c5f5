"""Loads that take longer than computing, in time that the test lets pass: they are left out, and
answers are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.connector.cost_model import SKIPS_BEFORE_TRIAL, CostModel
from kvkeep.engine.request import Request
from kvkeep.engine.step import Step, StepOutput
from kvkeep_lab.fuzz.engine import Fuzz

BLOCK_TOKENS = 4
NAME = "num_kvkeep_extra_cached_tokens"
BLOCKS = 5
TOKEN_S = 0.001


class Slow:
    """An engine with a cache behind a bus: a token takes a millisecond, a block of four as long as
    `block_s` says."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.now_s, self.block_s = 0.0, 0.02
        self.texts = 0
        connector = rig.scheduler.planner
        assert connector is not None
        self.connector = connector
        connector.costs = CostModel(loads_in_step=rig.config.sync_loads, clock=lambda: self.now_s)
        self.loads_s: dict[Any, float] = {}  # how long each load under way takes
        self._run, rig.engine.workers.run = rig.engine.workers.run, self._run_in_time  # type: ignore[method-assign]

    def _run_in_time(self, step: Step) -> StepOutput:
        output = self._run(step)
        self.now_s += TOKEN_S * sum(step.num_scheduled_tokens.values())
        loads = step.metadata.loads.items()
        self.loads_s |= {job: self.block_s * load.blocks for job, load in loads}
        self.now_s += sum(self.loads_s[job] for job, _ in loads)
        for report in output.reports:
            report.seconds.update({job: self.loads_s[job] for job in report.loaded})
        return output

    def serve(self, *, stored: bool = True) -> Request:
        """A prompt that nobody sent before, of which the cache has all blocks or none."""
        self.texts += 1
        tokens = self.rig.prompt(BLOCKS, which=self.texts)
        if stored:
            self.rig.seed(tokens)
        request = self.rig.add(tokens, max_tokens=2, kv_transfer_params={NAME: None})
        self.rig.run()
        return request


@pytest.fixture(params=[False, True], ids=["async", "sync"])
def slow(request: Any, rig: Callable[..., Any]) -> Slow:
    """One that has computed some prompts."""
    made = Slow(rig(sync_loads=request.param, num_blocks=512))
    for _ in range(4):
        made.serve(stored=False)
    return made


def test_slow_loads_are_left_out_and_the_answers_are_the_same(slow: Slow) -> None:
    learning = [slow.serve() for _ in range(4)]
    assert [each.metrics.external_cached_tokens for each in learning] == [BLOCKS * BLOCK_TOKENS] * 4
    loads, stores = len(slow.rig.cache.loads), len(slow.rig.cache.stores)
    for request in [slow.serve() for _ in range(5)]:
        assert request.metrics.external_cached_tokens == 0
        assert request.metrics.skipped_tokens == BLOCKS * BLOCK_TOKENS
        assert request.reply_params == {NAME: 0}
        assert request.output_tokens == slow.rig.answer(request)
    assert len(slow.rig.cache.loads) == loads
    assert len(slow.rig.cache.stores) == stores, "the cache has these blocks"
    assert not slow.rig.cache.leases
    assert (slow.connector.counts["skipped_loads"], slow.connector.counts["skipped_tokens"]) == (
        5,
        5 * BLOCKS * BLOCK_TOKENS,
    )


def test_fast_loads_are_done(slow: Slow) -> None:
    slow.block_s = 0.0001
    for request in [slow.serve() for _ in range(12)]:
        assert request.metrics.external_cached_tokens == BLOCKS * BLOCK_TOKENS
        assert request.metrics.skipped_tokens == 0
    assert slow.connector.counts["skipped_loads"] == 0


def test_when_the_bus_is_fast_again_loads_are_done_again(slow: Slow) -> None:
    while not slow.serve().metrics.skipped_tokens:
        pass
    slow.block_s = 0.0001
    skipped = 1
    while slow.serve().metrics.skipped_tokens:
        skipped += 1
    assert skipped == SKIPS_BEFORE_TRIAL
    assert [slow.serve().metrics.skipped_tokens for _ in range(8)] == [0] * 8


def test_a_step_that_fails_is_no_measure(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        slow.now_s += 60.0
        raise RuntimeError("the step")

    before = slow.connector.costs.figures()
    for at in range(20):
        slow.rig.add(slow.rig.prompt(BLOCKS, which=f"failing {at}"), max_tokens=1)
        with monkeypatch.context() as broken:
            broken.setattr(slow.rig.engine.workers, "_compute", fail)
            with pytest.raises(RuntimeError, match="the step"):
                slow.rig.step()
        slow.rig.run()
    assert slow.connector.costs.figures() == before


def test_whatever_is_decided_the_answers_are_those_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions: list[bool] = []
    chance = random.Random(7)

    def decide(worth: CostModel, blocks: int, tokens: int) -> bool:
        decisions.append(chance.random() < 0.5)
        return decisions[-1]

    monkeypatch.setattr(CostModel, "decide", decide)
    loaded = sum(Fuzz(seed).run().external_cached_tokens for seed in range(30))
    assert loaded and {*decisions} == {False, True}
