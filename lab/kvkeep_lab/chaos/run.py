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
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep_lab.chaos.checks import Checks
from kvkeep_lab.chaos.client import CLIENT_FILES, ChaosClient
from kvkeep_lab.chaos.disk import ChaosDisk
from kvkeep_lab.chaos.faults import Faults
from kvkeep_lab.chaos.machine import simulated_machine
from kvkeep_lab.chaos.network import ChaosNetwork
from kvkeep_lab.chaos.plan import (
    Arrival,
    DiskItem,
    EngineItem,
    HostsItem,
    Moment,
    Plan,
    Rate,
)
from kvkeep_lab.chaos.probe import Probe
from kvkeep_lab.chaos.record import Outcome, Record, Violation
from kvkeep_lab.chaos.server import ChaosServer
from kvkeep_lab.chaos.shared import ChaosShared, Clears
from kvkeep_lab.chaos.shared_service import SharedService
from kvkeep_lab.chaos.truth import Truth
from kvkeep_lab.simulation.simulation import Killed, Simulation

_SLOT_BYTES = 4096
_SLAB_BYTES = 4 * _SLOT_BYTES
_SLICE_US = 100_000
_PATIENCE_US = 15_000_000
_PREFIX_CHARS = 24
_SESSIONS_TIME_OUT_US = 11_000_000  # those that nobody attached to, too


