"""A device that puts off what it is given, and does it in any order that CUDA permits.

    permitted      an operation runs long after the call that gave it to a stream has returned; operations of different
                   streams run in any order, and in turns, a block at a time; host memory is read
                   and written when an operation runs, not when it is given
    not permitted  overtaking within a stream; beginning before a point that the stream was told to wait for

A seed decides on the order, so what was seen once is seen again. There is one thread: where another
one could run while ours waits or copies, `elsewhere` is called instead. `forgets` is for tests of
tests: dependencies that are left out."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tests.gpu.pretend import Halted, Immediate

from kvkeep.errors import DeviceError
from kvkeep.gpu.driver import Rows
from kvkeep.kv.checksum import checksum_at
from kvkeep.kv.copy import gather, scatter
from kvkeep.kv.runs import BlockRuns

STREAMS = ("out kernels", *["out copies"] * 2, "in kernels", *["in copies"] * 2)  # as a copier asks


class Dependency(NamedTuple):
    """`who`, a stream or the host, waits for a point in the work of `whom`."""

    who: str
    whom: str


class Point:
    """In the work of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.done = False


class Event:
    """Who waits for one that was never recorded does not wait. A handle is used again by the next
    event, and tells of the last point that was recorded with it, whoever did that."""

    def __init__(self, stream: Stream, unused: list[list[Point]]) -> None:
        self.stream = stream
        self._unused = unused
        self._handle = unused.pop() if unused else []

    def __del__(self) -> None:
        self._unused.append(self._handle)

    @property
    def point(self) -> Point | None:
        return self._handle[0] if self._handle else None

    @property
    def done(self) -> bool:
        return self.point is None or self.point.done

    def record(self) -> Point:
        self._handle[:] = [Point(self.stream)]
        return self._handle[0]


class Begin(NamedTuple):
    """In a stream: what follows begins after this point."""

    point: Point


class Stream:
    def __init__(self, name: str, haste: float) -> None:
        self.name = name
        self.haste = haste
        self.work: deque[Callable[[], None] | Begin] = deque()

    @property
    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Begin) or self.work[0].point.done)

    def run(self) -> None:
        """The next operation."""
        operation = self.work.popleft()
        if not isinstance(operation, Begin):
            operation()


class Memory(torch.Tensor):
    """Of a device, or of the host: what fills or copies it is work for the device's current
    stream."""

    owner: ClassVar[Lazy]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.zero_:
            cls.owner.give(partial(bytes_at(args[0]).fill, 0))
            return args[0]
        if func is torch.Tensor.copy_:
            cls.owner.give(partial(np.copyto, bytes_at(args[0]), bytes_at(args[1])))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def bytes_at(tensor: torch.Tensor) -> NDArray[np.int64]:
    """The same memory, to be used at once."""
    with torch._C.DisableTorchFunctionSubclass():
        array: NDArray[np.int64] = tensor.numpy()
        return array


class Collected:
    """A batch: nothing of it is given to the device before it runs."""

    def __init__(self, device: Lazy) -> None:
        self._device = device
        self._at_once = Immediate(device)
        self._commands: list[Callable[[], Any]] = []

    def mark(self, stream: Stream, *, urgent: bool = False) -> Event:
        event = self._device.event(stream)
        self._commands.append(partial(self._device.record, event))
        return event

    def __getattr__(self, name: str) -> Callable[..., None]:
        def collect(*given: Any) -> None:
            self._commands.append(partial(getattr(self._at_once, name), *given))

        return collect

    def run(self) -> bool:
        commands, self._commands = self._commands, []
        for command in commands:
            if self._device.fails():
                self._at_once.fail()
                raise DeviceError("work for the GPU failed")
            try:
                command()
            except Halted:
                self._device.halted += 1
                return False
        self._device.entered_in_runs.append(self._device.entered)
        return True


