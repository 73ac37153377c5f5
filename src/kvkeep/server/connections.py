"""The connections of engines: taken, proved, served in turn, and closed.

    accepted ──► proved ──────────────────────────► serves requests ──► closed
                 Unix socket, loopback: its user      a few at a time; nothing is read from a peer
                 beyond: its certificate              that does not take its replies

A peer takes at most the memory of one message and one reply, and all peers together
MOST_BYTES_HELD. Whatever one peer does or does not do, the others are served."""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from kvkeep.server.auth import ANYONE, Authority, Caller
from kvkeep.server.counters import Counters
from kvkeep.server.listeners import Listening
from kvkeep.server.log_limits import ProblemLog, StrangerLog
from kvkeep.units import MIB, format_size
from kvkeep.wire.frames import session_of
from kvkeep.wire.peers import is_trusted, peer_uid, recognise, remedy
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import certificate_text, handshake_problem, peer_expiry_s, peer_names

MOST_BYTES_HELD: Final = 256 * MIB  # of incomplete messages and unread replies, of all peers
# A message a little too long is answered with an error; a longer one ends the connection.
_MESSAGE_SLACK_BYTES = MIB
_MOST_UNPROVED: Final = 64
_PROVE_WITHIN_S, _SPEAK_WITHIN_S = 2.0, 10.0
_MESSAGES_A_TURN = 32  # of one connection
_TURN_S = 0.02  # for all connections, before the loop does its other duties

Answer = Callable[[list[bytes], Caller, int], list[Any] | None]


class Peer:
    """A connection. `number` grows with each one accepted. `caller`: the authenticated client, once
    known. `token`: of the session that it last spoke for, if any."""

    def __init__(
        self, stream: Stream, number: int, where: str, address: str, since_s: float
    ) -> None:
        self.stream, self.number, self.where, self.address = stream, number, where, address
        self.caller: Caller | None = None
        self.names: tuple[str, ...] = ()  # in its certificate
        self.expires_s = math.inf  # when its certificate does, by the wall clock
        self.token = 0
        self.held_bytes = 0  # as last counted
        self.waits_to_send = False
        self.since_s = since_s

    @property
    def is_tls(self) -> bool:
        return isinstance(self.stream.socket, ssl.SSLSocket)


