"""Sockets of a simulation: byte pipes between processes, with the faults of streams, and listeners
and epoll for them.

    client's end ── Pipe: sent, on its way, arrived ──► server's end
                 ◄── Pipe ───────────────────────────

A pipe keeps the order of bytes and loses none, as TCP and Unix sockets do. What it does choose: how
many bytes a send takes and a recv gives, when bytes arrive, and when the connection ends. A pipe
that is full takes no more."""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvkeep_lab.simulation.simulation import Process, Simulation, Task

_BACKLOG = 100  # connections that wait to be accepted


class Hub(Protocol):
    """What sockets ask of the network that they are in."""

    simulation: Simulation

    def next_number(self) -> int: ...

    def piece(self, most: int) -> int:
        """How many of so many bytes a call takes: at least one."""

    def send(self, sender: ChaosSocket, data: bytes) -> int:
        """Puts some of the bytes on their way, and returns how many."""

    def end(self, receiver: ChaosSocket, *, reset: bool) -> None:
        """The other end was closed."""

    def forget(self, closed: ChaosSocket | ChaosListener) -> None: ...


class Pipe:
    """One direction of a connection. `capacity` counts bytes on their way and bytes that nobody has
    read."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.arrived = bytearray()
        self.on_the_way = 0
        self.due_us = 0  # when the last byte on its way arrives: no later one overtakes it
        self.is_ended = False  # all has arrived, and no more comes

    @property
    def room(self) -> int:
        return self.capacity - self.on_the_way - len(self.arrived)


class ChaosSocket:
    """One end of a connection: what `Stream` needs of a `socket.socket`. `uid`: of the user that
    runs the other end, None while no process has the other end."""

    def __init__(
        self, hub: Hub, process: Process, family: int, incoming: Pipe, outgoing: Pipe
    ) -> None:
        self.process, self.family = process, family
        self.incoming, self.outgoing = incoming, outgoing
        self.other: ChaosSocket | None = None
        self.uid: int | None = None
        self.is_connected = True
        self.error = 0  # of a connection that could not be made
        self.is_reset = self.is_closed = False
        self.before_recv: Callable[[ChaosSocket], None] = lambda socket: None
        self.on_change: Callable[[], None] = lambda: None
        self._hub = hub
        self._number = hub.next_number()
        self._waiting: list[Task] = []

    # -- a socket

    def fileno(self) -> int:
        return -1 if self.is_closed else self._number

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, *_: Any) -> None:
        """Buffers of a simulation have the size that it has drawn."""

    def getsockopt(self, level: int, option: int) -> int:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR)
        return self.error

    def send(self, data: Any, flags: int = 0) -> int:
        self._hub.simulation.step()
        self._check()
        assert self.is_connected, "nothing is sent before there is a connection"
        if self.other is None or self.other.is_closed:
            raise BrokenPipeError(errno.EPIPE, "the other end is closed")
        if self.outgoing.room <= 0:
            raise BlockingIOError(errno.EAGAIN, "full")
        taken = self._hub.send(self, bytes(data[: self.outgoing.room]))
        self._hub.simulation.step()
        return taken

    def recv(self, most: int) -> bytes:
        self.before_recv(self)
        pipe = self.incoming
        if self.is_closed or not pipe.arrived:
            self._check()
            if pipe.is_ended:
                return b""
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        count = self._hub.piece(min(most, len(pipe.arrived)))
        data = bytes(pipe.arrived[:count])
        del pipe.arrived[:count]
        if self.other is not None:
            self.other.notify()
        self._hub.simulation.step()
        return data

    def close(self) -> None:
        """What was sent still arrives, then the end. With bytes unread the other end is told of a
        reset instead."""
        if self.is_closed:
            return
        self.is_closed = True
        self._hub.forget(self)
        if (other := self.other) is not None:
            self._hub.end(other, reset=bool(self.incoming.arrived or self.incoming.on_the_way))

    # -- for the simulation

    def is_ready(self, events: int) -> bool:
        """Whether poll would report the socket: for these events, or because the connection has
        ended."""
        if self.is_reset or self.error:
            return True
        if not self.is_connected:
            return False
        readable = bool(self.incoming.arrived) or self.incoming.is_ended
        is_gone = self.other is None or self.other.is_closed
        writable = self.outgoing.room > 0 or is_gone
        hung_up = self.incoming.is_ended and (is_gone or bool(events & select.POLLRDHUP))
        return (
            hung_up
            or bool(events & select.POLLIN and readable)
            or bool(events & select.POLLOUT and writable)
        )

    def wait(self, timeout_us: int) -> None:
        """Blocks the thread until something changes here, or for so long."""
        task = self._hub.simulation.current
        assert task is not None
        self._waiting.append(task)
        try:
            self._hub.simulation.block(timeout_us)
        finally:
            self._waiting.remove(task)

    def notify(self) -> None:
        for task in self._waiting:
            self._hub.simulation.wake(task)
        self.on_change()

    def reset(self) -> None:
        """The connection is gone, for this end. Bytes that have arrived can be read, as on
        Linux."""
        if not self.is_closed and not self.is_reset:
            self.is_reset = True
            self.notify()

    def _check(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "the socket is closed")
        if self.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset")


class ChaosListener:
    """A socket that listens, for a server's process of some user."""

    def __init__(self, hub: Hub, process: Process, family: int, uid: int) -> None:
        self.process, self.family, self.uid = process, family, uid
        self.is_closed = False
        self.on_change: Callable[[], None] = lambda: None
        self._hub = hub
        self._number = hub.next_number()
        self._queue: deque[tuple[ChaosSocket, int]] = deque()

    def fileno(self) -> int:
        return -1 if self.is_closed else self._number

    def accept(self) -> tuple[ChaosSocket, Any]:
        while self._queue:
            end, uid = self._queue.popleft()
            if end.is_reset or end.is_closed:
                continue
            end.uid, end.on_change = uid, self.on_change
            if end.other is not None:
                end.other.uid = self.uid
                end.other.notify()
            return end, ("127.0.0.1", 1) if self.family != socket.AF_UNIX else ""
        raise BlockingIOError(errno.EAGAIN, "nobody waits")

    def close(self) -> None:
        self.is_closed = True
        self._hub.forget(self)
        for end, _ in self._queue:
            end.close()
        self._queue.clear()

    def is_ready(self, events: int) -> bool:
        return bool(events & select.POLLIN and self._queue)

    def add(self, end: ChaosSocket, uid: int) -> None:
        """A connection of that user's. BlockingIOError if too many wait."""
        if len(self._queue) >= _BACKLOG:
            raise BlockingIOError(errno.EAGAIN, "the queue is full")
        self._queue.append((end, uid))
        self.on_change()


class ChaosEpoll:
    """`select.epoll` for sockets of a simulation. It never waits: whoever owns it is told of
    changes."""

    def __init__(self, find: Callable[[int], ChaosSocket | ChaosListener | None]) -> None:
        self._find = find
        self._events: dict[int, int] = {}

    def register(self, number: int, events: int) -> None:
        assert number not in self._events
        self._events[number] = events

    def modify(self, number: int, events: int) -> None:
        assert number in self._events
        self._events[number] = events

    def unregister(self, number: int) -> None:
        del self._events[number]

    def poll(self, timeout_s: float = 0) -> list[tuple[int, int]]:
        ready = []
        for number, events in self._events.items():
            found = self._find(number)
            if found is not None and found.is_ready(events):
                ready.append((number, events))
        return ready

    def close(self) -> None:
        self._events.clear()
