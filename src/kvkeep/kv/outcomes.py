"""What becomes of each block of a request's prompt: which cache had it, or why it was computed.

The engine knows an outcome for every block, and reports them when the request has finished. Where it
only knows that the server lacked a block (LACKED), the server says why, from what it knew when it
answered the lookup. So the outcomes of a request always add up to its blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_PROBES: Final = 32  # of one prompt

# What the engine knows. The numbers are those of `RequestState.outcomes`.
NOT_ASKED, LOCAL, LOADED, LAST, NOT_REACHED, NOT_WORTH, LOAD_FAILED = range(7)
UNREACHABLE, REFUSED, TOO_LATE, INCOMPLETE, LACKED, OTHER_SALT, OTHER_ADAPTER = range(7, 14)
# What only the server knows of a block that it lacked.
NEVER_STORED, EVICTED, OVER_LIMIT, NO_ROOM, BEING_WRITTEN, WITHHELD, DROPPED = range(14, 21)
OTHER_IDENTITY, NOT_KNOWN = range(21, 23)

# By number: its name on the wire, in JSON and in metrics, and what it means.
OUTCOMES: Final = (
    ("not_asked", "computed without asking the server: the request may not read the cache"),
    ("local", "the engine's own prefix cache had it"),
    ("loaded", "loaded from the server"),
    ("last", "it holds the prompt's last token or is not full, so it is always computed"),
    ("not_reached", "the request ended before it came to this block"),
    ("not_worth", "the server had it, and computing was expected to take less time"),
    ("load_failed", "its load failed, or its bytes did not match their checksum"),
    ("unreachable", "no server answered in time"),
    ("refused", "the server refused the lookup, or was shutting down"),
    ("too_late", "a tier had it, or was asked for it, and did not bring it up in time"),
    ("incomplete", "the server had it without a part that this request needs"),
    ("lacked", "the server lacked it"),
    ("other_salt", "the same tokens were cached under another salt"),
    ("other_adapter", "the same tokens were cached with another adapter"),
    ("never_stored", "the server has not stored it, as far as it remembers"),
    ("evicted", "it was evicted to make room"),
    ("over_limit", "its tenant's limit did not admit it, or evicted it"),
    ("no_room", "there was no room to store it: all memory was in use or promised to others"),
    ("being_written", "it was still being written"),
    ("withheld", "its tenant held as much memory for loads as it may"),
    ("dropped", "it was cleared, or its bytes proved bad"),
    ("other_identity", "the same tokens were cached by an engine with another identity"),
    (
        "not_known",
        "the server that lacked it was replaced, has forgotten the lookup, or had explained 8,192 "
        "blocks before it",
    ),
)
NAMES: Final = tuple(name for name, _ in OUTCOMES)
NUMBERS: Final = {name: number for number, name in enumerate(NAMES)}
# What an engine may report; anything else counts as `not_known`.
REPORTED: Final = frozenset(NAMES[: OTHER_ADAPTER + 1])
# Blocks that a cache gave, and the one that none can give.
NO_MISS: Final = frozenset((LOCAL, LOADED, LAST))


def probed_blocks(blocks: int) -> list[int]:
    """After how many of a prompt's full blocks a report has probes: 1, 2, 4, ... and all of them."""
    after = [1 << exponent for exponent in range(blocks.bit_length())]
    if after and after[-1] != blocks:
        after.append(blocks)
    return after[:MAX_PROBES]


def runs_of(outcomes: bytes | bytearray | NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Each outcome by number, with how many blocks in a row have it: as reports and explanations
    of requests have them."""
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
