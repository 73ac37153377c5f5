"""The disk of a chaos run moves blocks, and each of its faults happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.store.operators import clear
from kvkeep.wire import messages as m
from kvkeep_lab.chaos.disk import ChaosDisk
from kvkeep_lab.chaos.network import ChaosNetwork
from kvkeep_lab.chaos.plan import DISK_RATES, Arrival, DiskItem, Moment, Plan, Rate
from kvkeep_lab.chaos.record import Outcome, Record, Violation
from kvkeep_lab.chaos.run import ChaosRun
from kvkeep_lab.chaos.server import ChaosServer
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.simulation import Simulation

SLAB_BYTES = 4 * 4096
KEYS = chain("a", 2)


class Reading:
    """A server that reads two blocks from its disk into memory at this moment."""

    def __init__(self, directory: Path) -> None:
        simulation = self.simulation = Simulation(1)
        record = Record(simulation)
        self.disk = ChaosDisk(DiskItem(4, "wait"), simulation, {}, record, SLAB_BYTES, 1)
        network = ChaosNetwork(simulation, 1, {}, record)
        sizes = 8 * SLAB_BYTES, SLAB_BYTES
        self.server = ChaosServer(simulation, network, record, directory, *sizes, 1, self.disk)
        self.server.start()
        self.peer = Peer(
            lambda frames: self.server.service.handle(frames, self.server.process.now_ms())
        ).attach()
        self.layout = self.peer.open_layout()
        assert self.peer.store(self.layout, KEYS, [bytes([at]) * 64 for at in range(2)]) == 2
        self.pass_time()
        self.clear_memory(blocks_a_turn=1024)
        assert self.found() == 0
        self.server.resume()
        while not self.disk.mover.in_flight_bytes:
            simulation.run(10)

    def pass_time(self) -> None:
        self.server.resume()
        self.simulation.run(100_000)

    def clear_memory(self, blocks_a_turn: int) -> None:
        """What is not freed in this turn stays as it is."""
        self.server.store.blocks.a_turn = blocks_a_turn
        clear(self.server.store)

    def found(self) -> int:
        lookup = m.Lookup("default", self.layout, KEYS, patience_ms=1000)
        return self.peer.ask(m.Found, lookup).blocks


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    reading = Reading(tmp_path)
    yield reading
    reading.simulation.close()
    reading.server.stop(keep=False)


def run_with_disk(plan: Plan, *faults: Rate) -> Outcome:
    """All requests come several times, and memory loses its blocks between them."""
    again = [
        replace(item, at_ms=(item.at_ms + shift) % plan.duration_ms)
        for item in plan.items
        if isinstance(item, Arrival)
        for shift in (300, 700)
    ]
    moments = [Moment(at_ms, "evicted_memory", at_ms) for at_ms in range(100, plan.duration_ms, 90)]
    items = (*plan.items, DiskItem(40, "wait"), *again, *moments, *faults)
    return ChaosRun(replace(plan, items=items)).run()


def test_engines_get_blocks_from_the_disk(make_plan: Callable[..., Plan]) -> None:
    outcome = run_with_disk(make_plan())
    assert not outcome.violation
    assert outcome.written_blocks and outcome.promoted_blocks and outcome.hit_blocks
    assert outcome.finished == outcome.requests


@pytest.mark.parametrize("fault", DISK_RATES)
def test_every_fault_of_a_disk_happens_and_is_survived(
    make_plan: Callable[..., Plan], fault: str
) -> None:
    outcome = run_with_disk(make_plan(), Rate(fault, 0.2))
    assert not outcome.violation, outcome.violation
    assert outcome.faults.get(fault, 0) > 0
    assert outcome.finished == outcome.requests


def test_what_is_cleared_while_it_is_read_may_arrive_where_no_lookup_finds_it(
    reading: Reading,
) -> None:
    reading.disk.clear("default")
    reading.clear_memory(blocks_a_turn=1)
    reading.pass_time()
    assert reading.disk.mover.in_flight_bytes == 0 == reading.found()
    reading.disk.end()
    assert reading.disk.promoted_blocks == 2


def test_a_cleared_block_that_a_lookup_finds_in_memory_is_noticed(reading: Reading) -> None:
    reading.disk.clear("default")  # and memory keeps what it reads
    with pytest.raises(Violation, match="2 cleared blocks came up from the disk"):
        reading.pass_time()
    assert reading.found() == 2
