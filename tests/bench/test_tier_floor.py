"""The floor of a disk: it moves bytes, and says how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.bench import tier_floor
from kvkeep.errors import KVKeepError
from kvkeep.units import KIB, MIB

needs_fio = pytest.mark.skipif(not tier_floor.has_fio(), reason="fio is not installed")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(16 * MIB))
    return path


@pytest.mark.parametrize(
    "floor", [pytest.param(tier_floor.fio, marks=needs_fio), tier_floor.threads]
)
@pytest.mark.parametrize("direction", ["read", "write"])
def test_it_moves_bytes(floor: Callable[..., float], direction: str, data: Path) -> None:
    assert floor(data, direction, 64 * KIB, 16 * MIB) > 0
    assert data.stat().st_size == 16 * MIB


@needs_fio
def test_fio_reads_until_the_end_of_the_block(data: Path) -> None:
    with tier_floor.reading(data, 1e9) as fio:
        fio.again()
        while not fio.moved()[0]:
            time.sleep(0.01)
        nbytes, seconds = fio.moved()
        assert nbytes > 0 and seconds > 0
    with pytest.raises(OSError):
        fio.moved()  # its process has ended


@needs_fio
def test_a_file_that_fio_cannot_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(KVKeepError, match="fio failed"),
        tier_floor.reading(tmp_path / "folder", 1e9),
    ):
        pass
