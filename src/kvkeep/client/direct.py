"""A session's own way to a server on this host: the socket beside the pool, without ZMQ and its threads."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkeep.client.transport import Transport
from kvkeep.wire.messages import Welcome
from kvkeep.wire.stream import Stream, socket_path

_MOST_UNSENT_BYTES = 16 << 20  # for a server that does not read; deadlines end what waits there
_MOST_BYTES_A_BLOCK = 8 << 10  # of an answer: a slot and a thousand checksums
_PATIENCE_S = (
    0.004  # with a message that is longer than the kernel's buffers, and moves only while both sides are there
)
_TURNED_AWAY_S = 30.0


class DirectTransport:
    """A Transport that is connected, or over for good."""

    def __init__(self, connected: socket.socket, most_body_bytes: int) -> None:
        self._stream = Stream(connected, most_body_bytes)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._patience_s = _PATIENCE_S
        self._told = False
        self._has_heard = False

    @classmethod
    def open(cls, directory: Path, most_body_bytes: int) -> DirectTransport | None:
        """None where there is no such way: an older server's pool, say."""
        try:
            connecting = socket.socket(socket.AF_UNIX)
        except OSError:
            return None
        try:
            connecting.setblocking(False)
            with socket_path(directory) as path:
                connecting.connect(path)
            return cls(connecting, most_body_bytes)
        except OSError:
            connecting.close()
            return None

    def send(self, frames: Sequence[Any]) -> bool:
        if len(frames) != 2 or self._stream.unsent_bytes > _MOST_UNSENT_BYTES:
            return False
        self._stream.send(frames)
        self._help_along()
        return not self._stream.is_over

    def receive(self) -> list[bytes] | None:
        self._stream.flush()
        self._stream.read()
        self._help_along()
        message = self._stream.next()
        self._has_heard |= message is not None
        return message

    def wait(self, timeout_ms: int) -> None:
        if not self._stream.is_over:
            self._stream.flush()
            writes = select.POLLOUT if self._stream.unsent_bytes else 0
            self._poll.modify(self._stream.fileno(), select.POLLIN | writes)
            self._poll.poll(timeout_ms)

    def lost(self) -> bool:
        told, self._told = self._told, self._stream.is_over
        return self._stream.is_over and not told

    @property
    def was_turned_away(self) -> bool:
        """Whether the other side ended it without a word: it has no place for us, or is no server of ours."""
        return self._stream.is_over and not self._has_heard

    def refusal(self) -> str:
        return ""

    def close(self) -> None:
        self._stream.close()

    def _help_along(self) -> None:
        """A message of which a part has gone, or has come, goes on while we wait for it a moment: nobody else does it,
        and an engine may not be back before its step is over. Of a server that stands still we tire for good, until a
        message is whole again."""
        stream = self._stream
        if not stream.is_half:
            self._patience_s = _PATIENCE_S
            return
        until_s = time.monotonic() + self._patience_s
        while stream.is_half and not stream.has_next and not stream.is_over:
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            self.wait(max(1, int(left_s * 1000)))
            stream.flush()
            stream.read()
            self._patience_s = max(0.0, until_s - time.monotonic())


class Ways:
    """A Transport, and in its place, for a session on the server's host, the socket beside the pool.

    A session is on one connection at a time. If that one breaks it goes on by the other, and comes back later.
    """

    def __init__(self, transport: Transport, *, may_go_direct: bool = True) -> None:
        self._transport = transport
        self._direct: DirectTransport | None = None
        self._now: Transport = transport
        self._not_before_s = 0.0 if may_go_direct else float("inf")

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def go_direct(self, welcome: Welcome | None) -> None:
        """If there is such a way, for one who is on that host, and has no answers on their way; else all goes on as
        before."""
        if welcome is None or self.is_direct or time.monotonic() < self._not_before_s:
            return
        limits = welcome.limits
        most_bytes = limits.frame_bytes + limits.blocks_per_request * _MOST_BYTES_A_BLOCK
        self._direct = DirectTransport.open(Path(welcome.pool.directory), most_bytes)
        self._now = self._direct or self._transport

    def go_back(self) -> None:
        if self._direct is not None:
            if self._direct.was_turned_away:
                self._not_before_s = time.monotonic() + _TURNED_AWAY_S
            self._direct.close()
            self._direct, self._now = None, self._transport

    def send(self, frames: Sequence[Any]) -> bool:
        return self._now.send(frames)

    def receive(self) -> list[bytes] | None:
        return self._now.receive()

    def wait(self, timeout_ms: int) -> None:
        self._now.wait(timeout_ms)

    def lost(self) -> bool:
        lost = self._transport.lost()  # always: unread, what it has to tell would stop ZMQ's thread some day
        return self._direct.lost() if self._direct is not None else lost

    def refusal(self) -> str:
        return self._transport.refusal()

    def close(self) -> None:
        self.go_back()
        self._transport.close()
