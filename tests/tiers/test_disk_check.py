"""Every block of a disk is checked once, bad ones are dropped, and what happens meanwhile counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_life import SHAPES, store

from kvkeep.store.layouts import Layout
from kvkeep.tiers.disk_check import DiskCheck
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.mover import Check
from kvkeep.units import MIB

MOST_BYTES = MIB


class Disk:
    def __init__(self, directory: Path) -> None:
        self.files = DiskFiles.open(directory, 16 * MIB, MIB)
        self.index = DiskIndex(
            self.files.data_bytes, self.files.slab_bytes, None, self.files.recovered()
        )

    def put(self, tenant: str, shape: Layout, blocks: int) -> bytes:
        keys = os.urandom(16 * blocks)
        store(self.files, self.index, tenant, shape, b"", keys)
        return keys

    def offsets(self, tenant: str, shape: Layout, keys: bytes) -> list[int]:
        hit = self.index.find(tenant, shape, keys, 0, 0)
        if hit is None:
            return []
        self.index.release(hit.number, 0)
        return [int(each) for each in hit.offsets]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk")
    yield made
    made.files.close()


def checked(check: DiskCheck, bad: set[int], most_blocks: int = 8) -> list[int]:
    """Checks all blocks; those at the offsets `bad` are bad. Returns the offsets."""
    found: list[int] = []
    number = 0
    while (job := check.next(number := number + 1, most_blocks, MOST_BYTES)) is not None:
        offsets = offsets_of(job)
        assert len(offsets) <= most_blocks and len(offsets) * job.nbytes <= MOST_BYTES
        assert offsets == sorted(offsets)  # the disk is read forwards
        check.ended(job, np.array([each not in bad for each in offsets]), "", 0)
        found += offsets
    return found


def offsets_of(job: Check) -> list[int]:
    return [int(each) for each in np.frombuffer(job.offsets, "<i8")]


def test_every_block_of_every_layout_is_checked_once(disk: Disk) -> None:
    wanted: list[int] = []
    for number, shape in enumerate(SHAPES[:2]):
        keys = disk.put(f"t{number}", shape, 20)
        wanted += disk.offsets(f"t{number}", shape, keys)
    check = DiskCheck(disk.index)
    assert sorted(checked(check, set())) == sorted(wanted)
    counts = check.counts
    assert (counts.blocks, counts.bad_blocks, check.total_blocks) == (40, 0, 40)
    assert counts.nbytes == 20 * sum(
        Layout(0, b"", each.shard_bytes).slot_bytes for each in SHAPES[:2]
    )


def test_bad_blocks_are_dropped_and_counted_by_tenant(disk: Disk) -> None:
    shape = SHAPES[0]
    a, b = disk.put("a", shape, 10), disk.put("b", shape, 10)
    check = DiskCheck(disk.index)
    checked(check, {disk.offsets("a", shape, a)[3], *disk.offsets("b", shape, b)[8:]})
    assert check.counts.bad_by_tenant == {"a": 1, "b": 2} and check.counts.bad_blocks == 3
    assert len(disk.offsets("a", shape, a)) == 3 and len(disk.offsets("b", shape, b)) == 8


def test_blocks_that_cannot_be_read_stay(disk: Disk) -> None:
    keys = disk.put("a", SHAPES[0], 4)
    check = DiskCheck(disk.index)
    job = check.next(1, 8, MOST_BYTES)
    assert job is not None
    check.ended(job, np.array([True, False, False, True]), "Input/output error (EIO)", 0)
    assert (check.counts.unreadable_blocks, check.counts.bad_blocks) == (2, 0)
    assert len(disk.offsets("a", SHAPES[0], keys)) == 4


def test_a_block_that_is_cleared_while_it_is_read_keeps_its_place(disk: Disk) -> None:
    """Else another block could be written there, and look bad."""
    disk.put("a", SHAPES[0], 4)
    check = DiskCheck(disk.index)
    job = check.next(1, 8, MOST_BYTES)
    assert job is not None
    disk.index.clear("a")
    while disk.index.store.tidy(0):
        pass
    keys = disk.put("b", SHAPES[0], 4)
    assert not set(disk.offsets("b", SHAPES[0], keys)) & set(offsets_of(job))
    check.ended(job, np.zeros(4, np.bool_), "", 0)
    assert len(disk.offsets("b", SHAPES[0], keys)) == 4


def test_a_disk_without_blocks(disk: Disk) -> None:
    assert DiskCheck(disk.index).next(1, 8, MOST_BYTES) is None
