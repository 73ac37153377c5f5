"""An engine's own copies go the way they should, one after the other, for as long as something else
is copied."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.bench.transfer_floor import COPY_BYTES, Gpu, OwnCopies

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


class HostGpu(Gpu):
    """Stands for a GPU whose memory is the host's, and whose copies take as long as it is told."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.torch = SimpleNamespace(ones=self._ones, uint8=torch.uint8)
        self.device, self.takes_s = "cpu", takes_s
        self.waited: list[int] = []

    def _ones(self, nbytes: int, **options: Any) -> Any:
        self.on_device = torch.ones(nbytes, **options)
        return self.on_device

    def pinned(self, nbytes: int) -> Any:
        self.on_host = torch.empty(nbytes, dtype=torch.uint8)
        return self.on_host

    def stream(self, number: int) -> Any:
        return torch.no_grad()

    def wait(self, number: int) -> None:
        time.sleep(self.takes_s)
        self.waited.append(number)

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_goes_the_way_of_the_transfer_and_is_waited_for(direction: str) -> None:
    gpu = HostGpu(0.01)
    own = OwnCopies(gpu)
    to, source = gpu.on_host, gpu.on_device
    if direction == "load":
        to, source = source, to
    source.fill_(7)
    assert own.seconds(direction) >= 0.01
    assert to.eq(7).all() and gpu.waited == [2], "on a stream that nobody else has"


def test_copies_are_made_while_the_block_is_under_way_and_not_after() -> None:
    gpu = HostGpu()
    own = OwnCopies(gpu)
    with own.beside("load") as took:
        while len(took) < 5:
            time.sleep(0.001)
        gpu.takes_s = 0.05
        while max(took) < 0.05:
            time.sleep(0.001)
        gpu.takes_s = 0.0
    made = len(took)
    assert not any(thread.name == "own-copies" for thread in threading.enumerate())
    row = own.row("load", True, took)
    assert len(took) == made == row["samples"] and row["computes"] and row["bytes"] == COPY_BYTES
    assert row["most_ms"] >= 50 > row["p50_ms"] > 0 and row["alone_ms"] > 0


def test_a_transfer_that_fails_ends_them() -> None:
    with pytest.raises(ZeroDivisionError), OwnCopies(HostGpu()).beside("store"):
        raise ZeroDivisionError
    assert not any(thread.name == "own-copies" for thread in threading.enumerate())


def test_what_was_not_seen_has_no_figures() -> None:
    row = OwnCopies(HostGpu()).row("store", False, [])
    assert (row["samples"], row["p50_ms"], row["most_ms"]) == (0, None, None)
