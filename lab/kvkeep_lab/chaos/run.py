"""A chaos run: engines, clients, threads, network, server and store in simulated time, and faults
of every kind.

    outcome = ChaosRun(draw(7)).run()

Everything is the real code, and all that is not in it comes from the seed: who runs next, what
becomes of a message, when which process stops. During the run nothing may be wrong that a reader,
an engine or an operator could notice (chaos_checks.py). Then the faults end and some time passes:
every request has its answer, nothing is held."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep_lab.chaos.checks import Checks
from kvkeep_lab.chaos.client import CLIENT_FILES, ChaosClient
from kvkeep_lab.chaos.disk import ChaosDisk
from kvkeep_lab.chaos.faults import Faults
from kvkeep_lab.chaos.network import ChaosNetwork
from kvkeep_lab.chaos.plan import Arrival, DiskItem, EngineItem, Moment, Plan, Rate
from kvkeep_lab.chaos.record import Outcome, Record, Violation
from kvkeep_lab.chaos.server import ChaosServer
from kvkeep_lab.chaos.truth import Truth
from kvkeep_lab.simulation.simulation import Killed, Simulation

_SLOT_BYTES = 4096
_SLAB_BYTES = 4 * _SLOT_BYTES
_SLICE_US = 100_000
_PATIENCE_US = 15_000_000
_SESSIONS_TIME_OUT_US = 11_000_000  # those that nobody attached to, too


@dataclass(frozen=True)
class Cluster:
    """The parts of a run, for what happens in it beside its plan."""

    simulation: Simulation
    server: ChaosServer
    clients: list[ChaosClient]
    checks: Checks


class ChaosRun:
    """One run of a plan, which must have an engine. When it is over, nothing of it is left.
    `prepare` is called before the first event."""

    def __init__(
        self,
        plan: Plan,
        *,
        detailed: bool = False,
        prepare: Callable[[Cluster], None] = lambda cluster: None,
    ) -> None:
        self._plan = plan
        self._prepare = prepare
        stops_in = CLIENT_FILES if plan.any_line else frozenset[str]()
        self._simulation = Simulation(plan.seed, plan.switch_chance, stops_in=stops_in)
        self.record = Record(self._simulation, detailed)
        self._truth = Truth()
        rates = {item.fault: item.chance for item in plan.items if isinstance(item, Rate)}
        self._network = ChaosNetwork(self._simulation, plan.seed, rates, self.record)
        self._requests = 0
        self._refused = 0

    def run(self) -> Outcome:
        """Runs to the end. Whatever is found is in the outcome."""
        try:
            return self._run()
        finally:
            # servers, engines and simulation know each other, and have files open and mapped:
            vars(self).clear()
            gc.collect()  # only a collection ends them, and by itself it may come after many runs

    def _run(self) -> Outcome:
        memory = Path("/dev/shm")
        directory = Path(
            tempfile.mkdtemp(
                prefix=f"kvkeep-chaos-{os.getpid()}-", dir=memory if memory.is_dir() else None
            )
        )
        outcome = Outcome(self._plan.seed)
        sys.unraisablehook, before = _ignoring_the_killed(sys.unraisablehook), sys.unraisablehook
        gc.disable()  # what is found to be gone, and when, is no matter of the seed
        try:
            self._set_up(directory)
            self._simulation.run(self._plan.duration_ms * 1000)
            self._settle()
            outcome.finished = self._checks.answers()
            self._close()
        except Violation as violation:
            outcome.finding, outcome.violation = violation.finding, violation.text
            self.record.tell("violation", str(violation))
        except Exception as error:
            # guard: whatever left a thread or an event, it is a finding, and other seeds run
            place = "".join(traceback.format_tb(error.__traceback__)[-2:])
            outcome.finding = "engine_errors"
            outcome.violation = f"{type(error).__name__}: {error}\n{place}"
            self.record.tell("violation", outcome.violation)
        finally:
            outcome.simulated_ms = self._simulation.now_us // 1000
            outcome.story = list(self.record.story)
            self._simulation.close()
            for client in self._clients:
                client.clean_up()
            if self._server.is_up:
                self._server.stop(keep=False)
            shutil.rmtree(directory, ignore_errors=True)
            gc.enable()
            sys.unraisablehook = before
        outcome.requests = self._requests
        outcome.events = self._simulation.steps + self.record.messages
        outcome.faults = dict(self.record.faults)
        outcome.hit_blocks = self._server.hit_blocks
        outcome.adopted_blocks = self._server.adopted_blocks
        if self._server.disk is not None:
            outcome.written_blocks = self._server.disk.written_blocks
            outcome.promoted_blocks = self._server.disk.promoted_blocks
        return outcome

    def _set_up(self, directory: Path) -> None:
        plan, simulation, record = self._plan, self._simulation, self.record
        pool_bytes = -(-plan.pool_blocks * _SLOT_BYTES // _SLAB_BYTES) * _SLAB_BYTES
        disks = [
            ChaosDisk(item, simulation, self._network.rates, record, _SLAB_BYTES, plan.seed)
            for item in plan.items
            if isinstance(item, DiskItem)
        ]
        self._server = ChaosServer(
            simulation,
            self._network,
            record,
            directory,
            pool_bytes,
            _SLAB_BYTES,
            plan.seed,
            disks[0] if disks else None,
        )
        self._server.start()
        engines = [item for item in plan.items if isinstance(item, EngineItem)]
        self._clients = [
            ChaosClient(number, item, plan.cuts[item.cut], self._network, record, self._patience)
            for number, item in enumerate(engines)
        ]
        self._checks = Checks(self._server, self._clients, self._truth, record)
        self._server.after_request = self._after_request
        self._server.before_disk_copy = self._checks.before_disk_copy
        self._server.after_movement = self._checks.forget_usage
        self._server.after_start = self._checks.begin_anew
        for client in self._clients:
            client.before_copy = self._checks.before_copy
        faults = self._faults = Faults(
            simulation, self._network, self._server, self._clients, self._checks, record
        )
        for item in plan.items:
            if isinstance(item, Arrival):
                simulation.at(item.at_ms * 1000, lambda item=item: self._arrive(item))  # type: ignore[misc]
            elif isinstance(item, Moment):
                simulation.at(item.at_ms * 1000, lambda item=item: faults.carry_out(item))  # type: ignore[misc]
        self._prepare(Cluster(simulation, self._server, self._clients, self._checks))

    @property
    def _patience(self) -> str:
        """How long engines wait for blocks of the disk."""
        disks = [item for item in self._plan.items if isinstance(item, DiskItem)]
        return disks[0].patience if disks else "best_effort"

    def _arrive(self, arrival: Arrival) -> None:
        client = self._clients[arrival.engine % len(self._clients)]
        self._truth.learn(arrival, client.cut)
        client.arriving.append(arrival)
        self._requests += 1
        self.record.tell(
            "request", f"{len(arrival.tokens)} tokens to {client.process.name}, salt {arrival.salt}"
        )

    def _after_request(self) -> None:
        counters = self._server.service.counters
        refused = counters.refused_blocks - counters.orphan_blocks
        if refused > self._refused:
            self.record.faults["full_pool"] += 1
        self._refused = refused
        self._checks.after_request()

    # -- the end

    def _settle(self) -> None:
        """The faults are over, time passes, and nobody holds anything."""
        self.record.tell("faults", "are over")
        self._network.rates.clear()
        self._pass_time(lambda: not self._unsettled(), "stuck_requests", self._unsettled)
        self._pass_time(lambda: not self._checks.leases(), "leaked_leases", self._checks.leases)
        self._pass_time(lambda: not self._checks.writes(), "leaked_blocks", self._checks.writes)
        self._pass_time(lambda: not self._checks.moving(), "leaked_leases", self._checks.moving)
        # Only now: a session that times out gives back what it was made to forget.
        self._server.process.jump(_SESSIONS_TIME_OUT_US)
        self._pass_time(lambda: not self._checks.strays(), "leaked_leases", self._checks.strays)
        self._checks.everything()
        self._checks.engines_hold_nothing()

    def _unsettled(self) -> list[str]:
        """Who is not idle, after being set going again."""
        server = self._server
        self._faults.end_strangers()
        if not server.is_up:
            server.start()
        server.crash_in_request = None
        server.service.draining = False
        if server.process.paused:
            server.resume()
        for client in self._clients:
            client.process.paused = False
            client.stops.clear()
            client.start_if_dead()
        return [client.process.name for client in self._clients if not client.is_idle]

    def _close(self) -> None:
        for client in self._clients:
            client.asked_to_close = True

        def open_sessions() -> list[str]:
            return [f"session {session.number}" for session in self._server.service.sessions.all()]

        self._pass_time(
            lambda: all(client.closed for client in self._clients),
            "stuck_requests",
            lambda: ["engines do not close"],
        )
        self._pass_time(lambda: not open_sessions(), "leaked_leases", open_sessions)
        self._checks.pool_is_whole()

    def _pass_time(
        self, done: Callable[[], bool], finding: str, left: Callable[[], list[str]]
    ) -> None:
        until_us = self._simulation.now_us + _PATIENCE_US
        while not done():
            if self._simulation.now_us >= until_us:
                raise Violation(finding, f"after {_PATIENCE_US // 1_000_000} s: {left()}")
            self._simulation.run(_SLICE_US)


def _ignoring_the_killed(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """What a killed thread leaves behind is cleaned up by nobody, and that is no news."""
    return lambda unraisable: None if unraisable.exc_type is Killed else hook(unraisable)
