"""A session's own way to a server on this host: the socket beside the pool, without ZMQ and its threads."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkeep.client.transport import Transport
from kvkeep.wire.messages import Welcome
from kvkeep.wire.stream import Stream, socket_path

_MOST_UNSENT_BYTES = 16 << 20  # for a server that does not read; deadlines end what waits there


class DirectTransport:
    """A Transport that is connected, or over for good."""

    def __init__(self, connected: socket.socket, most_body_bytes: int) -> None:
        self._stream = Stream(connected, most_body_bytes)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._told = False

    @classmethod
    def open(cls, directory: Path, most_body_bytes: int) -> DirectTransport | None:
        """None where there is no such way: an older server's pool, or more connections than it takes."""
        connecting = socket.socket(socket.AF_UNIX)
        connecting.setblocking(False)
        try:
            with socket_path(directory) as path:
                connecting.connect(path)
        except OSError:
            connecting.close()
            return None
        return cls(connecting, most_body_bytes)

    def send(self, frames: Sequence[Any]) -> bool:
        if len(frames) != 2 or self._stream.unsent_bytes > _MOST_UNSENT_BYTES:
            return False
        self._stream.send(frames)
        return not self._stream.is_over

    def receive(self) -> list[bytes] | None:
        self._stream.flush()
        self._stream.read()
        return self._stream.next()

    def wait(self, timeout_ms: int) -> None:
        if not self._stream.is_over:
            self._stream.flush()
            self._poll.poll(timeout_ms)

    def lost(self) -> bool:
        told, self._told = self._told, self._stream.is_over
        return self._stream.is_over and not told

    def refusal(self) -> str:
        return ""

    def close(self) -> None:
        self._stream.close()


class Ways:
    """A Transport, and in its place, for a session on the server's host, the socket beside the pool.

    A session is on one connection at a time, and one that it has left is nobody's: who goes back says Hello again.
    """

    def __init__(self, transport: Transport, *, may_go_direct: bool = True) -> None:
        self._transport = self._now = transport
        self._may_go_direct = may_go_direct

    @property
    def is_direct(self) -> bool:
        return self._now is not self._transport

    def go_direct(self, welcome: Welcome | None) -> None:
        """If there is such a way, for one who is on that host; else all goes on as before."""
        if welcome is not None and self._may_go_direct and not self.is_direct:
            directory, most_bytes = Path(welcome.pool.directory), welcome.limits.frame_bytes
            self._now = DirectTransport.open(directory, most_bytes) or self._transport

    def go_back(self) -> None:
        if self.is_direct:
            self._now.close()
            self._now = self._transport

    def send(self, frames: Sequence[Any]) -> bool:
        return self._now.send(frames)

    def receive(self) -> list[bytes] | None:
        return self._now.receive()

    def wait(self, timeout_ms: int) -> None:
        self._now.wait(timeout_ms)

    def lost(self) -> bool:
        return self._now.lost()

    def refusal(self) -> str:
        return self._transport.refusal()

    def close(self) -> None:
        self.go_back()
        self._transport.close()
