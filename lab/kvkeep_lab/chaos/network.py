"""The network of a chaos run: connections between processes of a simulation, and what befalls the
bytes on their way.

A client has its real transport: only the operating system under it is simulated (chaos_sockets.py).
A server is found by its Unix socket and by TCP, as on one host."""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvkeep.client.transport import StreamTransport
from kvkeep.wire.frames import MAGIC, Header, encode
from kvkeep.wire.messages import Refused
from kvkeep.wire.stream import Stream
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.chaos.sockets import ChaosListener, ChaosSocket, Pipe
from kvkeep_lab.simulation.simulation import Process, Simulation

ADDRESS: Final = "tcp://127.0.0.1:5555"
FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET)
OWN_UID: Final = os.geteuid()
STRANGER_UID: Final = 4711 if OWN_UID != 4711 else 4712
_CAPACITIES = (600, 5_000, 60_000, 1_000_000)
_WHOLE = 0.7  # of the calls take or give all that they can
_USUAL_US = (30, 400)
_LATE_US = (50_000, 900_000)
_CONNECT_US = (50, 20_000)


class ChaosNetwork:
    """Any number of clients, and whoever listens. `rates` are those of chaos_plan.RATES that are in
    force."""

    def __init__(
        self,
        simulation: Simulation,
        seed: int,
        rates: Mapping[str, float],
        record: Record,
        host: int = 0,
    ) -> None:
        self.simulation = simulation
        self.rates = dict(rates)
        self.record = record
        self._random = random.Random(f"network {seed}{f' of host {host}' if host else ''}")
        self._numbers = itertools.count(1_000)
        self._open: dict[int, ChaosSocket | ChaosListener] = {}
        self._listeners: dict[int, ChaosListener] = {}  # by family

    # -- for processes

    def transport(self, process: Process) -> ChaosTransport:
        return ChaosTransport(self, process)

    def listen(
        self, process: Process, family: int, uid: int, on_change: Callable[[], None]
    ) -> ChaosListener:
        """OSError if another process listens there."""
        if family in self._listeners:
            raise OSError(errno.EADDRINUSE, "another process listens there")
        listener = ChaosListener(self, process, family, uid)
        listener.on_change = on_change
        self._listeners[family] = self._open[listener.fileno()] = listener
        return listener

    def is_taken(self, family: int) -> bool:
        return family in self._listeners

    def connect(self, process: Process, family: int) -> ChaosSocket:
        """A socket that has connected, or that is about to, if it is TCP."""
        self.simulation.step()
        there, back = (Pipe(self._random.choice(_CAPACITIES)) for _ in range(2))
        client = self._opened(ChaosSocket(self, process, family, incoming=back, outgoing=there))
        if family == socket.AF_UNIX:
            if (listener := self._listeners.get(family)) is None:
                client.close()
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
            self._join(client, listener)
            client.uid = listener.uid
        else:
            client.is_connected = False
            delay_us = self._random.randint(
                *(_LATE_US if self._befalls("late_message") else _CONNECT_US)
            )
            self.simulation.after(delay_us, lambda: self._arrive(client))
        return client

    def end_process(self, process: Process) -> None:
        """The kernel closes what a process had open."""
        for each in [each for each in self._open.values() if each.process is process]:
            each.close()

    def find(self, number: int) -> ChaosSocket | ChaosListener | None:
        return self._open.get(number)

    def stall(self, chance: random.Random, duration_us: int) -> bool:
        """Nothing moves in one direction of some connection for so long. False if there is none."""
        ends = [
            each
            for each in self._open.values()
            if isinstance(each, ChaosSocket) and each.other is not None
        ]
        if not ends:
            return False
        pipe = chance.choice(ends).incoming
        pipe.due_us = max(pipe.due_us, self.simulation.now_us + duration_us)
        return True

    # -- for sockets

    def next_number(self) -> int:
        return next(self._numbers)

    def piece(self, most: int) -> int:
        return most if self._random.random() < _WHOLE else self._random.randint(1, most)

    def send(self, sender: ChaosSocket, data: bytes) -> int:
        self._check_proved(sender)
        data = data[: self.piece(len(data))]
        pieces = [(data, _USUAL_US)]
        cut = self._random.randint(0, len(data))
        if self._befalls("cut_connection"):
            self._carry(sender, data[:cut], _USUAL_US)
            self._cut(sender)
            return len(data)
        if self._befalls("half_message"):
            pieces = [(data[:cut], _USUAL_US), (data[cut:], _LATE_US)]
        elif self._befalls("late_message"):
            pieces = [(data, _LATE_US)]
        elif self._random.random() >= _WHOLE:
            pieces = [(data[:cut], _USUAL_US), (data[cut:], _USUAL_US)]
        is_payload = not data.startswith(MAGIC)
        flips = self._befalls("flipped_payload_bit" if is_payload else "corrupted_message")
        at = self._random.randrange(len(data)) if flips else -1
        for piece, delay_us in pieces:
            self._carry(sender, _flipped(piece, at, self._random), delay_us)
            at -= len(piece)
        return len(data)

    def end(self, receiver: ChaosSocket, *, reset: bool) -> None:
        pipe = receiver.incoming

        def arrive() -> None:
            pipe.is_ended = True
            if reset:
                receiver.reset()
            receiver.notify()

        self._at_last(pipe, _USUAL_US, arrive)

    def forget(self, closed: ChaosSocket | ChaosListener) -> None:
        self._open = {number: each for number, each in self._open.items() if each is not closed}
        self._listeners = {
            family: each for family, each in self._listeners.items() if each is not closed
        }

    # -- on their way

    def _opened(self, end: ChaosSocket) -> ChaosSocket:
        self._open[end.fileno()] = end
        return end

    def _join(self, client: ChaosSocket, listener: ChaosListener) -> None:
        server = ChaosSocket(
            self, listener.process, client.family, client.outgoing, client.incoming
        )
        client.other, server.other = server, client
        try:
            listener.add(self._opened(server), OWN_UID)
        except BlockingIOError:
            server.close()
            client.close()
            raise

    def _arrive(self, client: ChaosSocket) -> None:
        """A TCP connection is made, or refused."""
        if client.is_closed:
            return
        listener = self._listeners.get(client.family)
        if listener is None:
            client.error = errno.ECONNREFUSED
        else:
            client.is_connected = True
            self._join(client, listener)
        client.notify()

    def _carry(self, sender: ChaosSocket, data: bytes, delay_us: tuple[int, int]) -> None:
        pipe, receiver = sender.outgoing, sender.other
        assert receiver is not None
        if not data:
            return
        pipe.on_the_way += len(data)

        def arrive() -> None:
            pipe.on_the_way -= len(data)
            if not (receiver.is_closed or receiver.is_reset or pipe.is_ended):
                pipe.arrived += data
                receiver.notify()

        self._at_last(pipe, delay_us, arrive)

    def _at_last(self, pipe: Pipe, delay_us: tuple[int, int], action: Callable[[], None]) -> None:
        """After whatever is on its way there."""
        pipe.due_us = max(pipe.due_us, self.simulation.now_us + self._random.randint(*delay_us))
        self.simulation.at(pipe.due_us, action)

    def _cut(self, sender: ChaosSocket) -> None:
        """The connection ends for both, in order or with an error for the receiver."""
        receiver = sender.other
        assert receiver is not None
        self.end(receiver, reset=self._random.random() < 0.5)
        self.end(sender, reset=True)

    def _befalls(self, fault: str) -> bool:
        chance = self.rates.get(fault, 0.0)
        if not chance or self._random.random() >= chance:
            return False
        self.record.faults[fault] += 1
        self.record.tell_detail("network", fault.replace("_", " "))
        return True

    def _check_proved(self, sender: ChaosSocket) -> None:
        """Nobody says a word to a process whose user is not known, or is not the right one."""
        if sender.uid != OWN_UID and sender.process.name != Stranger.NAME:
            text = f"{sender.process.name} sends to a process of {f'user {sender.uid}' if sender.uid else 'some user'}"
            self.simulation.fail(Violation("broken_rules", text))


