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

# Those that show in the first few seeds, each with what it must be seen as.
QUICK_MUTANTS = {
    "skip-proof": {"broken_rules"},
    "read-on": {"broken_rules"},
    "report-early": {"wrong_bytes"},
    "publish-early": {"wrong_bytes"},
    "evict-pinned": {"broken_rules", "wrong_bytes"},
    "release-without-unpin": {"broken_rules"},
    "skip-ghost": {"wrong_bytes"},
    "skip-fence": {"wrong_bytes"},
    "forget-disk-lease": {"leaked_leases"},
    "keep-promotions": {"leaked_blocks", "leaked_leases"},
    "confirm-unheard": {"broken_rules"},
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


@pytest.mark.parametrize(("mutant", "findings"), QUICK_MUTANTS.items())
def test_a_planted_bug_is_noticed(mutant: str, findings: set[str]) -> None:
    seen: Outcome | None = None
    with planted(mutant):
        for seed in range(200):
            seen = ChaosRun(draw(seed)).run()
            if seen.violation:
                break
    assert seen is not None
    assert seen.finding in findings, seen.violation
