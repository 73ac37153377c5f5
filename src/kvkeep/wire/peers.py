"""The other end of a connection: which user runs it, whether that user is trusted, and what it
seems to be if it does not speak our protocol.

    Unix socket     SO_PEERCRED: of a client, who connected; of a server, who listens
    loopback TCP    the owner of the socket at the other end, by sock_diag(7), as `ss` does it

The user is looked up before anything is sent, so a process of another user learns nothing. The
kernel finds a TCP socket by its two ends. (StoreCopy /proc/net/tcp takes 10 ms, and any user can make
it longer.) What a stranger sent is never quoted."""

from __future__ import annotations

import os
import pwd
import re
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvkeep.wire.frames import MAGIC
from kvkeep.wire.messages import PROTOCOL_VERSION

# -- the user

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid

# The socket module has no names for these.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_MESSAGE = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_WANTED = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_ENDS = struct.Struct(">HH16s16sI8s")  # inet_diag_sockid: ports, addresses, interface, cookie
# inet_diag_msg: state and timers, ports, other ends, queues, uid, inode
_FOUND = struct.Struct("=4s4s44s3III")
_NO_COOKIE: Final = b"\xff" * 8


def peer_uid(connected: socket.socket) -> int | None:
    """The uid of the other end. None while it is unknown: no process has accepted the TCP
    connection yet, or the other end has closed it. OSError if the connection is gone, or the kernel
    does not answer."""
    if connected.family == socket.AF_UNIX:
        data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid: int = _CREDENTIALS.unpack(data)[1]
        return uid
    (host, port), (own_host, own_port) = connected.getpeername()[:2], connected.getsockname()[:2]
    addresses = (
        socket.inet_pton(connected.family, name.partition("%")[0]) for name in (host, own_host)
    )
    request = _WANTED.pack(connected.family, socket.IPPROTO_TCP, 0, 0xFFFF_FFFF)
    request += _ENDS.pack(port, own_port, *addresses, 0, _NO_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        size = _MESSAGE.size + len(request)
        kernel.send(_MESSAGE.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request)
        return find_uid(kernel.recv(4096, socket.MSG_DONTWAIT), port, own_port)


def find_uid(reply: bytes, port: int, own_port: int) -> int | None:
    """The owner of the socket in the kernel's reply, if it is the other end of our connection: in
    place of a socket that is gone the kernel shows the one that listens there. A socket without an
    inode belongs to no process, and its uid means nothing."""
    _, kind, _, _, _ = _MESSAGE.unpack_from(reply)
    if kind != _SOCK_DIAG_BY_FAMILY or len(reply) < _MESSAGE.size + _FOUND.size:
        return None  # an error: there is no such socket
    _, ports, _, _, _, _, uid, inode = _FOUND.unpack_from(reply, _MESSAGE.size)
    return int(uid) if inode and ports == struct.pack(">HH", port, own_port) else None


# -- trust

USERS_FORMAT: Final = 'user ids or names with commas between, such as 1000,vllm, or "none"'
_LARGEST_UID: Final = (1 << 32) - 2  # the one above means "no user" to the kernel


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


# The kernel shows this uid in place of every user that our user namespace does not map.
OVERFLOW_UID: Final = _overflow_uid()


def is_trusted(uid: int, trusted: Collection[int]) -> bool:
    """Whether files and processes of this user are trusted like our own: our user, root, and
    `trusted`. The overflow uid stands for any user that is not mapped, so it is trusted only where
    it is our own and every user is mapped."""
    if uid == OVERFLOW_UID:
        return uid == os.geteuid() and _maps_every_user()
    return uid in (0, os.geteuid()) or uid in trusted


def _maps_every_user() -> bool:
    """Whether each user has an id of its own in our user namespace, as in that of the host."""
    try:
        ranges = Path("/proc/self/uid_map").read_text().splitlines()
        return sum(int(line.split()[2]) for line in ranges) > _LARGEST_UID
    except OSError:
        return False


def remedy(uid: int) -> str:
    """What to do where this user should have been trusted."""
    if uid == OVERFLOW_UID:
        return (
            f"uid {uid} stands for a user that this user namespace does not map: run both sides "
            "in one user namespace, or map that user into this one and name it in trusted_users"
        )
    return f"run both sides as one user, or name {uid} in trusted_users if that user is meant"


def parse_users(text: str) -> tuple[int, ...]:
    """The ids of users given by id or name. ValueError for an unknown name, and for the overflow
    uid, which cannot be trusted."""
    is_empty = text.strip().lower() in ("", "none")
    names = [] if is_empty else [name.strip() for name in text.split(",")]
    users = tuple(dict.fromkeys(map(_uid, names)))
    if OVERFLOW_UID in users:
        raise ValueError(
            f"{OVERFLOW_UID} is the kernel's overflow uid, which stands for every user that is "
            "not mapped"
        )
    return users


def _uid(name: str) -> int:
    if name.isascii() and name.isdigit():
        if (uid := int(name)) > _LARGEST_UID:
            raise ValueError(f"{uid} is not a user id")
        return uid
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise ValueError(f"there is no user {name!r}") from error


# -- strangers


@dataclass(frozen=True)
class Stranger:
    """`kind` says what it seems to be, `hint` what to do about it."""

    kind: str
    hint: str


_SERVER = "this is a kvkeep server"
HTTP = Stranger(
    "an HTTP client", "the HTTP API is at http_address, 127.0.0.1:5556 unless set otherwise"
)
TLS = Stranger("a TLS client", f"{_SERVER} without TLS: set tls_cert, tls_key and tls_ca on it")
REDIS = Stranger("a Redis client", f"{_SERVER}: check the address that client was given")
SSH = Stranger("an SSH client", f"{_SERVER}: check the address that client was given")
ZMQ = Stranger(
    "a ZMQ client: LMCache, or a kvkeep of an earlier release",
    "install the same kvkeep release on both sides; "
    "set KVKEEP_AS_LMCACHE=1 where an engine that is set up for LMCache is to use kvkeep",
)
UNKNOWN = Stranger("something unknown", f"{_SERVER}: check the address that peer was given")

_REDIS_COMMAND = rb"\*\d+\r\n\$\d+\r\n|(?:PING|HELLO|AUTH|INFO|COMMAND)\b[^\r\n]*\r\n"
_BEGINNINGS: Final = [
    (re.compile(rb"(?:[A-Z]{3,7} [^\r\n]* HTTP/\d|[A-Z]{3,7} /|PRI \* HTTP/2)"), HTTP),
    (re.compile(rb"\x16\x03[\x00-\x04]"), TLS),
    (re.compile(_REDIS_COMMAND, re.IGNORECASE), REDIS),
    (re.compile(rb"SSH-"), SSH),
    (re.compile(rb"\xff.{8}[\x7f\x01]", re.DOTALL), ZMQ),
]
_VERSION = struct.Struct("<H")


def recognise(first: bytes) -> Stranger | None:
    """What a client is, by the first bytes of its connection. None for a client of ours and of our
    protocol version."""
    if not first.startswith(MAGIC):
        found = (stranger for pattern, stranger in _BEGINNINGS if pattern.match(first))
        return next(found, UNKNOWN)
    if len(first) < len(MAGIC) + _VERSION.size:
        return None
    [version] = _VERSION.unpack_from(first, len(MAGIC))
    if version == PROTOCOL_VERSION:
        return None
    return Stranger(
        f"a kvkeep of protocol version {version}",
        f"this server speaks version {PROTOCOL_VERSION}: install the same kvkeep release on both "
        "sides",
    )


def recognise_server(first: bytes) -> str:
    """What a server is that answered with these bytes; "" if they do not tell."""
    if recognise(first) is ZMQ:
        return (
            "it is a kvkeep of an earlier release, or other software that speaks ZMQ "
            "(install the same release)"
        )
    if not first or first.startswith(MAGIC):
        return ""
    return "it is not a kvkeep server (check the address that this engine was given)"
