"""Frames over a ZMQ socket. Sending never blocks: a frame that cannot go now is a failure now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from kvkeep.errors import SettingsError


class Transport(Protocol):
    """What a connection needs of a network. `kvkeep.testing` has one that loses, delays, doubles and reorders."""

    def send(self, frames: Sequence[Any]) -> bool:
        """Sends one message, or returns False at once."""

    def receive(self) -> list[bytes] | None:
        """The next message that has arrived, if any."""

    def wait(self, timeout_ms: int) -> None:
        """Returns when something has arrived or the time is over."""

    def lost(self) -> bool:
        """Whether a connection has ended since this was last asked. What was sent over it may never have arrived."""

    def close(self) -> None: ...


class ZmqTransport:
    """A DEALER socket. ZMQ reconnects by itself; until it has, `send` fails at once."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no queueing for a server that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        self._socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            hint = "write tcp://host:port or ipc://path"
            raise SettingsError(f"{address!r} is no address to connect to: {error.strerror}", hint) from None

    def send(self, frames: Sequence[Any]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return None

    def wait(self, timeout_ms: int) -> None:
        self._socket.poll(timeout_ms)

    def lost(self) -> bool:
        events = 0
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            events += 1
        return events > 0

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
