"""What is swept in a shared directory. Ages are set, not waited for."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvkeep.testing.tiers import PLACE
from kvkeep.tiers.file_tier import FileTier
from kvkeep.tiers.sweeper import Sweeper
from kvkeep.tiers.swept_directory import SweptDirectory
from kvkeep.tiers.tier import Part

BLOCK = 1000


@pytest.fixture
def tier(tmp_path: Path) -> FileTier:
    return FileTier(tmp_path / "kv", 100 * BLOCK)


def sweeper_of(tier: FileTier) -> Sweeper:
    """Another host's."""
    return Sweeper(SweptDirectory(tier.directory), tier.sweeper.size_bytes)


def fill(tier: FileTier, blocks: int) -> list[str]:
    """Block 0 was used longest ago."""
    names = [f"{PLACE}/{number:032x}" for number in range(blocks)]
    for number, name in enumerate(names):
        assert tier.write([Part(name, [memoryview(bytes(BLOCK))])]) == [True]
        used = time.time() - 10_000 + 70 * number
        os.utime(path_of(tier, name), (used, used))
    return names


def path_of(tier: FileTier, name: str) -> Path:
    place, _, key = name.rpartition("/")
    return tier.directory / place / key[:2] / key


def there(tier: FileTier, names: list[str]) -> list[bool]:
    return [path_of(tier, name).exists() for name in names]


def test_a_full_directory_loses_what_was_used_longest_ago(tier: FileTier) -> None:
    with closing(tier):
        names = fill(tier, 98)
        assert sweeper_of(tier).turn()
        assert there(tier, names) == [False] * 8 + [True] * 90


def test_what_fits_is_left_alone_and_counted(tier: FileTier) -> None:
    with closing(tier):
        names = fill(tier, 94)
        sweeper = sweeper_of(tier)
        assert sweeper.turn()
        assert all(there(tier, names))
        assert (sweeper.usage().blocks, sweeper.usage().used_bytes) == (94, 94 * BLOCK)
        other = FileTier(tier.directory, tier.sweeper.size_bytes)
        assert other.usage().blocks == 94, "another host takes over the count"
        other.close()


def test_a_note_is_replaced_only_as_it_was_read(tier: FileTier) -> None:
    with closing(tier):
        directory = SweptDirectory(tier.directory)
        assert directory.note("sweep/written/host") is None and not directory.notes("sweep/written")
        assert directory.put_note("sweep/written/host", b"one", None)
        assert not directory.put_note("sweep/written/host", b"two", None)
        one = directory.note("sweep/written/host")
        assert one is not None and one.content == b"one"
        assert directory.put_note("sweep/written/host", b"two", one)
        assert not directory.put_note("sweep/written/host", b"three", one)
        two = directory.note("sweep/written/host")
        assert two is not None and two.content == b"two"
        assert directory.notes("sweep/written")["host"].version == two.version != one.version
        directory.remove_note("sweep/written/host")
        assert not directory.notes("sweep/written")


def test_files_without_a_writer_are_removed(tier: FileTier) -> None:
    with closing(tier):
        tmp = tier.directory / "tmp"
        (tmp / "old").write_bytes(b"x")
        (tmp / "deleted-1").mkdir()
        (tmp / "deleted-1" / "block").write_bytes(b"x")
        for name in ("old", "deleted-1"):
            os.utime(tmp / name, (0, 0))
        (tmp / "new").write_bytes(b"x")
        assert sweeper_of(tier).turn()
        assert [path.name for path in tmp.iterdir()] == ["new"]


def test_a_directory_that_is_gone_is_no_fault_of_the_sweeper(tmp_path: Path) -> None:
    sweeper = Sweeper(SweptDirectory(tmp_path / "gone"), 1)
    assert not sweeper.turn() and sweeper.usage().blocks == 0


def test_a_full_tier_refuses_until_a_sweep_has_made_room(tier: FileTier) -> None:
    with closing(tier):
        fill(tier, 100)
        more = Part(f"{PLACE}/{'ff' * 16}", [memoryview(bytes(BLOCK))])
        assert tier.write([more]) == [False]
        assert tier.sweeper.turn()
        assert tier.write([more]) == [True]


def test_what_is_written_again_was_used(tier: FileTier) -> None:
    with closing(tier):
        names = fill(tier, 98)
        assert tier.write([Part(names[0], [memoryview(bytes(BLOCK))])]) == [True]
        assert sweeper_of(tier).turn()
        assert there(tier, names) == [True] + [False] * 8 + [True] * 89
