"""The socket in the pool's directory, by which sessions on this host ask without ZMQ and its threads.

    Hello, Attach ── ZMQ, keys, authorized or not ──► a session ── everything else ──► here, with the session's token

Nobody becomes anybody here: who comes without the token of a session is told so, and whoever has one is who opened it.
Each connection has its turn, a few messages at a time, and nothing is read of one that does not take its answers.
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
from kvkeep.server.counters import Counters
from kvkeep.server.sessions import DIRECT
from kvkeep.server.stranger_log import StrangerLog
from kvkeep.units import MIB, format_size
from kvkeep.wire.frames import session_of
from kvkeep.wire.strangers import recognise
from kvkeep.wire.stream import Stream, socket_path

log = logging.getLogger(__name__)

MOST_BYTES_HELD: Final = 256 * MIB  # of messages that are not whole and answers that were not taken, over all
_FRAME_SLACK_BYTES = MIB  # a frame a little too long is answered with an error; a huge one ends the connection
_CONNECTS_WAITING = 100
_SPEAK_WITHIN_S = 10.0
_MESSAGES_A_TURN, _TURN_S = 32, 0.02  # of one connection, and for all of them: then the loop has other duties
_Answer = Callable[[list[bytes], bytes], list[Any] | None]


class _Peer:
    """A connection. `token`: of the session that it last spoke for, if any. `held_bytes`: as last counted."""

    def __init__(self, stream: Stream, name: bytes) -> None:
        self.stream = stream
        self.name = name
        self.token = 0
        self.held_bytes = 0
        self.has_waited = False  # for its answers to be taken
        self.since_s = time.monotonic()


def open_direct(
    directory: Path,
    most_sessions: int,
    most_frame_bytes: int,
    counters: Counters | None = None,
    strangers: StrangerLog | None = None,
) -> DirectSocket | None:
    """None if it cannot be had: everybody can ask by ZMQ."""
    try:
        return DirectSocket(directory, 2 * most_sessions, most_frame_bytes + _FRAME_SLACK_BYTES, counters, strangers)
    except OSError as error:
        log.warning("engines on this host ask by a slower way, there is no socket in %s: %s", directory, error)
        return None


class DirectSocket:
    """Listens from construction on; OSError if it cannot. For the loop's thread, which polls `fileno`."""

    def __init__(
        self,
        directory: Path,
        most_connections: int,
        most_body_bytes: int,
        counters: Counters | None = None,
        strangers: StrangerLog | None = None,
    ) -> None:
        self._directory = directory
        self._strangers = strangers or StrangerLog()
        self._most_connections, self._most_body_bytes = most_connections, most_body_bytes
        self._counters = counters or Counters()
        self._peers: dict[int, _Peer] = {}
        self._ready: dict[int, _Peer] = {}  # who has its turn next first
        self._held_bytes = 0
        self._named, self._warned_at = 0, float("-inf")
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with socket_path(directory) as path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # a dead server's
                self._socket.bind(path)
                os.chmod(path, 0o600)
                self._file = os.stat(path)
            self._socket.listen(_CONNECTS_WAITING)
            self._socket.setblocking(False)
            self._epoll = select.epoll()
            self._epoll.register(self._socket, select.EPOLLIN)
        except OSError:
            self._socket.close()
            raise
        self._listens = True

    def __len__(self) -> int:
        return len(self._peers)

    def fileno(self) -> int:
        """Readable when there is something to do, but for what is left over: see `has_more`."""
        return self._epoll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether `serve` has left something to do."""
        return bool(self._ready)

    def serve(self, answer: _Answer) -> None:
        """Does what there is to do, a little for each connection, and for so long at most."""
        until_s = time.monotonic() + _TURN_S
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor in self._peers:
                self._ready.setdefault(descriptor, self._peers[descriptor])
        for peer in list(self._ready.values()):
            if time.monotonic() >= until_s:
                return
            if self._ready.pop(peer.stream.fileno(), None) is None:
                continue  # it was closed for another's sake
            try:
                self._serve(peer, answer, until_s)
            except Exception:  # guard: whatever one makes us stumble over, the server serves the others
                self._counters.internal_errors += 1
                self._warn("a connection on this host is closed: serving it failed inside the server", trace=True)
                self._close(peer)

    def tend(self, is_on: Callable[[int, bytes], bool]) -> None:
        """Now and then: closes connections that no session is on: it is over, or on another, or never spoke."""
        spoken_by_s = time.monotonic() - _SPEAK_WITHIN_S
        for peer in list(self._peers.values()):
            if not is_on(peer.token, peer.name) and peer.since_s < spoken_by_s:
                self._close(peer)
        self._listen(on=True)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._close(peer)
        with contextlib.suppress(OSError), socket_path(self._directory) as path:
            if os.path.samestat(os.stat(path), self._file):  # or another server's, if the directory is one by now
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
        try:
            if len(self._peers) >= self._most_connections:
                raise OSError(f"there are {len(self._peers)} already")
            stream = Stream(connected, self._most_body_bytes)
            self._epoll.register(connected, select.EPOLLIN)
        except OSError as error:  # who is turned away goes on by ZMQ
            connected.close()
            self._warn(f"a connection on this host was not taken: {error}")
            return
        self._named += 1
        self._peers[connected.fileno()] = _Peer(stream, DIRECT + b"%d" % self._named)

    def _listen(self, *, on: bool) -> None:
        if on != self._listens:
            self._listens = on
            self._epoll.modify(self._socket, select.EPOLLIN if on else 0)

    def _serve(self, peer: _Peer, answer: _Answer, until_s: float) -> None:
        stream = peer.stream
        stream.flush()
        if not stream.unsent_bytes:
            stream.read()
        for _ in range(_MESSAGES_A_TURN):
            if stream.unsent_bytes or (frames := stream.next()) is None:
                break
            token = session_of(frames[0])
            if token is None:  # and what comes after it is none either
                stream.end()
                break
            peer.token = token
            reply = answer(frames, peer.name)
            if reply is not None and len(reply) == 2:  # blocks do not go this way
                stream.send(reply)
            if time.monotonic() >= until_s:
                break
        if stream.is_over and not stream.has_next:
            self._close(peer)
            return
        if bool(stream.unsent_bytes) != peer.has_waited:
            peer.has_waited = not peer.has_waited
            self._epoll.modify(stream.fileno(), select.EPOLLOUT if peer.has_waited else select.EPOLLIN)
        if stream.has_next and not peer.has_waited:
            self._ready[stream.fileno()] = peer
        self._count(peer, stream.read_bytes + stream.unsent_bytes)

    def _count(self, peer: _Peer, held_bytes: int) -> None:
        self._held_bytes += held_bytes - peer.held_bytes
        peer.held_bytes = held_bytes
        while self._held_bytes > MOST_BYTES_HELD:
            self._warn(
                f"half messages and answers take more than {format_size(MOST_BYTES_HELD)}; a connection is closed"
            )
            self._close(max(self._peers.values(), key=lambda each: each.held_bytes))

    def _warn(self, problem: str, *, trace: bool = False) -> None:
        """Once a minute at most: who knocks must not fill our disk."""
        if time.monotonic() - self._warned_at >= LOG_INTERVAL_S:
            self._warned_at = time.monotonic()
            log.warning("%s", problem, exc_info=trace)

    def _close(self, peer: _Peer) -> None:
        descriptor = peer.stream.fileno()
        if self._peers.pop(descriptor, None) is None:
            return
        if not peer.token and peer.stream.first:
            self._strangers.note("the socket beside the pool", "a process of this host", recognise(peer.stream.first))
        self._ready.pop(descriptor, None)
        self._held_bytes -= peer.held_bytes
        self._epoll.unregister(descriptor)
        peer.stream.close()
