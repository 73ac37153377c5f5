"""A disk is a tier like any other."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvkeep.errors import TierError
from kvkeep.store import operators
from kvkeep.testing.tiers import PLACE, check_tier
from kvkeep.tiers.disk_files import DiskFile, DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.disk_tier import DiskTier
from kvkeep.tiers.tier import Part
from kvkeep.units import MIB

SIZE, SLAB = 16 * MIB, 2 * MIB


class FaultyDisk:
    """Faults of one disk, by way of its data file."""

    def __init__(self, index: DiskIndex, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index, self.directory, self.monkeypatch = index, directory, monkeypatch

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        running = threading.Event()
        read, write = DiskFile.read, DiskFile.write

        def half(file: DiskFile, offset: int, views: Sequence[memoryview]) -> None:
            write(file, offset, [view[: len(view) // 2] for view in views])
            raise OSError(errno.EIO, "half of it")

        def slow_read(file: DiskFile, offset: int, views: Sequence[memoryview]) -> int:
            running.wait()
            return read(file, offset, views)

        def slow_write(file: DiskFile, offset: int, views: Sequence[memoryview]) -> None:
            running.wait()
            write(file, offset, views)

        with self.monkeypatch.context() as patched:
            if fault == "half":
                patched.setattr(DiskFile, "write", half)
            elif fault == "stall":
                patched.setattr(DiskFile, "read", slow_read)
                patched.setattr(DiskFile, "write", slow_write)
            leases = self.lease_all() if fault == "full" else []
            try:
                yield
            finally:
                running.set()
                operators.set_default_limit(self.index.store, None, 0)
                for number in leases:
                    self.index.release(number, 0)

    def lease_all(self) -> list[int]:
        """Leaves no room: nothing may be added, and nothing can be evicted."""
        index, leases = self.index, []
        (layout,) = index.store.layouts
        for owner in index.store.tenants:
            for key, _ in owner.index.items():
                hit = index.find(owner.name, layout, key, 0, 0)
                assert hit is not None
                leases.append(hit.number)
        operators.set_default_limit(index.store, layout.blocks * layout.slot_bytes, 0)
        return leases

    def garble(self) -> None:
        data = bytearray((self.directory / "data").read_bytes())
        for at in range(0, len(data), 4096):
            data[at + 7] ^= 4
        with (self.directory / "data").open("r+b") as file:
            file.write(data)


def opened(directory: Path) -> tuple[DiskTier, DiskIndex]:
    files = DiskFiles.open(directory, SIZE, SLAB)
    index = DiskIndex(files.data_bytes, files.slab_bytes, None, files.recovered())
    return DiskTier(files, index), index


def test_a_disk_is_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "tier"

    def make() -> tuple[DiskTier, FaultyDisk]:
        shutil.rmtree(directory, ignore_errors=True)
        tier, index = opened(directory)
        return tier, FaultyDisk(index, directory, monkeypatch)

    check_tier(make)


def test_what_was_written_and_deleted_is_so_after_a_restart(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path / "tier")
    names = [f"{PLACE}/kept", "v1/other/gone"]
    data = os.urandom(5000)
    assert tier.write([Part(name, [memoryview(data)]) for name in names]) == [True, True]
    assert tier.delete("v1/other/") == 1
    tier.close()
    tier, _ = opened(tmp_path / "tier")
    assert tier.leading(names) == 1 and tier.leading(names[1:]) == 0
    view = memoryview(bytearray(5000))
    assert tier.read([Part(names[0], [view])]) == [5000] and view == data
    tier.close()


def test_a_disk_that_fails_raises_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = opened(tmp_path / "tier")
    part = Part(f"{PLACE}/a", [memoryview(bytes(100))])
    tier.write([part])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(DiskFile, "read", fail)
        with pytest.raises(TierError, match=r"the disk failed: .*Input/output error"):
            tier.read([part])
    with monkeypatch.context() as broken:
        broken.setattr(DiskFile, "sync", fail)
        with pytest.raises(TierError, match="the disk failed"):
            tier.delete("v1/")
    assert tier.delete("v1/") == 0 and tier.leading([part.name]) == 0
    tier.close()
