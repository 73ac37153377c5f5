"""The target of warm restarts: it is quiet on the code as it is, adopts often, and notices bugs
that are planted."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.store import adopt as adopting
from kvkeep.store.adopt import adopt
from kvkeep.store.layouts import Layouts
from kvkeep.store.store import Store
from kvkeep_lab.fuzz import index as fuzz_index
from kvkeep_lab.fuzz.choices import random_inputs
from kvkeep_lab.fuzz.index import LeftColumns, blocks_of, left_behind, run_index


def run_all(count: int = 600, seed: int = 31) -> None:
    for data in random_inputs(seed, count, longest=120):
        run_index(data)


def test_what_is_left_undamaged_is_adopted_whole() -> None:
    columns, true_blocks = left_behind()
    store = Store(
        fuzz_index._POOL_BYTES,
        fuzz_index._SLAB_BYTES,
        fuzz_index._LIMITS,
        columns=LeftColumns(columns),
    )
    adoption = adopt(store, fuzz_index._SLABS, True, 20)
    assert set(blocks_of(store)) == true_blocks and adoption.blocks == len(true_blocks) == 12
    assert adoption.held > 3, "leased and half-written ones"


def test_it_is_quiet_in_memory_and_in_files() -> None:
    run_all()
    for first in (0, 255):
        for data in random_inputs(32, 100, longest=60):
            assert run_index(bytes([first]) + data) == (1, 0)


def test_one_input_does_not_change_what_the_next_one_finds() -> None:
    columns, _ = left_behind()
    before = {name: column.copy() for name, column in columns.items()}
    run_all(50)
    assert all(np.array_equal(before[name], column) for name, column in columns.items())


def test_seals_that_nobody_checks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopting._Found, "_check_seals", lambda self, good: None)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_all()


def test_slots_in_two_hands_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopting, "_once", lambda values, among: among.copy())
    monkeypatch.setattr(adopting._Found, "_check_seals", lambda self, good: None)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_all()


def test_checksums_of_a_layout_that_is_gone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by this target: a new layout under the number of one whose record was damaged had its
    checksums."""
    real = Layouts.open

    def keeps(self: Layouts, *arguments: object) -> object:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LeftColumns, "drop", lambda self, name: None)
            return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Layouts, "open", keeps)
    with pytest.raises(ValueError, match="broadcast"):
        run_all(2500)
