"""How long an engine's own copies wait while blocks are stored or loaded.

An engine copies a step's inputs to its GPU, such as block tables, and the step's tokens to the
host. A copy engine of the GPU may stay with our copies meanwhile. So here a thread makes one such
copy after the other, in the direction of a transfer, for as long as that takes, and each is timed
from being asked for until it has arrived."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvkeep.bench.transfer_floor import Gpu

COPY_BYTES = 256 << 10  # block tables of some hundred requests
_ALONE = 100  # copies while nothing else is copied
_REST_S = 0.0002


class OwnCopies:
    """Those of an engine, on a stream of their own."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._device = gpu.torch.ones(COPY_BYTES, dtype=gpu.torch.uint8, device=gpu.device)
        self._host = gpu.pinned(COPY_BYTES)
        self._host.fill_(1)
        gpu.synchronize()

    def seconds(self, direction: str) -> float:
        """Of one: to the host, as stores go, or to the device."""
        pair = self._host, self._device
        to, source = pair if direction == "store" else pair[::-1]
        started = time.perf_counter()
        with self._gpu.stream(2):
            to.copy_(source, non_blocking=True)
        self._gpu.wait(2)
        return time.perf_counter() - started

    @contextmanager
    def beside(self, direction: str) -> Iterator[list[float]]:
        """What each took that began while the block was under way."""
        took: list[float] = []
        over = threading.Event()

        def copy() -> None:
            while not over.is_set():
                took.append(self.seconds(direction))
                time.sleep(_REST_S)

        thread = threading.Thread(target=copy, name="own-copies", daemon=True)
        thread.start()
        try:
            yield took
        finally:
            over.set()
            thread.join()

    def row(self, direction: str, computes: bool, took: list[float]) -> dict[str, Any]:
        alone = [self.seconds(direction) for _ in range(_ALONE)]
        return {
            "direction": direction,
            "computes": computes,
            "bytes": COPY_BYTES,
            "samples": len(took),
            "alone_ms": round(statistics.median(alone) * 1e3, 3),
            "p50_ms": round(statistics.median(took) * 1e3, 3) if took else None,
            "most_ms": round(max(took) * 1e3, 3) if took else None,
        }
