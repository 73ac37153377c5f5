"""A device for machines without a GPU: kernels run in Triton's interpreter, copies are made at
once, and what must not happen on a real one is an error here: a copy to host memory that was never
registered, or to memory of nobody."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from kvkeep.errors import DeviceError
from kvkeep.gpu.driver import Gate, Rows


class Stream:
    """Work given to it is done at once, so all that is left to check is that it was ordered by
    somebody."""

    def __init__(self, name: str) -> None:
        self.name = name


CLOSED = 1 << 62


class Halted(Exception):
    """The gate is closed."""


def words_of(gate: Gate) -> ctypes.Array[ctypes.c_int64]:
    """The buffer that was entered last, and the one that was read last."""
    return (ctypes.c_int64 * 2).from_address(gate.address)


class Immediate:
    """A batch that does at once what it is told."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._gate: Gate | None = None
        self.after, self.mark = device.after, device.mark
        self.to_host, self.to_device, self.move = device.to_host, device.to_device, device.move

    def wait(self, event: Any, *, awake: bool = False) -> None:
        self._device.wait(event)

    def enter(self, gate: Gate, buffer: int) -> None:
        """As `_drive.c`, but for one thread."""
        words = words_of(gate)
        if words[0] & CLOSED:
            raise Halted
        words[0] = self._device.entered = buffer
        self._gate = gate

    def has_read(self, gate: Gate, buffer: int) -> None:
        words_of(gate)[1] = buffer

    def fail(self) -> None:
        """Likewise, at a command that is refused."""
        if self._gate is None:
            return
        words = words_of(self._gate)
        if words[1] != CLOSED:
            words[:] = [words[1] | CLOSED, CLOSED]

    def zero(self, stream: Any, words: torch.Tensor) -> None:
        with self._device.on(stream):
            words.zero_()

    def gather(
        self, stream: Any, units: Any, ids: torch.Tensor, staging: torch.Tensor, sums: Any
    ) -> None:
        with self._device.on(stream):
            units.gather(ids, staging, sums)

    def scatter(
        self, stream: Any, units: Any, ids: torch.Tensor, staging: torch.Tensor, sums: Any
    ) -> None:
        with self._device.on(stream):
            units.scatter(ids, staging, sums)

    def run(self) -> bool:
        return True


class Pretend:
    def __init__(self, registrable: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        self.registrable = registrable
        self.registered: dict[int, int] = {}
        self.own: list[torch.Tensor] = []
        self.copies: list[tuple[str, int, int]] = []  # direction, bytes, count
        self.waits: list[tuple[Any, Any]] = []  # stream, mark
        self.marks: list[Any] = []
        self.marks_left = 1 << 30  # then there is none to be had
        self.drained: list[Any] = []
        self.unfinished: list[Any] = []  # marks that have not come yet
        self.streams: list[Stream] = []  # in the order in which they were made
        self.threads = 0
        self.entered = 0  # the buffer whose gate was passed last
        self.largest_memory_bytes = 0

    def enter(self) -> None:
        self.threads += 1

    def free_bytes(self) -> int:
        return 1 << 40

    def memory(self, words: int) -> torch.Tensor:
        self.largest_memory_bytes = max(self.largest_memory_bytes, 8 * words)
        return torch.full((words,), -1, dtype=torch.int64)

    def host_memory(self, words: int) -> torch.Tensor:
        self.own.append(torch.full((words,), -1, dtype=torch.int64))
        return self.own[-1]

    def register(self, address: int, nbytes: int) -> None:
        if not self.registrable:
            raise DeviceError("cuMemHostRegister failed: CUDA_ERROR_NOT_PERMITTED")
        self.registered[address] = address + nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def stream(self) -> Stream:
        self.streams.append(Stream(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def batch(self) -> Immediate:
        return Immediate(self)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def mark(self, stream: Any = None, *, urgent: bool = False) -> Any:
        if not self.marks_left:
            raise DeviceError("CUDA error: out of memory")
        self.marks_left -= 1
        self.marks.append((stream, object()))
        return self.marks[-1]

    def after(self, stream: Any, event: Any) -> None:
        assert event in self.marks
        self.waits.append((stream, event))

    def wait(self, event: Any) -> None:
        assert event in self.marks
        self.unfinished = [mark for mark in self.unfinished if mark is not event]

    def is_over(self, event: Any) -> bool:
        return event not in self.unfinished

    def drain(self, stream: Any) -> None:
        self.drained.append(stream)

    def to_host(self, stream: Any, rows: Rows) -> None:
        self._copy("to host", (rows.host, rows.host_pitch), (rows.device, rows.device_pitch), rows)

    def to_device(self, stream: Any, rows: Rows) -> None:
        self._copy(
            "to device", (rows.device, rows.device_pitch), (rows.host, rows.host_pitch), rows
        )

    def move(self, stream: Any, to: int, start: int, words: int) -> None:
        ctypes.memmove(to, start, 8 * words)

    def _copy(self, way: str, to: tuple[int, int], start: tuple[int, int], rows: Rows) -> None:
        """Addresses and pitches."""
        last = rows.host + (rows.number - 1) * rows.host_pitch + rows.nbytes
        areas = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in self.own]
        areas += list(self.registered.items())
        assert any(low <= rows.host and last <= high for low, high in areas), (
            "a copy beyond what is registered"
        )
        for at in range(rows.number):
            ctypes.memmove(to[0] + at * to[1], start[0] + at * start[1], rows.nbytes)
        self.copies.append((way, rows.nbytes, rows.number))
