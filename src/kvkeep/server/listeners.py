"""The socket that engines connect to: opened, and opened again when what has come in by it must go.

Nobody else can take the port in between: the kernel's listening socket is ours, ZMQ has a second descriptor of it, and
who connects meanwhile waits there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from kvkeep.errors import SettingsError
from kvkeep.server.auth import Gate
from kvkeep.wire.address import split_host

# What a connection can make us keep. Out: a burst of small replies is let through; beyond it they are lost, and bytes
# are limited by backlog.py. In: a sender waits after 64 messages, and bytes are limited by own_memory.py.
_REPLIES_WAITING, _REQUESTS_WAITING = 256, 64
_HANDSHAKE_MS = 2_000  # a connection that does not speak ZMQ by then is closed
_FRAME_SLACK_BYTES = 1 << 20  # a frame a little too long is answered with an error; a huge one ends the connection
_CONNECTS_WAITING = 100
_LAST_WORDS_MS = 200  # not 0: ZMQ 4.3.5 aborts if a peer goes while a message to it is half sent and thrown away
_CLOSE_S, _OPEN_S, _STEP_S = 5.0, 1.0, 0.001


class Listener:
    """Listens from construction on. `address` is where: the port that was taken is in it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], gate: Gate, address: str, most_frame_bytes: int
    ) -> None:
        self._context = context
        self._gate = gate
        self._most_frame_bytes = most_frame_bytes
        self.path = _socket_path(address)
        self.address = address
        if self.path is not None:
            _check_free(self.path, address)
        self._listening = _listen(address, self.path)
        self._lent = -1  # ZMQ's descriptor of it
        try:
            self.socket = self._open()
        except BaseException:  # guard: whatever it is, nobody may find somebody listening who will never answer
            self._listening.close()
            raise
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()

    def reopen(self, meanwhile: Callable[[], None]) -> None:
        """Closes all connections, with every message that has come in by them, read or half read, and every reply that
        has not left. Runs `meanwhile` before anybody can connect again. `socket` is another one afterwards. OSError or
        ZMQError if there are no descriptors for it: `socket` is closed then, and this may be tried again."""
        self._gate.leave()
        self.socket.close(linger=_LAST_WORDS_MS)
        until = time.monotonic() + _CLOSE_S
        while _is_same(self._lent, self._listening.fileno()) and time.monotonic() < until:
            time.sleep(_STEP_S)  # ZMQ closes in a thread of its own, and would take connections until it has
        meanwhile()
        until = time.monotonic() + _OPEN_S
        while self.socket.closed:
            try:
                self.socket = self._open()
            except (OSError, zmq.ZMQError) as error:  # those of the connections become free one after the other
                if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() >= until:
                    raise
                time.sleep(_STEP_S)

    def close(self, linger_ms: int) -> None:
        """Nobody listens any more; replies that are on their way have that long."""
        self.socket.close(linger=linger_ms)
        self._listening.close()

    def remove_file(self) -> None:
        """While it is ours: nobody takes over a socket that listens."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.path = None

    def _open(self) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.MAXMSGSIZE, self._most_frame_bytes + _FRAME_SLACK_BYTES)
            router.setsockopt(zmq.SNDHWM, _REPLIES_WAITING)
            router.setsockopt(zmq.RCVHWM, _REQUESTS_WAITING)
            router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            self._gate.guard(router)
            self._lent = os.dup(self._listening.fileno())
            router.setsockopt(zmq.USE_FD, self._lent)  # ZMQ's own from here on: it closes it
            router.bind(self.address)  # of which ZMQ uses the scheme, as it has the socket
        except BaseException:  # guard: whatever it is, half a socket must not stay behind
            self._gate.leave()
            router.close(linger=0)
            raise
        return router


def _listen(address: str, path: Path | None) -> socket.socket:
    """The kernel's socket. ZMQ would make it, too, but not tell its descriptor."""
    _, _, where = address.partition("://")
    is_tcp = address.startswith("tcp://")
    family = socket.AF_UNIX if not is_tcp else socket.AF_INET6 if "[" in where else socket.AF_INET
    listening = socket.socket(family)
    before = os.umask(0o177)  # an ipc socket is the owner's from its first moment on
    try:
        if is_tcp:
            host, port = split_host(where)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind(({"localhost": "127.0.0.1", "*": ""}.get(host, host), port))
        elif path is not None:
            path.unlink(missing_ok=True)  # a dead server's
            listening.bind(str(path))
        else:
            listening.bind("\0" + where[1:])
        listening.listen(_CONNECTS_WAITING)
        listening.setblocking(False)  # ZMQ's thread must not wait for who knocked and went away
    except OSError as error:
        listening.close()
        raise SettingsError(f"cannot listen on {address}: {error.strerror}", _remedy(error.errno, path)) from error
    finally:
        os.umask(before)
    return listening


def _is_same(one: int, other: int) -> bool:
    """Whether two descriptors are names of one socket; not if the first is closed, or something else by now."""
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _socket_path(address: str) -> Path | None:
    """The file of an ipc:// address. None for tcp, and for a name that begins with @: those have no file."""
    scheme, _, rest = address.partition("://")
    return Path(rest) if scheme == "ipc" and not rest.startswith("@") else None


def _remedy(number: int | None, path: Path | None) -> str:
    """What to do about an address on which nobody could listen."""
    if number == errno.EADDRINUSE:
        return "if another server runs there, give this one a --name, an --address and an --http-address of its own"
    if path is not None and not path.parent.is_dir():
        return f"the directory {path.parent} does not exist: make it, or choose another --address"
    if path is not None:
        return f"see that {path.parent} can be written, or choose another --address"
    return "choose another --address"


def _check_free(path: Path, address: str) -> None:
    """Raises if the path is in use. (ZMQ would silently take over another server's socket, and delete a file.)"""
    if not path.exists():
        return
    if not path.is_socket():
        raise SettingsError(
            f"cannot listen on {address}: there is a file that is no socket", "choose another --address"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise SettingsError(
                f"another server listens on {address}",
                "stop it, or give this one a --name, an --address and an --http-address of its own",
            )