@dataclass(frozen=True)
class Cluster:
    """The parts of a run on one host, for what happens in it beside its plan."""

    simulation: Simulation
    server: ChaosServer
    clients: list[ChaosClient]
    checks: Checks
    network: ChaosNetwork
    faults: Faults


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
        self._rates = {item.fault: item.chance for item in plan.items if isinstance(item, Rate)}
        self._hosts: list[Cluster] = []
        self._service: SharedService | None = None
        self._clears = Clears()
        self._requests = 0
        self._refused: Counter[int] = Counter()  # by host

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
        # Servers tell engines this path: a longer one makes their messages longer.
        prefix = f"kvkeep-chaos-{os.getpid()}-".ljust(_PREFIX_CHARS, "-")
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=memory if memory.is_dir() else None))
        outcome = Outcome(self._plan.seed)
        sys.unraisablehook, before = _ignoring_the_killed(sys.unraisablehook), sys.unraisablehook
        gc.disable()  # what is found to be gone, and when, is no matter of the seed
        simulated = ExitStack()
        simulated.enter_context(simulated_machine(self._simulation, self._plan.seed))
        try:
            self._set_up(directory)
            self._simulation.run(self._plan.duration_ms * 1000)
            self._settle()
            self._probe()
            outcome.finished = sum(host.checks.answers() for host in self._hosts)
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
            for host in self._hosts:
                for client in host.clients:
                    client.clean_up()
                if host.server.is_up:
                    host.server.stop(keep=False)
            simulated.close()
            shutil.rmtree(directory, ignore_errors=True)
            gc.enable()
            sys.unraisablehook = before
        outcome.requests = self._requests
        outcome.events = self._simulation.steps + self.record.messages
        outcome.faults = dict(self.record.faults)
        outcome.hosts = len(self._hosts)
        outcome.clears = len(self._clears.complete)
        for server in (host.server for host in self._hosts):
            outcome.hit_blocks += server.hit_blocks
            outcome.adopted_blocks += server.adopted_blocks
            if server.tier is not None:
                outcome.written_blocks += server.tier.written_blocks
                outcome.promoted_blocks += server.tier.promoted_blocks
            if server.shared is not None:
                outcome.tier_hits += server.shared.hits
        return outcome

    def _set_up(self, directory: Path) -> None:
        plan, simulation = self._plan, self._simulation
        shares = [item for item in plan.items if isinstance(item, HostsItem)]
        hosts = shares[0].hosts if shares else 1
        if shares:
            self._service = SharedService(simulation, self._rates, self.record, plan.seed)
        engines = [item for item in plan.items if isinstance(item, EngineItem)]
        for number in range(hosts):
            numbered = [
                (at, item) for at, item in enumerate(engines) if item.host % hosts == number
            ]
            self._add_host(number, numbered, directory)
        for item in plan.items:
            if isinstance(item, Arrival):
                simulation.at(item.at_ms * 1000, lambda item=item: self._arrive(item))  # type: ignore[misc]
            elif isinstance(item, Moment):
                simulation.at(item.at_ms * 1000, lambda item=item: self._carry_out(item))  # type: ignore[misc]
        self._prepare(self._hosts[0])

    def _add_host(
        self, number: int, engines: list[tuple[int, EngineItem]], directory: Path
    ) -> None:
        """A server and its engines, with a network of their own."""
        plan, simulation, record = self._plan, self._simulation, self.record
        network = ChaosNetwork(simulation, plan.seed, self._rates, record, host=number)
        if number:
            directory = directory / str(number)
            directory.mkdir()
        pool_bytes = -(-plan.pool_blocks * _SLOT_BYTES // _SLAB_BYTES) * _SLAB_BYTES
        disks = [
            ChaosDisk(item, simulation, network.rates, record, _SLAB_BYTES, plan.seed)
            for item in plan.items
            if isinstance(item, DiskItem)
        ]
        shared = None
        if self._service is not None:
            shared = ChaosShared(number, self._service, self._clears, record, directory, plan.seed)
        server = ChaosServer(
            simulation,
            network,
            record,
            directory,
            pool_bytes,
            _SLAB_BYTES,
            plan.seed,
            disks[0] if disks else None,
            shared,
            number,
        )
        server.start()
        clients = [
            ChaosClient(at, item, plan.cuts[item.cut], network, record, self._patience)
            for at, item in engines
        ]
        checks = Checks(server, clients, self._truth, record)
        server.after_request = lambda: self._after_request(self._hosts[number])
        server.before_tier_copy = checks.before_tier_copy
        server.after_movement = checks.forget_usage
        server.after_start = checks.begin_anew
        for client in clients:
            client.before_copy = checks.before_copy
        faults = Faults(simulation, network, server, clients, checks, record)
        self._hosts.append(Cluster(simulation, server, clients, checks, network, faults))

    @property
    def _patience(self) -> str:
        """How long engines wait for blocks of the tier."""
        tiers = [item for item in self._plan.items if isinstance(item, DiskItem | HostsItem)]
        return tiers[0].patience if tiers else "best_effort"

    @property
    def _clients(self) -> list[ChaosClient]:
        clients = [client for host in self._hosts for client in host.clients]
        return sorted(clients, key=lambda client: client.number)

    def _carry_out(self, moment: Moment) -> None:
        """On a host that its seed picks."""
        at = random.Random(f"host of {moment.seed}").randrange(len(self._hosts))
        self._hosts[at].faults.carry_out(moment)

    def _arrive(self, arrival: Arrival) -> None:
        clients = self._clients
        self._send(arrival, clients[arrival.engine % len(clients)])

    def _send(self, arrival: Arrival, client: ChaosClient) -> None:
        self._truth.learn(arrival, client.cut)
        client.arriving.append(arrival)
        self._requests += 1
        self.record.tell(
            "request", f"{len(arrival.tokens)} tokens to {client.process.name}, salt {arrival.salt}"
        )

    def _after_request(self, host: Cluster) -> None:
        counters = host.server.service.counters
        refused = counters.refused_blocks - counters.orphan_blocks
        if refused > self._refused[host.server.host]:
            self.record.faults["full_pool"] += 1
        self._refused[host.server.host] = refused
        host.checks.after_request()

    # -- the end

    def _settle(self) -> None:
        """The faults are over, time passes, and nobody holds anything."""
        self.record.tell("faults", "are over")
        self._rates.clear()
        for host in self._hosts:
            host.network.rates.clear()
            if host.server.shared is not None:
                host.server.shared.medium.cut_until_us = 0
        if self._service is not None:
            self._service.stalled_until_us = 0
        self._pass_time(self._unsettled, "stuck_requests")
        self._pass_time(self._of_all(Checks.leases), "leaked_leases")
        self._pass_time(self._of_all(Checks.writes), "leaked_blocks")
        self._pass_time(self._of_all(Checks.moving), "leaked_leases")
        # Only now: a session that times out gives back what it was made to forget.
        for host in self._hosts:
            host.server.process.jump(_SESSIONS_TIME_OUT_US)
        self._pass_time(self._of_all(Checks.strays), "leaked_leases")
        for host in self._hosts:
            host.checks.everything()
            host.checks.engines_hold_nothing()

    def _probe(self) -> None:
        """Lets two hosts share a prompt, if it is long enough and no quota forbids it."""
        engines = [
            (host.server, client)
            for host in self._hosts
            for client in host.clients[:1]
            if client.item.cut == 0
        ]
        long = 2 * self._plan.cuts[0].config.block_tokens
        arrivals = [item for item in self._plan.items if isinstance(item, Arrival)]
        arrivals = [arrival for arrival in arrivals if len(arrival.tokens) > long]
        if len(engines) > 1 and arrivals and not self.record.faults["quota_change"]:
            self.record.tell("probe", "two hosts share a prompt")
            Probe(self._simulation, (engines[0], engines[1]), self._send).run(arrivals[-1])

    def _of_all(self, find: Callable[[Checks], list[str]]) -> Callable[[], list[str]]:
        """What one of the checks finds, on all hosts."""
        return lambda: [each for host in self._hosts for each in find(host.checks)]

    def _unsettled(self) -> list[str]:
        """Who is not idle, after being set going again."""
        for host in self._hosts:
            server = host.server
            host.faults.end_strangers()
            if not server.is_up:
                server.start()
            server.crash_in_request = None
            server.service.draining = False
            if server.process.paused:
                server.resume()
        clients = self._clients
        for client in clients:
            client.process.paused = False
            client.stops.clear()
            client.start_if_dead()
        return [client.process.name for client in clients if not client.is_idle]

    def _close(self) -> None:
        for client in self._clients:
            client.asked_to_close = True

        def open_engines() -> list[str]:
            return [client.process.name for client in self._clients if not client.closed]

        def open_sessions() -> list[str]:
            return [
                f"session {session.number}"
                for host in self._hosts
                for session in host.server.service.sessions.all()
            ]

        self._pass_time(open_engines, "stuck_requests")
        self._pass_time(open_sessions, "leaked_leases")
        self._pass_time(self._of_all(Checks.moving), "leaked_leases")
        for host in self._hosts:
            host.checks.pool_is_whole()

    def _pass_time(self, left: Callable[[], list[str]], finding: str) -> None:
        """Until nothing is left."""
        until_us = self._simulation.now_us + _PATIENCE_US
        while left():
            if self._simulation.now_us >= until_us:
                raise Violation(finding, f"after {_PATIENCE_US // 1_000_000} s: {left()}")
            self._simulation.run(_SLICE_US)


def _ignoring_the_killed(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """What a killed thread leaves behind is cleaned up by nobody, and that is no news."""
    return lambda unraisable: None if unraisable.exc_type is Killed else hook(unraisable)
