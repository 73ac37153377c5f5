"""A GPU as the copier needs it: streams, events, copies over the bus, and host memory that the bus can reach.

Kernels and events go through torch. Copies and the registration of host memory go to the driver itself: torch has no
call for a copy to an address, and a call through ctypes lets go of the interpreter. The copier takes anything that
looks like `Cuda`, which is how it is tested on machines without a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvkeep.errors import DeviceError

_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_*
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ALREADY_REGISTERED = 712


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D"""

    _fields_ = [
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class Cuda:
    """One CUDA device. Each thread that uses it calls `enter` first."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"the CUDA driver cannot be loaded: {error}", "is this a GPU host?") from error
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)

    # -- threads, memory

    def enter(self) -> None:
        """Makes the device current in this thread, and lets it work while another one captures a CUDA graph: nothing of
        ours is part of a graph, and without this our calls would spoil the capture."""
        mode = ctypes.c_int(_RELAXED)
        self._check(
            "cuThreadExchangeStreamCaptureMode", self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        )
        torch.cuda.set_device(self.torch_device)
        torch.cuda.current_stream(self.torch_device).query()  # makes the context current, too

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
        self._check("cuMemHostUnregister", self._driver.cuMemHostUnregister(ctypes.c_void_p(address)))

    # -- streams and events

    def stream(self) -> Any:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Kernels go to this stream inside the block."""
        return torch.cuda.stream(stream)

    def mark(self, stream: Any = None, *, urgent: bool = False) -> Any:
        """A point in the work of this stream. None: of the engine's. Who waits for it sleeps, or spins if `urgent`."""
        event = torch.cuda.Event(blocking=not urgent)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self.torch_device))
        return event

    def after(self, stream: Any, event: Any) -> None:
        """What is given to this stream from now on begins after that point. None: the engine's."""
        (stream or torch.cuda.current_stream(self.torch_device)).wait_event(event)

    def wait(self, event: Any) -> None:
        """Waits here, in this thread, without the interpreter."""
        event.synchronize()

    def drain(self, stream: Any) -> None:
        """Waits here for all that was given to this stream, and makes nothing for it."""
        stream.synchronize()

    # -- copies, which begin on a stream and are not waited for

    def to_host(
        self, stream: Any, host: int, host_pitch: int, device: int, pitch: int, nbytes: int, count: int
    ) -> None:
        """`count` times `nbytes`, each the pitch further on."""
        if count == 1 or host_pitch == pitch == nbytes:
            result = self._driver.cuMemcpyDtoHAsync_v2(
                ctypes.c_void_p(host),
                ctypes.c_uint64(device),
                ctypes.c_size_t(nbytes * count),
                ctypes.c_void_p(stream.cuda_stream),
            )
        else:
            copy = _Copy2D(src_type=_DEVICE, src_device=device, src_pitch=pitch, width=nbytes, height=count)
            copy.dst_type, copy.dst_host, copy.dst_pitch = _HOST, host, host_pitch
            result = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream.cuda_stream))
        self._check("a copy to the host", result)

    def to_device(
        self, stream: Any, device: int, pitch: int, host: int, host_pitch: int, nbytes: int, count: int
    ) -> None:
        if count == 1 or host_pitch == pitch == nbytes:
            result = self._driver.cuMemcpyHtoDAsync_v2(
                ctypes.c_uint64(device),
                ctypes.c_void_p(host),
                ctypes.c_size_t(nbytes * count),
                ctypes.c_void_p(stream.cuda_stream),
            )
        else:
            copy = _Copy2D(src_type=_HOST, src_host=host, src_pitch=host_pitch, width=nbytes, height=count)
            copy.dst_type, copy.dst_device, copy.dst_pitch = _DEVICE, device, pitch
            result = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream.cuda_stream))
        self._check("a copy to the GPU", result)

    def _check(self, what: str, result: int) -> None:
        if result:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(ctypes.c_int(result), ctypes.byref(name))
            raise DeviceError(f"{what} failed: {(name.value or b'?').decode()}")
