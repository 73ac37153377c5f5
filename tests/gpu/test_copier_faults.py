"""Whichever command the GPU's driver refuses, nobody writes any more into what is given back: slots
of a store that failed, and blocks of a load that did. Lives as in test_copier_orders, with faults
at any command."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest
from test_copier_orders import SIZES, World, Wrong, filled_world, small  # noqa: F401  (a fixture)

from kvkeep.client.copier import row_addresses
from kvkeep.errors import DeviceError

NOBODYS = 0xEE


class Faulty(World):
    """In slots that nobody has are known bytes, and stay."""

    def __init__(self, seed: int, rate: float) -> None:
        super().__init__(seed)
        dice = random.Random(seed + 1)
        self.device.fails = lambda: dice.random() < rate
        self.failed = 0
        for pool in self.pool:
            pool[:] = NOBODYS

    def turn(self, chance: float, *, busy: bool = True) -> None:
        super().turn(chance, busy=busy)
        if any((pool[self.free] != NOBODYS).any() for pool in self.pool):
            raise Wrong("a free slot was written into")
        for slot, content in self.full.items():
            if any(
                (pool[slot] != part).any() for pool, part in zip(self.pool, content, strict=True)
            ):
                raise Wrong("a full slot was written into")

    def begin_store(self) -> None:
        try:
            super().begin_store()
        except DeviceError:
            self.failed += 1
            store = self.stores.pop(0)
            for copy in store.copies:
                if copy is not None:
                    copy.close()
            store.sources.close()
            self._free(store.slots)

    def end_store(self) -> None:
        super().end_store()
        self._free([])  # that of one for which there was no room

    def _free(self, slots: list[int]) -> None:
        self.free += slots
        for pool in self.pool:
            pool[self.free] = NOBODYS

    def begin_load(self) -> None:
        try:
            super().begin_load()
        except DeviceError:
            self.failed += 1
            load = self.loads.pop(0)
            for moving in load.moving:
                moving.close()
            with self.device.on(self.device.engine):  # which computes them instead
                for piece, memory in enumerate(self.memory):
                    for block in load.blocks:
                        new = self.computed[piece][block] = self.bytes.integers(
                            0, 256, SIZES[piece], dtype=np.uint8
                        )
                        self.device.give(lambda row=memory[block], new=new: np.copyto(row, new))
            self.targets.difference_update(load.blocks)


@pytest.mark.parametrize("rate", [0.003, 0.02])
def test_nobody_writes_into_what_was_given_back(rate: float) -> None:
    failed = 0
    for seed in range(120):
        world = Faulty(seed, rate)
        world.run()
        failed += world.failed
    assert failed > 50


def test_a_store_whose_end_fails_has_ended_when_it_is_closed() -> None:
    """At any of the commands that give the last of it to the GPU."""
    for at in count():
        world = World(at)
        for pool in world.pool:
            world.copier.pin(pool.ctypes.data, pool.nbytes)
        world.device.elsewhere = lambda: None
        reading, slots = world.copier.begin_store(0, verify=True, ready=None), world.pool[0][:6]
        for start in (0, 3):
            reading.make_room()
            reading.gather(np.arange(start, start + 3), row_addresses(slots)[start : start + 3])
            reading.deliver()
        asked = count()
        world.device.fails = lambda asked=asked, at=at: next(asked) == at
        try:
            reading.end()
        except DeviceError:
            reading.close()
            slots[:] = NOBODYS
            while world.device.step():
                pass
            assert (slots == NOBODYS).all(), f"command {at}"
        else:
            break
    assert at >= 5


@pytest.mark.parametrize("buffers", [0, 1])
def test_a_reading_that_fails_leaves_the_reads_before_it_covered(buffers: int) -> None:
    """So an engine that halts it then, and writes, writes after those."""
    for seed in range(40):
        world, slots = filled_world(seed)
        was = world.memory[0].copy()
        before, reading = (world.copier.begin_store(0, verify=True, ready=None) for _ in range(2))
        assert before.read(np.arange(3), slots[:3]) == 3
        before.end()
        world.device.entered = 0
        # The launch after that gate.
        world.device.fails = lambda device=world.device: device.entered > buffers
        with pytest.raises(DeviceError):
            reading.read(np.arange(9, 15), slots[9:15])
        world.device.fails = lambda: False
        assert reading.halt() == buffers * reading.at_a_time
        world.copier.fence_reads()
        world.device.give(lambda memory=world.memory[0]: memory.fill(7))
        reading.close()
        before.sums()
        assert (world.pool[0][:3] == was[:3]).all()
