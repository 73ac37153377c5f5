"""Which user runs the process at the other end of a connection on this host, by the kernel's word.

    Unix socket     SO_PEERCRED: of a client, who connected; of a server, who listens
    loopback TCP    the owner of the socket at the other end, which the kernel tells by sock_diag(7), as it does `ss`

Both are asked before anything is sent, so a process of another user learns nothing and is told
nothing. The kernel finds a TCP socket by its two ends. (/proc/net/tcp takes 10 ms to read, and any
user can make it longer.)"""

from __future__ import annotations

import socket
import struct
from typing import Final

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid

# The socket module has no names for these.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_MESSAGE = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_WANTED = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_ENDS = struct.Struct(">HH16s16sI8s")  # inet_diag_sockid: ports, addresses, interface, cookie
_FOUND = struct.Struct(
    "=4s4s44s3III"
)  # inet_diag_msg: state and timers, ports, other ends, queues, uid, inode
_NO_COOKIE: Final = b"\xff" * 8


def peer_uid(connected: socket.socket) -> int | None:
    """The uid of the other end. None while it is not known: a TCP connection that no process has
    accepted yet, or that the other end has closed. OSError if the connection is gone, or the kernel
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
    place of one that is gone the kernel shows who listens there. A socket without an inode belongs
    to no process, and its uid means nothing."""
    _, kind, _, _, _ = _MESSAGE.unpack_from(reply)
    if kind != _SOCK_DIAG_BY_FAMILY or len(reply) < _MESSAGE.size + _FOUND.size:
        return None  # an error: there is no such socket
    _, ports, _, _, _, _, uid, inode = _FOUND.unpack_from(reply, _MESSAGE.size)
    return int(uid) if inode and ports == struct.pack(">HH", port, own_port) else None
