"""The server's own memory, beside the pool: what it has, and whether messages that nobody can read yet are too much.

ZMQ keeps the parts of a message until the last one has come. It limits the size of a part and the number of messages,
but not the number of parts, and tells nobody how many it has. What they take is seen in the memory of the process:

    own memory = what there was when nothing was under way + most blocks since + replies not read + what has come in

and of what has come in there may be INCOMING_BYTES.
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
_STILL_STEPS, _FALL_BYTES = 25, MIB  # when it has not fallen by so much in so many steps, it falls no more
_STATM_BYTES = 256  # more than its seven numbers ever take
_STATM_UNIT_BYTES = os.sysconf("SC_PAGE_SIZE")


class Statm:
    """Memory of this process that it shares with nobody: not the pool, not libraries. Its file is open from the start:
    clients can use up all descriptors, and it must be measured all the same."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def own_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._file, _STATM_BYTES, 0).split()
        return (int(resident) - int(shared)) * _STATM_UNIT_BYTES

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def give_back() -> None:
    """What was freed goes back to the system, as far as the C library lets us ask for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class OwnMemory:
    """Compares what the process has with what it had when nothing was under way."""

    def __init__(self, measure: Callable[[], int], blocks: int = 0) -> None:
        self._measure = measure
        self._first_bytes = measure()
        self._begin(self._first_bytes, blocks)

    def incoming_bytes(self, blocks: int, replies: Callable[[], int]) -> int:
        """What nothing else explains, of which there may be INCOMING_BYTES. Where that seems too much, what was freed
        is given back first, and `replies` is asked how much of it they are."""
        grown = self._grown(blocks)
        if grown <= INCOMING_BYTES:
            return grown
        give_back()
        return self._grown(blocks) - replies()

    def settle(self, blocks: int) -> None:
        """When all connections are closed: waits until their memory is free, for as long as it gets less. What is left
        then was not theirs, and counts as the server's own: it must not close connections again and again."""
        until, still = time.monotonic() + _SETTLE_S, 0
        grown = least = self._grown(blocks)
        while grown > _SETTLED_BYTES:
            if still >= _STILL_STEPS or time.monotonic() >= until:
                self._begin(self._measure(), blocks)
                return
            time.sleep(_SETTLE_STEP_S)
            give_back()
            grown, still = self._grown(blocks), still + 1
            if grown <= least - _FALL_BYTES:
                least, still = grown, 0

    def _begin(self, own_bytes: int, blocks: int) -> None:
        """A quiet moment, from which on growth counts."""
        self._quiet_bytes = own_bytes
        self._quiet_blocks = self._most_blocks = blocks

    def _grown(self, blocks: int) -> int:
        """The index keeps what it took for the most blocks when they go, most of it: so these explain it, not those of
        now. And what `settle` took for the server's own, and was freed later, was not."""
        own_bytes = self._measure()
        self._most_blocks = max(self._most_blocks, blocks)
        if own_bytes < self._quiet_bytes and self._quiet_bytes > self._first_bytes:
            self._begin(max(own_bytes, self._first_bytes), blocks)
        return own_bytes - self._quiet_bytes - (self._most_blocks - self._quiet_blocks) * _BLOCK_BYTES
