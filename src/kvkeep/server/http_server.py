"""The HTTP port: a thread with uvicorn, its connections and their TLS.

    client ◄──► asyncio's transport ◄──► HttpConnection                     on loopback
    client ◄──► asyncio's transport ◄──► TlsLayer ◄──► HttpConnection       beyond it, with tls_cert

A connection carries one request: there is no keep-alive and no pipelining. The whole request must
arrive, and its answer be read, in time. The bytes of unread answers are bounded over all
connections, and so is their number; beyond either limit the server ends the connection whose client
has kept it waiting longest. The event loop accepts a few connections in a turn and reads from all
it has before it accepts more, so a request that has arrived is read long before its connection is
the oldest, however many others connect.

Over TLS a client need not show a certificate: a token will do, and health checks have neither. A
certificate of a CA that is not in tls_ca is refused at the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep.errors import RequestError, SettingsError
from kvkeep.server.admin import Admin
from kvkeep.server.auth import Authority
from kvkeep.server.daemon import Daemon
from kvkeep.server.guard import Access, answer_to, make_token, token_reader
from kvkeep.server.http import STUCK_AFTER_S, count_failure, make_app
from kvkeep.server.listeners import IN_USE
from kvkeep.server.log_limits import ProblemLog, StrangerLog
from kvkeep.server.settings import Settings
from kvkeep.units import KIB, MIB
from kvkeep.wire.address import family_of, split_host
from kvkeep.wire.peers import HTTP, recognise
from kvkeep.wire.tls import handshake_problem, peer_names

log = logging.getLogger(__name__)

REQUEST_WITHIN_S: Final = 5.0
READ_WITHIN_S: Final = 10.0
HANDSHAKE_WITHIN_S: Final = 2.0
MOST_HANDSHAKES: Final = 64
_STOP_WITHIN_S = 5.0
_CONNECTIONS = 256
_ACCEPTED_A_TURN = 8  # of the event loop, which reads from a connection 3 turns after accepting it
_QUEUED = 2048  # connections in the kernel that are not accepted yet
_UNREAD_BYTES = 64 * MIB  # of all answers
_KERNEL_BYTES = 64 * KIB  # of one answer, in the kernel; without a limit it takes up to 4 MiB
_PIECE_BYTES = 64 * KIB
_REFUSAL = answer_to(
    RequestError(
        "https_only",
        "this port speaks HTTPS, and the request came without TLS",
        hint="write https:// in front of the address, as in --http https://HOST:PORT",
    )
).body
_IN_THE_CLEAR: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
)


class HttpConnection(H11Protocol):
    """Carries one request and ends with its answer: it waits for the request, then the server works
    on it, then it waits until the client has read the answer. Both waits have a time limit, and end
    sooner when other connections need the room."""

    strangers: StrangerLog
    problems: ProblemLog
    request_within_s: float
    read_within_s: float
    _is_known = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        self._timer = self.loop.call_later(
            self.request_within_s, self._end_unless_working, "sent no whole request"
        )
        if len(self._all()) > _CONNECTIONS:
            self.end_longest_waiting("too many connections")

    def data_received(self, data: bytes) -> None:
        if not self._is_known:
            self._is_known = True
            if (stranger := recognise(data)) is not HTTP:
                self.strangers.note("the HTTP port", self._peer(), stranger)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """The whole answer is in the transport's buffer, for the client to read."""
        super().on_response_complete()
        self.waiting_since = self.loop.time()
        self._timer.cancel()
        self._timer = self.loop.call_later(
            self.read_within_s, self._end_unless_working, "did not read its answer"
        )
        while sum(each.transport.get_write_buffer_size() for each in self._all()) > _UNREAD_BYTES:
            self.end_longest_waiting("too much is unread")

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def is_working(self) -> bool:
        """Whether the client waits for the server, and not the server for the client."""
        has_request = self.cycle is not None and not self.cycle.more_body
        return has_request and not self.cycle.response_complete and not self.transport.is_closing()

    def _end_unless_working(self, why: str) -> None:
        if not self.is_working():
            self._end(why)

    def end_longest_waiting(self, why: str) -> None:
        """Clients that do not read their answers go first: the server may have been busy with
        theirs while a new connection waited."""
        waiting = [each for each in self._all() if not each.is_working()]
        unread = [each for each in waiting if each.transport.get_write_buffer_size()]
        min(unread or waiting, key=lambda each: each.waiting_since, default=self)._end(why)

    def _end(self, why: str) -> None:
        """Aborts the connection: closing would wait for a client that does not read."""
        self.problems.note(why, f"the HTTP connection of {self._peer()} was closed")
        self.connections.discard(self)
        self.transport.abort()

    def _all(self) -> list[HttpConnection]:
        return [each for each in self.connections if isinstance(each, HttpConnection)]

    def _peer(self) -> str:
        return self.client[0] if self.client else ""


