"""Who is at the other end, by the kernel's word."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvkeep.wire.peer_user import find_uid, peer_uid

OTHER_UID = 54321
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can be another user, with setpriv",
)


def has_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def listen_unix() -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0kvkeep test of peers {os.getpid()}")
    listening.listen()
    return listening


def listen_4() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def listen_6() -> socket.socket:
    return socket.create_server(("::1", 0), family=socket.AF_INET6)


def listen_both() -> socket.socket:
    return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)


needs_6 = pytest.mark.skipif(not has_6(), reason="this host has no IPv6")
KINDS = [
    listen_unix,
    listen_4,
    pytest.param(listen_6, marks=needs_6),
    pytest.param(listen_both, marks=needs_6),
]


def where_to(listening: socket.socket) -> tuple[int, object]:
    if listening.family == socket.AF_UNIX:
        return socket.AF_UNIX, listening.getsockname()
    host, port = listening.getsockname()[:2]
    return (
        (socket.AF_INET, ("127.0.0.1", port))
        if host == "::"
        else (int(listening.family), (host, port))
    )


@pytest.mark.parametrize("listen", KINDS)
def test_both_ends_see_each_others_user(listen: Callable[[], socket.socket]) -> None:
    with listen() as listening:
        family, where = where_to(listening)
        with socket.socket(family) as client:
            client.connect(where)
            if family != socket.AF_UNIX:
                assert peer_uid(client) is None, "nobody has accepted it, so it belongs to nobody"
            server, _ = listening.accept()
            with server:
                assert peer_uid(client) == peer_uid(server) == os.geteuid()


@needs_root
@pytest.mark.parametrize("listen", KINDS)
def test_another_user_who_connects_is_seen(listen: Callable[[], socket.socket]) -> None:
    with listen() as listening:
        family, where = where_to(listening)
        program = f"import socket, sys; s = socket.socket({int(family)}); s.connect({where!r}); sys.stdin.read()"
        as_other = [
            "setpriv",
            "--reuid",
            str(OTHER_UID),
            "--clear-groups",
            sys.executable,
            "-S",
            "-c",
            program,
        ]
        with subprocess.Popen(as_other, stdin=subprocess.PIPE) as other:
            server, _ = listening.accept()
            with server:
                assert peer_uid(server) == OTHER_UID
            assert other.stdin is not None
            other.stdin.close()


def test_a_connection_that_is_gone_is_nobodys() -> None:
    with listen_4() as listening, socket.socket() as client:
        client.connect(listening.getsockname())
        server, _ = listening.accept()
        client.close()
        with contextlib.suppress(OSError):  # if the kernel has noticed already
            assert peer_uid(server) is None
        server.close()


def reply(uid: int, inode: int, ports: tuple[int, int] = (5555, 0xC001), kind: int = 20) -> bytes:
    found = struct.pack(">4sHH44s", bytes([2, 1, 0, 0]), *ports, bytes(44)) + struct.pack(
        "=5I", 0, 0, 0, uid, inode
    )
    return struct.pack("=IHHII", 16 + len(found), kind, 0, 0, 0) + found


def test_only_the_other_end_counts_and_only_if_somebody_has_it() -> None:
    assert find_uid(reply(1001, 222), 5555, 0xC001) == 1001
    assert find_uid(reply(0, 0), 5555, 0xC001) is None, "not accepted: its uid of 0 means nothing"
    assert find_uid(reply(1000, 111, (5555, 0)), 5555, 0xC001) is None, "that one listens"
    assert find_uid(reply(1001, 222, (0xC001, 5555)), 5555, 0xC001) is None, (
        "our own end is not the other one"
    )
    assert find_uid(struct.pack("=IHHIIi", 36, 2, 0, 0, 0, -2) + bytes(16), 5555, 0xC001) is None, (
        "an error"
    )
    assert find_uid(reply(1001, 222, kind=2), 5555, 0xC001) is None
