"""A network in memory that loses, delays and corrupts messages, all by one seed. As on a
connection, those that arrive do so once and in the order in which they were sent.

    network = SimulatedNetwork(seed=7, faults=Faults(loss=0.1, delay_ms=(0, 40)))
    network.serve(service)
    connection = Connection(shape, options, transport=network.transport(), clock=network.clock)

Time is simulated: waiting for an answer lets the network deliver what is due, and takes no real
time. The same seed gives the same run, message by message."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvkeep.testing.clock import SimulatedClock


class Server(Protocol):
    """What answers requests: a Service, or whatever stands in for one."""

    def handle(self, frames: Sequence[bytes], now_ms: int) -> list[Any] | None: ...


@dataclass(frozen=True)
class Faults:
    """Probabilities for each message, in each direction. A message that is delayed delays those
    behind it."""

    loss: float = 0.0
    corruption: float = 0.0
    delay_ms: tuple[int, int] = (0, 0)


class SimulatedNetwork:
    """Messages between any number of clients and one server."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.clock = SimulatedClock()
        self.faults = faults or Faults()
        self.counts = {"sent": 0, "lost": 0, "corrupted": 0}
        self._random = random.Random(seed)
        self._server: Server | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._next_event = 0

    def serve(self, server: Server | None) -> None:
        """From now on this server gets the messages; None: nobody does, as when a server is
        down."""
        self._server = server

    def transport(self) -> SimulatedTransport:
        return SimulatedTransport(self)

    def run_until(self, now_ms: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Delivers everything due by then, in order, or less if `stop` says so."""
        while self._events and self._events[0][0] <= now_ms and not stop():
            due_ms, _, deliver = heapq.heappop(self._events)
            self.clock.advance_to(max(due_ms, self.clock.now_ms))
            deliver()
        if not stop():
            self.clock.advance_to(max(now_ms, self.clock.now_ms))

    def to_server(self, sender: SimulatedTransport, frames: Sequence[Any]) -> None:
        def deliver(message: list[bytes]) -> None:
            if self._server is not None:
                reply = self._server.handle(message, self.clock.now_ms)
                if reply is not None:
                    self._post(sender.back, sender.inbox.append, reply)

        self._post(sender.there, deliver, frames)

    def _post(
        self, way: _Way, deliver: Callable[[list[bytes]], None], frames: Sequence[Any]
    ) -> None:
        self.counts["sent"] += 1
        message = [bytes(frame) for frame in frames]
        if self._random.random() < self.faults.loss:
            self.counts["lost"] += 1
            return
        damaged = self._random.random() < self.faults.corruption and any(message)
        arriving = self._corrupted(message) if damaged else message
        way.due_ms = max(
            way.due_ms, self.clock.now_ms + self._random.randint(*self.faults.delay_ms)
        )
        heapq.heappush(self._events, (way.due_ms, self._next_event, lambda: deliver(arriving)))
        self._next_event += 1

    def _corrupted(self, message: list[bytes]) -> list[bytes]:
        """One bit of one frame, flipped. Frames without bytes have none to flip."""
        frames = list(message)
        at = self._random.choice([at for at, frame in enumerate(frames) if frame])
        frame = bytearray(frames[at])
        frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
        frames[at] = bytes(frame)
        self.counts["corrupted"] += 1
        return frames


class _Way:
    """One direction of a connection, and when the last message that was sent arrives."""

    due_ms = 0


class SimulatedTransport:
    """One client's end of the network."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.there, self.back = _Way(), _Way()
        self._network = network

    def send(self, frames: Sequence[Any]) -> bool:
        self._network.to_server(self, frames)
        return True

    def receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def wait(self, timeout_ms: int) -> None:
        """Lets the network run until something has arrived here or the time is over."""
        self._network.run_until(
            self._network.clock.now_ms + timeout_ms, stop=lambda: bool(self.inbox)
        )

    def lost(self) -> bool:
        return False  # this network has no connections to lose, only messages

    def reconnect(self) -> None: ...

    def refusal(self) -> str:
        return ""

    def close(self) -> None:
        self.inbox.clear()
