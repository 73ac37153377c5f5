"""Where a server listens and engines find it, as text: `tcp://host:port` or `ipc://` and a path."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of a Unix socket, less its terminator
ADDRESS_FORMAT: Final = (
    f"tcp://host:port, or ipc:// and an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes"
)


def parse_address(text: str) -> str:
    """The address itself. ValueError if it is not one."""
    scheme, _, rest = text.partition("://")
    if scheme == "tcp":
        split_host(rest)
        return text
    if (
        not rest.isprintable()
        or scheme != "ipc"
        or rest[:1] not in ("/", "@")
        or len(rest.encode()) > MAX_SOCKET_PATH_BYTES
    ):
        raise ValueError
    return text


def split_host(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. ValueError unless both are there."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ValueError
    return match[1].strip("[]"), int(match[2])


def tcp_host(address: str) -> tuple[str, int] | None:
    """Host and port of a TCP address, with `localhost` as the number it stands for. None for a Unix
    socket's."""
    if not address.startswith("tcp://"):
        return None
    host, port = split_host(address.removeprefix("tcp://"))
    return "127.0.0.1" if host == "localhost" else host, port


def is_loopback(host: str) -> bool:
    """By name or number, without a resolver: what a name resolves to may change after the check."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def unix_name(address: str) -> str | None:
    """The Unix socket of an address, as `socket` takes it. A server on loopback, or on every
    interface, also listens on an abstract socket named after its port, which like the port exists
    in this network namespace only. None for another host."""
    if (tcp := tcp_host(address)) is None:
        path = address.removeprefix("ipc://")
        return f"\0{path[1:]}" if path.startswith("@") else path
    host, port = tcp
    host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
    return f"\0kvkeep {host}:{port}" if is_loopback(host) else None


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
