"""The socket in the pool's directory, by which sessions on this host ask without ZMQ and its threads.

    Hello, Attach ── ZMQ, keys, authorized or not ──► a session ── everything else ──► here, with the session's token

Nobody becomes anybody here: who comes without the token of a session is told so, and whoever has one is who opened it.
A message is answered before the next one of its connection is read, and nothing is read of a connection that does not
take its replies: what one can make us keep is one message and its answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvkeep.server.auth import LOG_INTERVAL_S
from kvkeep.units import MIB, format_size
from kvkeep.wire.frames import session_of
from kvkeep.wire.stream import Stream, socket_path

log = logging.getLogger(__name__)

MOST_BYTES_READ: Final = 256 * MIB  # of messages that are not whole, over all connections
_FRAME_SLACK_BYTES = MIB  # a frame a little too long is answered with an error; a huge one ends the connection
_LONG_BYTES = MIB  # no lookup is
_CONNECTS_WAITING = 100
_SPEAK_WITHIN_S = 10.0
_Answer = Callable[[list[bytes], bytes], list[Any] | None]


class _Peer:
    """A connection. `token`: of the session that it last spoke for, if any."""

    def __init__(self, stream: Stream, name: bytes) -> None:
        self.stream = stream
        self.name = name
        self.token = 0
        self.since_s = time.monotonic()


def open_direct(directory: Path, most_sessions: int, most_frame_bytes: int) -> DirectSocket | None:
    """None if it cannot be had: everybody can ask by ZMQ."""
    try:
        return DirectSocket(directory, 2 * most_sessions, most_frame_bytes + _FRAME_SLACK_BYTES)
    except OSError as error:
        log.warning("engines on this host ask by a slower way, there is no socket in %s: %s", directory, error)
        return None


class DirectSocket:
    """Listens from construction on; OSError if it cannot. For the loop's thread, which polls `fileno`."""

    def __init__(self, directory: Path, most_connections: int, most_body_bytes: int) -> None:
        self._directory = directory
        self._most_connections, self._most_body_bytes = most_connections, most_body_bytes
        self._peers: dict[int, _Peer] = {}
        self._named, self._warned_at = 0, float("-inf")
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with socket_path(directory) as path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # a dead server's
                self._socket.bind(path)
                os.chmod(path, 0o600)
            self._socket.listen(_CONNECTS_WAITING)
            self._socket.setblocking(False)
            self._epoll = select.epoll()
        except OSError:
            self._socket.close()
            raise
        self._epoll.register(self._socket, select.EPOLLIN)
        self._listens = True

    def __len__(self) -> int:
        return len(self._peers)

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._epoll.fileno()

    def serve(self, answer: _Answer) -> None:
        """Does what there is to do, a little for each connection."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor in self._peers:
                self._serve(self._peers[descriptor], answer)

    def tend(self, is_known: Callable[[int], bool]) -> None:
        """Now and then: closes connections of sessions that are over, and of those who never say anything."""
        spoken_by_s = time.monotonic() - _SPEAK_WITHIN_S
        for peer in list(self._peers.values()):
            if not is_known(peer.token) and peer.since_s < spoken_by_s:
                self._close(peer)
        self._listen(on=True)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._close(peer)
        with contextlib.suppress(OSError), socket_path(self._directory) as path:
            os.unlink(path)
        self._socket.close()
        self._epoll.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors: whoever waits does so until there may be some
            self._warn(f"a connection on this host could not be taken: {error}")
            self._listen(on=False)
            return
        if len(self._peers) >= self._most_connections:
            connected.close()
            return
        self._named += 1
        self._peers[connected.fileno()] = _Peer(Stream(connected, self._most_body_bytes), b"direct %d" % self._named)
        self._epoll.register(connected, select.EPOLLIN)

    def _listen(self, *, on: bool) -> None:
        if on != self._listens:
            self._listens = on
            self._epoll.modify(self._socket, select.EPOLLIN if on else 0)

    def _serve(self, peer: _Peer, answer: _Answer) -> None:
        stream = peer.stream
        had_unsent = stream.unsent_bytes
        stream.flush()
        if not stream.unsent_bytes:
            stream.read()
            self._limit(stream)
        while (frames := stream.next()) is not None:
            token = session_of(frames[0])
            if token is None:  # and what comes after it is none either
                stream.end()
                break
            peer.token = token
            reply = answer(frames, peer.name)
            if reply is not None and len(reply) == 2:  # blocks do not go this way
                stream.send(reply)
        if stream.is_over:
            self._close(peer)
        elif bool(stream.unsent_bytes) != bool(had_unsent):
            self._epoll.modify(stream.fileno(), select.EPOLLOUT if stream.unsent_bytes else select.EPOLLIN)

    def _limit(self, stream: Stream) -> None:
        if stream.read_bytes < _LONG_BYTES:
            return
        if sum(peer.stream.read_bytes for peer in self._peers.values()) > MOST_BYTES_READ:
            self._warn(f"messages that are not whole take more than {format_size(MOST_BYTES_READ)}; one is broken off")
            stream.end()

    def _warn(self, problem: str) -> None:
        """Once a minute at most: who knocks must not fill our disk."""
        if time.monotonic() - self._warned_at >= LOG_INTERVAL_S:
            self._warned_at = time.monotonic()
            log.warning("%s", problem)

    def _close(self, peer: _Peer) -> None:
        del self._peers[peer.stream.fileno()]
        self._epoll.unregister(peer.stream.fileno())
        peer.stream.close()