class HttpServer:
    """Listens from construction on, serves from `start` to `stop`."""

    def __init__(
        self,
        daemon: Daemon,
        stuck_after_s: float = STUCK_AFTER_S,
        request_within_s: float = REQUEST_WITHIN_S,
        read_within_s: float = READ_WITHIN_S,
        handshake_within_s: float = HANDSHAKE_WITHIN_S,
        **admin_options: float,
    ) -> None:
        self.admin = Admin(daemon, **admin_options)
        problems = ProblemLog()
        access = _access(daemon.settings, problems)
        self._socket = _listen(daemon.settings.http_address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        shared = {
            "strangers": daemon.strangers,
            "problems": problems,
            "request_within_s": request_within_s,
            "read_within_s": read_within_s,
        }
        make: Any = type("Connection", (HttpConnection,), shared)
        if daemon.settings.http_has_tls:
            self.address = f"https://{self.address}"
            count = partial(count_failure, daemon)
            make = _over_tls(make, Door(daemon.authority, problems, count, handshake_within_s))
        elif not daemon.settings.http_is_local:
            log.warning(
                "the admin API at %s is not encrypted: its token crosses the network in the clear "
                "(set tls_cert, tls_key and tls_ca, as `kvkeep keygen` makes them, or an "
                "http_address on loopback)",
                self.address,
            )
        daemon.http_address = self.address
        config = uvicorn.Config(
            make_app(self.admin, access, problems, stuck_after_s),
            log_config=None,
            log_level="critical",  # we log what is below, at a bounded rate
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            headers=[("connection", "close")],
            http=make,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            loop="asyncio",  # uvloop, which vLLM installs, accepts all that wait in one turn
            backlog=_ACCEPTED_A_TURN,  # see _Listener
        )
        self._server = uvicorn.Server(config)
        self.state = self._server.server_state  # its connections, and how many requests there were
        self._thread = threading.Thread(target=self._serve, name="kvkeep-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if it was started, and closes the port."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_WITHIN_S)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _access(settings: Settings, problems: ProblemLog) -> Access:
    """Makes the server's own token where `admin_token` is not set."""
    is_local = settings.http_is_local
    has_tls = settings.http_has_tls
    certificate = "; or show a certificate with the right admin in authorized_clients" * has_tls
    if settings.admin_token is not None:
        return Access(token_reader(settings.admin_token, problems), True, is_local, certificate)
    make_token(settings.made_token)
    token = token_reader(settings.made_token, problems, ours=True)
    # Other hosts are told no paths.
    where = f"; the token is in {settings.made_token}" if is_local else certificate
    return Access(token, not is_local, is_local, where)


def _over_tls(make: Any, door: Door) -> Any:
    """What uvicorn calls for each connection in place of `make`."""

    def make_layer(*, server_state: Any, app_state: dict[str, Any], **options: Any) -> TlsLayer:
        def make_above(state: dict[str, Any]) -> asyncio.Protocol:
            protocol: asyncio.Protocol = make(
                server_state=server_state, app_state={**app_state, **state}, **options
            )
            return protocol

        return TlsLayer(door, server_state.connections, make_above)

    return make_layer


class _Listener(socket.socket):
    """Keeps a long queue in the kernel. asyncio uses its `backlog` both for this queue and as the
    number of connections that it accepts in one turn."""

    def listen(self, backlog: int = _QUEUED) -> None:
        super().listen(_QUEUED)


def _listen(address: str) -> socket.socket:
    host, port = split_host(address)
    host = "127.0.0.1" if host == "localhost" else host
    try:
        with socket.create_server((host, port), family=family_of(host)) as bound:
            listener = _Listener(fileno=bound.detach())
        # Connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        listener.listen()
        return listener
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {address} for HTTP: {error.strerror}",
            IN_USE,
        ) from error


# -- TLS


@dataclass(frozen=True)
class Door:
    """What all TLS connections of one server share. `count` counts failed handshakes by reason."""

    authority: Authority
    problems: ProblemLog
    count: Callable[[str], None]
    within_s: float = HANDSHAKE_WITHIN_S


class TlsLayer(asyncio.Protocol, asyncio.Transport):
    """TLS between asyncio's transport and an HttpConnection: the protocol of the transport below,
    and the transport of the protocol above. `make_above` makes that protocol when the handshake is
    done, with the state that its requests get: `is_admin` tells, at each call, whether the client's
    certificate has that right.

    asyncio's own TLS is not used: its handshakes are not counted against any limit, each connection
    takes a buffer of 256 KiB, and closing waits for the client. Here all encrypted bytes that a
    client has not read are in the one transport below, and its limits hold for TLS, too."""

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
        """Encrypts all of it at once: unsent bytes are in the transport below."""
        if self._below.is_closing():
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def close(self) -> None:
        """Closes when what was written has been sent. Does not wait for the client's
        close_notify."""
        if not self._below.is_closing():
            with contextlib.suppress(ssl.SSLError):  # the client's close_notify has not come
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
        if name == "sslcontext":
            return self._tls.context
        return self._below.get_extra_info(name, default)

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
            why = "it speaks HTTP without TLS" if is_plain else handshake_problem(error)
            self._refuse("handshake", why)
            # Not closed yet: while the client still sends, that would discard the answer. The
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
        self._door.problems.note(reason, f"{self._peer()} was turned away at the HTTP port: {why}")

    def _give_up(self, why: str) -> None:
        self._is_refused = True
        self._connections.discard(self)
        self._door.problems.note(why, f"the HTTP connection of {self._peer()} was closed")
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
        """Gives the protocol above what has arrived. A connection that violates TLS ends."""
        assert self._above is not None
        pieces, is_over = [], False
        try:
            while piece := self._tls.read(_PIECE_BYTES):
                pieces.append(piece)
            is_over = True  # by the client's close_notify
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
