"""The CUDA driver: streams, events, host memory that the bus can reach, and batches of work.

Streams and memory are torch's. All else goes to the driver itself, because torch has no call for a
copy to an address. `Cuda` is one device; the copier takes anything that looks like it, which is how
it is tested on machines without a GPU.

A `Batch` collects copies, kernels and orders between streams and gives them to the driver in one
call of C code (`_drive.c`). A call from Python for each of them would release the interpreter and
wait for it again while an engine's own thread starts kernels; that used to limit transfers. Nothing
here waits for the GPU unless it is told to."""

from __future__ import annotations

import ctypes
import functools
from array import array
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from kvkeep.errors import DeviceError
from kvkeep.gpu.kernels import Mover, Units
from kvkeep.kv import native

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ALREADY_REGISTERED, _NOT_READY = 712, 600
_BLOCKING, _NO_TIMING = 1, 2  # CU_EVENT_*
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


def driver_functions(driver: ctypes.CDLL) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses that `_drive.c` wants, in its order."""
    addresses = [ctypes.cast(getattr(driver, name), ctypes.c_void_p) for name in _FUNCTIONS]
    return (ctypes.c_void_p * len(_FUNCTIONS))(*addresses)


class Rows(NamedTuple):
    """`number` rows of `nbytes`, in host and in device memory, each a pitch after the one before."""

    host: int
    host_pitch: int
    device: int
    device_pitch: int
    nbytes: int
    number: int

    def part(self, start: int, number: int) -> Rows:
        host = self.host + start * self.host_pitch
        device = self.device + start * self.device_pitch
        return Rows(host, self.host_pitch, device, self.device_pitch, self.nbytes, number)


class Event:
    """A point in a stream's work. When nobody has it any more its handle is used again, also if
    that point has not come yet: streams that wait for it are not held up by what it means later."""

    __slots__ = ("_unused", "handle")

    def __init__(self, handle: int, unused: list[int]) -> None:
        self.handle = handle
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.handle)


class Gate:
    """What a batch passes before it reads each buffer of blocks, and where another thread can halt
    it."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 2)()
        self.address = ctypes.addressof(self._words)

    def halt(self) -> int:
        """How many buffers are read, or will be: what that takes has been given to the driver. No more
        will be."""
        return native.halt(self.address)


