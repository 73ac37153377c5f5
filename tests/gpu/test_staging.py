"""Staging memory: bays come in turn, ledgers are nobody else's, and room aside is given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pretend import Pretend

from kvkeep.gpu.staging import MOST_BLOCKS, Line


@pytest.fixture
def line() -> Any:
    return Line(Pretend(), 3 << 12, 4096)  # type: ignore[arg-type]


def test_bays_come_in_turn_and_each_is_as_large_as_the_largest_block(line: Line) -> None:
    bays = [line.next_bay() for _ in range(6)]
    assert len({id(bay) for bay in bays}) == 3 and bays[:3] == bays[3:]
    assert all(bay.memory.numel() * 8 == line.bay_bytes >= 4096 for bay in bays)
    assert Line(Pretend(), 0, 12_288).bay_bytes == 12_288  # type: ignore[arg-type]


@pytest.mark.parametrize(("pitch", "blocks"), [(4096, 1), (1024, 4), (8, 512), (4096 * 3, 0)])
def test_blocks_a_bay(line: Line, pitch: int, blocks: int) -> None:
    assert line.blocks_a_bay(pitch) == blocks


def test_a_bay_never_takes_more_blocks_than_a_call() -> None:
    line = Line(Pretend(), 3 * 8 * MOST_BLOCKS * 2, 8)  # type: ignore[arg-type]
    assert line.blocks_a_bay(8) == MOST_BLOCKS


def test_however_many_ledgers_are_out_each_is_ones_own(line: Line) -> None:
    taken = [line.take_ledger() for _ in range(9)]
    assert len({id(ledger) for ledger in taken}) == 9
    line.give_back(taken[3])
    assert line.take_ledger() is taken[3]


def test_a_ledger_carries_ids_out_and_sums_back(line: Line) -> None:
    ledger = line.take_ledger()
    ledger.begin(8, verify=True)
    assert ledger.sums[:8].tolist() == [0] * 8
    assert ledger.ids(np.array([5, 6]), 3).tolist() == [5, 6]
    assert ledger.ids(np.array([7]), 5).tolist() == [7]
    ledger.sums[:2] = -1
    ledger.send_sums(2)
    assert ledger.sums_here(2).tolist() == [2**64 - 1] * 2


def test_a_bounce_buffer_is_made_once_for_each_bay(line: Line) -> None:
    bay = line.next_bay()
    assert bay.bounce is None
    assert line.bounce(bay) == line.bounce(bay)
    assert bay.bounce is not None and bay.bounce.numel() * 8 == line.bay_bytes
