"""Simulated sockets do what those of Linux do."""

from __future__ import annotations

import select
import socket
from typing import Any

import pytest

from kvkeep_lab.chaos.network import OWN_UID, ChaosNetwork
from kvkeep_lab.chaos.record import Record
from kvkeep_lab.chaos.sockets import ChaosEpoll, ChaosListener, ChaosSocket
from kvkeep_lab.simulation.simulation import Process, Simulation

SOON_US = 100_000


class Ends:
    def __init__(self, family: int = socket.AF_UNIX) -> None:
        self.simulation = Simulation(1)
        self.network = ChaosNetwork(self.simulation, 1, {}, Record(self.simulation))
        server, client = Process(self.simulation, "server"), Process(self.simulation, "client")
        self.listener: ChaosListener = self.network.listen(server, family, OWN_UID, lambda: None)
        self.client: ChaosSocket = self.network.connect(client, family)
        self.simulation.run(SOON_US)
        self.server: ChaosSocket = self.listener.accept()[0]

    def send(self, data: bytes) -> None:
        while data:
            data = data[self.client.send(data) :]
        self.simulation.run(SOON_US)

    def received(self) -> bytes:
        data = b""
        while self.server.is_ready(select.POLLIN):
            data += self.server.recv(10)
        return data


def test_bytes_come_in_their_order() -> None:
    ends = Ends()
    ends.send(b"one ")
    ends.send(b"two")
    assert ends.received() == b"one two"


def test_one_that_is_full_takes_no_more_until_the_other_has_read() -> None:
    ends = Ends()
    ends.client.outgoing.capacity = 10
    ends.send(b"0123456789")
    assert not ends.client.is_ready(select.POLLOUT)
    with pytest.raises(BlockingIOError):
        ends.client.send(b"x")
    ends.server.recv(1)
    assert ends.client.is_ready(select.POLLOUT)


def test_an_end_that_is_closed_lets_the_other_read_what_was_sent() -> None:
    ends = Ends()
    ends.send(b"last words")
    ends.client.close()
    ends.simulation.run(SOON_US)
    data = b""
    while piece := ends.server.recv(100):
        data += piece
    assert data == b"last words" and ends.client.fileno() == -1
    with pytest.raises(BrokenPipeError):
        ends.server.send(b"x")


def test_one_that_is_closed_with_bytes_unread_resets_the_other() -> None:
    ends = Ends()
    ends.send(b"unread")
    ends.server.close()
    ends.simulation.run(SOON_US)
    assert ends.client.is_ready(0)
    with pytest.raises(ConnectionResetError):
        ends.client.recv(1)
    with pytest.raises(OSError, match="closed"):
        ends.server.recv(1)


def test_a_tcp_connection_takes_time_and_its_user_is_known_when_it_is_accepted() -> None:
    ends = Ends(socket.AF_INET)
    late: Any = ends.network.connect(ends.client.process, socket.AF_INET)
    assert not late.is_connected and not late.is_ready(select.POLLOUT)
    ends.simulation.run(SOON_US)
    assert late.is_ready(select.POLLOUT) and late.uid is None and ends.client.uid == OWN_UID
    ends.listener.close()
    refused: Any = ends.network.connect(ends.client.process, socket.AF_INET)
    ends.simulation.run(SOON_US)
    assert refused.is_ready(select.POLLOUT) and refused.getsockopt(
        socket.SOL_SOCKET, socket.SO_ERROR
    )


def test_nobody_listens() -> None:
    ends = Ends()
    ends.listener.close()
    with pytest.raises(ConnectionRefusedError):
        ends.network.connect(ends.client.process, socket.AF_UNIX)


def test_epoll_tells_of_what_is_ready() -> None:
    ends = Ends()
    epoll = ChaosEpoll(ends.network.find)
    number = ends.server.fileno()
    epoll.register(number, select.EPOLLIN)
    assert epoll.poll(0) == []
    ends.send(b"x")
    assert epoll.poll(0) == [(number, select.EPOLLIN)]
    epoll.modify(number, 0)
    assert epoll.poll(0) == []
    epoll.unregister(number)
    epoll.close()
