"""Work for a GPU's streams, collected and given to the driver in one go (`_drive.c`).

Every single call to the driver would let go of the interpreter and have to wait for it again, while
an engine's own thread is busy starting kernels: with several calls for each batch of blocks that is
what limited transfers, and what an engine felt of them. Nothing here waits for the GPU unless it
was told to."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvkeep.errors import DeviceError
from kvkeep.kv import native

if TYPE_CHECKING:
    from kvkeep.gpu.kernels import Mover, Units

WORDS = 14
RECORD, AFTER, TO_HOST, TO_DEVICE, TO_HOST_2D, TO_DEVICE_2D, ZERO, LAUNCH, WAIT, PASS, READ = range(
    11
)
_HALTED = -2
_FUNCTIONS = (
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemsetD8Async",
    "cuLaunchKernel",
    "cuEventSynchronize",
    "cuEventQuery",
)


def entries(driver: ctypes.CDLL) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses that `_drive.c` wants, in its order."""
    addresses = [ctypes.cast(getattr(driver, name), ctypes.c_void_p) for name in _FUNCTIONS]
    return (ctypes.c_void_p * len(_FUNCTIONS))(*addresses)


class Event:
    """A point in a stream's work. When nobody has it any more its handle is used again, also if
    that point has not come yet: streams that wait for it are not held up by what it means later."""

    __slots__ = ("_unused", "handle")

    def __init__(self, handle: int, unused: list[int]) -> None:
        self.handle = handle
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.handle)


class Device(Protocol):
    """What a batch needs of a device (`kvkeep.gpu.device.Cuda`)."""

    entries: ctypes.Array[ctypes.c_void_p]

    @property
    def mover(self) -> Mover: ...

    def event(self, *, urgent: bool = False) -> Event: ...

    def name_of(self, result: int) -> str: ...


class Gate:
    """What a batch passes before it reads each bay of blocks, and where another thread can halt
    it."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 2)()
        self.address = ctypes.addressof(self._words)

    def halt(self) -> int:
        """How many bays are read, or will be: what that takes has been given to the driver. No more
        will be."""
        return native.halt(self.address)


class Batch:
    """For one thread. What is collected happens in `run`, in order; it can be used again after
    that."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._commands = array("Q")
        self._kept: list[Any] = []  # events that are to be recorded: nobody else may have kept them

    def after(self, stream: Any, event: Event) -> None:
        """What is given to this stream from now on begins after that point."""
        self._kept.append(event)
        self._add(AFTER, stream.cuda_stream, event.handle)

    def mark(self, stream: Any, *, urgent: bool = False) -> Event:
        """A point in the work of this stream; not before `run` can anybody wait for it."""
        event = self._device.event(urgent=urgent)
        self._kept.append(event)
        self._add(RECORD, event.handle, stream.cuda_stream)
        return event

    def wait(self, event: Event, *, awake: bool = False) -> None:
        """What follows is given to the driver when that point has come; `run` takes as long, asleep
        or awake."""
        self._kept.append(event)
        self._add(WAIT, event.handle, awake)

    def enter(self, gate: Gate, bay: int) -> None:
        """What follows is for bay number so much, from 1 on. If the gate is closed by then, `run`
        ends here."""
        self._kept.append(gate)
        self._add(PASS, gate.address, bay)

    def has_read(self, gate: Gate, bay: int) -> None:
        """The blocks of that bay are read by what the driver has by now."""
        self._add(READ, gate.address, bay)

    def to_host(
        self,
        stream: Any,
        host: int,
        host_pitch: int,
        device: int,
        pitch: int,
        nbytes: int,
        count: int,
    ) -> None:
        """`count` times `nbytes`, each the pitch further on."""
        if count == 1 or host_pitch == pitch == nbytes:
            self._add(TO_HOST, host, device, nbytes * count, stream.cuda_stream)
        else:
            self._add(
                TO_HOST_2D, host, host_pitch, device, pitch, nbytes, count, stream.cuda_stream
            )

    def to_device(
        self,
        stream: Any,
        device: int,
        pitch: int,
        host: int,
        host_pitch: int,
        nbytes: int,
        count: int,
    ) -> None:
        if count == 1 or host_pitch == pitch == nbytes:
            self._add(TO_DEVICE, device, host, nbytes * count, stream.cuda_stream)
        else:
            self._add(
                TO_DEVICE_2D, host, host_pitch, device, pitch, nbytes, count, stream.cuda_stream
            )

    def move(self, stream: Any, to: int, start: int, words: int) -> None:
        """A few words, by a kernel (`kernels.move`)."""
        if not words:
            return
        mover = self._device.mover
        self._add(
            LAUNCH,
            mover.function,
            mover.programs(words),
            1,
            mover.threads,
            mover.shared_bytes,
            stream.cuda_stream,
            to,
            start,
            words,
        )

    def zero(self, stream: Any, words: torch.Tensor) -> None:
        self._add(ZERO, words.data_ptr(), words.nbytes, stream.cuda_stream)

    def gather(
        self, stream: Any, units: Units, ids: torch.Tensor, staging: torch.Tensor, sums: Any
    ) -> None:
        """As `Units.gather`; all of that memory must stay until it is over."""
        self._launch("gather", stream, units, ids, staging, sums)

    def scatter(
        self, stream: Any, units: Units, ids: torch.Tensor, staging: torch.Tensor, sums: Any
    ) -> None:
        self._launch("scatter", stream, units, ids, staging, sums)

    def run(self) -> bool:
        """Gives it all to the driver. False: it was halted at a gate. DeviceError at the first that
        fails. What comes after is dropped."""
        commands, self._commands = self._commands, array("Q")
        kept, self._kept = self._kept, []
        if commands:
            address, count = commands.buffer_info()
            result, at = native.drive(self._device.entries, address, count // WORDS)
            if result == _HALTED:
                return False
            if result:
                raise DeviceError(
                    f"work for the GPU failed: {self._device.name_of(result)} (command {at})"
                )
        kept.clear()
        return True

    def _launch(
        self,
        name: str,
        stream: Any,
        units: Units,
        ids: torch.Tensor,
        staging: torch.Tensor,
        sums: Any,
    ) -> None:
        made = units.made(name, verify=sums is not None)
        self._add(
            LAUNCH,
            made.function,
            made.tiles,
            ids.numel(),
            made.threads,
            made.shared_bytes,
            stream.cuda_stream,
            ids.data_ptr(),
            made.base,
            made.stride,
            staging.data_ptr(),
            made.keys,
            (ids if sums is None else sums).data_ptr(),
        )

    def _add(self, *words: int) -> None:
        self._commands.extend(words)
        self._commands.extend(_PADDING[len(words)])


_PADDING = [(0,) * (WORDS - length) for length in range(WORDS + 1)]