class Connections:
    """For the loop's thread, which waits on it, and calls `serve` when there is something to do."""

    def __init__(
        self,
        listeners: Iterable[Listening],
        most_connections: int,
        most_frame_bytes: int,
        *,
        authority: Authority | None = None,
        trusted_users: Collection[int] = (),
        counters: Counters | None = None,
        strangers: StrangerLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        epoll: Any = None,  # as `select.epoll` has it
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._listeners = {each.socket.fileno(): each for each in listeners}
        self._most_connections = most_connections
        self._most_message_bytes = 2 * most_frame_bytes + _MESSAGE_SLACK_BYTES  # body and payload
        self._authority = authority or Authority(None, None)
        self._trusted_users = trusted_users
        self._counters, self._strangers = counters or Counters(), strangers or StrangerLog()
        self._peers: dict[int, Peer] = {}
        self._ready: dict[int, Peer] = {}  # in the order of their turns
        self._to_accept: list[Listening] = []
        self.held_bytes = 0  # of incomplete messages and unread replies
        self._accepted = 0
        self._problems = ProblemLog(clock)
        self._trust = self._authority.trust
        self._listens = True
        self._epoll = epoll or select.epoll()
        for descriptor in self._listeners:
            self._epoll.register(descriptor, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._peers)

    def also_wait_for(self, descriptor: int) -> None:
        """`wait` also returns when this descriptor is readable. The caller reads it."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def wait(self, timeout_s: float) -> list[int]:
        """Waits for something to do, at most `timeout_s`. Returns which others are readable."""
        others: list[int] = []
        self._to_accept.clear()
        for descriptor, _ in self._epoll.poll(0 if self._ready else timeout_s):
            if descriptor in self._listeners:
                self._to_accept.append(self._listeners[descriptor])
            elif descriptor in self._peers:
                self._ready.setdefault(descriptor, self._peers[descriptor])
            else:
                others.append(descriptor)
        return others

    def serve(self, answer: Answer) -> None:
        """Accepts one connection from each listener that has some. Then serves the peers that wait,
        a few requests each, for _TURN_S at most."""
        while self._to_accept:
            self._accept(self._to_accept.pop())
        until_s = self._clock() + _TURN_S
        for peer in list(self._ready.values()):
            if self._clock() >= until_s:
                return
            if self._ready.pop(peer.stream.fileno(), None) is None:
                continue  # it was closed to make room
            try:
                self._serve(peer, answer, until_s)
            except Exception as error:
                # guard: a fault with one peer must not keep the server from serving the others
                self._counters.internal_errors += 1
                failed = "serving a connection failed inside the server; it is closed"
                self._problems.note("internal", failed, error)
                self._close(peer)

    def tend(self, is_on: Callable[[int, int], bool]) -> None:
        """Now and then: closes connections that did not authenticate in time, those whose
        certificate has expired, and those without a session."""
        now_s, date_s = self._clock(), self._wall_clock()
        for peer in list(self._peers.values()):
            if peer.caller is None:
                if now_s - peer.since_s > _PROVE_WITHIN_S:
                    why = "it did not finish the handshake"
                    self._turn_away("handshake_timeout", peer.where, peer.address, why)
                    self._close(peer)
            elif date_s > peer.expires_s:
                why = f"its certificate {certificate_text(peer.names)} has expired (renew it there)"
                closed = f"a connection of {peer.address} to {peer.where} is closed: {why}"
                self._problems.note("expired", closed)
                self._close(peer)
            elif not is_on(peer.token, peer.number) and now_s - peer.since_s > _SPEAK_WITHIN_S:
                self._close(peer)
        self._listen(on=True)

    def check_certificates(self) -> None:
        """Applies changed rights to open connections, after the authority has read its files again.
        A revoked client learns so from its next request, and unmaps the pool then. Where a CA was
        removed, all connect again."""
        is_changed, self._trust = self._trust != self._authority.trust, self._authority.trust
        for peer in [peer for peer in self._peers.values() if peer.is_tls]:
            if peer.caller is not None:
                revoked = Caller(peer.caller.key, peer.caller.name, revoked=True)
                peer.caller = self._authority.caller_of(peer.names) or revoked
            if is_changed:
                self._close(peer)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._close(peer)
        self._epoll.close()

    # -- accepting

    def _accept(self, listening: Listening) -> None:
        try:
            connected, end = listening.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors: further peers wait until there may be some
            self._problems.note("accept", f"a connection could not be accepted: {error}")
            self._listen(on=False)
            return
        address = str(end[0]) if isinstance(end, tuple) else "a process of this host"
        try:
            self._make_room()
            caller = None
            if listening.is_unix or self._authority.context is None:
                self._check_user(connected)
                caller = ANYONE
            else:
                connected = self._authority.context.wrap_socket(
                    connected, server_side=True, do_handshake_on_connect=False
                )
            stream = Stream(connected, self._most_message_bytes)
            self._epoll.register(connected.fileno(), select.EPOLLIN)
        except PermissionError as error:
            connected.close()
            self._turn_away("other_user", listening.where, address, str(error))
            return
        except (OSError, ValueError) as error:
            connected.close()
            self._problems.note("accept", f"a connection was not accepted: {error}")
            return
        self._accepted += 1
        peer = Peer(stream, self._accepted, listening.where, address, self._clock())
        peer.caller = caller
        self._peers[stream.fileno()] = peer

    def _check_user(self, connected: socket.socket) -> None:
        """PermissionError unless a user that we trust runs the other end."""
        uid = self._peer_uid(connected)
        if uid is None:
            raise PermissionError("the kernel does not say which user it belongs to")
        if not is_trusted(uid, self._trusted_users):
            raise PermissionError(f"it belongs to another user (uid {uid}): {remedy(uid)}")

    def _peer_uid(self, connected: socket.socket) -> int | None:
        return peer_uid(connected)

    def _make_room(self) -> None:
        """OSError if there are too many connections. One that has not authenticated is closed
        first."""
        unproved = [peer for peer in self._peers.values() if peer.caller is None]
        is_full = len(self._peers) >= self._most_connections
        if unproved and (is_full or len(unproved) >= _MOST_UNPROVED):
            self._close(unproved[0])
        if len(self._peers) >= self._most_connections:
            raise OSError(f"there are {len(self._peers)} already")

    def _prove(self, peer: Peer) -> bool:
        """Continues a TLS handshake. Whether it is done, and the client is authorized."""
        if not peer.stream.shake_hands():
            if peer.stream.is_over:
                error, why = peer.stream.error, "it broke off the handshake"
                if isinstance(error, ssl.SSLError):
                    why = handshake_problem(error)
                self._turn_away("handshake", peer.where, peer.address, why)
                self._close(peer)
            return False
        assert isinstance(peer.stream.socket, ssl.SSLSocket)
        peer.names = peer_names(peer.stream.socket)
        peer.expires_s = peer_expiry_s(peer.stream.socket)
        peer.caller = self._authority.caller_of(peer.names)
        if peer.caller is None:
            why = f"its certificate {certificate_text(peer.names)} is not in authorized_clients"
            self._turn_away("unknown_client", peer.where, peer.address, why)
            self._close(peer)
        return peer.caller is not None

    # -- serving

    def _serve(self, peer: Peer, answer: Answer, until_s: float) -> None:
        if peer.caller is None and not self._prove(peer):
            return
        assert peer.caller is not None
        stream = peer.stream
        stream.flush()
        if not stream.unsent_bytes:
            stream.read()
        for _ in range(_MESSAGES_A_TURN):
            if stream.unsent_bytes or (frames := stream.next()) is None:
                break
            peer.token = session_of(frames[0])
            reply = answer(frames, peer.caller, peer.number)
            if reply is not None:
                stream.send(reply)
            if self._clock() >= until_s:
                break
        has_next = stream.has_next  # ends the stream if what comes next is not a message
        if stream.is_over and not has_next:
            self._close(peer)
            return
        if bool(stream.unsent_bytes) != peer.waits_to_send:
            peer.waits_to_send = not peer.waits_to_send
            awaited = select.EPOLLOUT if peer.waits_to_send else select.EPOLLIN
            self._epoll.modify(stream.fileno(), awaited)
        if has_next and not peer.waits_to_send:
            self._ready[stream.fileno()] = peer
        self._count(peer)

    def _count(self, peer: Peer) -> None:
        held_bytes = peer.stream.held_bytes
        self.held_bytes += held_bytes - peer.held_bytes
        peer.held_bytes = held_bytes
        while self.held_bytes > MOST_BYTES_HELD:
            self._counters.connection_resets += 1
            most = format_size(MOST_BYTES_HELD)
            closed = f"half messages and replies take more than {most}; a connection is closed"
            self._problems.note("memory", closed)
            self._close(max(self._peers.values(), key=lambda each: each.held_bytes))

    # -- closing

    def _close(self, peer: Peer) -> None:
        descriptor = peer.stream.fileno()
        if self._peers.pop(descriptor, None) is None:
            return
        if peer.stream.first and not peer.token:
            self._strangers.note(peer.where, peer.address, recognise(peer.stream.first))
        self._ready.pop(descriptor, None)
        self.held_bytes -= peer.held_bytes
        self._epoll.unregister(descriptor)
        peer.stream.close()

    def _listen(self, *, on: bool) -> None:
        if on != self._listens:
            self._listens = on
            for descriptor in self._listeners:
                self._epoll.modify(descriptor, select.EPOLLIN if on else 0)

    def _turn_away(self, reason: str, where: str, address: str, why: str) -> None:
        self._counters.fail_auth(reason)
        self._problems.note(reason, f"{address} was turned away at {where}: {why}")
