"""Blocks on their way from slots into engine memory, after they were given to the GPU: what is waited for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.gpu.device import Cuda
from kvkeep.gpu.kernels import Units
from kvkeep.gpu.staging import Ledger, Line


class Scattered(NamedTuple):
    """A part of them: its ledger, how many, when nearly all and when all are in place."""

    ledger: Ledger
    blocks: int
    nearly: Any
    done: Any


class Scattering:
    """Blocks on their way into engine memory."""

    def __init__(
        self, device: Cuda, line: Line, units: Units, parts: list[Scattered], expected: NDArray[np.uint64] | None
    ) -> None:
        self._device = device
        self._line = line
        self._units = units
        self._parts = parts
        self._count = sum(part.blocks for part in parts)
        self._expected = expected

    def good(self) -> NDArray[np.bool_]:
        """Waits until all are in place; True where the bytes have the checksum expected. A block answered False holds
        bytes that must not be used."""
        self._wait()
        good = np.ones(self._count, dtype=np.bool_)
        if self._expected is not None and self._parts:
            sums = np.concatenate([part.ledger.sums_here(part.blocks) for part in self._parts])
            good = np.equal(self._units.checksums(sums), self._expected)
        self.close()
        return good

    def close(self) -> None:
        """Waits until all are in place."""
        self._wait()
        parts, self._parts = self._parts, []
        for part in parts:
            self._line.give_back(part.ledger)

    def _wait(self) -> None:
        """Asleep for most of it, then awake, because the engine waits for us."""
        for part in self._parts:
            if part.nearly is not None:
                self._device.wait(part.nearly)
            self._device.wait(part.done)
