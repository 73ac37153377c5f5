"""The key benchmark runs, and names what it could not measure."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep_lab.bench import keys


def test_measures_every_candidate_that_is_installed(without_unit: Callable[..., list[str]]) -> None:
    result = keys.run(blocks=64, repeats=2)
    assert {"blake2b-128", "KeyChain, from a list", "KeyChain, from numpy"} <= set(
        result["us_per_block"]
    )
    assert all(microseconds > 0 for microseconds in result["us_per_block"].values())
    assert not set(result["left_out"]) & set(result["us_per_block"])
    assert without_unit(result) == []
