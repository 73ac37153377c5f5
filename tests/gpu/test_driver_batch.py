"""A batch tells the driver exactly what it was told, in order: here the driver is a set of
functions that write down what they are called with."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.errors import DeviceError
from kvkeep.gpu.driver import Batch, Gate, Rows, driver_functions
from kvkeep.gpu.kernels import Made, Mover
from kvkeep.kv import native

pytestmark = pytest.mark.skipif(not native.available, reason="the C kernel was not built")

_u64, _unsigned, _pointer = ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p
_SIGNATURES = {
    "cuEventRecord": (_u64, _u64),
    "cuStreamWaitEvent": (_u64, _u64, _unsigned),
    "cuMemcpyDtoHAsync_v2": (_u64, _u64, _u64, _u64),
    "cuMemcpyHtoDAsync_v2": (_u64, _u64, _u64, _u64),
    "cuMemcpy2DAsync_v2": (_pointer, _u64),
    "cuMemsetD8Async": (_u64, ctypes.c_ubyte, _u64, _u64),
    "cuLaunchKernel": (_u64, *[_unsigned] * 7, _u64, _pointer, _pointer),
    "cuEventSynchronize": (_u64,),
    "cuEventQuery": (_u64,),
}


class Driver:
    """Answers 0, or `answers` for a function of that name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, int] = {}
        self.then: Callable[[str], None] = lambda name: None
        for name, kinds in _SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._noting(name)))

    def _noting(self, name: str) -> Any:
        def note(*given: Any) -> int:
            if name == "cuMemcpy2DAsync_v2":
                words = (_u64 * 16).from_address(given[0])
                given = (*words, given[1])
            elif name == "cuLaunchKernel":
                places = (_pointer * 8).from_address(given[9])
                given = (
                    *given[:9],
                    [_u64.from_address(place).value for place in places],
                    given[10],
                )
            self.calls.append((name, *given))
            self.then(name)
            return self.answers.get(name, 0)

        return note


class Marked:
    """An event. Unlike a SimpleNamespace, one that a weak reference can name."""

    def __init__(self, handle: int, urgent: bool) -> None:
        self.handle = handle
        self.urgent = urgent


class Device:
    def __init__(self, driver: Driver) -> None:
        self.entries = driver_functions(driver)  # type: ignore[arg-type]
        self.made = 0
        self.mover = SimpleNamespace(
            function=1 << 44, threads=128, shared_bytes=7, programs=Mover.programs
        )

    def event(self, *, urgent: bool = False) -> Any:
        self.made += 1
        return Marked(1000 + self.made, urgent)

    def name_of(self, result: int) -> str:
        return f"CUDA_ERROR_{result}"


class World:
    def __init__(self) -> None:
        self.driver = Driver()
        self.device: Any = Device(self.driver)
        self.batch = Batch(self.device)
        self.stream, self.other = (
            SimpleNamespace(cuda_stream=(1 << 40) + 7),
            SimpleNamespace(cuda_stream=8),
        )

    def ran(self) -> list[tuple[Any, ...]]:
        assert not self.driver.calls, "nothing happens before"
        self.batch.run()
        calls, self.driver.calls = self.driver.calls, []
        return calls


@pytest.fixture
def world() -> World:
    return World()


def test_marks_and_orders(world: World) -> None:
    event = world.batch.mark(world.stream)
    world.batch.after(world.other, event)
    world.batch.wait(event)
    assert world.batch.mark(world.stream, urgent=True).urgent and not event.urgent
    assert world.ran() == [
        ("cuEventRecord", 1001, world.stream.cuda_stream),
        ("cuStreamWaitEvent", 8, 1001, 0),
        ("cuEventSynchronize", 1001),
        ("cuEventRecord", 1002, world.stream.cuda_stream),
    ]
    assert world.ran() == [], "once"


