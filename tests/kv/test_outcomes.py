"""Outcomes of blocks: their names, and runs of them."""

from __future__ import annotations

import pytest

from kvkeep.kv import outcomes


def test_every_outcome_has_a_number_and_a_name_of_its_own() -> None:
    assert [outcomes.NUMBERS[name] for name in outcomes.NAMES] == [*range(len(outcomes.NAMES))]
    assert outcomes.NAMES[outcomes.LACKED] == "lacked"
    assert outcomes.NAMES[outcomes.NOT_KNOWN] == "not_known"


@pytest.mark.parametrize(
    ("found", "runs"),
    [
        (b"", []),
        (b"\x02", [(2, 1)]),
        (b"\x02\x02\x02", [(2, 3)]),
        (b"\x01\x02\x02\x01\x00", [(1, 1), (2, 2), (1, 1), (0, 1)]),
    ],
)
def test_runs_say_how_many_blocks_in_a_row_have_each_outcome(
    found: bytes, runs: list[tuple[int, int]]
) -> None:
    assert outcomes.runs_of(found) == outcomes.runs_of(bytearray(found)) == runs


@pytest.mark.parametrize(
    ("blocks", "after"), [(0, []), (1, [1]), (4, [1, 2, 4]), (10, [1, 2, 4, 8, 10])]
)
def test_probes_follow_powers_of_two_and_the_last_block(blocks: int, after: list[int]) -> None:
    assert outcomes.probed_blocks(blocks) == after
