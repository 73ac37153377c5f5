"""TLS for the HTTP port: a layer between asyncio's transport and the protocol that speaks HTTP.

    client ◄──► asyncio's transport ◄──► TlsLayer ◄──► _Connection of http.py

asyncio's own TLS is not used. Its handshakes are not counted against any limit, each connection
takes a buffer of 256 KiB, and closing waits for the client. Here all encrypted bytes that a client
has not read are in the one transport below, and what that transport does holds for TLS, too.

A client need not show a certificate: a token will do, and health checks have neither. One that
shows a certificate of a CA that is not in tls_ca is refused at the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvkeep.errors import RequestError
from kvkeep.server.auth import Authority
from kvkeep.server.guard import RefusalLog, as_json
from kvkeep.wire.peers import HTTP, recognise
from kvkeep.wire.tls import handshake_problem, peer_names

HANDSHAKE_WITHIN_S: Final = 2.0
MOST_HANDSHAKES: Final = 64
_PIECE_BYTES = 64 * 1024
_REFUSAL = RequestError(
    "https_only",
    "this port speaks HTTPS, and the request came without TLS",
    hint="write https:// in front of the address, as in --http https://HOST:PORT",
)
_IN_THE_CLEAR: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(as_json(_REFUSAL)), as_json(_REFUSAL))
)


@dataclass(frozen=True)
class Door:
    """What all TLS connections of one server share. `count` counts a failed handshake by its
    reason."""

    authority: Authority
    refusals: RefusalLog
    count: Callable[[str], None]
    within_s: float = HANDSHAKE_WITHIN_S


class TlsLayer(asyncio.Protocol, asyncio.Transport):
    """The protocol of the transport below, and the transport of the protocol above. `make_above`
    makes that protocol when the handshake is done, with the state that its requests get:
    `is_admin` says, each time it is called, whether the client's certificate administers."""

    def __init__(
        self,
        door: Door,
        connections: set[Any],
        make_above: Callable[[dict[str, Any]], asyncio.Protocol],
    ) -> None:
        self._door = door
        self._connections = connections  # of uvicorn, which shuts them down
        self._make_above = make_above
        self._above: asyncio.Protocol | None = None
        self._is_refused = False
        self._trust = door.authority.trust  # before the context: see Authority
        context = door.authority.http_context
        assert context is not None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    # -- the protocol of the transport below

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._below = transport
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self._door.within_s, self._end_late)
        self._connections.add(self)
        waiting = [each for each in self._connections if isinstance(each, TlsLayer)]
        if len(waiting) > MOST_HANDSHAKES:
            min(waiting, key=lambda each: each._since)._give_up("too many TLS handshakes")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._incoming.write(data)
        if self._above is not None or self._shake_hands(data):
            self._pass_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.discard(self)
        if self._above is not None:
            self._above.connection_lost(exc)
        elif not self._is_refused:
            self._refuse("handshake", "it broke off the handshake")

    def pause_writing(self) -> None:
        if self._above is not None:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._above is not None:
            self._above.resume_writing()

    # -- the transport of the protocol above

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts all of it at once: what has not been sent is in the transport below."""
        if self._below.is_closing():
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def close(self) -> None:
        """After what was written has been sent. Does not wait for the client's farewell."""
        if not self._below.is_closing():
            with contextlib.suppress(ssl.SSLError):  # the client's farewell has not come
                self._tls.unwrap()
            self._flush()
            self._below.close()

    def abort(self) -> None:
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (
            self._tls.context if name == "sslcontext" else self._below.get_extra_info(name, default)
        )

    # -- the handshake

    def _shake_hands(self, data: bytes) -> bool:
        """Whether the handshake is done, and there is a protocol above."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            is_plain = recognise(data) is HTTP
            if is_plain:
                self._below.write(_IN_THE_CLEAR)
            else:
                self._flush()  # an alert that says why
            self._refuse(
                "handshake", "it speaks HTTP without TLS" if is_plain else handshake_problem(error)
            )
            # Not closed yet: while the client still sends, that would take the answer back. The
            # client closes, or the timer does.
            self._below.write_eof()
            return False
        self._flush()
        self._timer.cancel()
        self._connections.discard(self)
        is_admin = partial(self._door.authority.is_admin, peer_names(self._tls), self._trust)
        self._above = self._make_above({"is_admin": is_admin})
        self._above.connection_made(self)
        return True

    def _end_late(self) -> None:
        if not self._is_refused:
            self._refuse("handshake_timeout", "it did not finish the handshake")
        self.abort()

    def _refuse(self, reason: str, why: str) -> None:
        self._is_refused = True
        self._door.count(reason)
        self._door.refusals.note(reason, f"{self._peer()} was turned away at the HTTP port: {why}")

    def _give_up(self, why: str) -> None:
        self._is_refused = True
        self._connections.discard(self)
        self._door.refusals.note(why, f"the HTTP connection of {self._peer()} was closed")
        self.abort()

    def shutdown(self) -> None:
        """The server stops."""
        self._is_refused = True
        self.abort()

    def _peer(self) -> str:
        end = self._below.get_extra_info("peername")
        return str(end[0]) if end else "an unknown address"

    # -- bytes

    def _pass_on(self) -> None:
        """Gives the protocol above what has come. A connection that breaks the rules of TLS
        ends."""
        assert self._above is not None
        pieces, is_over = [], False
        try:
            while piece := self._tls.read(_PIECE_BYTES):
                pieces.append(piece)
            is_over = True  # by the client's farewell
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.abort()
            return
        self._flush()  # TLS itself may have an answer
        if pieces:
            self._above.data_received(b"".join(pieces))
        if is_over:
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())
