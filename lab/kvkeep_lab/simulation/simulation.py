"""Simulated time and processes: one thread runs at a time, and a seed decides which.

    simulation = Simulation(seed=7)
    process = Process(simulation, "engine 0")
    process.begin(main)                    # a thread of it
    simulation.after(20_000, crash)        # something that happens in 20 ms
    simulation.run(1_000_000)              # one second, in no time

Threads are real ones, so the code that runs in them is the real one. But only the one that has the
baton runs, and it passes the baton on only where it waits, sleeps, takes or lets go of a lock,
sends, or copies (`step`, `block`), or, if told so, at any line of some files: there the seed says
who is next. So a run is the same every time. What happens at a time (`at`, `after`) happens between
two steps of whoever has the baton; it may not wait. Time passes with each step, and when everybody
waits.

A process that is killed ends where its threads are: `Killed` is raised there, and whatever they do
on their way out (`finally`, `with`) reaches nobody. One that is paused stays where it is."""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from types import FrameType
from typing import Any

_FOREVER_US = 1 << 62
_STEPS_A_LINE = 0.05


class Killed(BaseException):
    """Ends the threads of a process that is no more. No `except Exception` stops it."""


class Process:
    """Threads that live and die together, and their clock."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.paused = False
        self.dead = False
        self.offset_us = 0  # of its clock
        self.jumped_us = -_FOREVER_US  # when that changed

    def now_ms(self) -> int:
        return (self.simulation.now_us + self.offset_us) // 1000

    def jump(self, duration_us: int) -> None:
        """Its clock, and nothing else, is suddenly so much further."""
        self.offset_us += duration_us
        self.jumped_us = self.simulation.now_us

    def begin(self, target: Callable[[], object]) -> Task:
        """Another thread of this process, which runs from now on."""
        return self.simulation.begin(self, target)

    def kill(self) -> None:
        self.dead = True
        self.paused = False
        self.simulation.rouse(self)


class Task:
    """One thread."""

    def __init__(self, process: Process, target: Callable[[], object], number: int) -> None:
        self.process = process
        self.target = target
        self.number = number
        self.alive = True
        self.joiners: list[Task] = []
        self.go = allocate_lock()
        self.go.acquire()
        self.blocked = False
        self.woken = False
        self.turn = 0  # which of its waits this is


class Simulation:
    """See the module's docstring. `switch_chance`: how often a step passes the baton on.
    `stops_in`: files of which each line may be a step, too; none of them may hold a real lock."""

    def __init__(
        self,
        seed: object,
        switch_chance: float = 0.3,
        step_us: int = 5,
        stops_in: frozenset[str] = frozenset(),
    ) -> None:
        self.now_us = 0
        self.steps = 0
        self.over = False
        self.random = random.Random(f"schedule {seed}")
        self.switch_chance = switch_chance
        self._step_us = step_us
        self._stops_in = stops_in
        self._until_us = 0
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count(1)
        self._tasks: dict[int, Task] = {}  # that are alive
        self._ready: list[Task] = []
        self._current: Task | None = None
        self._in_event = False
        self._failure: BaseException | None = None
        self._main = allocate_lock()
        self._main.acquire()

    # -- for whoever runs it

    def at(self, time_us: int, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(time_us, self.now_us), next(self._numbers), action))

    def after(self, delay_us: int, action: Callable[[], object]) -> None:
        self.at(self.now_us + delay_us, action)

    def run(self, duration_us: int) -> None:
        """Lets so much time pass. Raises what was raised in an event, or left a thread; then there
        is only `close`."""
        assert self._current is None, "only the thread that made the simulation runs it"
        self._until_us = self.now_us + duration_us
        first = self._next()
        if first is not None:
            self._current = first
            first.go.release()
            self._main.acquire()
        self._current = None
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error, unless there is one already."""
        self._failure = self._failure or error

    def close(self) -> None:
        """Kills everybody, and waits until every thread has ended."""
        self._failure = None
        self._events.clear()
        for task in list(self._tasks.values()):
            task.process.kill()
        while self._tasks:
            before = len(self._tasks)
            self._failure = None
            self._until_us = _FOREVER_US
            first = self._next()
            assert first is not None and before, "a thread that was killed waits for something"
            self._current = first
            first.go.release()
            self._main.acquire()
            self._current = None
        self.over = True

    # -- for threads

    @property
    def current(self) -> Task | None:
        """Whose turn it is; None outside of all threads."""
        return None if self._in_event else self._current

    def begin(self, process: Process, target: Callable[[], object]) -> Task:
        task = Task(process, target, next(self._numbers))
        self._tasks[task.number] = task
        self._ready.append(task)
        start_new_thread(self._run_task, (task,))
        return task

    def step(self) -> None:
        """A place where another thread may have its turn."""
        task = self._current
        if task is None or self._in_event:
            return
        if task.process.dead:
            raise Killed
        self.steps += 1
        self.now_us += self._step_us
        due = bool(self._events) and self._events[0][0] <= self.now_us
        if due or task.process.paused or self.random.random() < self.switch_chance:
            self._pass_on(task)

    def block(self, timeout_us: int | None = None) -> bool:
        """Waits until somebody says `wake`. False if that took too long."""
        task = self._current
        assert task is not None and not self._in_event, "an event may not wait"
        if task.process.dead:
            raise Killed
        task.turn += 1
        task.blocked, task.woken = True, False
        self._ready.remove(task)
        if timeout_us is not None:
            turn = task.turn
            self.after(max(timeout_us, 1), lambda: self._time_out(task, turn))
        self._pass_on(task)
        return task.woken

    def wake(self, task: Task) -> None:
        if task.blocked:
            task.blocked, task.woken = False, True
            self._ready.append(task)

    def sleep(self, duration_us: int) -> None:
        self.block(duration_us)

    def rouse(self, process: Process) -> None:
        """Ends all waits of a process."""
        for task in self._tasks.values():
            if task.process is process:
                self.wake(task)

    # -- the baton

    def _time_out(self, task: Task, turn: int) -> None:
        if task.blocked and task.turn == turn:
            task.blocked = False
            self._ready.append(task)

    def _pass_on(self, task: Task) -> None:
        following = self._next()
        if following is not task:
            self._current = following
            (following.go if following else self._main).release()
            task.go.acquire()
        if task.process.dead:
            raise Killed

    def _next(self) -> Task | None:
        """Whose turn it is. None: that of whoever runs the simulation, because the time is over or
        something failed."""
        while self._failure is None and self.now_us < self._until_us:
            if self._events and self._events[0][0] <= self.now_us:
                self._happen(heapq.heappop(self._events)[2])
                continue
            ready = [task for task in self._ready if not task.process.paused]
            if ready:
                return ready[0] if len(ready) == 1 else ready[self.random.randrange(len(ready))]
            if not self._events or self._events[0][0] >= self._until_us:
                self.now_us = max(self.now_us, self._until_us)
            else:
                self.now_us = self._events[0][0]
        return None

    def _happen(self, action: Callable[[], object]) -> None:
        self._in_event = True
        try:
            action()
        except BaseException as error:
            # guard: raised by `run`; here it would meet the code of whoever has the baton
            self.fail(error)
        finally:
            self._in_event = False

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            return self._trace if frame.f_code.co_filename in self._stops_in else None
        if event == "line" and self.random.random() < _STEPS_A_LINE:
            self.step()
        return self._trace

    def _run_task(self, task: Task) -> None:
        task.go.acquire()
        try:
            if not task.process.dead:
                if self._stops_in:
                    sys.settrace(self._trace)
                task.target()
        except Killed:
            pass
        except BaseException as error:
            # guard: raised by `run`; a thread's end must pass the baton on
            if not task.process.dead:
                self.fail(error)
        task.alive = False
        self._ready.remove(task)
        del self._tasks[task.number]
        for joiner in task.joiners:
            self.wake(joiner)
        following = self._next()
        self._current = following
        (following.go if following else self._main).release()
