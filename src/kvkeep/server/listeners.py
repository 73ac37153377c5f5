"""The sockets that engines connect to: the address that was set, and the Unix socket that goes with
a TCP port."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import SettingsError
from kvkeep.wire.address import family_of, tcp_host, unix_name

log = logging.getLogger(__name__)

IN_USE = (
    "if another server runs there, give this one a --name, an --address and an --http-address of "
    "its own"
)
_CONNECTS_WAITING = 100


@dataclass(frozen=True)
class Listening:
    """A socket that listens, and where, as people write it."""

    socket: socket.socket
    where: str

    @property
    def is_unix(self) -> bool:
        return self.socket.family == socket.AF_UNIX


class Listeners:
    """Listens from construction on. `address` has the port that was taken. Only the owner may open
    the file of a Unix socket, unless `for_others`: then the accepting side checks the peer's
    user."""

    def __init__(self, address: str, *, for_others: bool = False) -> None:
        self.address, self._file = address, _socket_file(address)
        self._all: list[Listening] = []
        if (tcp := tcp_host(address)) is None:
            self._all.append(Listening(_listen_unix(address, self._file, for_others), address))
            return
        first = _listen_tcp(address, *tcp)
        host, port = first.getsockname()[:2]
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._all.append(Listening(first, self.address))
        self._add_unix_socket()

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._all)

    def close(self) -> None:
        """Stops listening. Removes the socket's file first, while no other server can take it
        over."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        for each in self._all:
            each.socket.close()

    def _add_unix_socket(self) -> None:
        """Listens beside a TCP port, for engines of this host. Without it they use the port."""
        if (name := unix_name(self.address)) is None:
            return
        try:
            listening = _listen(socket.AF_UNIX, name)
            self._all.append(Listening(listening, f"the Unix socket @{name[1:]}"))
        except OSError as error:
            text = "engines on this host connect by TCP: the Unix socket @%s is taken: %s"
            log.warning(text, name[1:], error)


def check_free(address: str, shown: str = "") -> None:
    """SettingsError, which shows the address so, if it cannot be listened on now. A server that
    cannot serve is to make no pool first."""
    if (tcp := tcp_host(address)) is not None:
        _listen_tcp(shown or address, *tcp).close()
    elif (path := _socket_file(address)) is not None:
        _check_free(path, address)


def _listen_tcp(address: str, host: str, port: int) -> socket.socket:
    try:
        return _listen(family_of(host), ("" if host == "*" else host, port))
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {address}: {error.strerror}", _remedy(error.errno, None)
        ) from error


def _listen_unix(address: str, path: Path | None, for_others: bool) -> socket.socket:
    name = unix_name(address)
    assert name is not None
    if path is not None:
        _check_free(path, address)
        path.unlink(missing_ok=True)  # a dead server's
    before = os.umask(0o111 if for_others else 0o177)  # the file has this mode from the start
    try:
        return _listen(socket.AF_UNIX, name)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {address}: {error.strerror}", _remedy(error.errno, path)
        ) from error
    finally:
        os.umask(before)


def _listen(family: int, where: str | tuple[str, int]) -> socket.socket:
    listening = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(where)
        listening.listen(_CONNECTS_WAITING)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _socket_file(address: str) -> Path | None:
    """The file of an ipc:// address. None for tcp, and for a name that begins with @."""
    scheme, _, rest = address.partition("://")
    return Path(rest) if scheme == "ipc" and not rest.startswith("@") else None


def _remedy(number: int | None, path: Path | None) -> str:
    """What to do if the server cannot listen on an address."""
    if number == errno.EADDRINUSE:
        return IN_USE
    if path is not None and not path.parent.is_dir():
        return f"the directory {path.parent} does not exist: make it, or choose another --address"
    if path is not None:
        return f"check that {path.parent} can be written, or choose another --address"
    return "choose another --address"


def _check_free(path: Path, address: str) -> None:
    """SettingsError if another server, or a file that is not a socket, uses the path."""
    if not path.exists():
        return
    if not path.is_socket():
        raise SettingsError(
            f"cannot listen on {address}: a file there is not a socket",
            "choose another --address",
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        # EAGAIN: a server that hangs, with a full queue.
        if probe.connect_ex(str(path)) in (0, errno.EAGAIN):
            raise SettingsError(f"another server listens on {address}", f"stop it; {IN_USE}")
