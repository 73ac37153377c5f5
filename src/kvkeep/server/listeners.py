"""The socket that engines connect to: opened, and opened again when what has come in by it must go.

Nobody else can take the port in between: the kernel's listening socket stays open under its second name, and who
connects meanwhile waits there.
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
_CLOSE_S, _CLOSE_STEP_S = 5.0, 0.001


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
        self.socket = self._open(None)
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()

    def reopen(self, meanwhile: Callable[[], None]) -> None:
        """Closes all connections, with every message that has come in by them, read or half read, and every reply that
        has not left. Runs `meanwhile` before anybody can connect again. `socket` is another one afterwards."""
        old, kept = _second_name(self.address)
        self._gate.leave()
        self.socket.close(linger=0)
        until = time.monotonic() + _CLOSE_S
        while _is_same(old, kept) and time.monotonic() < until:
            time.sleep(_CLOSE_STEP_S)  # ZMQ closes in a thread of its own, and would take connections until it has
        meanwhile()
        self.socket = self._open(kept)

    def remove_file(self) -> None:
        """While it is ours: nobody takes over a socket that listens."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.path = None

    def _open(self, listening: int | None) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, self._most_frame_bytes + _FRAME_SLACK_BYTES)
        router.setsockopt(zmq.SNDHWM, _REPLIES_WAITING)
        router.setsockopt(zmq.RCVHWM, _REQUESTS_WAITING)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        router.setsockopt(zmq.IPV6, 1 if "[" in self.address else 0)
        if listening is not None:
            router.setsockopt(zmq.USE_FD, listening)  # ZMQ's own from here on
        self._gate.guard(router)
        before = os.umask(0o177)  # an ipc socket is the owner's from its first moment on
        try:
            router.bind(self.address.replace("//localhost:", "//127.0.0.1:"))
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise SettingsError(
                f"cannot listen on {self.address}: {error.strerror}", _remedy(error.errno, self.path)
            ) from error
        finally:
            os.umask(before)
        return router


def _second_name(address: str) -> tuple[int, int]:
    """The descriptor of the socket of this process that listens at an address, and another one for the same; ZMQ does
    not tell its own."""
    _, _, where = address.partition("://")
    name: object = split_host(where)[1] if address.startswith("tcp://") else where
    name = b"\0" + where[1:].encode() if where.startswith("@") else name
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            second = os.dup(number)
        except OSError:  # the directory itself, or closed meanwhile
            continue
        try:
            one = socket.socket(fileno=second)
        except OSError:  # no socket
            os.close(second)
            continue
        with one:
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            is_listening = (is_tcp or one.family == socket.AF_UNIX) and _is_listening(one)
            if is_listening and (one.getsockname()[1] if is_tcp else one.getsockname()) == name:
                return number, one.detach()
    raise AssertionError(f"nobody listens at {address}, which is ours")


def _is_same(one: int, other: int) -> bool:
    """Whether two descriptors are names of one socket; not if the first is closed, or something else by now."""
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _is_listening(one: socket.socket) -> bool:
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


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
