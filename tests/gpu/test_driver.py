"""What the driver does for us, on a GPU; and what is said where there is none."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.errors import DeviceError
from kvkeep.gpu import driver as module
from kvkeep.gpu.driver import Cuda, Rows

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")


@pytest.fixture
def device() -> Cuda:
    made = Cuda(torch.device("cuda"))
    made.enter()
    return made


@pytest.fixture
def host(device: Cuda) -> Any:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), dtype=np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
    device.register(memory.ctypes.data, len(memory))
    yield memory
    device.unregister(memory.ctypes.data)


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="the CUDA driver cannot be loaded"):
        module.Cuda(torch.device("cuda"))


@needs_cuda
@pytest.mark.parametrize(
    ("pitch", "host_pitch", "count"),
    [(4096, 4096, 5), (4096, 8192, 7), (8192, 4096, 3), (4096, 0, 1)],
)
def test_copies_go_where_they_should(
    device: Cuda, host: Any, pitch: int, host_pitch: int, count: int
) -> None:
    there, stream, before = device.memory(1 << 14), device.stream(), host.copy()
    batch = device.batch()
    rows = Rows(host.ctypes.data, host_pitch, there.data_ptr(), pitch, 4096, count)
    batch.to_device(stream, rows)
    arrival = batch.mark(stream)
    batch.run()
    device.wait(arrival)
    arrived = there.cpu().numpy().view(np.uint8)
    for at in range(count):
        row = before[at * host_pitch : at * host_pitch + 4096]
        assert np.array_equal(arrived[at * pitch : at * pitch + 4096], row)
    host[:] = 0
    batch.to_host(stream, rows)
    batch.run()
    device.wait(device.mark(stream, urgent=True))
    for at in range(count):
        row = host[at * host_pitch : at * host_pitch + 4096]
        assert np.array_equal(row, before[at * host_pitch : at * host_pitch + 4096])


@needs_cuda
def test_an_event_is_over_when_its_point_has_come_and_its_handle_is_used_again(
    device: Cuda,
) -> None:
    stream = device.stream()
    with device.on(stream):
        torch.cuda._sleep(1 << 30)  # some half a second
    event = device.mark(stream)
    assert not device.is_over(event)
    device.wait(event)
    assert device.is_over(event)
    handle = event.handle
    del event
    assert device.event(urgent=True).handle != handle, "that one would sleep"
    handles = [
        device.event().handle for _ in range(2)
    ]  # in an assertion pytest would keep the first event
    assert handles == [handle, handle]


@needs_cuda
@pytest.mark.parametrize("words", [1, 1500, 4096])
def test_words_are_moved_to_and_fro(device: Cuda, words: int) -> None:
    here, there, back = device.host_memory(words), device.memory(words), device.host_memory(words)
    here.random_()
    stream, batch = device.stream(), device.batch()
    batch.move(stream, there.data_ptr(), here.data_ptr(), words)
    batch.move(stream, back.data_ptr(), there.data_ptr(), words)
    over = batch.mark(stream)
    batch.run()
    device.wait(over)
    assert torch.equal(back, here)


@needs_cuda
def test_what_cannot_be_registered_is_an_error_with_the_drivers_word(device: Cuda) -> None:
    with pytest.raises(DeviceError, match="CUDA_ERROR"):
        device.register(4096, 4096)
    with pytest.raises(DeviceError, match="CUDA_ERROR"):
        device.unregister(4096)


@needs_cuda
def test_a_copy_across_two_registrations_is_refused_which_is_why_we_never_make_one(
    device: Cuda,
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4 << 20), dtype=np.uint8)
    base, half = memory.ctypes.data, len(memory) // 2
    device.register(base, half)
    device.register(base + half, half)
    there, stream = device.memory(1 << 18), device.stream()
    batch = device.batch()
    start = base + half - (1 << 19)
    batch.to_device(stream, Rows(start, 1 << 20, there.data_ptr(), 1 << 20, 1 << 20, 1))
    with pytest.raises(DeviceError, match=r"CUDA_ERROR.*command 0"):
        batch.run()
    device.unregister(base)
    device.unregister(base + half)


@needs_cuda
def test_threads_of_ours_do_not_spoil_the_capture_of_a_graph(device: Cuda, host: Any) -> None:
    import threading

    graph, value = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    failed: list[BaseException] = []
    captured = threading.Event()

    def work() -> None:
        try:
            device.enter()
            memory = np.frombuffer(mmap.mmap(-1, 1 << 20), dtype=np.uint8)
            device.register(memory.ctypes.data, len(memory))
            stream = device.stream()
            batch, there = device.batch(), device.memory(512)
            rows = Rows(memory.ctypes.data, 4096, there.data_ptr(), 4096, 4096, 1)
            batch.to_device(stream, rows)
            batch.run()
            device.wait(device.mark(stream))
            device.unregister(memory.ctypes.data)
        except BaseException as error:  # guard: the test's own thread tells
            failed.append(error)
        captured.set()

    with torch.cuda.graph(graph):
        thread = threading.Thread(target=work)
        thread.start()
        captured.wait(30)
        value.add_(1)
    thread.join()
    assert not failed
    graph.replay()
    torch.cuda.synchronize()
    assert value.tolist() == [1.0] * 8