def test_who_stays_awake_asks_until_it_is_over(world: World) -> None:
    world.batch.wait(world.batch.mark(world.stream), awake=True)
    world.batch.mark(world.other)
    world.driver.answers["cuEventQuery"] = 600  # CUDA_ERROR_NOT_READY
    count = 0

    def count_down(name: str) -> None:
        nonlocal count
        count += name == "cuEventQuery"
        if count == 3:  # what is said now is the answer
            world.driver.answers[name] = 0

    world.driver.then = count_down
    assert [name for name, *_ in world.ran()] == [
        "cuEventRecord",
        *["cuEventQuery"] * 3,
        "cuEventRecord",
    ]


def test_copies_of_what_lies_together_are_one(world: World) -> None:
    world.batch.to_host(world.stream, Rows(1 << 50, 4096, 3 << 40, 4096, 4096, 5))
    world.batch.to_host(world.stream, Rows(11, 99, 22, 77, 4096, 1))
    world.batch.to_device(world.other, Rows(44, 64, 33, 64, 64, 3))
    assert world.ran() == [
        ("cuMemcpyDtoHAsync_v2", 1 << 50, 3 << 40, 5 * 4096, world.stream.cuda_stream),
        ("cuMemcpyDtoHAsync_v2", 11, 22, 4096, world.stream.cuda_stream),
        ("cuMemcpyHtoDAsync_v2", 33, 44, 192, 8),
    ]


HOST, DEVICE = 1, 2


def test_copies_of_rows_say_where_they_begin_and_how_far_apart_they_are(world: World) -> None:
    world.batch.to_host(world.stream, Rows(100, 8192, 200, 4096, 4000, 5))
    world.batch.to_device(world.stream, Rows(400, 8192, 300, 4096, 4000, 6))
    (_, *first, stream), (_, *second, _) = world.ran()
    # CUDA_MEMCPY2D: x, y, type, host, device, array, pitch of the source, then of the destination;
    # width and height.
    assert first == [0, 0, DEVICE, 0, 200, 0, 4096, 0, 0, HOST, 100, 0, 0, 8192, 4000, 5]
    assert second == [0, 0, HOST, 400, 0, 0, 8192, 0, 0, DEVICE, 0, 300, 0, 4096, 4000, 6]
    assert stream == world.stream.cuda_stream


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_a_kernel_is_launched_with_its_arguments(world: World, name: str, verify: bool) -> None:
    ids, staging, sums = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
    asked: list[tuple[str, bool]] = []

    def made(name: str, *, verify: bool) -> Made:
        asked.append((name, verify))
        return Made(1 << 45, 256, 96, 17, 111, 222, 333)

    getattr(world.batch, name)(
        world.stream, SimpleNamespace(made=made), ids[1:], staging, sums[2:] if verify else None
    )
    last = sums[2:].data_ptr() if verify else ids[1:].data_ptr()
    assert asked == [(name, verify)]
    arguments = [ids[1:].data_ptr(), 111, 222, staging.data_ptr(), 333, last, 0, 0]
    assert world.ran() == [
        (
            "cuLaunchKernel",
            1 << 45,
            17,
            3,
            1,
            256,
            1,
            1,
            96,
            world.stream.cuda_stream,
            arguments,
            None,
        )
    ]


def test_words_are_moved_by_a_kernel(world: World) -> None:
    world.batch.move(world.stream, 5, 6, 0)
    world.batch.move(world.stream, 1 << 50, 3 << 40, 2500)
    arguments = [1 << 50, 3 << 40, 2500, 0, 0, 0, 0, 0]
    assert world.ran() == [
        (
            "cuLaunchKernel",
            1 << 44,
            3,
            1,
            1,
            128,
            1,
            1,
            7,
            world.stream.cuda_stream,
            arguments,
            None,
        )
    ]


def test_memory_is_zeroed(world: World) -> None:
    words = torch.ones(5, dtype=torch.int64)
    world.batch.zero(world.stream, words[1:4])
    assert world.ran() == [
        ("cuMemsetD8Async", words[1:].data_ptr(), 0, 24, world.stream.cuda_stream)
    ]


