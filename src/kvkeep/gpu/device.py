"""A GPU as the copier needs it: streams, events, batches of work, and host memory that the bus can
reach.

Streams and memory are torch's. All else goes to the driver itself: torch has no call for a copy to
an address, and a call through ctypes lets go of the interpreter, or keeps it where that is sooner
over. The copier takes anything that looks like `Cuda`, which is how it is tested on machines
without a GPU."""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvkeep.errors import DeviceError
from kvkeep.gpu.batch import Batch, Event, entries
from kvkeep.gpu.kernels import Mover
from kvkeep.kv import native

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ALREADY_REGISTERED, _NOT_READY = 712, 600
_BLOCKING, _NO_TIMING = 1, 2  # CU_EVENT_*


class Cuda:
    """One CUDA device. Each thread that uses it calls `enter` first."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._quickly = ctypes.PyDLL(
                "libcuda.so.1"
            )  # keeps the interpreter, for calls that are over at once
        except OSError as error:
            raise DeviceError(
                f"the CUDA driver cannot be loaded: {error}", "is this a GPU host?"
            ) from error
        if not native.available:
            raise DeviceError(
                "the C kernel was not built", "install a C compiler and reinstall kvkeep"
            )
        self.entries = entries(self._driver)
        self._unused_events: tuple[list[int], list[int]] = (
            [],
            [],
        )  # of those who sleep, and of those who spin
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
