"""Which users of a host are trusted: ourselves, root, and those who were named."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.wire import messages as m
from kvkeep.wire import peers
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.peers import (
    HTTP,
    OVERFLOW_UID,
    REDIS,
    SSH,
    TLS,
    UNKNOWN,
    ZMQ,
    Stranger,
    find_uid,
    is_trusted,
    parse_users,
    peer_uid,
    recognise,
    recognise_server,
    remedy,
)


@pytest.fixture
def _not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.os, "geteuid", lambda: 1_000)


@pytest.mark.usefixtures("_not_root")
@pytest.mark.parametrize(
    ("uid", "trusted", "expected"),
    [
        (1_000, (), True),
        (0, (), True),
        (1_001, (), False),
        (1_001, (1_001,), True),
        (1_002, (1_001, 1_003), False),
        (OVERFLOW_UID, (), False),
        (OVERFLOW_UID, (OVERFLOW_UID,), False),
    ],
)
def test_our_own_roots_and_those_who_were_named(
    uid: int, trusted: tuple[int, ...], expected: bool
) -> None:
    assert is_trusted(uid, trusted) is expected


@pytest.mark.parametrize("every_user", [True, False])
def test_the_overflow_uid_may_be_our_own_where_it_can_be_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, every_user: bool
) -> None:
    monkeypatch.setattr(peers.os, "geteuid", lambda: OVERFLOW_UID)
    ids = f"0 0 {(1 << 32) - 1}" if every_user else "0 100000 65536"
    monkeypatch.setattr(peers, "Path", lambda path: SimpleNamespace(read_text=lambda: ids))
    assert is_trusted(OVERFLOW_UID, ()) is every_user


_IN_A_NAMESPACE = """
import os, sys
from kvkeep.wire.peers import OVERFLOW_UID, is_trusted
print(os.geteuid(), is_trusted(os.geteuid(), ()), is_trusted(0, ()), is_trusted(OVERFLOW_UID, ()))
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            (),
            f"{OVERFLOW_UID} False True False",
        ),  # nobody is mapped: all look alike, ourselves among them
        (("--map-root-user",), "0 True True False"),
        (("--map-user", str(OVERFLOW_UID)), f"{OVERFLOW_UID} False True False"),
    ],
)
def test_in_a_user_namespace_the_overflow_uid_may_be_anybody(
    flags: tuple[str, ...], said: str
) -> None:
    command = ["unshare", "--user", *flags, sys.executable, "-c", _IN_A_NAMESPACE]
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--user", *flags, "true"]).returncode
    ):
        pytest.skip("user namespaces cannot be made here")
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == said
    )


def test_what_to_do_depends_on_whether_the_user_is_known_here() -> None:
    assert "name 1234 in trusted_users" in remedy(1234) and "namespace" not in remedy(1234)
    assert "one user namespace" in remedy(OVERFLOW_UID) and "trusted_users" in remedy(OVERFLOW_UID)


def test_the_kernel_says_what_it_shows_for_users_that_it_cannot_map() -> None:
    with open("/proc/sys/kernel/overflowuid") as file:
        assert int(file.read()) == OVERFLOW_UID


@pytest.mark.parametrize(
    ("text", "users"),
    [
        ("", ()),
        ("none", ()),
        (" None ", ()),
        ("7", (7,)),
        ("7, 8,7", (7, 8)),
        ("root", (0,)),
        (f"1234,{pwd.getpwuid(0).pw_name}", (1234, 0)),
        ("4294967294", (4294967294,)),
    ],
)
def test_users_are_read_by_id_or_name(text: str, users: tuple[int, ...]) -> None:
    assert parse_users(text) == users


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "4294967295",
        "1,,2",
        ",",
        "no such user",
        "1.5",
        "0x10",
        "²",
        str(OVERFLOW_UID),
        f"1,{OVERFLOW_UID}",
    ],
)
def test_what_is_no_user_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no user|not a user|stands for every user"):
        parse_users(text)


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


BROWSER = b"GET /favicon.ico HTTP/1.1\r\nHost: localhost:5555\r\nUser-Agent: Mozilla/5.0\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (BROWSER, HTTP),
        (b"POST /v1/completions HTTP/1.0\r\n", HTTP),
        (b"GET /a-path-that-has-not-come-whole", HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP),  # gRPC among others
        (bytes.fromhex("16030100c8010000c40303") + bytes(32), TLS),
        (b"*1\r\n$4\r\nPING\r\n", REDIS),
        (b"*3\r\n$5\r\nHELLO\r\n$1\r\n3\r\n", REDIS),
        (b"ping\r\n", REDIS),
        (b"SSH-2.0-OpenSSH_9.6\r\n", SSH),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE", ZMQ),
        (b"\xff" + bytes(7) + b"\x01\x7f", ZMQ),
        (b"\x00\x01\x02", UNKNOWN),
        (b"", UNKNOWN),
    ],
)
def test_a_stream_is_told_by_its_first_bytes(first: bytes, expected: Stranger) -> None:
    assert recognise(first) == expected


def test_our_own_are_no_strangers_unless_they_are_of_another_version() -> None:
    same = encode(Header(3, 4), m.Ping())
    other = encode(Header(3, 4, m.PROTOCOL_VERSION + 1), m.Ping())
    assert recognise(same[0]) is None
    assert recognise(b"KVKP") is None, "the rest has not come"
    found = recognise(other[0])
    assert (
        found is not None and found.kind == f"a kvkeep of protocol version {m.PROTOCOL_VERSION + 1}"
    )
    assert "install the same kvkeep release on both sides" in found.hint


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"", ""),
        (b"KVKP", ""),
        (b"\xff" + bytes(8) + b"\x7f", "a kvkeep of an earlier release"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not a kvkeep server"),
    ],
)
def test_a_server_is_told_by_what_it_answers(first: bytes, expected: str) -> None:
    assert expected in recognise_server(first) and bool(expected) == bool(recognise_server(first))


@given(st.binary(max_size=300))
def test_nothing_that_comes_raises_or_is_quoted(first: bytes) -> None:
    found = recognise(first)
    assert found is None or (found.kind + found.hint).isprintable()
    assert recognise_server(first) == "" or recognise_server(first).isprintable()
