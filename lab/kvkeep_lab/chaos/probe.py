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
        """With a service that has begun anew. All is tried again for a while: what a host thinks is
        there is written when it is used again, and a miss is remembered for some seconds."""
        tiers = [_tier(server) for server, _ in self._engines]
        self._wait(lambda: all(tier.is_settled for tier in tiers), "recovers")
        self._forget()
        self._simulation.run(_PAUSE_US)  # no clear is on its way, and nothing is written any more
        tiers[0].service.empty()
        self._simulation.run(_PAUSE_US)  # hosts note the log of clears again
        counts, first = tiers[0].tier.counts, self._engines[0][1]
        written = counts.written_blocks

        def is_written() -> bool:
            self._answer_anew(arrival, first)
            return counts.written_blocks > written

        self._wait(is_written, "gets new blocks")
        for (server, client), tier in zip(self._engines, tiers, strict=True):

            def is_found(server: ChaosServer = server, tier: ChaosShared = tier) -> bool:
                self._answer_anew(arrival, client)  # noqa: B023 (used in this turn only)
                self._forget()
                self._simulation.run(_PAUSE_US)
                promoted = tier.tier.counts.promoted_blocks
                tier.ask_again(server.process.now_ms())  # no engine computes it meanwhile
                self._simulation.run(_PAUSE_US)
                return tier.tier.counts.promoted_blocks > promoted

            self._wait(is_found, f"gives its blocks to {tier.name}")

    def _forget(self) -> None:
        """Only the service has blocks, if it has."""
        for server, client in self._engines:
            clear(server.store)
            client.commands.append(lambda engine: engine.scheduler.pool.forget_all())

    def _answer_anew(self, arrival: Arrival, client: ChaosClient) -> None:
        """Twice, from empty memory: what it computes, and what it then finds in memory."""
        self._forget()
        self._simulation.run(_PAUSE_US)
        for _ in range(2):
            client.commands.append(lambda engine: engine.scheduler.pool.forget_all())
            self._simulation.run(100_000)  # the engine has forgotten
            self._ask(arrival, client)
            self._wait(lambda: client.is_idle, "holds up no request")

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        until_us = self._simulation.now_us + RECOVERS_US
        while not done():
            if self._simulation.now_us >= until_us:
                text = f"the shared tier never {what}, though all faults have ended"
                raise Violation("broken_rules", text)
            self._simulation.run(100_000)


def _tier(server: ChaosServer) -> ChaosShared:
    assert server.shared is not None
    return server.shared
