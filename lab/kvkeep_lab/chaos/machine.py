"""What a run would take from the machine comes from its seed: the time, threads, random names and
the number of a process. A run then depends on nothing else, so its seed replays it anywhere."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from kvkeep.client import connection, loads, rank_memory, worker
from kvkeep.connector import request_state
from kvkeep.connector.cost_model import CostModel
from kvkeep.engine import engine
from kvkeep.server import sessions
from kvkeep.server import shared as shared_tier
from kvkeep.tiers import clear_log, shared_process, summaries, tier_keys
from kvkeep_lab.simulation.simulation import Simulation
from kvkeep_lab.simulation.threads import OwnThreads, SimulatedTime

_PID = 4711


class SeededSecrets:
    """The module `secrets`, so that a seed also gives the names that are drawn, and with them the
    order of what is sorted by name."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"secrets {seed}")

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def token_hex(self, length: int) -> str:
        return self._random.randbytes(length).hex()


class OneProcess:
    """The module `os` for clients. They say the number of their process to the server, and a message
    with a larger number is longer."""

    @staticmethod
    def getpid() -> int:
        return _PID


@contextlib.contextmanager
def simulated_machine(simulation: Simulation, seed: int) -> Iterator[None]:
    """Time and threads of shared tiers are those of the simulation, and so are the times by which
    engines decide how long they wait for a tier."""
    # It is said once in a process, so the first of several runs would pass lines that others do not.
    rank_memory._note_slow_copies.cache_clear()
    threads, time = OwnThreads(simulation), SimulatedTime(simulation)
    secrets = SeededSecrets(seed)
    patches: list[tuple[Any, str, Any]] = [
        (connection, "os", OneProcess),
        (sessions, "secrets", secrets),
        (tier_keys, "secrets", secrets),
        (shared_tier, "secrets", secrets),
        (shared_tier, "time", time),
        (summaries, "time", time),
        (summaries, "threading", threads),
        (clear_log, "secrets", secrets),
        (clear_log, "threading", threads),
        (shared_process, "time", time),
        (shared_process, "threading", threads),
        (loads, "time", time),
        (worker, "time", time),
        (request_state, "time", time),
        (engine, "CostModel", partial(CostModel, clock=time.monotonic)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, simulated in patches:
        setattr(module, name, simulated)
    try:
        yield
    finally:
        for module, name, real in before:
            setattr(module, name, real)