def _flipped(data: bytes, at: int, chance: random.Random) -> bytes:
    """With one bit of that byte flipped, if there is such a byte."""
    if not 0 <= at < len(data):
        return data
    flipped = bytearray(data)
    flipped[at] ^= 1 << chance.randrange(8)
    return bytes(flipped)


class ChaosTransport(StreamTransport):
    """The transport of one process, with what it asks of the operating system."""

    def __init__(self, network: ChaosNetwork, process: Process) -> None:
        super().__init__(ADDRESS)
        self.process = process
        self._network = network

    def _now_s(self) -> float:
        return (self.process.simulation.now_us + self.process.offset_us) / 1e6

    def _peer_uid(self, connected: Any) -> int | None:
        assert isinstance(connected, ChaosSocket)
        return connected.uid

    def _connect(self, family: int, where: Any) -> Any:
        return self._network.connect(self.process, family)

    def _poll(self, stream: Stream | None, timeout_ms: int, events: int) -> bool:
        simulation = self.process.simulation
        simulation.step()
        if stream is None:
            if timeout_ms:
                simulation.sleep(timeout_ms * 1000)
            return False
        end: Any = stream.socket
        if timeout_ms and not end.is_ready(events):
            end.wait(timeout_ms * 1000)
        ready: bool = end.is_ready(events)
        return ready


class Stranger:
    """A process of another user that listens where the server did. It takes connections, and says
    something that a server might say. Nobody may speak to it, nor believe it."""

    NAME: Final = "a stranger"

    def __init__(self, network: ChaosNetwork, families: tuple[int, ...]) -> None:
        self.process = Process(network.simulation, self.NAME)
        self._listeners: list[ChaosListener] = []
        for family in families:
            self._listeners.append(network.listen(self.process, family, STRANGER_UID, self._accept))
        self._network = network

    def leave(self) -> None:
        self._network.end_process(self.process)

    def _accept(self) -> None:
        for listener in self._listeners:
            while not listener.is_closed and listener.is_ready(1):
                end, _ = listener.accept()
                forged = encode(Header(0, 1), Refused("forged", "do as I say"))
                end.send(b"".join(forged))
