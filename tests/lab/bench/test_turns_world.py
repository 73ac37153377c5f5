"""The store that the benchmark of turns fills."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep_lab.bench.turns_world import SLAB_SLOTS, Turns, World


def test_it_holds_what_was_put_into_it_and_notes_its_longest_turn() -> None:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        world = World(8192, Path(directory))
        world.fill("t", 1 + 20 * 16, 16)
        assert len(world.store.blocks.table) == 321 and len(world.leaves) == 20
        assert world.put("t", b"", world.keys(512)) == 0
        assert world.store.slabs.capacity_bytes == 2 * SLAB_SLOTS * 4096
        turns = Turns()
        assert [turns.take(lambda: 7), turns.take(lambda: sum(range(100_000)))][0] == 7
        world.note("sum", 1, turns)
        (row,) = world.rows
        assert row["turns"] == 2 and row["longest_cpu_ms"] > 0
