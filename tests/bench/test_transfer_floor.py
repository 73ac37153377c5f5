"""Which GPU is refused, and which copies make a floor; on a GPU, that they are made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.bench.transfer_floor import DIRECTIONS, Gpu, PlainCopy, check_device, load_gbps
from kvkeep.errors import SettingsError

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")


class HostGpu(Gpu):
    """Stands for a GPU whose memory is the host's, and writes down what it is asked."""

    def __init__(self) -> None:
        self.torch = SimpleNamespace(empty=self._empty, uint8=torch.uint8)
        self.device, self.name, self.free_bytes = "cpu", "none", 64 << 30
        self.asked: list[str] = []
        self.on_device: list[Any] = []  # memory for stores, then for loads
        self.on_host: list[Any] = []

    def _empty(self, nbytes: int, **options: Any) -> Any:
        self.on_device.append(torch.empty(nbytes, **options))
        return self.on_device[-1]

    def pinned(self, nbytes: int) -> Any:
        self.on_host.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.on_host[-1]

    def stream(self, number: int) -> AbstractContextManager[Any]:
        self.asked.append(f"stream {number}")
        return nullcontext()

    def synchronize(self) -> None:
        self.asked.append("synchronize")


def test_a_device_that_is_none_is_refused() -> None:
    for device in ("gpu", "cuda:", "cuda:x", "cudax", ""):
        with pytest.raises(SettingsError, match="expected cpu, cuda or cuda:N"):
            check_device(device)


def test_a_gpu_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SettingsError, match="--device cuda is not here: torch finds 0 CUDA devices"
    ) as caught:
        check_device("cuda")
    assert "leave out --device" in caught.value.hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device("cuda")
    check_device("cuda:0")
    with pytest.raises(SettingsError, match="--device cuda:1 is not here"):
        check_device("cuda:1")


def test_each_way_copies_the_bytes_asked_for_and_no_more() -> None:
    gpu = HostGpu()
    floor = PlainCopy(gpu, 100)
    for way, to, source in (
        ("store", gpu.on_host[0], gpu.on_device[0]),
        ("load", gpu.on_device[1], gpu.on_host[1]),
    ):
        source.fill_(7)
        assert floor.seconds(way, 60) > 0
        assert to[:60].eq(7).all() and to[60:].eq(1).all()
    assert gpu.asked == ["synchronize", "stream 0", "synchronize"] * 2


def test_both_ways_have_a_stream_each() -> None:
    gpu = HostGpu()
    floor = PlainCopy(gpu, 10)
    gpu.on_device[0].fill_(7)
    gpu.on_host[1].fill_(8)
    floor.seconds("both", 10)
    assert gpu.asked == ["synchronize", "stream 0", "stream 1", "synchronize"]
    assert gpu.on_host[0].eq(7).all() and gpu.on_device[1].eq(8).all()


@needs_cuda
def test_a_gpu_copies() -> None:
    gpu = Gpu("cuda")
    assert gpu.name and gpu.free_bytes > 0
    floor = PlainCopy(gpu, 1 << 20)
    assert all(tensor.is_pinned() for tensor in floor._host.values())
    floor._device["store"].fill_(7)
    assert all(floor.seconds(way, 1 << 20) > 0 for way in DIRECTIONS)
    assert floor._host["store"].eq(7).all()


def test_the_rate_is_that_of_the_middle_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([0.5, 9.0, 0.1, 0.2, 0.4])
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(
        PlainCopy, "seconds", lambda self, way, nbytes: (asked.append((way, nbytes)), next(took))[1]
    )
    assert load_gbps(HostGpu(), 4_000_000) == pytest.approx(0.01)
    assert asked == [("load", 4_000_000)] * 5
