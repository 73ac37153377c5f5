"""After the faults: a shared tier is used again by itself, and what one host computes another
finds. A run without this would be content with hosts that never share a block."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep.store.operators import clear
from kvkeep_lab.chaos.client import ChaosClient
from kvkeep_lab.chaos.plan import Arrival
from kvkeep_lab.chaos.record import Violation
from kvkeep_lab.chaos.server import ChaosServer
from kvkeep_lab.chaos.shared import ChaosShared
from kvkeep_lab.simulation.simulation import Simulation

RECOVERS_US = 90_000_000  # the longest pause is a minute
_PAUSE_US = 3_500_000  # a miss lasts two seconds, what hosts publish is read each second
_WITHIN_US = 15_000_000


class Probe:
    """`ask` sends the request to an engine. The first of two engines, each on its own host, computes
    it; then memory is emptied, and both are to find it."""

    def __init__(
        self,
        simulation: Simulation,
        engines: tuple[tuple[ChaosServer, ChaosClient], tuple[ChaosServer, ChaosClient]],
        ask: Callable[[Arrival, ChaosClient], None],
    ) -> None:
        self._simulation = simulation
        self._engines = engines
        self._ask = ask

    def run(self, arrival: Arrival) -> None:
        """With a service that has begun anew."""
        tiers = [_tier(server) for server, _ in self._engines]
        self._wait(lambda: all(tier.is_settled for tier in tiers), RECOVERS_US, "recovers")
        self._forget()
        self._simulation.run(_PAUSE_US)  # no clear is on its way, and nothing is written any more
        tiers[0].service.empty()
        written = tiers[0].tier.counts.written_blocks
        first = self._engines[0][1]
        for _ in range(2):  # what the host thinks is there already is written when it is used again
            self._answer(arrival, first)
            first.commands.append(lambda engine: engine.scheduler.pool.forget_all())
        self._wait(
            lambda: tiers[0].tier.counts.written_blocks > written, _WITHIN_US, "gets new blocks"
        )
        for (server, client), tier in zip(self._engines, tiers, strict=True):
            self._forget()
            self._simulation.run(_PAUSE_US)
            self._answer(arrival, client)
            self._forget()
            self._simulation.run(_PAUSE_US)
            promoted = tier.tier.counts.promoted_blocks
            tier.ask_again(server.process.now_ms())  # without an engine that computes it meanwhile
            self._wait(
                lambda tier=tier, before=promoted: tier.tier.counts.promoted_blocks > before,  # type: ignore[misc]
                _WITHIN_US,
                f"gives its blocks to {tier.name}",
            )

    def _forget(self) -> None:
        """Only the service has blocks, if it has."""
        for server, client in self._engines:
            clear(server.store)
            client.commands.append(lambda engine: engine.scheduler.pool.forget_all())

    def _answer(self, arrival: Arrival, client: ChaosClient) -> None:
        self._simulation.run(100_000)  # the engine has forgotten
        self._ask(arrival, client)
        self._wait(lambda: client.is_idle, _WITHIN_US, "holds up no request")

    def _wait(self, done: Callable[[], bool], within_us: int, what: str) -> None:
        until_us = self._simulation.now_us + within_us
        while not done():
            if self._simulation.now_us >= until_us:
                text = f"the shared tier never {what}, though all faults have ended"
                raise Violation("broken_rules", text)
            self._simulation.run(100_000)


def _tier(server: ChaosServer) -> ChaosShared:
    assert server.shared is not None
    return server.shared
