"""The server's own memory, beside the pool: what it has, and whether messages that nobody can read yet are too much.

ZMQ keeps the parts of a message until the last one has come. It limits the size of a part and the number of messages,
but not the number of parts, and tells nobody how many it has. What they take is seen in the memory of the process:

    own memory = what there was when nothing was under way + blocks since + replies not read + what has come in
                                                                                               └ at most INCOMING_BYTES
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

from kvkeep.units import MIB

INCOMING_BYTES: Final = 1024 * MIB  # more takes longer to read than a client waits for its answer
_BLOCK_BYTES = 400  # of the index, at most: see `kvkeep bench index`
_SETTLED_BYTES = 128 * MIB
_SETTLE_S, _SETTLE_STEP_S = 5.0, 0.02
_STATM_UNIT_BYTES = os.sysconf("SC_PAGE_SIZE")


def own_bytes() -> int:
    """Memory of this process that it shares with nobody: not the pool, not libraries."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * _STATM_UNIT_BYTES


def give_back() -> None:
    """What was freed goes back to the system, as far as the C library lets us ask for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class OwnMemory:
    """Compares what the process has with what it had when nothing was under way."""

    def __init__(self, blocks: int = 0, measure: Callable[[], int] = own_bytes) -> None:
        self._measure = measure
        self._quiet_bytes, self._quiet_blocks = measure(), blocks

    def incoming_bytes(self, blocks: int, replies: Callable[[], int]) -> int:
        """What nothing else explains, of which there may be INCOMING_BYTES. Where that seems too much, what was freed
        is given back first, and `replies` is asked how much of it they are."""
        grown = self._grown(blocks)
        if grown <= INCOMING_BYTES:
            return grown
        give_back()
        return self._grown(blocks) - replies()

    def settle(self, blocks: int) -> None:
        """When all connections are closed: waits until their memory is free. What is not in the end was not theirs, and
        counts as the server's own from now on: it must not close connections again and again."""
        until = time.monotonic() + _SETTLE_S
        while self._grown(blocks) > _SETTLED_BYTES:
            if time.monotonic() >= until:
                self._quiet_bytes, self._quiet_blocks = self._measure(), blocks
                return
            time.sleep(_SETTLE_STEP_S)
            give_back()

    def _grown(self, blocks: int) -> int:
        return self._measure() - self._quiet_bytes - max(0, blocks - self._quiet_blocks) * _BLOCK_BYTES
