"""A tier's process as the server sees it: one result for each job, none before the process has
ended."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.tiers.mover import Find, Job, Result
from kvkeep_lab.chaos.mover import ChaosMover
from kvkeep_lab.simulation.simulation import Simulation


class Mover(ChaosMover):
    """Its process does what the test says."""

    def __init__(self, simulation: Simulation) -> None:
        files = SimpleNamespace(close=lambda: None)
        segments = SimpleNamespace(close=lambda: None, files=files)
        pool: Any = SimpleNamespace(lock=os.open(os.devnull, os.O_RDONLY), segments=segments)
        super().__init__(simulation, pool, random.Random(1))
        self.begun: list[Job] = []
        self.has_ended = False

    def _begin(self, job: Job) -> None:
        self.begun.append(job)

    def _end(self) -> None:
        self.has_ended = True

    def answer(self, number: int) -> None:
        self._take(Result(number, found=3))


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(1)


def find(number: int) -> Find:
    return Find(number, "v1/a/0/b", bytes(16))


def test_a_job_has_one_result(simulation: Simulation) -> None:
    mover = Mover(simulation)
    assert mover.send(find(1)) and mover.in_flight_bytes > 0 and mover.results() == []
    simulation.run(2_000_000)
    assert mover.oldest_s == 2.0
    mover.answer(1)
    assert [each.found for each in mover.results()] == [3]
    assert mover.results() == [] and mover.oldest_s == 0.0 == mover.in_flight_bytes
    assert mover.close() and mover.has_ended


def test_one_that_is_killed_fails_its_jobs_when_it_has_ended(simulation: Simulation) -> None:
    mover, told = Mover(simulation), list[bool]()
    mover.after_result = lambda: told.append(mover.is_dead)
    assert mover.send(find(1))
    mover.kill("too slow")
    mover.answer(1)  # too late
    assert mover.results() == [] and mover.is_alive and not mover.send(find(2))
    simulation.run(1_000_000)
    assert not mover.is_alive and told == [False, True]
    assert [(each.number, each.error) for each in mover.results()] == [(1, "too slow")]
    assert mover.results() == []
