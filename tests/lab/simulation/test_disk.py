from __future__ import annotations

from random import Random

from kvkeep_lab.simulation.disk import SECTOR, SimulatedFile


def content(file: SimulatedFile, offset: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    assert file.read(offset, [memoryview(found)]) == nbytes
    return bytes(found)


def test_what_was_synced_survives_a_power_cut() -> None:
    file = SimulatedFile(8 * SECTOR)
    file.write(SECTOR, [memoryview(b"a" * SECTOR), memoryview(b"b" * SECTOR)])
    file.sync()
    file.cut(Random(1))
    assert content(file, SECTOR, 2 * SECTOR) == b"a" * SECTOR + b"b" * SECTOR


def test_of_what_was_not_synced_any_sectors_survive() -> None:
    kept = set()
    for seed in range(40):
        file = SimulatedFile(4 * SECTOR)
        file.write(0, [memoryview(b"a" * 4 * SECTOR)])
        assert content(file, 0, 4 * SECTOR) == b"a" * 4 * SECTOR
        file.cut(Random(seed))
        sectors = [content(file, at * SECTOR, SECTOR) for at in range(4)]
        assert set(sectors) <= {b"a" * SECTOR, bytes(SECTOR)}
        kept.add(sum(sector[0] != 0 for sector in sectors))
    assert kept == {0, 1, 2, 3, 4}
