"""Frames over a ZMQ socket. Sending never blocks: a frame that cannot go now is a failure now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvkeep.errors import SettingsError
from kvkeep.wire.auth import at_home, read_pair, read_public

_LAST_WORDS_MS = 200  # not 0: ZMQ 4.3.5 aborts if a peer goes while a message to it is half sent and thrown away
_KNOCK_AGAIN_S = 1.0
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_POLLIN = int(zmq.POLLIN)  # an enum's arithmetic takes as long again as asking


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

    def refusal(self) -> str:
        """Why the other side does not talk to us at all; "" if it does, or is not there."""

    def close(self) -> None: ...


class ZmqTransport:
    """A DEALER socket. ZMQ reconnects by itself; until it has, `send` fails at once.

    With a `curve_key` (the file of our secret key) and a `server_key` (the server's public key, or a file of it) all
    is encrypted, and only a server that has the other half of that key can answer.
    """

    def __init__(self, address: str, curve_key: str | None = None, server_key: str | None = None) -> None:
        keys = None
        if curve_key is not None and server_key is not None:
            keys = (*read_pair(at_home(curve_key)), read_public(server_key))
        self._address = address
        self._turned_away = 0  # since the last handshake that succeeded
        self._knock_at: float | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no queueing for a server that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)  # a server that starts again is back in a second
        self._socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[0].encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1].encode())
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys[2].encode())
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED | _BROKEN_OFF
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(events)
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
            return self._socket.recv_multipart(zmq.NOBLOCK) if _has_arrived(self._socket) else None
        except zmq.ZMQError:
            return None

    def wait(self, timeout_ms: int) -> None:
        self._socket.poll(timeout_ms)

    def lost(self) -> bool:
        ended = False
        while _has_arrived(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_DISCONNECTED:
                ended = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._turned_away, self._knock_at = 0, None
            else:
                self._note_refusal(event)
        if self._knock_at is not None and time.monotonic() >= self._knock_at:
            self._knock_at = None
            with contextlib.suppress(zmq.ZMQError):  # there may be nothing left to disconnect
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        return ended

    def refusal(self) -> str:
        """Why the server lets nobody in who has our keys, or none; "" if it does, or is not there."""
        return "its keys and ours do not fit (see curve_key and server_key)" if self._turned_away >= 2 else ""

    def _note_refusal(self, event: int) -> None:
        """A handshake failed. ZMQ gives up for good after some of these, but keys may be set right while we wait. One
        that was merely broken off may have met a server that was ending; two in a row did not."""
        self._turned_away += 2 if event & _REFUSED else 1
        if self._knock_at is None:
            self._knock_at = time.monotonic() + _KNOCK_AGAIN_S

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=_LAST_WORDS_MS)


def _has_arrived(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive. Mostly there is nothing, and an error that says so takes longer."""
    return bool(int(socket.get(zmq.EVENTS)) & _POLLIN)