class Lazy:
    """What `kvkeep.gpu.driver.Cuda` is for a GPU."""

    def __init__(self, seed: int, forgets: Dependency | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.forgets = forgets
        self.elsewhere: Callable[[], None] = lambda: None
        self.fails: Callable[[], bool] = lambda: False  # asked before each command of a batch
        self.halted = 0  # batches
        self.entered = 0  # the buffer whose gate was passed last
        self.entered_in_runs: list[int] = []  # the same at the end of each batch
        self._random = random.Random(seed)
        self._as_late_as_possible = self._random.random() < 0.5
        self._most_at_once = self._random.choice(
            [0, 0, 1, 4]
        )  # operations that run when one is given
        self._memory = type("MemoryOfOne", (Memory,), {"owner": self})
        self._reachable: list[tuple[int, int]] = []
        self._keep: list[torch.Tensor] = []
        self._streams: list[Stream] = []
        self._unused_events: list[list[Point]] = []
        self.engine, self._nobody = self._stream("engine"), self._stream("nobody's")
        self._names = iter(STREAMS)
        self._current = self.engine

    # -- threads, memory

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """As in a thread that is not the engine's: what is given to no stream in particular is
        ordered with nothing."""
        with self.on(self._nobody):
            yield

    def enter(self) -> None: ...

    def free_bytes(self) -> int:
        return 1 << 40

    def memory(self, words: int) -> torch.Tensor:
        return torch.full((words,), -1, dtype=torch.int64).as_subclass(self._memory)

    def host_memory(self, words: int) -> torch.Tensor:
        made = self.memory(words)
        self._keep.append(made)
        self.register(made.data_ptr(), 8 * words)
        return made

    def register(self, address: int, nbytes: int) -> None:
        self._reachable.append((address, address + nbytes))

    def unregister(self, address: int) -> None:
        self._reachable = [area for area in self._reachable if area[0] != address]

    # -- streams and events

    def _stream(self, name: str) -> Stream:
        self._streams.append(Stream(name, self._random.choice([0.01, 0.3, 1])))
        return self._streams[-1]

    def stream(self) -> Stream:
        return self._stream(next(self._names))

    def batch(self) -> Collected:
        return Collected(self)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def give(self, operation: Callable[[], None], stream: Stream | None = None) -> None:
        (stream or self._current).work.append(operation)
        for _ in range(self._random.randint(0, self._most_at_once)):
            self.step()

    def mark(self, stream: Stream | None = None, *, urgent: bool = False) -> Event:
        event = self.event(stream or self._current)
        self.record(event)
        return event

    def event(self, stream: Stream) -> Event:
        return Event(stream, self._unused_events)

    def record(self, event: Event) -> None:
        self.give(partial(setattr, event.record(), "done", True), event.stream)

    def after(self, stream: Stream | None, event: Event) -> None:
        stream = stream or self._current
        if self.forgets != (stream.name, event.stream.name) and event.point is not None:
            stream.work.append(Begin(event.point))

    def wait(self, event: Event) -> None:
        self.elsewhere()
        if self.forgets == ("host", event.stream.name):
            return
        point = event.point
        while point is not None and not point.done and not self._as_late_as_possible:
            assert self.step(), "nothing may run, so this would never end"
        if point is not None:
            self._hurry(point)

    def is_over(self, event: Event) -> bool:
        return event.done or self.forgets == ("host", event.stream.name)

    def drain(self, stream: Stream) -> None:
        while stream.work:
            assert self.step(), "nothing may run, so this would never end"

    def step(self) -> bool:
        """Runs one operation that may run now. False if there is none."""
        ready = [stream for stream in self._streams if stream.ready]
        if ready:
            self._random.choices(ready, [stream.haste for stream in ready])[0].run()
        return bool(ready)

    def is_still(self, streams: str) -> bool:
        """Whether all is done that was given to streams whose names begin so."""
        return not any(each.work for each in self._streams if each.name.startswith(streams))

    def _hurry(self, point: Point) -> None:
        """Runs what this point needs, and nothing else."""
        while not point.done:
            first = point.stream.work[0]
            if isinstance(first, Begin):
                self._hurry(first.point)
            point.stream.run()

    # -- copies

    def to_host(self, stream: Stream, rows: Rows) -> None:
        self._copy(stream, (rows.host, rows.host_pitch), (rows.device, rows.device_pitch), rows)

    def to_device(self, stream: Stream, rows: Rows) -> None:
        self._copy(stream, (rows.device, rows.device_pitch), (rows.host, rows.host_pitch), rows)

    def move(self, stream: Stream, to: int, start: int, words: int) -> None:
        self.give(partial(ctypes.memmove, to, start, 8 * words), stream)

    def _reach(self, host: int, nbytes: int) -> None:
        areas = self._reachable
        assert any(low <= host and host + nbytes <= high for low, high in areas), (
            "a copy beyond what is registered"
        )

    def _copy(
        self, stream: Stream, to: tuple[int, int], start: tuple[int, int], rows: Rows
    ) -> None:
        """Addresses and pitches."""
        self._reach(rows.host, (rows.number - 1) * rows.host_pitch + rows.nbytes)
        self.elsewhere()
        for at in range(rows.number):
            self.give(
                partial(ctypes.memmove, to[0] + at * to[1], start[0] + at * start[1], rows.nbytes),
                stream,
            )


class Units:
    """What `kvkeep.gpu.kernels.Units` is, on such a device. A sum is the whole checksum."""

    def __init__(self, runs: BlockRuns) -> None:
        self._runs = runs
        self.nbytes = runs.nbytes
        self.pitch = -(-runs.nbytes // 8) * 8

    @classmethod
    def of(cls, runs: BlockRuns, device: torch.device) -> Units:
        return cls(runs)

    def gather(self, ids: torch.Tensor, staging: torch.Tensor, sums: torch.Tensor | None) -> None:
        self._launch(self._gather, ids, staging, sums)

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor, sums: torch.Tensor | None) -> None:
        self._launch(self._scatter, ids, staging, sums)

    def checksums(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return sums

    def _launch(
        self, kernel: Any, ids: torch.Tensor, staging: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        assert isinstance(staging, Memory)
        for at in range(len(ids)):
            place = np.array([staging.data_ptr() + at * self.pitch], dtype=np.uint64)
            total = None if sums is None else bytes_at(sums)[at : at + 1].view(np.uint64)
            staging.owner.give(partial(kernel, bytes_at(ids)[at : at + 1], place, total))

    def _gather(
        self, ids: NDArray[np.int64], place: NDArray[np.uint64], total: NDArray[np.uint64] | None
    ) -> None:
        made = gather(self._runs, ids, place, verify=True)
        if total is not None and made is not None:
            total += made

    def _scatter(
        self, ids: NDArray[np.int64], place: NDArray[np.uint64], total: NDArray[np.uint64] | None
    ) -> None:
        scatter(self._runs, ids, place, None)
        if total is not None:
            total += checksum_at(place, self.nbytes)
