"""A client's connection to a server: made, proved, and made again when it is lost. No method blocks
but `wait`.

    to connect ──► connecting ──► the other end proves who it is ──► open ──► lost ──► to connect
                                  Unix socket, loopback: by the user that runs it
                                  another host: by its certificate

A server on this host is asked by its Unix socket where there is one, and by TCP otherwise. Nothing
is sent before the other end has proved who it is."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from kvkeep.errors import SettingsError
from kvkeep.wire.address import ADDRESS_FORMAT, is_loopback, parse_address, tcp_host, unix_name
from kvkeep.wire.peers import is_trusted, peer_uid, recognise_server, remedy
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, client_context, handshake_problem

_RETRY_S = 0.1  # a server that starts again is found within this time
_PROVE_WITHIN_S = 2.0
_MOST_REPLY_BYTES = 1 << 30
# for a server that does not read; deadlines end the calls that wait there
_MOST_UNSENT_BYTES = 16 << 20
# How long to stay with a message that is larger than the kernel's buffers, and moves only while
# both sides are there.
_PATIENCE_S = 0.004


class Transport(Protocol):
    """What a connection needs of a network. The simulation has one that loses, delays and corrupts
    messages."""

    def send(self, frames: Sequence[Any]) -> bool:
        """Sends one message, or returns False at once."""

    def receive(self) -> list[bytes] | None:
        """The next message that has arrived, if any."""

    def wait(self, timeout_ms: int) -> None:
        """Returns when something has arrived or the time is over."""

    def lost(self) -> bool:
        """Whether a connection has ended since this was last asked. What was sent over it may never
        have arrived."""

    def reconnect(self) -> None:
        """Gives up a connection on which nothing comes any more. What was sent over it may never
        have arrived."""

    def refusal(self) -> str:
        """Why there is no connection, as far as the other side's behaviour tells; "" if there is
        one, or nobody."""

    def close(self) -> None: ...


class StreamTransport:
    """A Transport over a socket. `send` fails at once while there is no connection. SettingsError
    if the address, or the TLS files, cannot be used."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None = None,
        trusted_users: Collection[int] = (),
        *,
        may_use_unix_socket: bool = True,
    ) -> None:
        try:
            parse_address(address)
        except ValueError:
            hint = f"write {ADDRESS_FORMAT}"
            raise SettingsError(f"{address!r} is no address to connect to", hint) from None
        self._tcp = tcp_host(address)
        self._unix_name = unix_name(address) if may_use_unix_socket or self._tcp is None else None
        self._tls, self._trusted_users = tls, trusted_users
        if self._tcp is not None and not is_loopback(self._tcp[0]) and tls is None:
            raise SettingsError(
                f"{address} is on another host, and there is no certificate to prove who we are",
                "set tls_ca, tls_cert and tls_key (`kvkeep keygen` makes them)",
            )
        if tls is not None:
            # what is wrong with the files is said now; they are read again for each connection
            client_context(tls)
        self._ways: Iterator[Callable[[], socket.socket]] | None = None  # that are left to try
        self._resolver = _Resolver(self._tcp[0]) if self._tcp is not None else None
        self._stream: Stream | None = None
        self._is_open = self._is_connected = self._was_lost = self._has_heard = False
        self._try_at_s, self._prove_by_s = 0.0, 0.0
        self._refusal = ""
        self._silent_ends = 0  # connections that the server ended without a word, in a row
        self._patience_s = _PATIENCE_S
        self._is_closed = False

    def __repr__(self) -> str:
        if self._stream is None:
            return "StreamTransport(no connection)"
        family, unsent_bytes = self._stream.socket.family.name, self._stream.unsent_bytes
        return f"StreamTransport({family}, unsent_bytes={unsent_bytes})"

    # -- a Transport

    def send(self, frames: Sequence[Any]) -> bool:
        self._advance()
        stream = self._stream
        if stream is None or not self._is_open or stream.unsent_bytes > _MOST_UNSENT_BYTES:
            return False
        stream.send(frames)
        self._stay_with(stream)
        return not stream.is_over

    def receive(self) -> list[bytes] | None:
        self._advance()
        if (stream := self._stream) is None or not self._is_open:
            return None
        stream.flush()
        stream.read()
        self._stay_with(stream)
        message = stream.next()
        if message is not None:
            self._has_heard, self._silent_ends, self._refusal = True, 0, ""
        elif stream.is_over:
            self._lose(stream)
        return message

    def wait(self, timeout_ms: int) -> None:
        stream = self._stream
        if stream is None or self._is_closed or (stream.is_over and not self._is_open):
            self._poll(None, timeout_ms, 0)
            return
        if self._is_open:
            stream.flush()
            if stream.is_over or stream.has_next:
                return  # `receive` says so
        writes = stream.unsent_bytes or not self._is_connected
        self._poll(stream, timeout_ms, select.POLLIN | (select.POLLOUT if writes else 0))

    def lost(self) -> bool:
        lost, self._was_lost = self._was_lost, False
        return lost

    def reconnect(self) -> None:
        if self._is_open:
            self._was_lost, self._ways = True, None
            self._drop()

    def refusal(self) -> str:
        return self._refusal

    def close(self) -> None:
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    # -- making a connection

    def _advance(self) -> None:
        """One step further, if the connection is not open."""
        if self._is_open or self._is_closed:
            return
        if self._stream is None:
            self._begin()
        if self._stream is not None and not self._is_open:
            self._prove(self._stream)

    def _begin(self) -> None:
        """Begins with the next way to the server; some time after the last one, with the first
        again."""
        if self._ways is None:
            now_s = self._now_s()
            if now_s < self._try_at_s:
                return
            self._ways, self._try_at_s = self._all_ways(), now_s + _RETRY_S
        for connect in self._ways:
            try:
                self._stream = Stream(connect(), _MOST_REPLY_BYTES)
            except (OSError, ValueError):
                continue
            except SettingsError as error:  # the TLS files were fine before
                self._refusal = str(error)
                continue
            self._is_connected = self._has_heard = False
            self._prove_by_s = self._now_s() + _PROVE_WITHIN_S
            return
        self._ways = None

    def _all_ways(self) -> Iterator[Callable[[], socket.socket]]:
        if (name := self._unix_name) is not None:
            yield lambda: self._connect(socket.AF_UNIX, name)
        if self._tcp is None or self._resolver is None:
            return
        for family, host in self._resolver.addresses():
            yield lambda family=family, host=host: self._connect_tcp(family, host)  # type: ignore[misc]

    def _connect_tcp(self, family: int, host: str) -> socket.socket:
        assert self._tcp is not None
        name, port = self._tcp
        connecting = self._connect(family, (host, port))
        if self._tls is None:
            return connecting
        context = client_context(self._tls)
        return context.wrap_socket(connecting, server_hostname=name, do_handshake_on_connect=False)

    def _prove(self, stream: Stream) -> None:
        """Opens the connection if the other end has proved who it is. Takes the next way if it
        cannot."""
        try:
            self._is_connected = self._is_connected or self._has_connected(stream)
            if self._is_connected:
                self._is_open = (
                    stream.shake_hands() if _is_tls(stream) else self._is_run_by_friend(stream)
                )
            if stream.is_over or (not self._is_open and self._now_s() >= self._prove_by_s):
                raise stream.error or TimeoutError
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                self._refusal = handshake_problem(error)
            elif isinstance(error, PermissionError):
                self._refusal = str(error)
            elif isinstance(error, ConnectionAbortedError) and not self._refusal:
                self._note_silent_end()
            self._drop()
            self._begin()

    def _is_run_by_friend(self, stream: Stream) -> bool:
        """Whether a user that we trust runs the other end. PermissionError if another one does,
        ConnectionAbortedError if the other end has closed the connection before that was known."""
        uid = self._peer_uid(stream.socket)
        if uid is None and self._poll(stream, 0, select.POLLRDHUP):
            raise ConnectionAbortedError
        if uid is not None and not is_trusted(uid, self._trusted_users):
            raise PermissionError(f"it belongs to another user (uid {uid}): {remedy(uid)}")
        return uid is not None

    def _has_connected(self, stream: Stream) -> bool:
        """OSError if the attempt has failed."""
        if stream.socket.family == socket.AF_UNIX:
            return True
        if not self._poll(stream, 0, select.POLLOUT):
            return False
        if code := stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, "could not connect")
        return True

    def _lose(self, stream: Stream) -> None:
        """An open connection has ended."""
        self._was_lost = True
        # a server rejects a certificate after our side of the handshake
        if isinstance(stream.error, ssl.SSLError):
            self._refusal = handshake_problem(stream.error)
        elif not self._has_heard:
            self._note_silent_end(stream.first)
        self._drop()
        self._ways = None

    def _note_silent_end(self, first: bytes = b"") -> None:
        """The server ended a connection without an answer. One may have met a server that was
        stopping."""
        self._silent_ends += 1
        self._refusal = recognise_server(first)
        if not self._refusal and self._silent_ends >= 2:
            cause = (
                "see authorized_clients there"
                if self._tls is not None
                else "see trusted_users there, and its TLS"
            )
            self._refusal = f"it ends our connections without a word; its log says why ({cause})"

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._is_open, self._is_connected = None, False, False

    def _stay_with(self, stream: Stream) -> None:
        """A large message moves on only while somebody sends or reads it, and an engine may not be
        back before its step is over: so stay with it for a moment. A server that stands still uses
        that moment up until a message is whole again."""
        if not stream.is_half:
            self._patience_s = _PATIENCE_S
            return
        until_s = self._now_s() + self._patience_s
        while stream.is_half and not stream.has_next and not stream.is_over:
            if (left_s := until_s - self._now_s()) <= 0:
                break
            self.wait(max(1, int(left_s * 1000)))
            stream.flush()
            stream.read()
            self._patience_s = max(0.0, until_s - self._now_s())

    # -- what the operating system does, or a simulation in its place

    def _now_s(self) -> float:
        return time.monotonic()

    def _peer_uid(self, connected: socket.socket) -> int | None:
        return peer_uid(connected)

    def _connect(self, family: int, where: Any) -> socket.socket:
        """A socket that connects or has connected. OSError if nobody listens there."""
        connecting = socket.socket(family)
        try:
            connecting.setblocking(False)
            connecting.connect(where)
        except BlockingIOError as error:
            if error.errno != errno.EINPROGRESS:  # a Unix socket whose queue is full
                connecting.close()
                raise
        except (OSError, ValueError):
            connecting.close()
            raise
        return connecting

    def _poll(self, stream: Stream | None, timeout_ms: int, events: int) -> bool:
        """Waits for the stream, or, if there is none, lets the time pass. Whether there is
        something to do."""
        poll = select.poll()
        if stream is not None:
            poll.register(stream.fileno(), events)
        return bool(poll.poll(timeout_ms))


class _Resolver:
    """The addresses of a host. A name is looked up in a thread of its own, because that may take
    seconds."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._found: list[tuple[int, str]] = []
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError):
            self._found = _look_up(host, socket.AI_NUMERICHOST)
        self._is_number = bool(self._found)

    def addresses(self) -> list[tuple[int, str]]:
        """Those that are known. Each call begins to look the name up again: what it stands for may
        change."""
        if not self._is_number and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="kvkeep-resolve", daemon=True)
            self._thread.start()
        return self._found

    def _run(self) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            self._found = _look_up(self._host, 0)


def _look_up(host: str, flags: int) -> list[tuple[int, str]]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((int(family), str(end[0])) for family, _, _, _, end in found))


def _is_tls(stream: Stream) -> bool:
    return isinstance(stream.socket, ssl.SSLSocket)
