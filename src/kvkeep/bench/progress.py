"""How far a benchmark has come, for people who wait for it."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """On stderr: never part of the answer."""
    print(text, file=sys.stderr, flush=True)
