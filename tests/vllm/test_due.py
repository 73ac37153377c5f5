"""Nobody looks at requests that cannot have anything to store, and nobody is forgotten for that."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it")

from engine_parts import BLOCK, Engine, request

from kvkeep.vllm.arrivals import Known
from kvkeep.vllm.due import Due
from kvkeep_lab.simulation.cache import SimulatedCache


class Counting(dict[str, Known]):
    """How often somebody was looked at."""

    looks = 0

    def get(self, *asked: Any) -> Any:
        self.looks += 1
        return super().get(*asked)


def known(computed: int, next_store: int) -> Known:
    keys: Any = None
    return Known(SimpleNamespace(num_computed_tokens=computed), keys, next_store=next_store)


def compute(some: Mapping[str, Known], work: Mapping[str, int]) -> None:
    """vLLM counts a step's tokens when it has made the step."""
    for request_id, count in work.items():
        if request_id in some:
            some[request_id].request.num_computed_tokens += count


def test_steps_that_decode_are_looked_at_when_the_first_store_is_due() -> None:
    some = Counting(a=known(10, 20), b=known(10, 14), c=known(10, 100))
    due, work, seen = Due(some), dict.fromkeys("abc", 1), []
    names = {id(each): name for name, each in some.items()}
    for _ in range(9):
        seen.append([names[id(each)] for each, _ in due.after(work, is_new=False)])
        compute(some, work)
        if seen[-1]:
            some["b"].next_store = 1000
    assert seen == [[], [], [], ["b"], [], [], [], [], []]
    assert some.looks == 3 * 3, "at first, when b is due, and once more to see what it is now"
    assert [computed for _, computed in due.after(work, is_new=False)] == [20]


@pytest.mark.parametrize(
    ("work", "is_new"),
    [({"a": 1, "b": 1}, True), ({"a": 1}, False), ({"a": 2, "b": 1}, False), ({"a": 1, "c": 1}, False)],
    ids=["one is new", "one is missing", "two tokens", "another one"],
)
def test_any_other_step_is_looked_at(work: dict[str, int], is_new: bool) -> None:
    some = Counting(a=known(10, 100), b=known(10, 100), c=known(10, 100))
    due = Due(some)
    assert not due.after({"a": 1, "b": 1}, is_new=False)
    some.looks = 0
    assert not due.after({"a": 1, "b": 1}, is_new=False) and not some.looks
    assert not due.after(work, is_new=is_new) and some.looks == len(work)


def lives(seed: int) -> Iterator[tuple[Counting, dict[str, int], bool]]:
    """Requests come, are computed in parts, decode, guess, wait, are preempted, resumed, end; some are not known."""
    chance, some, waiting, running = random.Random(seed), Counting(), list[str](), list[str]()
    for number in range(400):
        if chance.random() < 0.1:
            name = f"{number}" if chance.random() < 0.7 else "again"
            if name not in (*waiting, *running):
                waiting.append(name)
                if chance.random() < 0.9:
                    some[name] = known(chance.choice([0, 0, 32]), 0)
        is_new = bool(waiting) and chance.random() < 0.5
        if is_new:
            running.append(waiting.pop())
        for name in list(running):
            if chance.random() < 0.02:
                running.remove(name)
                if chance.random() < 0.5:
                    some.pop(name, None)
                else:
                    waiting.append(name)
                    if name in some:
                        some[name].request.num_computed_tokens = 0
        counts = [1, 1, 1, 1, 2, 40] if chance.random() < 0.15 else [1]
        yield some, {name: chance.choice(counts) for name in running if chance.random() < 0.995}, is_new


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_forgotten(seed: int) -> None:
    due, found, quiet, chance = None, 0, 0, random.Random(-1 - seed)
    for some, work, is_new in lives(seed):
        due = due or Due(some)
        wanted = [
            (some[name], computed)
            for name, count in work.items()
            if name in some and (computed := some[name].request.num_computed_tokens + count) >= some[name].next_store
        ]
        some.looks = 0
        assert due.after(work, is_new=is_new) == wanted
        found, quiet = found + len(wanted), quiet + bool(work and not some.looks)
        compute(some, work)
        for each, computed in wanted:
            if chance.random() < 0.8:  # else the server has not answered, and the next step looks again
                each.next_store = computed + chance.choice([1, 16, 128])
    assert found > 50 and quiet > 50


def test_a_step_without_news_says_nothing_and_stores_nothing() -> None:
    engine = Engine(SimulatedCache(seed=1), num_blocks=60)
    engine.add(request(list(range(3 * BLOCK)), max_tokens=30))
    steps: list[Any] = []
    begin = engine.rank.bind_connector_metadata
    with mock.patch.object(engine.rank, "bind_connector_metadata", lambda step: (steps.append(step), begin(step))):
        for _ in range(25):
            engine.step()
    quiet = [step for step in steps if step.later is None]
    assert len(steps) == 25 and 20 <= len(quiet) < 25
    assert len({id(step.step) for step in quiet}) == 1 and not (quiet[0].step.stores or quiet[0].step.stores_after)
