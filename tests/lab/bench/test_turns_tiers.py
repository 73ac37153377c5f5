"""The store above a disk that the benchmark of turns uses: what is on the disk comes up."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep_lab.bench.turns_tiers import Tiered


def test_blocks_on_the_disk_come_up_and_others_go_down() -> None:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        world = Tiered(8192, Path(directory))
        low, high = world.keys(300), world.keys(300)
        world.put_on_disk("t", b"", low)
        world.put("t", b"", high)
        movement, layout = world.movement, world.layout
        assert movement.coming(1, "t", layout, low, 0, 0, 0, False)[0] == 300
        movement.coming(1, "t", layout, high, 300, 0, 0, False)
        while movement.has_to_do or any(tier.jobs for tier in movement.tiers):
            movement.turn(0)
        assert world.store.lookup(1, 1, "t", layout, low, 0, 0).blocks == 300
        assert world.index.known("t", high) == 300
