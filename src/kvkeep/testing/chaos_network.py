"""The network of a chaos run: messages between processes of a simulation, and what befalls them on their way."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvkeep.testing.chaos_record import Record
from kvkeep.testing.simulation import Process, Simulation, Task
from kvkeep.wire.frames import HEADER_BYTES

_USUAL_US = (30, 400)
_REORDERING_US = (500, 8_000)
_LATE_US = (50_000, 900_000)
_RECONNECT_US = (1_000, 150_000)


class Listener(Protocol):
    """The server's end."""

    def receive(self, sender: ChaosTransport, message: list[bytes]) -> None: ...


class ChaosNetwork:
    """Any number of clients and one server at a time. `rates` are those of chaos_plan.RATES that are in force."""

    def __init__(self, simulation: Simulation, seed: int, rates: Mapping[str, float], record: Record) -> None:
        self.simulation = simulation
        self.rates = dict(rates)
        self.record = record
        self._random = random.Random(f"network {seed}")
        self._listener: Listener | None = None
        self._transports: list[ChaosTransport] = []

    def transport(self, process: Process) -> ChaosTransport:
        transport = ChaosTransport(self, process)
        self._transports.append(transport)
        return transport

    def listen(self, listener: Listener | None) -> None:
        """Another server is there, or none. Connections are lost, and made again some time later."""
        self._listener = listener
        self._transports = [each for each in self._transports if not each.process.dead]
        for transport in self._transports:
            transport.was_lost = transport.was_lost or transport.is_connected
            transport.is_connected = False
            if listener is not None:
                delay_us = self._random.randint(*_RECONNECT_US)
                self.simulation.after(delay_us, lambda each=transport: each.reconnect(listener))  # type: ignore[misc]

    def serves(self, listener: Listener) -> bool:
        return self._listener is listener

    def to_server(self, sender: ChaosTransport, frames: Sequence[Any]) -> None:
        def deliver(message: list[bytes]) -> None:
            # A late one may meet the next server. Its session is not known there.
            if self._listener is not None:
                self._listener.receive(sender, message)

        self._post(deliver, frames)

    def to_client(self, receiver: ChaosTransport, frames: Sequence[Any]) -> None:
        self._post(receiver.take, frames)

    def _post(self, deliver: Callable[[list[bytes]], None], frames: Sequence[Any]) -> None:
        self.record.messages += 1
        message = [bytes(frame) for frame in frames]
        if self._befalls("lost_message"):
            return
        for _ in range(2 if self._befalls("duplicated_message") else 1):
            arriving = message
            if self._befalls("corrupted_message"):
                arriving = self._flipped(message, (0, 1))
            elif len(message) > 2 and self._befalls("flipped_payload_bit"):
                arriving = self._flipped(message, range(2, len(message)))
            delay_us = self._random.randint(*_USUAL_US)
            if self._befalls("late_message"):
                delay_us = self._random.randint(*_LATE_US)
            elif self._befalls("reordered_message"):
                delay_us = self._random.randint(*_REORDERING_US)
            self.simulation.after(delay_us, lambda m=arriving: deliver(m))  # type: ignore[misc]

    def _befalls(self, fault: str) -> bool:
        chance = self.rates.get(fault, 0.0)
        if not chance or self._random.random() >= chance:
            return False
        self.record.faults[fault] += 1
        self.record.tell_detail("network", fault.replace("_", " "))
        return True

    def _flipped(self, message: list[bytes], among: Sequence[int]) -> list[bytes]:
        frames = list(message)
        at = self._random.choice([at for at in among if frames[at]])
        frame = bytearray(frames[at])
        frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
        frames[at] = bytes(frame)
        assert at > 0 or len(frame) == HEADER_BYTES
        return frames


class ChaosTransport:
    """A `kvkeep.client.transport.Transport` of one process."""

    def __init__(self, network: ChaosNetwork, process: Process) -> None:
        self.process = process
        self.is_connected = network._listener is not None
        self.was_lost = False
        self._network = network
        self._inbox: deque[list[bytes]] = deque()
        self._waiting: list[Task] = []

    def send(self, frames: Sequence[Any]) -> bool:
        simulation = self.process.simulation
        simulation.step()
        if self.process.dead or not self.is_connected:
            return False
        self._network.to_server(self, frames)
        simulation.step()
        return True

    def receive(self) -> list[bytes] | None:
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_ms: int) -> None:
        simulation = self.process.simulation
        task = simulation.current
        assert task is not None
        if not self._inbox:
            self._waiting.append(task)
            simulation.block(timeout_ms * 1000)
            self._waiting.remove(task)

    def lost(self) -> bool:
        lost, self.was_lost = self.was_lost, False
        return lost

    def refusal(self) -> str:
        return ""

    def close(self) -> None:
        """May be called by the garbage collector, at any time: nothing happens."""

    def take(self, message: list[bytes]) -> None:
        if not self.process.dead:
            self._inbox.append(message)
            for task in self._waiting:
                self.process.simulation.wake(task)

    def reconnect(self, listener: Listener) -> None:
        self.is_connected = self._network.serves(listener)
