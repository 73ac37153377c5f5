"""Many tenants are cleared in memory and on a disk, some of them a turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvkeep.server.clearing import TENANTS_A_TURN, Clearing
from kvkeep.server.shared import tenant_digest
from kvkeep.store.store import Store
from kvkeep_lab.bench.turns_tiers import Tiered

TENANTS = 3 * TENANTS_A_TURN


@pytest.fixture
def world() -> Iterator[Tiered]:
    """Some tenants are in memory, some on the disk, and some on both."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        world = Tiered(4 * TENANTS, Path(directory))
        for number in range(TENANTS):
            if number % 3:
                world.put(f"t{number}", b"", world.keys(1))
            if number % 2:
                world.put_on_disk(f"t{number}", b"", world.keys(1))
        yield world


def holding(store: Store) -> set[str]:
    """The tenants of which a lookup could find a block."""
    return {tenant.name for tenant in store.tenants if tenant.index}


def test_a_turn_clears_a_few_tenants_and_in_the_end_all_are_clear(world: Tiered) -> None:
    clearing, turns = world.movement.clear_all(), 0
    assert world.movement.is_clearing and world.movement.is_held
    while world.movement.is_held:
        before = len(holding(world.store)), len(holding(world.index.store))
        world.movement.turn(0)
        assert before[0] - len(holding(world.store)) <= TENANTS_A_TURN
        assert before[1] - len(holding(world.index.store)) <= TENANTS_A_TURN
        turns += 1
    assert turns > 3 and not holding(world.store) and not holding(world.index.store)
    assert (clearing.in_memory, clearing.on_disks) == (2 * TENANTS // 3, TENANTS // 2)


def test_what_is_stored_after_its_tenant_was_cleared_stays(world: Tiered) -> None:
    clearing = world.movement.clear_all()
    clearing.turn()
    world.put("t1", b"", world.keys(1))
    while clearing.turn():
        pass
    assert holding(world.store) == {"t1"}


def test_only_tenants_that_were_named_are_cleared_wherever_they_are(world: Tiered) -> None:
    in_memory, on_disk = holding(world.store), holding(world.index.store)
    gone = {"t1", "t3", "t4"}  # on both, on the disk, in memory
    clearing = Clearing(world.store, [world.index], {tenant_digest(name) for name in gone})
    while clearing.turn():
        pass
    assert holding(world.store) == in_memory - gone
    assert holding(world.index.store) == on_disk - gone
    assert (clearing.in_memory, clearing.on_disks) == (2, 2)


def test_nothing_moves_meanwhile(world: Tiered) -> None:
    keys = world.keys(2)
    world.put_on_disk("reader", b"", keys)
    ask = (1, "reader", world.layout, keys, 0, 0, 0, False)
    clearing = world.movement.clear_all()
    assert world.movement.coming(*ask) == (0, 0)
    while clearing.turn():
        pass
    world.put_on_disk("reader", b"", keys)
    while world.movement.has_to_do:
        world.movement.turn(0)
    assert world.movement.coming(*ask)[0] == 2