class Cuda:
    """One CUDA device. Each thread that uses it calls `enter` first."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            # Keeps the interpreter's lock: for calls that return at once.
            self._quickly = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(
                f"the CUDA driver cannot be loaded: {error}", "is this a GPU host?"
            ) from error
        if not native.available:
            raise DeviceError(
                "the C kernel was not built", "install a C compiler and reinstall kvkeep"
            )
        self.entries = driver_functions(self._driver)
        # Events whose waiters sleep, and events whose waiters spin.
        self._unused_events: tuple[list[int], list[int]] = ([], [])
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)

    # -- threads, memory

    def enter(self) -> None:
        """Makes the device current in this thread, and lets it work while another one captures a
        CUDA graph: nothing of ours is part of a graph, and without this our calls would spoil the
        capture."""
        mode = ctypes.c_int(_RELAXED)
        self._check(
            "cuThreadExchangeStreamCaptureMode",
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
        )
        torch.cuda.set_device(self.torch_device)
        torch.cuda.current_stream(self.torch_device).query()  # makes the context current, too

    def free_bytes(self) -> int:
        """Device memory that nobody has taken."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def memory(self, words: int) -> torch.Tensor:
        """Device memory, in words of 8 bytes."""
        return torch.empty(words, dtype=torch.int64, device=self.torch_device)

    def host_memory(self, words: int) -> torch.Tensor:
        """Host memory that the bus can reach."""
        return torch.empty(words, dtype=torch.int64, pin_memory=True)

    def register(self, address: int, nbytes: int) -> None:
        """Lets the bus reach this host memory. DeviceError if it cannot be had."""
        result = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
        )
        if result != _ALREADY_REGISTERED:
            self._check("cuMemHostRegister", result)

    def unregister(self, address: int) -> None:
        self._check(
            "cuMemHostUnregister", self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        )

    # -- streams and events

    def stream(self) -> Any:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Kernels go to this stream inside the block."""
        return torch.cuda.stream(stream)

    def event(self, *, urgent: bool = False) -> Event:
        """Of nothing yet. Who waits for it sleeps, or spins if `urgent`."""
        unused = self._unused_events[urgent]
        try:
            return Event(unused.pop(), unused)
        except IndexError:
            pass
        handle = ctypes.c_void_p()
        flags = _NO_TIMING if urgent else _NO_TIMING | _BLOCKING
        self._check(
            "cuEventCreate", self._quickly.cuEventCreate(ctypes.byref(handle), ctypes.c_uint(flags))
        )
        return Event(handle.value or 0, unused)

    def mark(self, stream: Any = None, *, urgent: bool = False) -> Event:
        """A point in the work of this stream. None: of the engine's."""
        event = self.event(urgent=urgent)
        result = self._quickly.cuEventRecord(ctypes.c_void_p(event.handle), self._handle(stream))
        self._check("cuEventRecord", result)
        return event

    def after(self, stream: Any, event: Event) -> None:
        """What is given to this stream from now on begins after that point. None: the engine's."""
        result = self._quickly.cuStreamWaitEvent(
            self._handle(stream), ctypes.c_void_p(event.handle), ctypes.c_uint(0)
        )
        self._check("cuStreamWaitEvent", result)

    def wait(self, event: Event) -> None:
        """Waits here, in this thread, without the interpreter."""
        self._check(
            "cuEventSynchronize", self._driver.cuEventSynchronize(ctypes.c_void_p(event.handle))
        )

    def is_over(self, event: Event) -> bool:
        return bool(self._quickly.cuEventQuery(ctypes.c_void_p(event.handle)) != _NOT_READY)

    def drain(self, stream: Any) -> None:
        """Waits here for all that was given to this stream, and makes nothing for it."""
        stream.synchronize()

    def batch(self) -> Batch:
        """Copies, kernels and marks that begin together, and are not waited for."""
        return Batch(self)

    @functools.cached_property
    def mover(self) -> Mover:
        """Compiled when it is first asked for."""
        return Mover(self.torch_device)

    def name_of(self, result: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(result), ctypes.byref(name))
        return (name.value or b"?").decode()

    def _handle(self, stream: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p((stream or torch.cuda.current_stream(self.torch_device)).cuda_stream)

    def _check(self, what: str, result: int) -> None:
        if result:
            raise DeviceError(f"{what} failed: {self.name_of(result)}")


class Batch:
    """For one thread. What is collected happens in `run`, in order; it can be used again after
    that."""

    def __init__(self, device: Cuda) -> None:
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

    def enter(self, gate: Gate, buffer: int) -> None:
        """What follows is for buffer number so much, from 1 on. If the gate is closed by then, `run`
        ends here."""
        self._kept.append(gate)
        self._add(PASS, gate.address, buffer)

    def has_read(self, gate: Gate, buffer: int) -> None:
        """The blocks of that buffer are read by what the driver has by now."""
        self._add(READ, gate.address, buffer)

    def to_host(self, stream: Any, rows: Rows) -> None:
        host, host_pitch, device, pitch, nbytes, number = rows
        if number == 1 or host_pitch == pitch == nbytes:
            self._add(TO_HOST, host, device, nbytes * number, stream.cuda_stream)
        else:
            self._add(TO_HOST_2D, *rows, stream.cuda_stream)

    def to_device(self, stream: Any, rows: Rows) -> None:
        host, host_pitch, device, pitch, nbytes, number = rows
        if number == 1 or host_pitch == pitch == nbytes:
            self._add(TO_DEVICE, device, host, nbytes * number, stream.cuda_stream)
        else:
            self._add(TO_DEVICE_2D, *rows, stream.cuda_stream)

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
