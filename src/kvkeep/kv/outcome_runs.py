"""Runs of equal outcomes, as reports and explanations of requests have them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def runs_of(outcomes: bytes | bytearray | NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Each outcome by number, with how many blocks in a row have it."""
    found = np.frombuffer(outcomes, dtype=np.uint8)
    if not len(found):
        return []
    # several times as fast as np.diff with values before and behind
    starts = [0, *(np.flatnonzero(found[1:] != found[:-1]) + 1).tolist()]
    stops = [*starts[1:], len(found)]
    return [
        (number, stop - start)
        for number, start, stop in zip(found[starts].tolist(), starts, stops, strict=True)
    ]
