"""The two hosts of `kvkeep demo --hosts 2`: network namespaces where they are allowed, else two
loopback addresses.

    namespace of host A: server, engine ──► listener ─┐
                                                      ├─ the demo, which hands on to the tier
    namespace of host B: server, engine ──► listener ─┘

A directory needs no network. A Valkey is reached through a listener, a socket of the namespace that
the demo serves: so a namespace needs no interface but its own loopback. It ends with its last
process."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Thread
from urllib.parse import urlsplit

from kvkeep.errors import SettingsError
from kvkeep.tiers.tier_address import TierAddress, parse_tier

_VALKEY_PORT = 6379
# Puts up the loopback interface (SIOCSIFFLAGS, IFF_UP), hands over a listener, and stays as long as
# the demo.
_KEEPER = """
import fcntl, socket, struct, sys
demo = socket.socket(fileno=int(sys.argv[1]))
with socket.create_server(("127.0.0.1", 0)) as listener:
    fcntl.ioctl(listener, 0x8914, struct.pack("16sh14x", b"lo", 1))
    socket.send_fds(demo, [b"up"], [listener.fileno()])
demo.recv(1)
"""


@dataclass(frozen=True)
class Host:
    """`inside`: what goes before a command that runs on it; `tier`: its address of the tier."""

    inside: tuple[str, ...]
    loopback: str
    tier: str


class _NotHere(Exception):
    """Why hosts are no network namespaces."""


def two_hosts(tier: str, ends: ExitStack) -> tuple[list[Host], str]:
    """The hosts, until `ends` is closed, and what they are, in words."""
    address = _shared(tier)
    try:
        connect = _connector(address)
        return [_namespace(address, connect, ends) for _ in range(2)], "network namespaces"
    except _NotHere as why:
        return (
            [Host((), loopback, tier) for loopback in ("127.0.0.1", "127.0.0.2")],
            f"loopback addresses (no network namespaces: {why})",
        )


def _shared(tier: str) -> TierAddress:
    try:
        address = parse_tier(tier)
    except ValueError as error:
        raise SettingsError(
            f"--tier is wrong: {error}",
            "expected such as file:///srv/kv?size=2TiB, or valkey://host:6379/0",
        ) from None
    if not address.is_shared:
        raise SettingsError("--tier is a disk, which hosts do not share", "use file:// instead")
    return address


def _connector(address: TierAddress) -> Callable[[], socket.socket] | None:
    """Connects to the tier's service; None for a directory."""
    if not address.host:
        return None
    if address.scheme not in ("valkey", "redis") or address.option("cluster") == "yes":
        raise _NotHere("only a directory or one Valkey without TLS is reached from inside them")
    url = urlsplit(str(address))
    service = url.hostname, url.port or _VALKEY_PORT
    return lambda: socket.create_connection(service)


def _namespace(
    address: TierAddress, connect: Callable[[], socket.socket] | None, ends: ExitStack
) -> Host:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        raise _NotHere("unshare or nsenter is not installed")
    try:
        pid, listener = _keep(("--net",), ends)
        enter: tuple[str, ...] = ()
    except _NotHere:  # that takes root; a user may be root of a user namespace
        pid, listener = _keep(("--net", "--user", "--map-root-user"), ends)
        enter = ("--user", "--preserve-credentials")
    if connect is not None:
        Thread(target=_serve, args=(listener, connect), daemon=True).start()
        host, port = listener.getsockname()
        address = replace(address, host=f"{host}:{port}")
    inside = ("nsenter", "--target", str(pid), "--net", *enter, "--")
    return Host(inside, "127.0.0.1", str(address))


def _keep(flags: tuple[str, ...], ends: ExitStack) -> tuple[int, socket.socket]:
    """A process that keeps a new namespace, and a listener in it."""
    ours, theirs = socket.socketpair()
    keeper = subprocess.Popen(
        ["unshare", *flags, sys.executable, "-c", _KEEPER, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches the demo alone
    )
    ends.callback(_end, keeper, ours)
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 2, 1)
    if not descriptors:
        _, said = keeper.communicate()
        raise _NotHere(said.strip().rpartition("\n")[2])
    return keeper.pid, ends.enter_context(socket.socket(fileno=descriptors[0]))


def _end(keeper: subprocess.Popen[str], ours: socket.socket) -> None:
    ours.close()
    with keeper:
        keeper.kill()


def _serve(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    with contextlib.suppress(OSError):  # the demo has ended
        while True:
            near, _ = listener.accept()
            try:
                far = connect()
            except OSError:  # the service does not answer: the server on the host sees it
                near.close()
                continue
            Thread(target=_relay, args=(near, far), daemon=True).start()


def _relay(near: socket.socket, far: socket.socket) -> None:
    """In both directions, until one side has ended."""
    with near, far:
        back = Thread(target=_hand_on, args=(far, near), daemon=True)
        back.start()
        _hand_on(near, far)
        back.join()


def _hand_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
