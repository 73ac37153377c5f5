"""Random lives, all right; and lives of engines with a planted fault, which must come to light."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job
from kvkeep.engine import engine
from kvkeep.engine.blocks import BlockPool
from kvkeep.engine.scheduler import Scheduler
from kvkeep_lab.fuzz.engine import Fuzz, Outcome, Violation

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet_and_single_threaded() -> Iterator[None]:
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    torch.set_num_threads(threads)
    logging.disable(disabled)


def total(outcomes: list[Outcome], name: str) -> int:
    return sum(getattr(each, name) for each in outcomes)


@pytest.mark.parametrize(("model", "seeds"), [("oracle", 40), ("gqa", 10), ("mla", 10)])
def test_answers_are_those_without_a_cache(model: str, seeds: int) -> None:
    outcomes = [Fuzz(seed, model).run() for seed in range(seeds)]
    for name in (
        "requests",
        "tokens",
        "aborted",
        "preemptions",
        "local_cached_tokens",
        "external_cached_tokens",
    ):
        assert total(outcomes, name) > 0, f"no run has {name}: it tests less than it should"
    happened = {name for each in outcomes for name, count in each.faults.items() if count}
    assert {"loads", "stores", "failed_blocks", "bit_flips", "lost", "corrupted"} <= happened
    if model == "oracle":
        assert total(outcomes, "checked_bytes") > 0 and total(outcomes, "failed") > 0
        assert total(outcomes, "promoted") > 0


def test_the_same_seed_is_the_same_life() -> None:
    first, second = Fuzz(7).run(), Fuzz(7).run()
    assert dataclasses.asdict(first) == dataclasses.asdict(second)
    assert dataclasses.asdict(first) != dataclasses.asdict(Fuzz(8).run())


def replace(target: object, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


# Faults that need a rarer meeting of events are killed by the named tests of the scheduler.
MUTANTS: dict[str, Patch] = {
    "a failed load goes unnoticed": replace(Scheduler, "_recover", lambda *_: set()),
    "a bad block stays in the prefix cache": replace(BlockPool, "forget", lambda *_: None),
    "all of a load is taken for good": replace(
        Job, "good_blocks", lambda self: len(self.block_ids)
    ),
    "blocks are written into that stores have not read": replace(
        BlockPool, "take_given", lambda _: set()
    ),
    "a request is told of blocks that it computed itself": replace(
        RequestState, "hold", lambda *_: None
    ),
    "a request is told of blocks that failed to load": replace(
        RequestState,
        "count_loaded",
        lambda self, stop, _real=RequestState.count_loaded: _real(self, stop + 1),
    ),
    "salts are left out of the key": replace(
        engine, "root_key", lambda identity, salt, _real=engine.root_key: _real(identity, None)
    ),
}


def _live(lives: int) -> None:
    for seed in range(lives):
        Fuzz(seed).run()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_comes_to_light(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    monkeypatch.setattr("kvkeep_lab.fuzz.engine._STEPS_AT_MOST", 1_000)
    with pytest.raises(Violation, match="model oracle"):
        _live(100)
