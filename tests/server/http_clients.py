"""Clients of the admin API that speak HTTP by hand, and what the server holds of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from kvkeep.server.http import _Connection
from kvkeep.store.operators import set_quota

LARGE = "GET /v1/tenants?limit=100000"


def eventually(happens: Callable[[], bool]) -> bool:
    give_up_s = time.monotonic() + 30
    while not happens():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.01)
    return True


def request(line: str, token: str, *headers: str) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def has_been_closed(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def add_tenants(running: Any, count: int) -> None:
    """So many that the answer to LARGE does not fit the kernel's buffers."""

    def work() -> None:
        for number in range(count):
            set_quota(running.daemon.store, f"t-{number:032x}", 0, 0)

    running.in_loop(work)


def connections(running: Any) -> set[Any]:
    found: set[Any] = running.http._server.server_state.connections
    return set(found)


def unread_bytes(running: Any) -> int:
    """Of answers: a connection that is still in its TLS handshake has none."""
    answering = [each for each in connections(running) if isinstance(each, _Connection)]
    return sum(each.transport.get_write_buffer_size() for each in answering)


def received(connection: socket.socket) -> bytes:
    """All that still comes, until the server's end."""
    connection.settimeout(60)
    data = b""
    try:
        while piece := connection.recv(1 << 20):
            data += piece
    except ConnectionResetError:
        pass
    return data
