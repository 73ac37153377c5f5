"""Connections to the admin API that are silent, slow or greedy, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.server.guard import MAX_WAITING, MAX_WORKED_ON
from kvkeep.server.http import _Connection

sys.path.insert(0, str(Path(__file__).parent))
from http_clients import (
    LARGE,
    add_tenants,
    connections,
    eventually,
    has_been_closed,
    received,
    request,
    unread_bytes,
)

TENANT = "t-" + "a" * 32
Start = Callable[..., Any]


@pytest.fixture
def running(start: Start) -> Any:
    return start()


@pytest.fixture
def crowd() -> Iterator[contextlib.ExitStack]:
    """Closes what is put into it when the test ends."""
    with contextlib.ExitStack() as clients:
        yield clients


def connect(running: Any, receive_bytes: int = 0) -> socket.socket:
    host, _, port = running.http.address.rpartition(":")
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    return connection


def test_silent_connections_keep_nobody_out(running: Any) -> None:
    silent = [connect(running) for _ in range(600)]
    try:
        assert running.ask("/healthz")[0] == 200
        assert has_been_closed(silent[0]), "the oldest made way"
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("sent", [b"", b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_health_is_answered_when_hundreds_connect_in_one_turn(running: Any, sent: bytes) -> None:
    """The event loop is held while they connect, so that it finds all of them in the kernel's
    queue."""
    with connect(running):
        assert eventually(lambda: len(connections(running)) == 1)
        [one] = connections(running)
        loop = one.loop
    for _ in range(5):
        release = threading.Event()
        with contextlib.ExitStack() as crowd:
            crowd.callback(release.set)
            loop.call_soon_threadsafe(release.wait, 60)
            flood = [crowd.enter_context(connect(running)) for _ in range(300)]
            health = crowd.enter_context(connect(running))
            health.sendall(request("GET /healthz", ""))
            flood += [crowd.enter_context(connect(running)) for _ in range(300)]
            for each in flood:
                each.sendall(sent)
            release.set()
            assert received(health).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HT", b"GET /v1/status HTTP/1.1\r\nContent-Length: 9\r\n"]
)
def test_a_connection_that_sends_no_whole_request_is_closed(start: Start, sent: bytes) -> None:
    with connect(start(request_within_s=0.1)) as connection:
        connection.sendall(sent)
        assert has_been_closed(connection)


def test_a_body_that_never_comes_is_waited_for_as_long_as_a_request(start: Start) -> None:
    running = start(request_within_s=0.1)
    with connect(running) as connection:
        connection.sendall(request("PATCH /v1/settings", running.token, "Content-Length: 9") + b"{")
        assert has_been_closed(connection)


def test_a_request_that_takes_long_is_answered_all_the_same(start: Start) -> None:
    running = start(request_within_s=0.05)
    running.daemon.run_in_loop(lambda: time.sleep(0.5))
    assert running.ask("/v1/status")[0] == 200


# -- clients that do not read, and those that send too much


def stall(running: Any, line: str = LARGE) -> socket.socket:
    """A client that asks and never reads."""
    connection = connect(running, receive_bytes=4096)
    connection.sendall(request(line, running.token))
    return connection


def test_a_client_that_does_not_read_is_cut_off(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(read_within_s=0.1)
    add_tenants(running, 5_000)
    with stall(running) as stalled:
        assert eventually(lambda: "did not read its answer" in caplog.text)
        assert eventually(lambda: not connections(running))
        assert len(received(stalled)) < 5_000 * 200
    assert running.ask("/v1/tenants?limit=5000")[1]["total"] == 5_000, (
        "who reads gets the whole answer"
    )


def test_unread_answers_are_bounded_and_the_oldest_goes_first(
    start: Start, crowd: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(read_within_s=3600)
    add_tenants(running, 5_000)
    with stall(running) as first:
        assert eventually(lambda: unread_bytes(running) > 0)
        one_answer = unread_bytes(running)
        monkeypatch.setattr("kvkeep.server.http._UNREAD_BYTES", int(2.5 * one_answer))
        for _ in range(4):
            crowd.enter_context(stall(running))
        assert eventually(lambda: running.http._server.server_state.total_requests == 5)
        assert len(connections(running)) == 2 and unread_bytes(running) <= 2.5 * one_answer
        assert len(received(first)) < one_answer


def working(running: Any) -> list[Any]:
    return [each for each in connections(running) if each._is_working()]


def test_health_is_answered_when_stalled_clients_have_all_connections(
    start: Start, crowd: contextlib.ExitStack
) -> None:
    running = start(read_within_s=3600, request_within_s=3600)
    add_tenants(running, 3_000)
    for _ in range(30):
        crowd.enter_context(stall(running))
    assert eventually(lambda: len(connections(running)) == 30 and not working(running))
    for _ in range(600):
        crowd.enter_context(connect(running))
    for path in ("/healthz", "/readyz"):
        assert running.ask(path, headers={"authorization": ""})[0] == 200
    assert len(connections(running)) <= 257


def test_health_does_not_wait_for_other_requests(
    start: Start, crowd: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop is held, so that requests wait: as many as may, and one more, which is refused."""
    running = start(loop_wait_s=600, stuck_after_s=600)
    release = threading.Event()
    crowd.callback(release.set)
    running.daemon.run_in_loop(lambda: release.wait(600))  # longer than a client waits
    waiting = [
        crowd.enter_context(stall(running, "GET /v1/status"))
        for _ in range(MAX_WORKED_ON + MAX_WAITING)
    ]
    assert eventually(lambda: len(working(running)) == len(waiting))
    status, said = running.ask("/v1/settings")
    assert (status, said["error"]) == (503, "too_many_requests")
    assert "too_many_requests" in caplog.text
    assert [running.ask(path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    release.set()
    assert all(received(each).startswith(b"HTTP/1.1 200") for each in waiting), (
        "those that waited are answered"
    )


def test_a_second_request_on_a_connection_is_not_carried_out(running: Any) -> None:
    running.store(TENANT, 3)
    with connect(running) as connection:
        clear = request("DELETE /v1/blocks?confirm=everything", running.token)
        connection.sendall(request("GET /v1/status", running.token) + 10 * clear)
        said = received(connection)
    assert said.count(b"HTTP/1.1 ") == 1 and b"connection: close" in said.lower()
    assert running.ask(f"/v1/tenants/{TENANT}")[1]["blocks"] == 3


def test_pipelined_requests_are_not_kept_in_memory(start: Start) -> None:
    """While the first request is worked on, the server reads one piece of what follows and no
    more."""
    running = start(loop_wait_s=600)
    release = threading.Event()
    running.daemon.run_in_loop(lambda: release.wait(600))
    with connect(running) as connection, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(release.set)
        connection.sendall(request("GET /v1/status", running.token))
        assert eventually(lambda: len(working(running)) == 1)
        connection.setblocking(False)
        more = 10_000 * request("GET /v1/status", running.token)
        with contextlib.suppress(BlockingIOError):  # until the kernel's buffers are full
            for _ in range(1000):
                connection.send(more)
        [one] = connections(running)
        assert eventually(lambda: one.flow.read_paused)
        assert len(one.conn.trailing_data[0]) <= 1 << 20


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"\xff" + bytes(7) + b"\x01\x7f", "a ZMQ client"),
        (b"*1\r\n$4\r\nPING\r\n", "a Redis client"),
    ],
)
def test_a_foreign_client_gets_one_line_that_says_what_it_seems_to_be(
    running: Any, caplog: pytest.LogCaptureFixture, sent: bytes, kind: str
) -> None:
    host, _, port = running.http.address.rpartition(":")
    for _ in range(2):
        with socket.create_connection((host, int(port))) as foreign:
            foreign.sendall(sent)
            foreign.shutdown(socket.SHUT_WR)
            while foreign.recv(4096):  # until the server closes it
                pass
    said = [each.getMessage() for each in caplog.records if "seems to be" in each.getMessage()]
    assert [line.split(": ")[0] for line in said] == [
        f"127.0.0.1 talks to the HTTP port and seems to be {kind}"
    ]


class Waiting(_Connection):
    """A connection that waits since then, with so many bytes of its answer unread."""

    def __init__(self, connections: set[Any], since: float, unread_bytes: int) -> None:
        self.connections = connections
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: unread_bytes)  # type: ignore[assignment]
        self._waiting_since = since
        connections.add(self)

    def _is_working(self) -> bool:
        return False

    def _end(self, why: str) -> None:
        self.connections.discard(self)


def test_who_does_not_read_makes_way_before_who_waits_longer_for_its_turn() -> None:
    """While the server worked on the answers that nobody reads, a health check has connected and
    waits."""
    connections: set[Any] = set()
    health = Waiting(connections, since=1.0, unread_bytes=0)
    later, sooner = (Waiting(connections, since, 1000) for since in (3.0, 2.0))
    health._end_longest_waiting("too much is unread")
    assert connections == {health, later} and sooner not in connections
    health._end_longest_waiting("too much is unread")
    assert connections == {health}
    health._end_longest_waiting("too many connections")
    assert not connections, "where all read, who waits longest goes"
