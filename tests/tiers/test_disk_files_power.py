"""Power cuts: nothing wrong is ever served, everything acknowledged is there, cleared stays cleared.

Each seed is one life of a tier with several ends (see disk_life.py)."""

from __future__ import annotations

from collections import Counter

import pytest
from disk_life import Life, PowerCut

from kvkeep_lab.simulation.store_integrity import check_integrity

GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_whatever_a_power_cut_leaves(group: int, request: pytest.FixtureRequest) -> None:
    rounds = 50 if request.config.getoption("--tier") == "nightly" else 6
    seen: Counter[str] = Counter()
    for seed in range(group * rounds, (group + 1) * rounds):
        life = Life(seed)
        try:
            for _ in range(4):
                life.live(life.random.randint(1, 120))
                life.restart(power=life.random.random() < 0.8)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        seen["checked"] += life.checked
        seen["lost"] += life.lost
        check_integrity(life.index.store)
    assert seen["checked"] > 10 * rounds and seen["lost"], f"too tame a life: {seen}"


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_while_the_log_is_compacted_again_and_again(seed: int) -> None:
    life = Life(seed)
    for _ in range(6):
        life.plan()
        life.commit()
    life.left = life.random.randint(1, 12)
    try:
        while True:
            life.files.compact()
    except PowerCut:
        life.left = 1 << 30
        life.shown = life.visible() & life.acknowledged
    life.restart(power=True)
