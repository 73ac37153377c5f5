"""In the place of `Mover`: a tier's process in simulated time, as the server sees it."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from kvkeep.tiers.mover import Job, Result, _flight_of, _InFlight
from kvkeep.tiers.mover_process import MappedPool
from kvkeep_lab.simulation.simulation import Simulation

JOB_BYTES: Final = 2 * 4096
_MOST_BYTES = 16 * 4096
_DYING_US = (1_000, 400_000)


class ChaosMover(ABC):
    """The jobs in flight. Its process goes on while the server is paused."""

    def __init__(self, simulation: Simulation, pool: MappedPool, chance: random.Random) -> None:
        self.job_bytes = JOB_BYTES
        self.problem = ""
        self.is_dead = False
        self.after_result: Callable[[], None] = lambda: None
        self.before_copy: Callable[[int, bool], None] = lambda slot, is_write: None
        self._simulation = simulation
        self._pool = pool
        self._random = chance
        self._jobs: dict[int, tuple[_InFlight, int]] = {}  # and since when
        self._results: deque[Result] = deque()

    @abstractmethod
    def _begin(self, job: Job) -> None:
        """Gives a job to the process."""

    @abstractmethod
    def _end(self) -> None:
        """The process ends now, in the middle of what it does."""

    @property
    def in_flight_bytes(self) -> int:
        return sum(flight.nbytes for flight, _ in self._jobs.values())

    @property
    def can_read(self) -> bool:
        return self._has_room("read", self.job_bytes)

    @property
    def can_write(self) -> bool:
        return self._has_room("write", self.job_bytes)

    @property
    def oldest_s(self) -> float:
        first = min((since for _, since in self._jobs.values()), default=None)
        return (self._simulation.now_us - first) / 1e6 if first is not None else 0.0

    @property
    def is_alive(self) -> bool:
        return not self.is_dead

    def fileno(self) -> int:
        return -1

    def send(self, job: Job) -> bool:
        flight = _flight_of(job)
        if not self._has_room(flight.kind, flight.nbytes):
            return False
        self._jobs[job.number] = flight, self._simulation.now_us
        self._begin(job)
        return True

    def results(self) -> list[Result]:
        found = [] if self.problem else list(self._results)
        self._results.clear()
        if self.is_dead:
            found = [
                Result(number, self.problem, bytes(flight.blocks))
                for number, (flight, _) in self._jobs.items()
            ]
        for result in found:
            del self._jobs[result.number]
        return found

    def kill(self, problem: str = "the mover was killed") -> None:
        """It ends a little later: a process that waits for a tier does not end at once."""
        if not self.problem:
            self.problem = problem
            self._simulation.after(self._random.randint(*_DYING_US), self.die)

    def die(self) -> None:
        """Now."""
        if not self.is_dead:
            self._end()
            self.is_dead = True
            os.close(self._pool.lock)
            self._pool.segments.close()
            self._pool.segments.files.close()
            self.after_result()

    def close(self) -> bool:
        self.problem = self.problem or "the mover was killed"
        self.die()
        return True

    def _has_room(self, kind: str, nbytes: int) -> bool:
        same = any(flight.kind == kind for flight, _ in self._jobs.values())
        return not self.problem and (self.in_flight_bytes + nbytes <= _MOST_BYTES or not same)

    def _take(self, result: Result) -> None:
        """The process has answered."""
        self._results.append(result)
        self.after_result()
