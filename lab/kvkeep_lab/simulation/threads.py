"""`threading` in simulated time: what `kvkeep.client.threads.Threads` asks for, for the threads of
one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvkeep_lab.simulation.simulation import Process, Simulation, Task


class SimulatedThreads:
    """Pass it where the module `threading` is expected."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._simulation = process.simulation

    def Thread(
        self,
        target: Callable[..., object],
        name: str = "",
        daemon: bool = True,
        args: tuple[Any, ...] = (),
    ) -> SimulatedThread:
        return SimulatedThread(self._process, lambda: target(*args))

    def Lock(self) -> SimulatedLock:
        return SimulatedLock(self._simulation)

    def RLock(self) -> SimulatedRLock:
        return SimulatedRLock(self._simulation)

    def Condition(self, lock: SimulatedLock | None = None) -> SimulatedCondition:
        return SimulatedCondition(self._simulation, lock or self.RLock())

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self._simulation)

    def get_ident(self) -> int:
        task = self._simulation.current
        assert task is not None, "outside of all threads"
        return task.number


class OwnThreads:
    """The same for code that asks the module `threading` itself: whichever thread asks gets what is
    of its process."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __getattr__(self, name: str) -> Any:
        task = self._simulation.current
        assert task is not None, "outside of all threads"
        return getattr(SimulatedThreads(task.process), name)


class SimulatedTime:
    """The module `time` for such code."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def monotonic(self) -> float:
        return self._simulation.now_us / 1e6

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self._simulation.sleep(int(seconds * 1e6))


class SimulatedThread:
    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self._process = process
        self._target = target
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return self._task.number if self._task else None

    def start(self) -> None:
        self._task = self._process.begin(self._target)
        self._process.simulation.step()

    def is_alive(self) -> bool:
        return self._task is not None and self._task.alive

    def join(self) -> None:
        simulation = self._process.simulation
        while self._task is not None and self._task.alive:
            task = simulation.current
            assert task is not None
            self._task.joiners.append(task)
            simulation.block()


class SimulatedLock:
    """Who waits for it gets it in no order."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[Task] = []
        self._owner: Task | None = None

    def acquire(self, blocking: bool = True) -> bool:
        self._simulation.step()
        task = self._simulation.current
        assert task is not None or self._simulation.over, "a lock outside of all threads"
        while task is not None and self._owner is not None:
            if not blocking:
                return False
            self._waiting.append(task)
            self._simulation.block()
        self._owner = task
        return True

    def release(self) -> None:
        self._owner = None
        if self._waiting:
            at = self._simulation.random.randrange(len(self._waiting))
            self._simulation.wake(self._waiting.pop(at))
        self._simulation.step()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock(SimulatedLock):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        is_others = self._owner is None or self._owner is not self._simulation.current
        if is_others and not super().acquire(blocking):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class SimulatedCondition:
    def __init__(self, simulation: Simulation, lock: SimulatedLock) -> None:
        self._simulation = simulation
        self._lock = lock
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = self._simulation.current
        assert task is not None and self._lock.locked(), "wait without the lock"
        depth = getattr(self._lock, "_depth", 1)
        self._waiting.append(task)
        for _ in range(depth):
            self._lock.release()
        # Whoever notified between the two has taken the task off the list: then there is nothing to
        # wait for.
        woken = task not in self._waiting or self._simulation.block(
            None if timeout is None else int(timeout * 1e6)
        )
        if task in self._waiting:
            self._waiting.remove(task)
        for _ in range(depth):
            self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline_us = None if timeout is None else self._simulation.now_us + int(timeout * 1e6)
        while not (result := predicate()):
            left_us = None if deadline_us is None else deadline_us - self._simulation.now_us
            if left_us is not None and left_us <= 0:
                break
            self.wait(None if left_us is None else left_us / 1e6)
        return result

    def notify(self, n: int = 1) -> None:
        """Wakes all, as a condition may: those for which there is nothing wait again."""
        self.notify_all()

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._simulation.wake(task)


class SimulatedEvent:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._set = False
        self._waiting: list[Task] = []

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            self._simulation.wake(task)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        task = self._simulation.current
        assert task is not None
        if not self._set:
            self._waiting.append(task)
            self._simulation.block(None if timeout is None else int(timeout * 1e6))
            self._waiting.remove(task)
        return self._set
