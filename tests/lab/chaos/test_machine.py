from __future__ import annotations

import os
import subprocess
import sys

_STORIES = """
import hashlib, logging, os, sys
logging.disable(logging.CRITICAL)
from kvkeep_lab.chaos.run import ChaosRun
from kvkeep_lab.chaos.plan import draw
number, *seeds = map(int, sys.argv[1:])
os.getpid = lambda: number
for seed in seeds:
    outcome = ChaosRun(draw(seed), detailed=True).run()
    print(seed, outcome.events, hashlib.sha256("".join(outcome.story).encode()).hexdigest())
"""
_SEEDS = (0, 1, 2, 3, 16, 24, 402)  # the last three have several hosts


def test_a_seed_is_the_same_story_in_every_process() -> None:
    """Whatever its number, the seed of its hashes, and what it ran before."""
    stories = [
        subprocess.run(
            [sys.executable, "-c", _STORIES, str(number), *map(str, seeds)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout.splitlines()
        for number, seeds, hash_seed in ((7, _SEEDS, "1"), (7_000_000, _SEEDS[::-1], "2"))
    ]
    assert stories[0] == stories[1][::-1]
    assert len(set(stories[0])) == len(_SEEDS)