def test_the_first_that_fails_is_named_and_ends_it(world: World) -> None:
    world.driver.answers["cuMemsetD8Async"] = 700
    world.batch.mark(world.stream)
    world.batch.zero(world.stream, torch.ones(1, dtype=torch.int64))
    world.batch.mark(world.stream)
    with pytest.raises(DeviceError, match=r"work for the GPU failed: CUDA_ERROR_700 \(command 1\)"):
        world.batch.run()
    assert [name for name, *_ in world.driver.calls] == ["cuEventRecord", "cuMemsetD8Async"]
    world.driver.calls, world.driver.answers = [], {}
    world.batch.mark(world.stream)
    assert len(world.ran()) == 1, "what came after it is dropped"


def test_an_event_that_nobody_else_keeps_lives_until_it_is_recorded(world: World) -> None:
    event = weakref.ref(world.batch.mark(world.stream))
    assert event() is not None
    world.batch.run()
    assert event() is None


# -- gates


def reads(world: World, gate: Gate, buffers: int) -> None:
    """A batch that reads so many buffers: for each it waits, passes the gate, reads, says so, and
    copies."""
    for buffer in range(1, buffers + 1):
        world.batch.wait(world.device.event())
        world.batch.enter(gate, buffer)
        world.batch.mark(world.stream)
        world.batch.has_read(gate, buffer)
        world.batch.to_host(world.stream, Rows(buffer, 4, 2, 4, 4, 1))


WHOLE = ["cuEventSynchronize", "cuEventRecord", "cuMemcpyDtoHAsync_v2"]


def test_a_gate_that_nobody_closes_is_passed(world: World) -> None:
    gate = Gate()
    reads(world, gate, 3)
    assert [name for name, *_ in world.ran()] == WHOLE * 3
    assert gate.halt() == 3 and gate.halt() == 3


@pytest.mark.parametrize("at", range(9))
def test_whoever_closes_a_gate_knows_what_is_read_and_no_more_is(world: World, at: int) -> None:
    """From inside the calls of the driver, where another thread may be at any time."""
    gate, said = Gate(), list[int]()

    def halt(name: str) -> None:
        if (
            len(world.driver.calls) == at + 1 and name != "cuEventRecord"
        ):  # there it would wait for the end of that
            said.append(gate.halt())

    world.driver.then = halt
    reads(world, gate, 3)
    done = world.batch.run()
    names = [name for name, *_ in world.driver.calls]
    if said:
        assert (
            names.count("cuEventRecord")
            == said[0]
            == gate.halt()
            == names.count("cuMemcpyDtoHAsync_v2")
        )
        assert done == (said[0] == 3) and names[: 3 * said[0]] == WHOLE * said[0]
    else:
        assert done and names == WHOLE * 3


def test_a_closed_gate_is_not_passed_at_all(world: World) -> None:
    gate = Gate()
    assert gate.halt() == 0
    reads(world, gate, 3)
    assert not world.batch.run() and [name for name, *_ in world.driver.calls] == WHOLE[:1]


@pytest.mark.parametrize("name", WHOLE)
def test_nobody_waits_for_reads_that_failed(world: World, name: str) -> None:
    gate = Gate()
    reads(world, gate, 3)
    world.driver.answers[name] = 700
    with pytest.raises(DeviceError, match="CUDA_ERROR_700"):
        world.batch.run()
    assert gate.halt() == (name == "cuMemcpyDtoHAsync_v2"), "what is read, is read"


def test_a_gate_is_closed_while_another_thread_passes_it(world: World) -> None:
    for wait_s in np.linspace(0, 0.002, 40):
        gate, world.driver.calls = Gate(), []
        reads(world, gate, 400)
        halted: list[bool] = []
        thread = threading.Thread(target=lambda halted=halted: halted.append(not world.batch.run()))
        thread.start()
        time.sleep(wait_s)
        read = gate.halt()
        begun = sum(name == "cuEventRecord" for name, *_ in world.driver.calls)
        thread.join()
        assert begun == read == sum(name == "cuEventRecord" for name, *_ in world.driver.calls)
        assert halted == [read < 400]
