"""A GPU and plain copies on it, with which transfers are compared.

`PlainCopy` is the floor: one contiguous copy between the GPU and pinned memory, synchronized at its
end; both ways at once on two streams. `OwnCopies` are those of an engine: a step's inputs, such as
block tables, go to the GPU, and its tokens to the host. A copy engine of the GPU may be busy with
blocks meanwhile, so a thread makes one such copy after the other beside a transfer, and each is
timed."""

from __future__ import annotations

import importlib
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvkeep.errors import SettingsError
from kvkeep.units import GIB

ONE_WAY = ("store", "load")  # to the host, and to the device
DIRECTIONS = (*ONE_WAY, "both")
_TRIALS = 5
COPY_BYTES = 256 << 10  # block tables of some hundred requests
_ALONE = 100  # copies while nothing else is copied
_REST_S = 0.0002


class Gpu:
    """What of CUDA is needed here, so that tests can do without."""

    def __init__(self, device: str) -> None:
        self.torch = importlib.import_module("torch")
        self.device = device
        self.name = str(self.torch.cuda.get_device_name(device))
        self.free_bytes = int(self.torch.cuda.mem_get_info(device)[0])
        self._streams = [self.torch.cuda.Stream(device) for _ in range(3)]

    def pinned(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=True)

    def stream(self, number: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.torch.cuda.stream(self._streams[number])
        return context

    def wait(self, number: int) -> None:
        """For what that stream was given."""
        self._streams[number].synchronize()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.device)


def check_device(device: str) -> None:
    """SettingsError unless it is a GPU that is here."""
    remedy = "leave out --device to measure a CPU"
    if not re.fullmatch(r"cuda(:[0-9]{1,3})?", device):
        raise SettingsError(f'--device "{device}": expected cpu, cuda or cuda:N', remedy)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise SettingsError(
            f"--device {device} needs torch: {error}", f"install it, or {remedy}"
        ) from None
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= found:
        raise SettingsError(
            f"--device {device} is not here: torch finds {found} CUDA devices", remedy
        )


class PlainCopy:
    """The floor: contiguous copies between the GPU and pinned memory, of up to `most_bytes` each
    way."""

    def __init__(self, gpu: Gpu, most_bytes: int) -> None:
        self._gpu = gpu
        empty = gpu.torch.empty
        self._device = {
            way: empty(most_bytes, dtype=gpu.torch.uint8, device=gpu.device) for way in ONE_WAY
        }
        self._host = {way: gpu.pinned(most_bytes) for way in ONE_WAY}
        for tensor in (*self._device.values(), *self._host.values()):
            tensor.fill_(1)

    def seconds(self, direction: str, nbytes: int) -> float:
        """A store's copy goes to the host, a load's to the device, and "both" do so at once,
        `nbytes` each."""
        ways = [way for way in ONE_WAY if direction in (way, "both")]
        self._gpu.synchronize()
        started = time.perf_counter()
        for number, way in enumerate(ways):
            pair = self._host[way][:nbytes], self._device[way][:nbytes]
            to, source = pair if way == "store" else pair[::-1]
            with self._gpu.stream(number):
                to.copy_(source, non_blocking=True)
        self._gpu.synchronize()
        return time.perf_counter() - started


def load_gbps(gpu: Gpu, nbytes: int = GIB) -> float:
    """How fast one such copy to the device is."""
    floor = PlainCopy(gpu, nbytes)
    return nbytes / statistics.median(floor.seconds("load", nbytes) for _ in range(_TRIALS)) / 1e9


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
