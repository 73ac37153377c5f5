"""Some seeds of `kvkeep chaos`, and some of its mutants. `make chaos` runs many, and all."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.chaos.plan import draw
from kvkeep_lab.chaos.record import Outcome
from kvkeep_lab.chaos.run import ChaosRun

SEEDS = range(int(os.environ.get("KVKEEP_CHAOS_SEEDS", "25")))

# What each must be seen as, and the seed from which on it is sought: the first that shows it now.
QUICK_MUTANTS: dict[str, tuple[set[str], int]] = {
    "skip-proof": ({"broken_rules"}, 13),
    "read-on": ({"broken_rules"}, 0),
    "report-early": ({"wrong_bytes"}, 4),
    "publish-early": ({"broken_rules", "wrong_bytes"}, 0),
    "evict-pinned": ({"broken_rules", "wrong_bytes"}, 0),
    "release-without-unpin": ({"broken_rules"}, 1),
    "skip-ghost": ({"wrong_bytes"}, 2),
    "skip-fence": ({"wrong_bytes"}, 19),
    "forget-disk-lease": ({"leaked_leases"}, 3),
    "keep-promotions": ({"leaked_blocks", "leaked_leases"}, 16),
    "confirm-unheard": ({"broken_rules"}, 81),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_wrong(seed: int) -> None:
    outcome = ChaosRun(draw(seed)).run()
    assert not outcome.violation, f"replay: kvkeep chaos --seed {seed}\n" + "\n".join(
        outcome.story[-40:]
    )


@pytest.mark.parametrize("mutant", QUICK_MUTANTS)
def test_a_planted_bug_is_noticed(mutant: str) -> None:
    findings, first = QUICK_MUTANTS[mutant]
    seen: Outcome | None = None
    with planted(mutant):
        for seed in range(first, first + 200):
            seen = ChaosRun(draw(seed)).run()
            if seen.violation:
                break
    assert seen is not None
    assert seen.finding in findings, seen.violation
